"""Which replays the lower bound of a step uses for each action of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qeffect.gpu_runtime.lab.runner.rank_parts import action_of, bound_ms
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.step.plan.order import Kind
from qeffect.gpu_runtime.step.plan.rows import Row, walked

FIRST = 100  # index of each stage's first slot in a pool, far from a local one


class Named:
    """An executor whose actions return what they were given."""

    def forward(self, memory: Any, slot: int) -> tuple[Any, ...]:
        """F of a slot."""
        return Kind.FORWARD, slot

    def dgrad(self, memory: Any, slot: int, variant: Any) -> tuple[Any, ...]:
        """The dI of a slot."""
        return Kind.DGRAD, slot

    def wgrad(self, memory: Any, slot: int, variant: Any, others: Any) -> tuple[Any, ...]:
        """The dW of a slot alone."""
        assert not others
        return Kind.WGRAD, slot, variant.accumulate


def replayed(row: Row) -> list[tuple[Any, Any]]:
    """Each step of a row, and what its action runs."""
    plan, microbatches = row.slots, range(row.order.num_microbatches)
    executor: Any = Named()
    memories: dict[int, Any] = {}
    for stage in row.stages:
        first = FIRST * stage
        memories[stage] = SimpleNamespace(
            slot_of=[first + plan.slot_of[stage, m] for m in microbatches],
            variants=[plan.variant(stage, m, "accumulate") for m in microbatches],
            groups=[plan.members(m) for m in microbatches],
            table={first + local: first + local for local in range(plan.num_slots[stage])},
        )
    acts = [action_of(step, memories[step.stage], executor) for step in row.order.steps]
    return [(step, act()) for step, act in zip(row.order.steps, acts, strict=True) if act]


@pytest.mark.parametrize("schedule", ["il", "izb", "zbv"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bound_replays_the_graphs_that_a_step_does(schedule: str, rank: int) -> None:
    """
    The row's own slots, none of which is taken again while it holds a tape, and each stage's first
    dW alone overwrites.
    """
    row = Row.of(walked(Job(schedule=schedule, pp=2, microbatches=8).table(), "live"), rank)
    held: dict[int, tuple[int, int]] = {}
    written: set[int] = set()
    for step, (kind, slot, *adds) in replayed(row):
        assert kind is step.kind
        tape = step.stage, step.microbatch
        if kind is Kind.FORWARD:
            assert slot not in held
            held[slot] = tape
        assert held[slot] == tape
        if kind is Kind.WGRAD:
            assert adds == [step.stage in written]
            written.add(step.stage)
            del held[slot]
        assert slot == FIRST * step.stage + row.slots.slot_of[tape]
    assert not held
    assert written == set(row.stages)


@pytest.mark.parametrize(("schedule", "pp"), [("il", 2), ("izb", 2), ("zbv", 2), ("zbv", 4)])
def test_a_bound_has_the_refreshes_of_all_stages_of_a_rank(schedule: str, pp: int) -> None:
    """None is free: with refreshes that outlast all else, both of each rank, and its actions."""
    job = Job(schedule=schedule, pp=pp, microbatches=4)
    took = []
    for refresh in (0.0, 1000.0):
        times = {"F": 1.0, "I": 1.0, "W": 1.0, "refresh": refresh}
        alone = {str(stage): times for stage in range(2 * pp)}
        took.append(bound_ms(job, alone, [0.5] * pp, 0.0))
    without, both = took
    assert without is not None
    assert both is not None
    actions = 2 * 4 * 3  # of a rank
    assert 2 * 1000.0 + actions + 0.5 <= both <= 2 * pp * 1000.0 + without


def test_a_bound_hides_the_refresh_of_a_rank_that_waits() -> None:
    """The second rank has nothing to do before the first one's forward has come."""
    job = Job(schedule="il", pp=2, microbatches=4)
    times = {"F": 3.0, "I": 1.0, "W": 1.0, "refresh": 0.0}
    bounds = [
        bound_ms(
            job, {str(s): {**times, "refresh": 2.0 * (s in slow)} for s in range(4)}, [0, 0], 0
        )
        for slow in ((), (1,), (0,))
    ]
    assert bounds[0] is not None
    assert bounds == [bounds[0], bounds[0], bounds[0] + 2.0]
