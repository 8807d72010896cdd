"""
The table of a schedule object of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from .actions import Schedule, ScheduleError
from .infer import from_actions
from .torch_tables import torch_schedule

__all__ = ["read_object"]


def read_object(schedule: Any) -> Schedule:
    """
    Read the table of a schedule object of one of torch's classes or a subclass.

    Args:
        schedule: The object. Its table is the attribute ``pipeline_order_with_comms``, or else
            ``pipeline_order``. A class with one stage per rank executes a loop instead of a table;
            this function runs the loop on stages that only record their calls.

    Raises:
        ScheduleError: The object has neither a table nor a loop of torch's single-stage classes.
    """
    if isinstance(schedule, type):
        raise ScheduleError(
            f"{schedule.__name__}: expected a schedule object, found a class; pass the class and "
            "its sizes to qeffect.schedule.torch_tables.torch_schedule"
        )
    cls = type(schedule)
    stages = getattr(schedule, "_num_stages", None)
    microbatches = getattr(schedule, "_n_microbatches", None)
    for order in ("pipeline_order_with_comms", "pipeline_order"):
        table = getattr(schedule, order, None)
        if isinstance(table, dict) and table and hasattr(schedule, "_stages"):
            return from_actions(
                {rank: list(row) for rank, row in table.items()},
                source=cls.__name__,
                num_stages=stages,
                num_microbatches=microbatches,
            )
    if not hasattr(schedule, "_stage") or stages is None or microbatches is None:
        raise ScheduleError(
            f"{cls.__name__}: expected a Schedule of qeffect.schedule, or a schedule object of "
            f"torch.distributed.pipelining with a pipeline_order{_remedy(schedule)}"
        )
    return torch_schedule(cls, pp=stages, microbatches=microbatches, comms=True)


def _remedy(given: Any) -> str:
    """Return advice on how to make a schedule from the given kind of input."""
    if isinstance(given, str | PathLike):
        return "; read a file with qeffect.schedule.tables.read_table"
    if isinstance(given, Mapping | list | tuple):
        return "; read rows of actions with qeffect.schedule.infer.from_actions"
    return ""
