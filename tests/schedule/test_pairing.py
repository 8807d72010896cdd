"""
Pairing disciplines: what a runtime without keys would pair, on torch's tables and on random ones.
"""

from __future__ import annotations

import pytest

from qeffect.schedule.actions import Kind, Schedule, ScheduleError
from qeffect.schedule.infer import from_actions
from qeffect.schedule.pairing import DISCIPLINES, discipline, first_mismatch, mismatches
from qeffect.schedule.random_schedules import Shape, random_schedule
from qeffect.schedule.tables import fixture_names, read_fixture

from .edits import ZBV

ZBV_4 = "ScheduleZBVZeroBubble_pp4_vpp2_m8.compute.csv"


@pytest.mark.parametrize("name", fixture_names())
@pytest.mark.parametrize("pairing", ["contract", "fifo"])
def test_never_mismatch_on_torchs_tables(name: str, pairing: str) -> None:
    """In every table of torch a stage's weight gradients run in the order of its dgrads."""
    assert () == mismatches(read_fixture(name), pairing)


class TestLatest:
    def test_the_latest_dgrad_is_wrong_once_in_zbv(self) -> None:
        """The most recent dgrad is the wrong one once, on rank 1 of ZB-V at PP=2, M=4."""
        found = mismatches(read_fixture(ZBV), "latest")

        assert 1 == len(found)
        assert (1, 22, "1W2", (1, 2), (1, 3)) == (
            found[0].rank,
            found[0].step,
            found[0].action,
            found[0].expected,
            found[0].got,
        )

    def test_a_mismatch_names_the_owned_work_and_the_given(self) -> None:
        """The mismatch names the work that it owns and the work that it is given."""
        mismatch = first_mismatch(read_fixture(ZBV), "latest")
        assert mismatch is not None
        found = mismatch.finding

        assert "schedule.pairing-mismatch" == found.clause
        assert "under 'latest' pairing, 1W2 would consume what 1I3 left behind, not 1I2" == (
            found.message
        )
        assert [("1I2", "owner", 19), ("1I3", "picked", 21)] == [
            (p.action, p.role, p.step) for p in found.related
        ]

    def test_comms_table_agrees(self) -> None:
        """The table with messages has the same mismatch."""
        found = mismatches(read_fixture(ZBV.replace("compute", "comms")), "latest")

        assert [(1, "1W2")] == [(m.rank, m.action) for m in found]


class TestGlobal:
    def test_smaller_zbv_is_fine(self) -> None:
        """One queue a rank is right for ZB-V at PP=2, M=4."""
        assert first_mismatch(read_fixture(ZBV), "global") is None

    def test_zbv_with_four_ranks(self) -> None:
        """One queue a rank is first wrong in ZB-V at PP=4, M=8."""
        found = first_mismatch(read_fixture(ZBV_4), "global")

        assert found is not None
        assert (1, 44, "1W5", (1, 5), (6, 7)) == (
            found.rank,
            found.step,
            found.action,
            found.expected,
            found.got,
        )
        assert 9 == len(mismatches(read_fixture(ZBV_4), "global"))


def _by_definition(schedule: Schedule, pairing: str) -> list[tuple[int, int]]:
    """Mismatches computed from the definitions, looking back over the whole row every time."""
    wrong = []
    for rank, atoms in enumerate(schedule.atoms):
        backward = [a for a in atoms if a.kind in (Kind.DGRAD, Kind.WGRAD)]
        for i, atom in enumerate(backward):
            if atom.kind is not Kind.WGRAD:
                continue
            before = backward[:i]
            if pairing != "global":
                before = [a for a in before if a.stage == atom.stage]
            dgrads = [(a.stage, a.microbatch) for a in before if a.kind is Kind.DGRAD]
            consumed = sum(a.kind is Kind.WGRAD for a in before)
            got = dgrads[-1] if pairing == "latest" else dgrads[consumed]
            if got != (atom.stage, atom.microbatch):
                wrong.append((rank, atom.step))
    return wrong


@pytest.mark.parametrize("pairing", ["fifo", "latest", "global"])
def test_keyless_disciplines_fail_where_their_definitions_say(pairing: str) -> None:
    """Each keyless discipline fails on some schedule, and just where its definition says."""
    failed = 0
    for seed in range(60):
        schedule = random_schedule(seed)
        found = [(m.rank, m.step) for m in mismatches(schedule, pairing)]
        failed += bool(found)

        assert _by_definition(schedule, pairing) == found
        assert () == mismatches(schedule, "contract")
    assert failed


def test_fifo_fails_once_wgrads_leave_their_order() -> None:
    """A queue a stage needs weight gradients in the order of dgrads."""
    row = ["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"]
    found = mismatches(from_actions([row]), "fifo")

    assert [((0, 1), (0, 0)), ((0, 0), (0, 1))] == [(m.expected, m.got) for m in found]


def test_full_backward_takes_up_older_work() -> None:
    """B under a queue consumes the work that an earlier I left."""
    found = first_mismatch(from_actions([["0F0", "0F1", "0I0", "0B1", "0W0"]]), "fifo")

    assert found is not None
    assert ("0B1", (0, 0)) == (found.action, found.got)


def test_nothing_left_behind() -> None:
    """Where nothing is retained, every discipline offers nothing."""
    for pairing in DISCIPLINES:
        assert discipline(pairing).pick((0, 0)) is None


def test_no_work_is_a_mismatch() -> None:
    """A weight gradient without any retained work is reported as such."""
    found = first_mismatch(from_actions([["0F0", "0W0", "0I0"]]), "contract")

    assert found is not None
    assert found.got is None
    assert "what nothing left behind" in found.finding.message


def test_contract_gives_work_once() -> None:
    """Under keys a second weight gradient finds nothing."""
    keyed = discipline("contract")
    keyed.retain((0, 1))

    assert (0, 1) == keyed.pick((0, 1))
    assert keyed.pick((0, 1)) is None


def test_an_unknown_discipline_is_refused_with_the_known_ones() -> None:
    """An unknown discipline is refused with the list of known ones."""
    with pytest.raises(
        ScheduleError, match="unknown pairing 'lifo'; expected one of contract, fifo"
    ):
        mismatches(random_schedule(0, Shape((0,), 1, (1,))), "lifo")
