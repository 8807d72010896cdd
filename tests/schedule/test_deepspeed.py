"""
DeepSpeed's instruction streams: the streams that a release wrote, and the faults in other streams.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.schedule.actions import Schedule, ScheduleError
from qeffect.schedule.check import Verdict, check
from qeffect.schedule.deepspeed import MODULE, deepspeed_schedule
from qeffect.schedule.transport import Transport
from tests.schedule.make_deepspeed_streams import FOLDER, SIZES

RELEASE = "0.19.8"
STREAMS = json.loads((FOLDER / f"{RELEASE}.json").read_text(encoding="utf-8"))
#: Rewrites the instructions of a rank, as (name, arguments).
Edit = Callable[[int, list[list[list[Any]]]], list[list[list[Any]]]]


def instruction(name: str, given: dict[str, Any]) -> Any:
    """An instruction as DeepSpeed's: a class of its name, the arguments in `kwargs`."""
    made = type(name, (), {})()
    made.kwargs = given
    return made


def played(name: str, edit: Edit | None = None, buffers: int | None = None) -> type:
    """A schedule class that plays the recorded streams of a class of DeepSpeed."""

    class Played:
        def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
            self.stream = STREAMS[f"{name} {stages} {micro_batches}"][stage_id]
            self.rank = stage_id

        def steps(self) -> Iterator[list[Any]]:
            steps = json.loads(json.dumps(self.stream["steps"]))
            for step in steps if edit is None else edit(self.rank, steps):
                yield [instruction(*entry) for entry in step]

        def num_pipe_buffers(self) -> int:
            return self.stream["buffers"] if buffers is None else buffers

    Played.__name__ = name
    return Played


def read(name: str, stages: int, microbatches: int, edit: Edit | None = None) -> Schedule:
    """The table of a recorded class."""
    return deepspeed_schedule(played(name, edit), stages=stages, microbatches=microbatches)


def checked(name: str, stages: int, microbatches: int, edit: Edit | None = None) -> Verdict:
    """The verdict on a recorded class."""
    return check(read(name, stages, microbatches, edit))


TRAINING = [size for size in SIZES if size[0] != "InferenceSchedule"]


@pytest.mark.parametrize(("name", "stages", "microbatches"), TRAINING)
def test_the_release_is_accepted(name: str, stages: int, microbatches: int) -> None:
    """Every stream of the release keeps the contract, each tape in its own buffer."""
    table = read(name, stages, microbatches)
    verdict = check(table)

    assert verdict.finding is None
    assert table.num_stages == (2 * stages if name == "DualPipeVSchedule" else stages)
    assert table.num_microbatches == microbatches
    assert table.buffers is not None
    assert len(table.buffers) == table.num_stages * microbatches
    assert verdict.counts["commit"] == 2 * stages


def test_the_rows_of_a_small_pipeline() -> None:
    """Rank 1 of two, three microbatches: written by hand from the instructions."""
    rows = [" ".join(map(str, row)) for row in read("TrainSchedule", 2, 3).rows]

    assert rows[1] == (
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1REDUCE_GRAD"
    )


def test_blocking_messages_do_not_deadlock() -> None:
    """TrainSchedule sends and receives at once; even and odd ranks meet in turn."""
    verdict = check(read("TrainSchedule", 4, 8), transport=Transport(rendezvous="rank"))

    assert verdict.finding is None


def test_a_batch_is_where_its_commit_is() -> None:
    """DualPipeV's rank 0 posts its first send with the receive of the next commit, sends first."""
    row = [str(action) for action in read("DualPipeVSchedule", 2, 4).rows[0]]

    assert row[0] == "0F0"
    assert row.index("0SEND_F0") > row.index("0F0")
    assert row.index("3RECV_F0") < row.index("3F0")
    assert not read("TrainSchedule", 2, 3).notes
    assert "CommitP2P" in read("DualPipeVSchedule", 2, 4).notes[0]


def replace(name: str, **given: Any) -> Edit:
    """An edit that gives all instructions of a name these arguments."""

    def edit(_: int, steps: list[list[list[Any]]]) -> list[list[list[Any]]]:
        for step in steps:
            for entry in step:
                if entry[0] == name:
                    entry[1] |= given
        return steps

    return edit


def one_buffer(_: int, steps: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """An edit that uses buffer 0 for everything."""
    for step in steps:
        for entry in step:
            if "buffer_id" in entry[1]:
                entry[1]["buffer_id"] = 0
    return steps


def without(name: str, rank: int, count: int = 1) -> Edit:
    """An edit that drops a rank's first instructions of a name."""

    def edit(at: int, steps: list[list[list[Any]]]) -> list[list[list[Any]]]:
        left = count if at == rank else 0
        kept = []
        for step in steps:
            here = []
            for entry in step:
                if left and entry[0] == name:
                    left -= 1
                    continue
                here.append(entry)
            kept.append(here)
        return kept

    return edit


def swapped(first: str, second: str) -> Edit:
    """An edit that exchanges two neighbouring instructions wherever they follow each other."""

    def edit(_: int, steps: list[list[list[Any]]]) -> list[list[list[Any]]]:
        for step in steps:
            for i, (one, other) in enumerate(itertools.pairwise(step)):
                if (one[0], other[0]) == (first, second):
                    step[i], step[i + 1] = other, one
        return steps

    return edit


def test_a_buffer_that_is_still_in_use_is_refused() -> None:
    """One buffer for two live tapes: the second F finds it busy, and both F are named."""
    finding = checked("TrainSchedule", 2, 3, one_buffer).finding

    assert finding is not None
    assert (finding.clause, finding.rank, finding.action) == ("ownership.slot-busy", 0, "0F1")
    assert "buffer 0, which still holds the tape of stage 0 and microbatch 0" in finding.message
    assert ["0F0"] == [place.action for place in finding.related]


def test_one_buffer_is_enough_where_one_tape_is_live() -> None:
    """The instrument refuses no single buffer as such: without a pipeline one tape is live."""
    assert checked("TrainSchedule", 1, 3, one_buffer).finding is None


@pytest.mark.parametrize(
    ("name", "size", "edit", "clause"),
    [
        ("TrainSchedule", (2, 3), without("BackwardPass", 1, 3), "microbatch-missing"),
        ("TrainSchedule", (2, 3), without("SendActivation", 0, 3), "receive-without-send"),
        ("TrainSchedule", (2, 3), without("RecvGrad", 0, 3), "send-without-receive"),
        ("TrainSchedule", (4, 8), swapped("RecvActivation", "ForwardPass"), "use-before-receive"),
        ("DualPipeVSchedule", (2, 4), without("CommitP2P", 1), "use-before-receive"),
        ("DualPipeVSchedule", (2, 4), without("CommitP2P", 1, 99), "send-without-receive"),
    ],
)
def test_a_wrong_stream_is_refused(
    name: str, size: tuple[int, int], edit: Edit, clause: str
) -> None:
    """What is left out, exchanged or never launched is named."""
    assert f"schedule.{clause}" == checked(name, *size, edit).clause


def test_gradients_that_leave_early_are_refused() -> None:
    """ReduceGrads before the last BackwardPass."""

    def early(_: int, steps: list[list[list[Any]]]) -> list[list[list[Any]]]:
        return [[["ReduceGrads", {}]], *without("ReduceGrads", _)(_, steps)]

    assert checked("TrainSchedule", 2, 3, early).clause == "schedule.reduction-before-settled"


def add(name: str, given: dict[str, Any]) -> Edit:
    """An edit that puts one more instruction at the end."""
    return lambda _, steps: [*steps, [[name, given]]]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (add("Prefetch", {}), "rank 0, step 8: .* instruction Prefetch: unknown instruction"),
        (
            add("BackwardPass", {"buffer_id": 0}),
            "expected no instruction of the step after OptimizerStep",
        ),
        (replace("SendGrad", buffer_id="a"), "rank 1, .* SendGrad: expected a buffer_id of at"),
        (replace("BackwardPass", phase=2), "BackwardPass: expected a phase of 0 or 1, found 2"),
        (replace("ForwardPass", buffer_id=7), "ForwardPass: buffer 7 does not exist; .* 2 buffers"),
        (replace("BackwardPass", phase=1), "use buffer 0 at once"),
    ],
)
def test_what_cannot_be_read_names_its_place(edit: Edit, said: str) -> None:
    """The error is one line with rank, DeepSpeed's step and the instruction."""
    with pytest.raises(ScheduleError, match=said) as error:
        read("TrainSchedule", 2, 3, edit)

    assert "\n" not in str(error.value)
    assert error.value.rank is not None


def test_a_schedule_that_trains_nothing_is_not_checked() -> None:
    """Inference has no backward."""
    with pytest.raises(ScheduleError, match="no BackwardPass on any rank"):
        read("InferenceSchedule", 2, 3)


class Endless:
    """A schedule that never ends, or fails."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches == 1:
            raise ValueError("needs\nmore")

    def steps(self) -> Iterator[list[Any]]:
        """Yield for ever."""
        while True:
            yield []

    def num_pipe_buffers(self) -> int:
        """One buffer."""
        return 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stages": 0}, "stages must be at least 1, not 0"),
        ({"microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"microbatches": 10**6}, "more than the limit of 1000000 entries"),
        ({"microbatches": 1}, "the class refuses rank 0: ValueError: needs more"),
        ({}, "more than the limit of 1000000 entries"),
    ],
)
def test_wrong_sizes_and_wrong_classes(given: dict[str, int], said: str) -> None:
    """Sizes are checked first; what a class raises is said in one line."""
    with pytest.raises(ScheduleError, match=re.escape(said)) as error:
        deepspeed_schedule(Endless, **{"stages": 2, "microbatches": 4, **given})

    assert "\n" not in str(error.value)


OWN = """
class Instruction:
    def __init__(self, **given):
        self.kwargs = given

class LoadMicroBatch(Instruction): ...
class ForwardPass(Instruction): ...
class BackwardPass(Instruction): ...
class OwnBackward(BackwardPass): ...

class Mine:
    buffers = 1

    def __init__(self, micro_batches, stages, stage_id):
        self.micro_batches = micro_batches

    def num_pipe_buffers(self):
        return self.buffers

    def steps(self):
        for work in (LoadMicroBatch, ForwardPass, OwnBackward):
            for number in range(self.micro_batches):
                yield [work(buffer_id=number % self.buffers)]

class Wide(Mine):
    buffers = 2
"""


def test_a_class_of_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command imports ``module:Class``; its instructions may be subclasses of DeepSpeed's."""
    (tmp_path / "own_deepspeed.py").write_text(OWN, "utf-8")
    monkeypatch.chdir(tmp_path)
    sizes = ("--stages", "1", "--microbatches", "2", "--json")
    accepted = main(["check", "--deepspeed", "own_deepspeed:Wide", *sizes])
    wide = json.loads(capsys.readouterr().out)
    refused = main(["check", "--deepspeed", "own_deepspeed:Mine", *sizes])
    narrow = json.loads(capsys.readouterr().out)

    assert (0, 1) == (accepted, refused)
    assert ("accepted", 12) == (wide["verdict"], wide["actions"])
    assert ("ownership.slot-busy", 0, "0F1") == tuple(
        narrow[name] for name in ("clause", "rank", "action")
    )


def test_another_class_is_no_schedule() -> None:
    """A class without steps() is refused."""
    with pytest.raises(ScheduleError, match=r"builtins:dict is not a schedule class"):
        deepspeed_schedule(dict, stages=2, microbatches=4)


def test_the_classes_of_deepspeed_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a module is a class of DeepSpeed's own module."""
    names = [MODULE.rsplit(".", n)[0] for n in (3, 2, 1)] + [MODULE]
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[MODULE].TrainSchedule = played("TrainSchedule")  # type: ignore[attr-defined]

    table = deepspeed_schedule("TrainSchedule", stages=2, microbatches=3)

    assert table.rows == read("TrainSchedule", 2, 3).rows
    with pytest.raises(ScheduleError, match="no class 'TrainShedule'; did you mean TrainSchedule"):
        deepspeed_schedule("TrainShedule", stages=2, microbatches=3)


def test_deepspeed_is_not_needed_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the message says how to get it."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ScheduleError, match="pip install deepspeed, or name your own class"):
        deepspeed_schedule("TrainSchedule", stages=2, microbatches=3)


def test_a_module_that_prints_leaves_the_output_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an imported module prints goes to standard error."""
    (tmp_path / "chatty_schedules.py").write_text("print('loading')\nclass Mine: ...\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ScheduleError, match="Mine is not a schedule class"):
        deepspeed_schedule("chatty_schedules:Mine", stages=1, microbatches=1)

    assert ("", "loading\n") == capsys.readouterr()
