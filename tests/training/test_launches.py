"""
Training by one launch a step has the bits of guarded replays, with all that a run has.

What a device would do is done by `tests.ranks.recorded`; all else is the run's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.commands.restarts import resumed_row
from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks.ranks import launch

from . import launched_bodies as bodies
from .helpers import SMALL, language, noise, text

RUN = (
    SMALL.format(vocabulary=128, layers=4)
    + """{model}
[parallel]
{parallel}
[data]
train = "train.npy"
held_out = "train.npy"
[optimizer]
rate = 0.02
warmup = 4
decay_steps = 9
weight_decay = 0.1
clip_norm = 0.5
skip_nonfinite = true
[run]
steps = 9
evaluate_every = 6
evaluate_windows = 4
"""
)
PIPE = 'pp = 2\nschedule = "zbv"\nmicrobatches = 2'
FOUR = 'pp = 2\ndp = 2\nschedule = "il"\nmicrobatches = 2\namax = "replicas"'


def files(folder: Path, parallel: str, model: str = "", run: str = RUN) -> dict[str, str]:
    """One run by replays, and by launches: whole, and with saves on its way."""
    text(folder)
    found = {}
    for name, one_launch, saves in (
        ("replays", False, False),
        ("launches", True, False),
        ("kept", True, True),
    ):
        launches = f'\nmode = "{"one launch" if one_launch else "replays"}"'
        body = run.format(model=model, parallel=parallel + launches) + f'log = "{name}.jsonl"\n'
        body += '[checkpoint]\nfolder = "kept"\nevery = 4\nasynchronous = true\n' if saves else ""
        path = folder / f"{name}.toml"
        path.write_text(body)
        found[name] = str(path)
    return found


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a log that have a loss, without what a clock and an allocator say."""
    every = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    timed = ("step_ms", "tokens_per_s", "memory_bytes", "seconds_left")
    timed += ("compute_ms", "wait_ms", "launch_ms", "weights_ms", "slowest")
    return [{k: v for k, v in line.items() if k not in timed} for line in every if "loss" in line]


class Replays:
    """
    A run by replays over two ranks: what each rank says, and the log's lines about losses.

    Attributes:
        words: By rank.
        lines: Of its log.
    """

    def __init__(
        self, folder: Path, made: dict[str, str], body: Callable[..., Any] = bodies.in_turn
    ) -> None:
        """
        Train.

        Args:
            folder: Of the run's files.
            made: What `files` made.
            body: What a rank does.
        """
        (folder / "by replays").mkdir()
        said = launch(2, folder / "by replays", body, [(made["replays"], {})])
        assert said.codes == [0, 0]
        self.words: list[dict[str, Any]] = [said.words[rank][0] for rank in range(2)]
        self.lines = lines(folder, "replays")


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Replays:
    """Train once by replays, for all tests that compare launches with them."""
    folder = tmp_path_factory.mktemp("replays")
    return Replays(folder, files(folder, PIPE))


def begun_again(
    folder: Path,
    made: dict[str, str],
    faults: list[list[Any]],
    replays: Replays,
    name: str = "launches",
    body: Callable[..., Any] = bodies.in_turn,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """
    A run of launches over two ranks with several stops. After each stop the step restarts, and the
    run has the bits of a run by replays.

    Args:
        folder: Of the run's files.
        made: What `files` made.
        faults: Step, rank, kind and action of each stop.
        replays: What the same run by replays says.
        name: Which of the runs of launches.
        body: What a rank does.

    Returns:
        What each rank says of its launches, and the log's lines about stops.
    """
    path = Path(made[name])
    path.write_text(path.read_text().replace("[run]", "[run]\nretries = 1"))
    (folder / "said").mkdir()
    said = launch(2, folder / "said", body, [(made[name], {"faults": faults})])
    assert said.codes == [0, 0]
    words = [said.words[rank][0] for rank in range(2)]
    for launched, replayed in zip(words, replays.words, strict=True):
        assert launched["losses"] == replayed["losses"]
        assert launched["left"] == replayed["left"]
    assert lines(folder, name) == replays.lines
    every = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return words, [line for line in every if "stopped" in line]


@pytest.mark.parametrize(
    ("parallel", "model", "world"),
    [(PIPE, "", 2), pytest.param(FOUR, "tied = true", 4, marks=pytest.mark.nightly)],
    ids=["a pipeline", "replicas of a tied model"],
)
def test_launches_train_as_replays(parallel: str, model: str, world: int, tmp_path: Path) -> None:
    """
    Losses, norms, held-out losses and every tensor: whole, and stopped at 3 and gone on afresh.

    The rate is another one in every step, and every gradient is clipped.
    """
    made = files(tmp_path, parallel, model)
    require_alike(tmp_path, made, world, bodies.in_turn, clip=0.5)


def require_alike(
    folder: Path, made: dict[str, str], world: int, in_turn: Any, *, clip: float
) -> None:
    """Require of nine steps by launches, held-out text behind 6 and 9, what replays leave."""
    for name in ("whole", "again"):
        (folder / name).mkdir()
    cases = [(made["replays"], {}), (made["launches"], {}), (made["kept"], {"steps": 3})]
    whole = launch(world, folder / "whole", in_turn, cases)
    again = launch(world, folder / "again", in_turn, [(made["kept"], {"resume": True})])
    assert whole.codes == again.codes == [0] * world
    for rank in range(world):
        replays, launched, begun = whole.words[rank]
        (resumed,) = again.words[rank]
        assert replays["launches"] == 0
        assert launched["losses"] == replays["losses"]
        assert launched["left"] == replays["left"]
        assert launched["held_out"] == replays["held_out"]
        assert set(launched["held_out"]) == {"6", "9"}
        assert (launched["launches"], launched["replays"]) == (8, "")
        rehearsed, as_one = launched["rehearsed and as one"]
        assert rehearsed + as_one == 7
        assert as_one >= 3
        assert launched["ahead"] == [0, 0, 1, 1, 1, 1, 0, 1, 1]  # left for held-out text behind 6
        assert (begun["launches"], resumed["began"], resumed["launches"]) == (2, 3, 5)
        assert begun["losses"] + resumed["losses"] == replays["losses"]
        assert resumed["left"] == replays["left"]
        assert len(replays["left"]) > 50
    told = lines(folder, "replays")
    assert [line["step"] for line in told] == list(range(9))
    assert len({line["rate"] for line in told}) == 8  # the peak twice, around the warm-up's end
    assert all(line["norm"] > clip and not line["skipped"] for line in told)
    assert lines(folder, "launches") == lines(folder, "kept") == told


def test_stops_are_begun_again_and_told_once(tmp_path: Path, replays: Replays) -> None:
    """
    A refusal before a launch that others have sent off, a device that counted otherwise in a step
    that is waited for, as held-out text is next, and one that did so in a step that is not.

    Each step has one line, whatever was launched twice, and the run ends in the bits of replays.
    """
    faults = [[3, 1, "twice", "1W1"], [5, 0, "miscounted", ""], [7, 1, "miscounted", ""]]
    words, told = begun_again(tmp_path, files(tmp_path, PIPE), faults, replays)
    for launched, replayed in zip(words, replays.words, strict=True):
        assert launched["held_out"] == replayed["held_out"]
        assert launched["launches"] == 9 - 4  # a guarded step at first, and one behind each stop
    stops = [(line["step"], line["stopped"]) for line in told]
    assert [step for step, _ in stops] == [3, 5, 7]
    assert "rank 1, step 3, 1W1" in stops[0][1]
    assert "rank 0, step 5" in stops[1][1]
    assert "rank 1, step 7" in stops[2][1]


@pytest.mark.ci
def test_a_stop_behind_a_step_leaves_out_nothing_that_is_due(
    tmp_path: Path, replays: Replays
) -> None:
    """
    All devices updated, and a rank stopped while losses were brought together: behind steps after
    which held-out text and a checkpoint are due, and behind the last.
    """
    made = files(tmp_path, PIPE)
    path = Path(made["kept"])
    path.write_text(path.read_text().replace("every = 4", "every = 6"))
    faults = [[5, 1, "unheard", ""], [8, 0, "unheard", ""]]
    words, told = begun_again(tmp_path, made, faults, replays, "kept")
    for launched, replayed in zip(words, replays.words, strict=True):
        assert launched["held_out"] == replayed["held_out"]
    assert [line["step"] for line in told] == [6, 9]
    assert sorted(path.name for path in (tmp_path / "kept").glob("step*")) == [
        "step-00000006",
        "step-00000009",
    ]


@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 1])
def test_losses_that_one_rank_alone_has_brought_together_are_of_their_own_step(
    victim: int, tmp_path: Path, replays: Replays
) -> None:
    """The other has gone on to the next step: each line is still there once, with its own loss."""
    faults = [[3, victim, "heard in vain", ""]]
    _, told = begun_again(tmp_path, files(tmp_path, PIPE), faults, replays)
    assert len(told) == 1


@pytest.mark.ci
def test_skipped_updates_are_told_alike(tmp_path: Path) -> None:
    """With a rate at which nothing stays finite the device skips what the host would skip."""
    made = files(tmp_path, PIPE)
    for path in map(Path, made.values()):
        path.write_text(path.read_text().replace("rate = 0.02", "rate = 1e9"))
    (tmp_path / "said").mkdir()
    cases = [(made["replays"], {}), (made["launches"], {})]
    said = launch(2, tmp_path / "said", bodies.in_turn, cases)
    assert said.codes == [0, 0]
    for rank in range(2):
        replays, launched = said.words[rank]
        assert launched["left"] == replays["left"]
    told = lines(tmp_path, "replays")
    assert lines(tmp_path, "launches") == told
    assert {line["skipped"] for line in told} == {True, False}
    assert [line["norm"] is None for line in told] == [line["skipped"] for line in told]


def test_event_logs_have_a_launch_in_one_line(tmp_path: Path) -> None:
    """Steps recur beside a log, and what is written is accepted to the last epoch."""
    made = files(tmp_path, PIPE.replace("pp = 2", "pp = 1"))
    path = Path(made["launches"])
    path.write_text(path.read_text().replace("[run]", '[run]\nevent_logs = "events"'))
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.in_turn, [(made["launches"], {})])
    assert said.codes == [0]
    ((launched,),) = said.words.values()
    assert (launched["launches"], launched["rehearsed and as one"]) == (8, [2, 5])
    assert main(["replay", str(tmp_path / "events" / "rank0.jsonl"), "--quiet"]) == 0


@pytest.mark.nightly
def test_a_launch_costs_less_than_a_kilobyte_of_a_rotating_log(tmp_path: Path) -> None:
    """
    Per step and rank, with what each file begins and ends with; together with the rank log beside
    it, if files have 80 steps. The files replay together.
    """
    made = files(tmp_path, PIPE)
    path = Path(made["launches"])
    path.write_text(
        path.read_text()
        .replace("[run]", '[run]\nevent_logs = "events"\nevent_log_steps = 40')
        .replace("steps = 9", "steps = 80")
    )
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.in_turn, [(made["launches"], {})])
    assert said.codes == [0, 0]
    logs = sorted((tmp_path / "events").glob("rank*.jsonl"))
    assert len(logs) == 3 * 2  # two of 40 steps, and one without any
    for rank in range(2):
        log = (tmp_path / "events" / f"rank{rank}.00001.jsonl").read_bytes()
        each, head = len(log) / 40, log.index(b"\n") + 1
        (beside,) = [path for path in said.logs if f".{rank}." in path.name]
        told = beside.stat().st_size / 80  # the rank log, from its start on
        assert 70 < each < 1024, each
        assert 200 < told < told + (len(log) - head) / 40 + head / 80 < 1024, (told, each, head)
    assert main(["replay", *map(str, logs), "--quiet"]) == 0


def test_a_step_that_cannot_be_captured_is_replayed_from_there(
    tmp_path: Path, replays: Replays
) -> None:
    """The library of one rank refuses the capture. All ranks continue by guarded replays, and the
    log reports this once."""
    made = files(tmp_path, PIPE)
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.unable, made["launches"])
    assert said.codes == [0, 0]
    for rank in range(2):
        word, replayed = said.words[rank], replays.words[rank]
        assert word["left"] == replayed["left"]
        assert word["losses"] == replayed["losses"]
        assert word["launches"] == 0
        assert word["replays"].startswith("the step could not be captured: rank 1, step 1")
    every = list(map(json.loads, (tmp_path / "launches.jsonl").read_text().splitlines()))
    assert [line for line in every if "one_launch" in line] == [
        {"one_launch": True},
        {"one_launch": False, "guarded_replays": said.words[0]["replays"]},
    ]


def test_where_no_step_can_be_one_launch_it_says_why(tmp_path: Path) -> None:
    """On a CPU: in a line of the log, on the terminal and in the report; and it trains."""
    made = files(tmp_path, PIPE.replace("pp = 2", "pp = 1").replace("zbv", "1f1b"))
    path, out = Path(made["launches"]), tmp_path / "out.json"
    path.write_text(path.read_text().replace("steps = 9", "steps = 2"))
    (tmp_path / "said").mkdir()
    words = ["--out", str(out), "--commit", "1" * 40, "--quiet"]
    said = launch(1, tmp_path / "said", bodies.said, [["train", str(path), *words]])
    ((code, told, _),) = said.words[0]
    assert code == 0
    assert "guarded replays, not one launch per step: a CPU has no CUDA graphs" in told
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    (run,) = report["raw"]["runs"]
    why = "a CPU has no CUDA graphs: run on cuda"
    assert (run["launches"], run["guarded_replays"]) == (0, why)
    first, *others = map(json.loads, (tmp_path / "launches.jsonl").read_text().splitlines())
    assert first == {"one_launch": False, "guarded_replays": why}
    assert [line["step"] for line in others if "loss" in line] == [0, 1]


@pytest.mark.ci
def test_restarts_compare_launches_with_replays(tmp_path: Path) -> None:
    """The rows of the command: gone on from one checkpoint by launches, and by replays."""
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.restarted, Job(), str(tmp_path / "kept"))
    assert said.codes == [0, 0]
    whole, again, replayed = ([said.words[rank][n] for rank in range(2)] for n in range(3))
    for ranks, there, count in ((again, None, 4), (replayed, "zbv, guarded replays", 0)):
        row = resumed_row("zbv", whole, ranks, {}, there)
        assert (row["differ"], row["launches"]) == (0, [7, count])
        assert row["compared"] > 100
        assert row["loaded_under"] == (there or "zbv")


def test_a_worker_for_launches_wants_nothing_but_graphs(tmp_path: Path) -> None:
    """Its update can be captured, and a language model's rate is where a graph reads it."""
    jobs = [Job(pp=1), language(noise(tmp_path), pp=1)]
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.without_graphs, jobs)
    plain, model = said.words[0]
    for found in (plain, model):
        assert found["missing"] == ["a CPU has no CUDA graphs: run on cuda"]
    assert (plain["tensors"], model["tensors"]) == (False, True)


@pytest.mark.ci
def test_a_launched_side_of_curves_is_the_native_one(tmp_path: Path) -> None:
    """The same losses, held-out losses and tensors; without graphs that side is refused."""
    made = files(tmp_path, PIPE.replace("pp = 2", "pp = 1"))
    path, out = Path(made["replays"]), tmp_path / "out.json"
    path.write_text(path.read_text().replace("skip_nonfinite = true\n", ""))
    runs = ["--runs", "native:zbv:0", "launched:zbv:0", "guarded:zbv:0"]
    case = [
        "report",
        "curves",
        str(path),
        *runs,
        "--out",
        str(out),
        "--commit",
        "1" * 40,
        "--quiet",
    ]
    short = [*case[:4], "launched:zbv:0", *case[7:]]
    for name in ("said", "refused"):
        (tmp_path / name).mkdir()
    refused = launch(1, tmp_path / "refused", bodies.said, [short])
    ((code, _, err),) = refused.words[0]
    assert code == 2
    assert "the steps of this run cannot be launched as one graph: a CPU has no CUDA graphs" in err
    said = launch(1, tmp_path / "said", bodies.commands, [case])
    ((code, told, _),) = said.words[0]
    assert code == 0
    assert "launched:zbv:0:te and native:zbv:0:te: 0 of 9 losses differ" in told
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    assert [run["launches"] for run in report["raw"]["runs"]] == [0, 8, 0]
    rows = {row["run"]: row for row in report["derived"]["same_order"]}
    for name in ("launched:zbv:0:te", "guarded:zbv:0:te"):
        assert not rows[name]["state_differs"]
        assert (rows[name]["losses_differ"], rows[name]["held_out_differ"]) == (0, 0)


@pytest.mark.parametrize(
    ("new", "options", "told"),
    [
        ("one_launch = true\ncaptured = false", [], "[parallel] one_launch: expected captured = t"),
        (
            'mode = "replays"\ncaptured = true',
            [],
            "[parallel] captured: expected mode alone, found captured",
        ),
        (
            'mode = "one launch"',
            ["--compare", "all"],
            "[parallel] mode: --compare all needs",
        ),
        ("one_launch = 1", [], "[parallel] one_launch: expected true or false, found 1"),
    ],
)
def test_one_launch_beside_what_excludes_it_is_one_line(
    new: str, options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything is made."""
    path = Path(files(tmp_path, PIPE)["launches"])
    path.write_text(path.read_text().replace('mode = "one launch"', new))
    assert main(["runtime", "train", str(path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert line.count("launches.toml") == 1
