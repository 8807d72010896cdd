"""
When each entry of a schedule is drawn: the placement that timeline and trace share.

A compute-only table is drawn as it stands, a column a step, since its idle entries say when it
waits. A compute+comms table has no idle entries, so there the time is that of a dry run: F, I and W
take one unit, `B` two, messages none; a receive is drawn where its message arrives. A schedule
whose step was timed (`qeffect.schedule.steptime`) is drawn to scale: `timed_layout`.
"""

from __future__ import annotations

import attrs

from .actions import Action, Schedule
from .index import index_of
from .simulate import Run, simulate
from .steptime import Span, StepTime


@attrs.frozen
class Placed:
    """
    An entry and when it runs.

    Args:
        rank: Its rank.
        step: Its step.
        action: What it does.
        start: When it begins.
        length: How long it takes; zero for messages, sharding and reductions.
        ran: Whether the dry run came this far.
    """

    rank: int
    step: int
    action: Action
    start: float
    length: float
    ran: bool = True


@attrs.frozen
class Layout:
    """
    All entries of a schedule with their times.

    Args:
        entries: The entries, by rank and then step.
        unit: What a unit of time is: `step`, `time`, or that of the durations.
        end: The end of the last entry; of the step, where that was timed.
        timed: The times that entries are drawn by, where they are drawn to scale.
    """

    entries: tuple[Placed, ...]
    unit: str
    end: float
    timed: StepTime | None = None


def layout(schedule: Schedule) -> Layout:
    """
    Place every entry of a schedule in time.

    Entries behind a deadlock are placed after the stop, one after the other, and marked as not run.

    Args:
        schedule: The schedule.
    """
    by_step = not schedule.has_comms
    run = None if by_step else _run(schedule)
    placed: list[Placed] = []
    for rank, row in enumerate(schedule.rows):
        clock = 0
        for step, action in enumerate(row):
            if action is None:
                continue
            if run is None:
                start, length, ran = step, 1, True
            else:
                ran = (rank, step) in run.finish
                start = run.start.get((rank, step), clock)
                length = sum(leaf.is_compute for leaf in action.leaves())
                if ran:
                    length = run.finish[rank, step] - start
            clock = start + length
            placed.append(Placed(rank, step, action, start, length, ran))
    return Layout(
        tuple(placed),
        "step" if by_step else "time",
        max((entry.start + entry.length for entry in placed), default=0),
    )


def timed_layout(timed: StepTime) -> Layout:
    """
    Place every computation of a schedule where its times have it.

    An entry of several computations, as B, is placed from the first one's start to the last one's
    end. Messages, reductions and updates are in `timed` alone: they are no boxes of a row.

    Args:
        timed: The times of the schedule's step.
    """
    parts: dict[tuple[int, int], list[Span]] = {}
    for span in timed.spans:
        if span.what == "computation" and span.step is not None:
            parts.setdefault((span.rank, span.step), []).append(span)
    placed = []
    for (rank, step), spans in sorted(parts.items()):
        action = timed.schedule.entry(rank, step)
        assert action is not None
        start = float(spans[0].start)
        placed.append(Placed(rank, step, action, start, float(spans[-1].end) - start))
    return Layout(tuple(placed), timed.unit, float(timed.time), timed)


def _run(schedule: Schedule) -> Run:
    index = index_of(schedule)
    run = simulate(index)
    # Where ranks stop, the picture shows where; otherwise it shows when things really happen.
    return run if run.waits else simulate(index, blocking=False)
