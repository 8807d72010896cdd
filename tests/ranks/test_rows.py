"""
The order in which a rank runs its row: sends follow their source, and an action waits where a slot
is used again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.step.plan.rows import Row, ScheduleRefusedError, walked
from qeffect.gpu_runtime.step.plan.slots import PROVISIONINGS, Provisioning
from qeffect.schedule.actions import SEND_WAITS, SENDS, Kind, Schedule, ScheduleError
from qeffect.schedule.infer import from_actions
from qeffect.schedule.tables import fixture_names, read_fixture, read_table

#: All but the largest table, which takes seconds to check.
COMMS = sorted(
    name for name in fixture_names() if name.endswith(".comms.csv") and "pp8" not in name
)
TABLES = Path(__file__).parents[1] / "schedule" / "torch_tables"
AWAITED = sorted((TABLES / "2.15.0").glob("*.sends2.comms.csv"))
SOURCE = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.DGRAD}


def messages(table: Schedule) -> list[list[str]]:
    """Each rank's messages in order."""
    kinds = SENDS | {Kind.RECV_F, Kind.RECV_B}
    return [[str(a) for a in row if a is not None and a.kind in kinds] for row in table.rows]


@pytest.mark.parametrize("provisioning", PROVISIONINGS)
@pytest.mark.parametrize("name", COMMS)
def test_a_walk_is_the_table_with_sends_first_and_slots_kept(
    name: str, provisioning: Provisioning
) -> None:
    """Nothing is lost, no slot has two tenants, and no send leaves from a slot that moved on."""
    given = read_fixture(name)
    table = walked(given, provisioning)
    for rank in range(given.num_ranks):
        row = Row.of(table, rank, provisioning)
        atoms = [a for a in row.atoms if a.kind not in SEND_WAITS]
        kept = {Kind.UNSHARD, Kind.RESHARD}
        expected = [a[:3] for a in given.atoms[rank] if a.kind not in kept]
        assert sorted(a[:3] for a in atoms) == sorted(expected)
        assert [a[1:3] for a in atoms if a.kind is Kind.FORWARD] == [
            a[1:3] for a in given.atoms[rank] if a.kind is Kind.FORWARD
        ]
        seen: dict[tuple[Kind, int, int], int] = {}
        tenants: dict[tuple[int, int], int] = {}
        leaving: dict[tuple[int, int], int] = {}
        for place, (kind, stage, m, *_) in enumerate(row.atoms):
            seen[kind, stage, m] = place
            slot = (stage, row.slots.slot_of[stage, max(m, 0)])
            if kind is Kind.RECV_F or (kind is Kind.FORWARD and tenants.get(slot) != m):
                if slot in tenants:
                    assert (Kind.WGRAD, stage, tenants[slot]) in seen
                assert leaving.get(slot, 0) == 0
                tenants[slot] = m
            if kind in SENDS:
                leaving[slot] = leaving.get(slot, 0) + 1
                assert seen[SOURCE[kind], stage, m] < place
                if kind is Kind.SEND_B:
                    assert (Kind.WGRAD, stage, m) not in seen
            elif kind in SEND_WAITS:
                assert tenants[slot] == m
                leaving[slot] -= 1
        assert not any(leaving.values())


def test_messages_keep_their_order_in_every_channel() -> None:
    """Only a dW is overtaken: the other end still receives in the order of sends."""
    for name in COMMS:
        given = read_fixture(name)
        assert messages(walked(given)) == messages(given)


def test_waits_of_a_table_are_taken_as_they_stand() -> None:
    """torch 2.15 says where sends end."""
    found = [read_table(path) for path in AWAITED]
    awaited = [table for table in found if table.awaits_sends and table.complete]
    assert awaited
    for given in awaited[:4]:
        table = walked(given)
        count = sum(a.kind in SEND_WAITS for atoms in given.atoms for a in atoms)
        assert count == sum(a.kind in SEND_WAITS for atoms in table.atoms for a in atoms) > 0


@pytest.mark.parametrize("release", ["2.13.0", "2.14.1", "2.15.0"])
def test_deferred_receives_that_exchange_tensors_are_never_walked(release: str) -> None:
    """torch moves receives on one side only, and runs this table without an error."""
    name = "ScheduleZBVZeroBubble_pp2_vpp2_m4.defer.comms.csv"
    given = read_table(TABLES / release / name)
    with pytest.raises(ScheduleRefusedError, match="the tensors would be swapped") as refused:
        walked(given)
    assert refused.value.finding.clause == "schedule.message-order"


def test_what_check_refuses_is_never_walked() -> None:
    """The cause is the finding, as `qeffect check` prints it."""
    deadlock = from_actions(
        [
            ["0RECV_B0", "0F0", "0SEND_F0", "0B0"],
            ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
        ]
    )
    with pytest.raises(ScheduleRefusedError, match=r"schedule\.") as refused:
        walked(deadlock)
    assert refused.value.finding.clause.startswith("schedule.")
    with pytest.raises(ScheduleError, match="names no messages"):
        walked(from_actions([["0F0", "0B0"], ["1F0", "1B0"]]))
    with pytest.raises(ScheduleError, match="some ranks are missing"):
        walked(from_actions(["1RECV_F0", "1F0", "1B0", "1SEND_B0"]))
