"""The slot planner, compared with brute force, and every other planner that calls it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.gpu_runtime.step.plan.slots import plan_slots
from qeffect.schedule.actions import SENDS, Kind, Schedule
from qeffect.schedule.index import Event
from qeffect.schedule.plan import plan
from qeffect.schedule.slots import assign, own_readers
from qeffect.schedule.torch_tables import torch_schedule

from .pool_oracle import replays
from .random_schedules import random_schedule

TABLES = [
    ("Interleaved1F1B", 2, 4),
    ("Interleaved1F1B", 4, 8),
    ("InterleavedZeroBubble", 4, 8),
    ("ZBVZeroBubble", 2, 8),
    ("ZBVZeroBubble", 4, 8),
    ("DualPipeV", 4, 8),
]


def steps_of(schedule: Schedule, rank: int) -> list[Event]:
    """A rank's row as plain steps."""
    return [(atom.kind, atom.stage, atom.microbatch) for atom in schedule.atoms[rank]]


def live_before(
    steps: Sequence[Event], readers: frozenset[Kind], place: int
) -> set[tuple[int, int]]:
    """Tapes that have begun before a place and that some step from there on still reads."""
    begun = {(s, m) for kind, s, m in steps[:place] if kind is Kind.FORWARD}
    read = {(s, m) for kind, s, m in steps[place:] if kind in readers}
    return begun & read


def check(steps: Sequence[Event], readers: frozenset[Kind]) -> None:
    """Peaks, slots and tenants of a walk are what looking at every place anew finds."""
    made = assign(steps, own_readers(steps, readers))
    alive = [live_before(steps, readers, place) for place in range(len(steps) + 1)]
    stages = {s for kind, s, _ in steps if kind is Kind.FORWARD}

    assert made.peak == max(map(len, alive))
    assert {s: max(sum(t[0] == s for t in now) for now in alive) for s in stages} == made.peaks
    assert made.peaks == made.num_slots
    for now in alive:
        assert len(now) == len({(stage, made.slot_of[stage, m]) for stage, m in now})


@pytest.mark.parametrize("readers", [{Kind.WGRAD}, {Kind.WGRAD, *SENDS}], ids=["dW", "sends too"])
@pytest.mark.parametrize("seed", range(20))
def test_random_schedules(seed: int, readers: set[Kind]) -> None:
    """No two live tapes share a slot, and a stage has as many slots as tapes live at once."""
    schedule = random_schedule(seed)
    for rank in range(schedule.num_ranks):
        check(steps_of(schedule, rank), frozenset(readers))


@pytest.mark.parametrize(("name", "pp", "microbatches"), TABLES)
def test_planners_agree(name: str, pp: int, microbatches: int) -> None:
    """Plan, replays and the runtime's slots give one table the same slots and the same peaks."""
    schedule = torch_schedule(name, pp=pp, microbatches=microbatches)
    planned = plan(schedule)
    for rank in range(schedule.num_ranks):
        order = Order.of_rank(schedule, rank)
        made = plan_slots(order)
        replayed = {
            (r.atom.stage, r.atom.microbatch): r.graph[2]
            for r in replays(schedule, rank)
            if r.atom.kind is Kind.FORWARD
        }
        alone = own_readers(order.steps)

        check(order.steps, frozenset({Kind.WGRAD}))
        assert dict(made.slot_of) == replayed == assign(order.steps, alone).slot_of
        assert made.num_slots == order.peaks
        assert order.peaks == {s.stage: s.peak_live for s in planned.ranks[rank].stages}
        assert planned.ranks[rank].peak_live == assign(order.steps, alone).peak


def test_without_reuse() -> None:
    """Every microbatch has its own slot; the tapes live at once are as many as before."""
    steps = Order.parse("0F0 0I0 0W0 0F1 0I1 0W1").steps

    made = assign(steps, own_readers(steps), reuse=False)

    assert {(0, 0): 0, (0, 1): 1} == made.slot_of
    assert ({0: 2}, {0: 1}, 1) == (made.num_slots, made.peaks, made.peak)


def test_a_tape_that_nobody_reads_stays() -> None:
    """A row that ends before its dW keeps its tapes."""
    steps = Order.parse("0F0 0F1 0F2").steps

    made = assign(steps, own_readers(steps))

    assert [0, 1, 2] == [made.slot_of[0, m] for m in range(3)]
    assert 3 == made.peak
