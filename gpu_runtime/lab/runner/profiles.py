"""
Profile the rows of a report: other processes run some steps of each side under the profiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...backends.protocol import BackendError
from ...ranks.consent import StoppedError
from ...ranks.job import Job
from ...ranks.membership import Member, all_gather
from ...step.plan.order import Order
from ..sides.pipelines import LaunchSide, isolation, unit_bytes
from ..sides.side import RankSide
from ..statistics.traces import busy_times, launch_shares, matrix_copies, summarize, times_by_name
from .processes import first_line
from .rank_parts import device_ms, row_as_one_graph
from .rank_process import Findings
from .rank_rows import RankRun
from .starts import RankStart, RankStarts
from .timing import WARMUP, meet_idle

__all__ = ["SIDE_ERRORS", "SideRow", "add_profiles", "profile_row", "profile_rows"]

PROFILED = 2
"""Number of steps of each side under the profiler."""
TRACED = 5
"""
Number of steps under the profiler whose time is split; the first step only marks where the second
step begins.
"""

SIDE_ERRORS = (BackendError, StoppedError, RuntimeError, ValueError)
"""Errors of one side, after which the other sides are still measured."""


class SideRow(Protocol):
    """A row of a report: one cell (workload) under one schedule, run by one side. A row can be
    pickled, so that any process can build its side."""

    @property
    def name(self) -> dict[str, Any]:
        """The fields that name the row in its report."""

    @property
    def settling_steps(self) -> int:
        """Number of steps before the side is measured."""

    @property
    def copies(self) -> bool:
        """Whether copies of matrix gradients are counted."""

    @property
    def split(self) -> bool:
        """
        Whether the time of a step that is one launch is split into parts. To split the time, the
        profile compares the step with the same rank's actions without messages.
        """

    def job(self) -> Job:
        """The pipeline job that this row describes."""

    def make(self, member: Member) -> RankSide:
        """Build the pipeline that runs this row; every rank calls this method."""


def add_profiles(
    starts: RankStarts,
    meet: Callable[[], Member],
    rows: Sequence[tuple[SideRow, dict[str, Any]]],
    *,
    save: Callable[[], None],
    note: Callable[[str], None],
    limit: float = math.inf,
) -> RankStart:
    """
    Start all ranks once more, and add the profiler's figures of each row to the measurement of the
    row.

    Args:
        starts: Starts the ranks; the processes that measured must have ended.
        meet: Function that each rank calls to connect to the other ranks; it can be pickled.
        rows: Each row with its measurement. If a side (a way to run a step) fails under the
            profiler, its measurement keeps no profile figures. On a CPU no side has profile
            figures, because the profiler records no device events there.
        save: Function that is called whenever the figures of a row have been added.
        note: Function that shows a line of progress.
        limit: Time limit in seconds.
    """
    waiting = iter(rows)

    def take(figures: dict[str, Any]) -> None:
        row, measured = next(waiting)
        if (error := figures.pop("error", None)) is not None:
            note(f"Not profiled. {_spelled(row)}: {error}")
        measured.update(figures)
        save()

    asked = [row for row, _ in rows]
    return starts.start(profile_rows, meet, asked, profiles=True, limit=limit, take=take, note=note)


def profile_rows(meet: Callable[[], Member], rows: Sequence[SideRow], findings: Findings) -> None:
    """Profile one row of the report (a cell under one schedule, run by one side) after another;
    each rank calls this function."""
    member = meet()
    for row in rows:
        findings.note(f"Profiling: {_spelled(row)}")
        with isolation(member):
            try:
                findings.add(profile_row(member, row))
            except SIDE_ERRORS as error:
                findings.add({"error": first_line(error)})


def profile_row(member: Member, row: SideRow) -> dict[str, Any]:
    """
    Profile one row of the report and return its figures; every rank calls this function.

    Returns:
        `busy_ms` and `work_ms` by rank, empty on a CPU; `copies` and `split` by rank where the row
        has them.
    """
    run = RankRun.of(member, row.make)
    run.settle(row.settling_steps + WARMUP)
    side = run.side
    found = profile_side(member, side, copies=row.copies)
    if row.split and isinstance(side, LaunchSide):
        job = row.job()
        order = Order.of_rank(job.table(), member.rank % job.pp)
        found["split"] = all_gather(member, _split(member, side, order))
    side.close()
    return found


def profile_side(
    member: Member,
    side: RankSide,
    *,
    copies: bool = False,
) -> dict[str, Any]:
    """
    Profile some steps of a side; return the figures `busy_ms`, `work_ms` and (if asked for)
    `copies`, by rank.
    """
    meet_idle(member)
    own: tuple[Any, Any, Any] | None = None
    if member.device.type == "cuda":
        from .profiler import trace_steps

        events = trace_steps(side.step, member.synchronize, PROFILED)
        copied = matrix_copies(summarize(events, PROFILED), unit_bytes(side)) if copies else None
        own = busy_times(events, PROFILED), times_by_name(events, PROFILED), copied
    else:
        for _ in range(PROFILED):
            side.step()
    ranks = [rank for rank in all_gather(member, own) if rank is not None]
    found: dict[str, Any] = {
        "busy_ms": [rank[0] for rank in ranks],
        "work_ms": [rank[1] for rank in ranks],
    }
    if copies:
        found["copies"] = [rank[2] for rank in ranks]
    return found


def _split(member: Member, side: LaunchSide, order: Order) -> dict[str, Any]:
    """
    The time shares of a step that is one launch, the same shares for a graph of the rank's actions
    without messages, and the time of that graph.
    """
    from .profiler import trace_steps

    meet_idle(member)
    launch = launch_shares(trace_steps(side.step, member.synchronize, TRACED), TRACED)
    side.whole.leave()
    worker = side.worker
    gradients = worker.pipeline.step(worker.optimizer)
    meet_idle(member)
    with row_as_one_graph(worker, gradients, order) as replay:
        took = device_ms(replay)
        row = launch_shares(trace_steps(replay, torch.cuda.synchronize, TRACED), TRACED)
    return {"launch": launch, "row_ms": took, "row": row}


def _spelled(row: SideRow) -> str:
    return ", ".join(str(row.name[field]) for field in ("cell", "side", "schedule"))
