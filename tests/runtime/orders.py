"""Orders to run: rank rows of torch's own schedule tables, and random non-LIFO ones."""

from __future__ import annotations

import random
from functools import cache

from qeffect.gpu_runtime.plan.order import Kind, Order, Step
from qeffect.schedule.torch_tables import torch_schedule

SCHEDULES = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)


@cache
def table_order(name: str, rank: int, *, pp: int = 2, microbatches: int = 4) -> Order:
    """One rank's row of one of torch's tables, two chunks a rank."""
    return Order.of_rank(torch_schedule(name, pp=pp, vpp=2, microbatches=microbatches), rank)


TABLE_ROWS = tuple((name, rank) for name in SCHEDULES for rank in (0, 1))


def random_order(seed: int, *, num_stages: int = 2, num_microbatches: int = 4) -> Order:
    """A legal order with arbitrary delays: only F before dI before dW of one tape is kept."""
    rng = random.Random(seed)
    after = {Kind.FORWARD: Kind.DGRAD, Kind.DGRAD: Kind.WGRAD}
    ready = [
        Step(Kind.FORWARD, stage, microbatch)
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
    ]
    steps = []
    while ready:
        step = ready.pop(rng.randrange(len(ready)))
        steps.append(step)
        if step.kind in after:
            ready.append(step._replace(kind=after[step.kind]))
    return Order(tuple(steps), f"random, seed {seed}")
