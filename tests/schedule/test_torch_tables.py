"""The tables of torch's schedule classes, selected by name."""

from __future__ import annotations

import sys

import pytest

from qeffect.schedule.actions import Kind, ScheduleError
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.tables import fixture_names, read_fixture
from qeffect.schedule.torch_tables import (
    CLASSES,
    LOOPED,
    SINGLE,
    V_SHAPED,
    class_name,
    torch_schedule,
)


@pytest.mark.parametrize("name", [n for n in fixture_names() if "_m64" not in n])
def test_shipped_tables_are_torchs(name: str) -> None:
    """The shipped tables are what the installed torch makes."""
    cls, pp, vpp, rest = name.split("_")
    microbatches, kind = rest.split(".")[:2]
    made = torch_schedule(
        cls,
        pp=int(pp[2:]),
        vpp=int(vpp[3:]),
        microbatches=int(microbatches[1:]),
        comms=kind == "comms",
    )

    assert read_fixture(name).rows == made.rows


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("comms", [False, True])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 2), (2, 4), (3, 6), (4, 8)])
def test_every_table_is_accepted(cls: str, pp: int, microbatches: int, comms: bool) -> None:
    """What torch executes has no findings, in either format."""
    schedule = torch_schedule(cls, pp=pp, microbatches=microbatches, comms=comms)

    assert () == check_ranks(schedule)
    assert pp == schedule.num_ranks
    assert microbatches == schedule.num_microbatches


@pytest.mark.parametrize("cls", LOOPED)
def test_any_number_of_chunks(cls: str) -> None:
    """Looped classes take any number of stages a rank."""
    schedule = torch_schedule(cls, pp=2, vpp=3, microbatches=4)

    assert (0, 2, 4) == schedule.stages_of(0)
    assert () == check_ranks(schedule)


@pytest.mark.parametrize("cls", V_SHAPED)
def test_v_puts_both_ends_on_rank_zero(cls: str) -> None:
    """V-shaped classes fold the pipeline."""
    schedule = torch_schedule(cls, pp=2, microbatches=4)

    assert {0: 0, 1: 1, 2: 1, 3: 0} == schedule.stage_to_rank


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 2), (2, 4), (4, 8)])
def test_each_stage_takes_its_microbatches_in_turn(cls: str, pp: int, microbatches: int) -> None:
    """In F and in backward, whichever table; looped BFS alone turns its backwards round."""
    schedule = torch_schedule(cls, pp=pp, microbatches=microbatches)
    every = [atom for row in schedule.atoms for atom in row]
    turn = list(range(microbatches))
    back = turn[::-1] if cls == "ScheduleLoopedBFS" else turn
    for stage in schedule.stage_to_rank:
        for kind, wanted in ((Kind.FORWARD, turn), (Kind.DGRAD, back), (Kind.WGRAD, back)):
            taken = [a.microbatch for a in every if (a.stage, a.kind) == (stage, kind)]
            assert taken == wanted


class TestSingle:
    @pytest.mark.parametrize("cls", SINGLE)
    def test_what_is_executed(self, cls: str) -> None:
        """The recorded loop computes each microbatch once on every rank."""
        schedule = torch_schedule(cls, pp=4, microbatches=8)

        for rank, row in enumerate(schedule.rows):
            forwards = [a.microbatch for a in row if a is not None and a.kind is Kind.FORWARD]
            assert list(range(8)) == forwards
            assert {rank} == {a.stage for a in row if a is not None}

    def test_gpipe_agrees_with_its_drawing(self) -> None:
        """GPipe's drawn table is its executed order followed by the reduction."""
        executed = torch_schedule("GPipe", pp=2, microbatches=4)
        drawn = torch_schedule("GPipe", pp=2, microbatches=4, drawn=True)

        for ran, shown in zip(executed.rows, drawn.rows, strict=True):
            assert ran == shown[:-1]
            assert "REDUCE_GRAD" in str(shown[-1])
        assert drawn.notes

    def test_1f1b_is_drawn_wrongly(self) -> None:
        """torch's drawing of 1F1B skips microbatch 0 on the last rank, and is refused there."""
        drawn = torch_schedule("1F1B", pp=4, microbatches=8, drawn=True)
        found = check_ranks(drawn)

        assert ["schedule.microbatch-out-of-range", "schedule.microbatch-missing"] == [
            f.clause for f in found
        ]
        assert (3, "3F8") == (found[0].rank, found[0].action)
        assert () == check_ranks(torch_schedule("1F1B", pp=4, microbatches=8))

    def test_comms_have_messages_and_reductions(self) -> None:
        """The recorded loop shows its messages and its reduction."""
        row = torch_schedule("1F1B", pp=2, microbatches=2, comms=True).rows[0]

        assert "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD" == " ".join(
            map(str, row)
        )


class TestNames:
    @pytest.mark.parametrize(
        ("given", "full"),
        [
            ("ScheduleZBVZeroBubble", "ScheduleZBVZeroBubble"),
            ("ZBVZeroBubble", "ScheduleZBVZeroBubble"),
            ("1f1b", "Schedule1F1B"),
            ("schedulegpipe", "ScheduleGPipe"),
        ],
    )
    def test_any_case_and_prefix(self, given: str, full: str) -> None:
        """A class is found with or without its prefix, in any case."""
        assert full == class_name(given)

    def test_an_unknown_class_is_refused_with_the_known_ones(self) -> None:
        """An unknown class is refused with the list of known ones."""
        with pytest.raises(ScheduleError, match=r"unknown schedule class 'Nope'.*ScheduleZBV"):
            torch_schedule("Nope", pp=2, microbatches=4)


class TestRefused:
    @pytest.mark.parametrize(
        ("cls", "arguments", "said"),
        [
            ("ZBVZeroBubble", {"pp": 2, "vpp": 3, "microbatches": 4}, "exactly 2 stages per rank"),
            ("DualPipeV", {"pp": 2, "vpp": 1, "microbatches": 4}, "exactly 2 stages per rank"),
            ("DualPipeV", {"pp": 2, "microbatches": 3}, "torch refuses .*as stages"),
            ("1F1B", {"pp": 2, "vpp": 2, "microbatches": 4}, "exactly 1 stage per rank"),
            ("1F1B", {"pp": 4, "microbatches": 2}, "torch refuses .*greater than or equal"),
            ("Interleaved1F1B", {"pp": 2, "microbatches": 5}, "torch refuses .*multiple of"),
            ("GPipe", {"pp": 0, "microbatches": 2}, "must be at least 1"),
            ("GPipe", {"pp": 2, "microbatches": 0}, "must be at least 1"),
            ("GPipe", {"pp": 10**5, "microbatches": 10**5}, "more than the limit of 1000000"),
            ("ZBVZeroBubble", {"pp": 2, "microbatches": 4, "drawn": True}, "have a drawn table"),
            (
                "GPipe",
                {"pp": 2, "microbatches": 4, "drawn": True, "comms": True},
                "has no messages",
            ),
        ],
    )
    def test_an_impossible_combination_is_one_line(
        self, cls: str, arguments: dict[str, int], said: str
    ) -> None:
        """A combination that the class cannot do is one line that says why."""
        with pytest.raises(ScheduleError, match=said) as caught:
            torch_schedule(cls, **arguments)  # type: ignore[arg-type]

        assert "\n" not in str(caught.value)

    def test_without_torch_the_error_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where torch is missing, the error says which extra brings it."""
        monkeypatch.setitem(sys.modules, "torch", None)

        with pytest.raises(ScheduleError, match=r"pip install 'qeffect\[torch\]'"):
            torch_schedule("GPipe", pp=2, microbatches=4)

    def test_torch_is_imported_lazily(self) -> None:
        """Importing the whole package, and checking a shipped table, does not import torch."""
        import subprocess

        program = (
            "import sys, pkgutil, importlib, qeffect.schedule as p\n"
            "for m in pkgutil.iter_modules(p.__path__):\n"
            "    importlib.import_module(f'qeffect.schedule.{m.name}')\n"
            "from qeffect.schedule.tables import fixture_names, read_fixture\n"
            "from qeffect.schedule.ranks import check_ranks\n"
            "assert check_ranks(read_fixture(fixture_names()[0])) == ()\n"
            "print('torch' in sys.modules)\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )

        assert "False" == ran.stdout.strip()
