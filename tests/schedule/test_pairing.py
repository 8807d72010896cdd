"""
Pairing of messages: what a runtime without message keys would pair, on torch's tables and on random
tables.
"""

from __future__ import annotations

import pytest

from qeffect.schedule.actions import Kind, Schedule, ScheduleError
from qeffect.schedule.infer import from_actions
from qeffect.schedule.pairing import DISCIPLINES, Work, discipline
from qeffect.schedule.tables import fixture_names, read_fixture

from .edits import ZBV
from .pairing_oracle import Mispaired, mispaired
from .random_schedules import random_schedule

ZBV_4 = "ScheduleZBVZeroBubble_pp4_vpp2_m8.compute.csv"


def picked(schedule: Schedule, pairing: str) -> list[tuple[int, int, str, Work, Work | None]]:
    """What a discipline picks for each dW that is not its own work."""
    wrong = []
    for rank, atoms in enumerate(schedule.atoms):
        rule = discipline(pairing)
        for atom in atoms:
            work = (atom.stage, atom.microbatch)
            if atom.kind is Kind.DGRAD:
                rule.retain(work)
            elif atom.kind is Kind.WGRAD and (got := rule.pick(work)) != work:
                wrong.append((rank, atom.step, str(atom.action), work, got))
    return wrong


def listed(found: tuple[Mispaired, ...]) -> list[tuple[int, int, str, Work, Work | None]]:
    """The oracle's findings in the same form."""
    return [(m.rank, m.step, m.action, m.own, m.given) for m in found]


@pytest.mark.parametrize("name", [n for n in fixture_names() if "_m64" not in n])
@pytest.mark.parametrize("pairing", sorted(DISCIPLINES))
def test_a_discipline_picks_what_its_definition_says(name: str, pairing: str) -> None:
    """On torch's tables; there keys and a queue for each stage are never wrong."""
    schedule = read_fixture(name)
    found = picked(schedule, pairing)

    assert listed(mispaired(schedule, pairing)) == found
    assert pairing in ("latest", "global") or not found


@pytest.mark.parametrize("pairing", sorted(DISCIPLINES))
def test_keyless_disciplines_fail_where_their_definitions_say(pairing: str) -> None:
    """Each keyless discipline fails on some schedule, and just where its definition says."""
    failed = 0
    for seed in range(60):
        schedule = random_schedule(seed)
        found = picked(schedule, pairing)
        failed += bool(found)

        assert listed(mispaired(schedule, pairing)) == found
    assert bool(failed) is (pairing != "contract")


class TestOracle:
    """What the oracle says of tables that can be looked at by hand."""

    @pytest.mark.parametrize("name", [ZBV, ZBV.replace("compute", "comms")])
    def test_the_latest_dgrad_is_wrong_once_in_zbv(self, name: str) -> None:
        """The most recent dgrad is the wrong one once, on rank 1 of ZB-V at PP=2, M=4."""
        (found,) = mispaired(read_fixture(name), "latest")

        assert (1, "1W2", (1, 2), (1, 3)) == (found.rank, found.action, found.own, found.given)
        assert name != ZBV or found.step == 22

    def test_one_queue_a_rank_needs_four_ranks_to_fail_in_zbv(self) -> None:
        """One queue a rank is right for ZB-V at PP=2, M=4, and first wrong at PP=4, M=8."""
        found = mispaired(read_fixture(ZBV_4), "global")
        first = min(found, key=lambda m: m.step)

        assert () == mispaired(read_fixture(ZBV), "global")
        assert 9 == len(found)
        assert Mispaired(1, 44, "1W5", (1, 5), (6, 7)) == first

    def test_fifo_fails_once_wgrads_leave_their_order(self) -> None:
        """A queue a stage needs weight gradients in the order of dgrads."""
        row = ["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"]
        found = mispaired(from_actions([row]), "fifo")

        assert [((0, 1), (0, 0)), ((0, 0), (0, 1))] == [(m.own, m.given) for m in found]

    def test_full_backward_takes_up_older_work(self) -> None:
        """B under a queue consumes the work that an earlier I left."""
        found = mispaired(from_actions([["0F0", "0F1", "0I0", "0B1", "0W0"]]), "fifo")

        assert ("0B1", (0, 0)) == (found[0].action, found[0].given)


def test_nothing_left_behind() -> None:
    """Where nothing is retained, every discipline offers nothing."""
    for pairing in DISCIPLINES:
        assert discipline(pairing).pick((0, 0)) is None


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
        discipline("lifo")
