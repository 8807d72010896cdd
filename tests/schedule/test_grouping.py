"""
Grouped dW: what a grouped table keeps, where its dW stand, and the slots that it needs.
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from qeffect.gpu_runtime.step.plan.rows import Row, walked
from qeffect.schedule.actions import SENDS, SHARDING, Kind, Schedule, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.grouping import group_of, group_wgrads, require_group
from qeffect.schedule.infer import from_actions
from qeffect.schedule.plan import plan, runtime_slots
from qeffect.schedule.tables import fixture_names, read_fixture, read_table
from qeffect.schedule.transport import Transport

from .edits import ZBV
from .random_schedules import random_schedule

RELEASE = Path(__file__).parent / "torch_tables" / "2.15.0"
#: All but the largest table, which takes seconds to check.
FIXTURES = sorted(name for name in fixture_names() if "m64" not in name)
#: Tables that say where their sends end; deferred receives are refused.
AWAITED = sorted(p.name for p in RELEASE.glob("*sends2.comms.csv") if "defer" not in p.name)
RUNTIME = Transport("edge", rendezvous="queue")


@functools.cache
def table_of(name: str) -> Schedule:
    """A shipped table, or one of torch 2.15."""
    return read_fixture(name) if name in FIXTURES else read_table(RELEASE / name)


def divisors(number: int) -> list[int]:
    """All groups of a number of microbatches."""
    return [g for g in range(1, number + 1) if number % g == 0]


EVERY = [
    pytest.param(name, group, id=f"{name.removeprefix('Schedule').removesuffix('.csv')}-{group}")
    for name in (*FIXTURES, *AWAITED)
    for group in divisors(table_of(name).num_microbatches)
]
WITH_MESSAGES = [param for param in EVERY if ".comms" in str(param.values[0])]


@pytest.mark.parametrize(("name", "group"), EVERY)
def test_a_grouped_table_has_the_same_actions(name: str, group: int) -> None:
    """Each rank keeps its steps, and only dW change their place among computations."""
    given = table_of(name)
    table = group_wgrads(given, group)
    for before, after in zip(given.atoms, table.atoms, strict=True):
        kept = [atom[:3] for atom in before if atom.kind not in SHARDING]
        assert Counter(kept) == Counter(atom[:3] for atom in after)
        for kinds in ({Kind.FORWARD, Kind.DGRAD}, SENDS):
            assert [a for a in kept if a[0] in kinds] == [a[:3] for a in after if a.kind in kinds]


@pytest.mark.parametrize(("name", "group"), EVERY)
def test_the_dw_of_a_group_stand_where_the_last_of_them_stood(name: str, group: int) -> None:
    """They are adjacent and ascending, and everything else stands as in the split table."""
    given = table_of(name)
    split, table = group_wgrads(given, 1), group_wgrads(given, group)
    for before, after in zip(split.atoms, table.atoms, strict=True):
        expected: list[tuple[Kind, int, int]] = []
        seen: Counter[tuple[int, int]] = Counter()
        for kind, stage, microbatch, *_ in before:
            if kind is not Kind.WGRAD:
                expected.append((kind, stage, microbatch))
                continue
            block = group_of(microbatch, group)
            seen[stage, block[0]] += 1
            if seen[stage, block[0]] == group:
                expected += [(kind, stage, m) for m in block]
        assert expected == [atom[:3] for atom in after]


@pytest.mark.parametrize(("name", "group"), EVERY)
def test_check_accepts_a_grouped_table(name: str, group: int) -> None:
    """Under torch's transport and under the runtime's, if `check` accepts the given table."""
    given = table_of(name)
    transports = [Transport()]
    if given.has_comms and check(given, transport=RUNTIME).finding is None:
        transports.append(RUNTIME)
    for transport in transports:
        assert check(group_wgrads(given, group), transport=transport).finding is None


def test_check_accepts_grouped_random_tables() -> None:
    """So it is for legal schedules of no known shape: late dW, overlaps, waits."""
    found: Counter[int] = Counter()
    for seed in range(60):
        given = random_schedule(seed)
        for group in divisors(given.num_microbatches):
            assert check(group_wgrads(given, group)).finding is None, (seed, group)
            found[group] += 1

    assert len(found) > 2


@pytest.mark.parametrize(("name", "group"), WITH_MESSAGES)
def test_the_planned_slots_are_those_of_the_runtime(name: str, group: int) -> None:
    """`runtime_slots` equals each row's slots, and is at least the plan's, which reads less."""
    given = table_of(name)
    grouped = group_wgrads(given, group)
    table = walked(given, "live", group)
    found: dict[int, int] = {}
    for rank in range(given.num_ranks):
        found.update(Row.of(table, rank, "live", group).slots.num_slots)
    planned = runtime_slots(grouped)

    assert found == planned
    for stage, slots in plan(grouped).slots.items():
        assert found[stage] >= slots


@pytest.mark.parametrize("name", [n for n in FIXTURES if n.endswith("vpp1_m8.comms.csv")])
def test_with_one_stage_per_rank_both_counts_agree(name: str) -> None:
    """A receive directly before its F, and no other stage to read a tape: nothing differs."""
    given = table_of(name)
    for group in divisors(given.num_microbatches):
        grouped = group_wgrads(given, group)
        assert plan(grouped).slots == runtime_slots(grouped)


def test_the_runtime_takes_no_table_without_messages() -> None:
    """Ranks without messages, and one rank of several, have no slots there; one rank alone has."""
    alone = from_actions([["0F0", "0F1", "0B0", "0B1"]])
    row = from_actions([["1RECV_F0", "1F0", "1B0", "1SEND_B0"]], complete=False)

    assert runtime_slots(group_wgrads(read_fixture(ZBV), 2)) is None
    assert runtime_slots(group_wgrads(row, 1)) is None
    assert {0: 2} == runtime_slots(group_wgrads(alone, 2))


def test_larger_groups_need_no_fewer_slots() -> None:
    """A group's tapes wait for its last dI; with one group, all tapes of a step are live."""
    for name in FIXTURES:
        given = table_of(name)
        most = given.num_microbatches
        chain = [g for g in (1, 2, 4, 8) if most % g == 0]
        found = [plan(group_wgrads(given, group)).slots for group in chain]
        for less, more in pairwise(found):
            assert all(less[stage] <= more[stage] for stage in less), name
        assert set(plan(group_wgrads(given, most)).slots.values()) == {most}


def test_full_backwards_send_before_their_dw() -> None:
    """A send follows what produces it, and a group's dW follow the last dI and its send."""
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    found = [" ".join(map(str, row)) for row in group_wgrads(from_actions(rows), 2).rows]

    assert [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0RECV_B1 0I1 0W0 0W1",
        "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1",
    ] == found


def test_groups_of_microbatches_out_of_order() -> None:
    """Groups are blocks of numbers, whatever the order in the table; dW ascend all the same."""
    order = (3, 0, 2, 1)
    row = [f"0F{m}" for m in order] + [f"0B{m}" for m in order]
    (found,) = group_wgrads(from_actions([row]), 2).rows

    assert "0I3 0I0 0I2 0W2 0W3 0I1 0W0 0W1" == " ".join(map(str, found[4:]))


def test_groups_cover_all_microbatches_once() -> None:
    """Each microbatch is in the group that it names, and groups do not overlap."""
    for whole in (1, 2, 6, 8):
        for group in divisors(whole):
            blocks = {group_of(m, group) for m in range(whole)}
            assert sorted(m for block in blocks for m in block) == list(range(whole))
            assert all(m in group_of(m, group) for m in range(whole))


@pytest.mark.parametrize("group", [0, -1, True, 3, "2", 2.0, None, 16])
def test_a_bad_group_is_refused(group: object) -> None:
    """The message says expected, found, and what 1 would do."""
    table = read_fixture("ScheduleZBVZeroBubble_pp4_vpp2_m8.compute.csv")
    said = f"group: expected a divisor of the 8 microbatches of the schedule, found {group!r}; 1"
    for refuse in (
        lambda: require_group(group, 8),  # type: ignore[arg-type]
        lambda: group_wgrads(table, group),  # type: ignore[arg-type]
    ):
        with pytest.raises(ScheduleError, match=f"^{said}"):
            refuse()
