"""
The start time and length of each entry of a schedule, for timelines and traces.

A compute-only table is drawn as written, one column per step, because its idle entries show the
waits. A compute+comms table has no idle entries, so its times come from a dry run. In the dry run,
F, I and W take one unit of time, `B` takes two units, and messages take no time. A receive is drawn
where its message arrives. `timed_layout` uses the simulated times of `qeffect.schedule.steptime`
instead.
"""

from __future__ import annotations

import attrs

from .actions import Action, Schedule
from .index import index_of
from .simulate import Run, simulate
from .steptime import Span, StepTime


@attrs.frozen
class TimedEntry:
    """
    A table entry with its start time and length.

    Args:
        rank: Rank of the entry.
        step: Step of the entry.
        action: Action of the entry.
        start: Start time.
        length: Duration; zero for messages, sharding and reductions.
        ran: Whether the dry run reached the entry.
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
        unit: Unit of time: `step`, `time`, or the unit of the durations.
        end: End time of the last entry, or of the step if the step was simulated with durations.
        timed: The simulated times; `None` unless the entries are drawn to scale.
    """

    entries: tuple[TimedEntry, ...]
    unit: str
    end: float
    timed: StepTime | None = None


def layout(schedule: Schedule) -> Layout:
    """
    Give every entry of a schedule a start time and a length.

    Entries that never run because of a deadlock come last in their row, and are marked as not run.

    Args:
        schedule: The schedule.
    """
    by_step = not schedule.has_comms
    run = None if by_step else _run(schedule)
    placed: list[TimedEntry] = []
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
            placed.append(TimedEntry(rank, step, action, start, length, ran))
    return Layout(
        tuple(placed),
        "step" if by_step else "time",
        max((entry.start + entry.length for entry in placed), default=0),
    )


def timed_layout(timed: StepTime) -> Layout:
    """
    Give every computation of a schedule its simulated start time and length.

    An entry of several computations, such as B, extends from the start of the first to the end of
    the last. Messages, reductions and updates get no entry here; only `timed` has their times.

    Args:
        timed: The simulated times of the schedule's step.
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
        placed.append(TimedEntry(rank, step, action, start, float(spans[-1].end) - start))
    return Layout(tuple(placed), timed.unit, float(timed.time), timed)


def _run(schedule: Schedule) -> Run:
    index = index_of(schedule)
    run = simulate(index)
    # A run that deadlocks shows where ranks stop; otherwise sends do not block in the picture.
    return run if run.waits else simulate(index, blocking=False)
