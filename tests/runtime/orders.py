"""Orders of actions to run: those of ranks in torch's own schedule tables, and random non-LIFO
ones."""

from __future__ import annotations

from functools import cache

from qeffect.gpu_runtime.lab.comparisons.cases import random_order
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.schedule.torch_tables import torch_schedule

__all__ = ["SCHEDULES", "TABLE_ROWS", "random_order", "table_order"]

SCHEDULES = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)


@cache
def table_order(name: str, rank: int, *, pp: int = 2, microbatches: int = 4) -> Order:
    """The actions of one rank in the order of one of torch's tables, with two chunks per rank."""
    return Order.of_rank(torch_schedule(name, pp=pp, vpp=2, microbatches=microbatches), rank)


TABLE_ROWS = tuple((name, rank) for name in SCHEDULES for rank in (0, 1))
