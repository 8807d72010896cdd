"""
Infer the number of stages and microbatches of a table, and the rank of each stage.

If a table has one wrong entry, the check should report this entry, not a hundred missing entries.
So the inferred numbers follow the majority of entries, not the largest number in the table. The
number of microbatches is the most common number of distinct microbatches per stage. A stage exists
if it has at least half the computations of the median stage. A stage belongs to the rank with most
of its computations.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..text import counted
from .actions import COMPUTE, Action, Kind, Row, Schedule, ScheduleError, shorten

MAX_ENTRIES = 1_000_000
MAX_RANKS = 65_536
MAX_MICROBATCHES = 1_000_000


def schedule_of(
    rows: Iterable[Iterable[Action | None]],
    *,
    source: str,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    stage_to_rank: Mapping[int, int] | None = None,
    complete: bool | None = None,
    notes: Sequence[str] = (),
    buffers: Mapping[tuple[int, int], int] | None = None,
) -> Schedule:
    """
    Build a schedule from rows of actions; numbers that are not given are inferred.

    Args:
        rows: Actions of each rank in order, `None` for an idle entry.
        source: Origin of the rows, for messages.
        num_stages: Number of stages of the pipeline; inferred by default.
        num_microbatches: Number of microbatches; inferred by default.
        stage_to_rank: Rank of each stage; inferred by default.
        complete: Whether all ranks are present; inferred by default (a single row whose stages are
            not exactly 0, 1, 2, ... is one rank of a larger pipeline).
        notes: Facts about the source that a user should know.
        buffers: The slot of each pair of stage and microbatch, if the source names slots.

    Raises:
        ScheduleError: The table has no computation, exceeds a limit, or contradicts the given
            `stage_to_rank`.
    """
    table: tuple[Row, ...] = tuple(tuple(row) for row in rows)
    _check_size(table, num_microbatches)
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    seen: dict[tuple[int, Kind], set[int]] = defaultdict(set)
    for rank, row in enumerate(table):
        for action in row:
            for leaf in action.leaves() if action is not None else ():
                if leaf.kind in COMPUTE:
                    votes[leaf.stage][rank] += 1
                    seen[leaf.stage, leaf.kind].add(leaf.microbatch)
    if not votes:
        raise ScheduleError(f"{source}: nothing is computed; expected F, I, W or B actions")
    real = _real_stages(votes)
    if complete is None:
        complete = len(table) > 1 or real == list(range(len(real)))
    if num_stages is None:
        num_stages = real[-1] + 1
    if num_microbatches is None:
        num_microbatches = _vote_microbatches(seen)
    homes = (
        dict(stage_to_rank)
        if stage_to_rank is not None
        else {s: _home(votes[s]) for s in sorted(votes) if s < num_stages}
    )
    for stage, rank in homes.items():
        if not (0 <= stage < num_stages and 0 <= rank < len(table)):
            raise ScheduleError(
                f"{source}: the stage map puts stage {stage} on rank {rank}, but there are "
                f"{counted(num_stages, 'stage')} and {counted(len(table), 'rank')}"
            )
    return Schedule(
        rows=table,
        stage_to_rank=homes,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        source=source,
        complete=complete,
        notes=tuple(notes),
        buffers=None if buffers is None else dict(buffers),
    )


def from_actions(
    rows: Mapping[int, Iterable[object]] | Iterable[object],
    *,
    source: str = "actions",
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    stage_to_rank: Mapping[int, int] | None = None,
    complete: bool | None = None,
    notes: Sequence[str] = (),
) -> Schedule:
    """
    Read a plain Python list of actions.

    An entry is an `Action`, a string as in a table, a `(stage, kind, microbatch)` tuple, any object
    that prints as an entry (as torch's own actions do), or `None` or "" for idle. A flat list is
    one rank; a list of lists, or a mapping from rank to list, has one row per rank.

    >>> from_actions([["0F0", "0I0", "0W0"]]).num_microbatches
    1
    >>> from_actions(["0F0", (0, "B", 0)]).num_actions
    2

    Args:
        rows: The entries.
        source: Origin of the entries, for messages.
        num_stages: Number of stages of the pipeline; inferred by default.
        num_microbatches: Number of microbatches; inferred by default.
        stage_to_rank: Rank of each stage; inferred by default.
        complete: Whether all ranks are present; inferred by default.
        notes: Facts about the source that a user should know.

    Raises:
        ScheduleError: An entry is not an action, or the rows are not numbered 0, 1, 2, ...
    """
    if isinstance(rows, Mapping):
        if sorted(rows) != list(range(len(rows))):
            raise ScheduleError(f"{source}: ranks must be 0, 1, 2, ...; found {sorted(rows)[:8]}")
        table: list[object] = [rows[rank] for rank in range(len(rows))]
    else:
        table = list(rows)
        if not any(isinstance(row, list) for row in table):
            table = [table]
    parsed: list[list[Action | None]] = []
    for rank, row in enumerate(table):
        if isinstance(row, str) or not isinstance(row, Iterable):
            raise ScheduleError(
                f"{source}: expected a list of entries, found {shorten(repr(row))}", rank=rank
            )
        parsed.append([_entry(entry, rank, step) for step, entry in enumerate(row)])
    return schedule_of(
        parsed,
        source=source,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        stage_to_rank=stage_to_rank,
        complete=complete,
        notes=notes,
    )


def parse_entry(text: str, rank: int, step: int) -> Action | None:
    """
    Read one entry of a table; the error for a wrong entry names its rank and step.

    Raises:
        ScheduleError: The entry is neither blank nor exactly one action.
    """
    if not text.strip():
        return None
    try:
        return Action.parse(text)
    except ScheduleError as error:
        raise ScheduleError(str(error), rank=rank, step=step, entry=error.entry) from None


def _entry(entry: object, rank: int, step: int) -> Action | None:
    if entry is None or isinstance(entry, Action):
        return entry
    if type(entry) is tuple and 2 <= len(entry) <= 3:
        entry = "".join(str(part) for part in entry if part is not None)
    return parse_entry(str(entry), rank, step)


def _check_size(table: tuple[Row, ...], num_microbatches: int | None) -> None:
    entries = sum(map(len, table))
    if len(table) > MAX_RANKS or entries > MAX_ENTRIES:
        raise ScheduleError(
            f"{len(table)} ranks with {entries} entries are too many: "
            f"at most {MAX_RANKS} ranks and {MAX_ENTRIES} entries are read"
        )
    if num_microbatches is not None and not 1 <= num_microbatches <= MAX_MICROBATCHES:
        raise ScheduleError(
            f"{num_microbatches} microbatches: expected between 1 and {MAX_MICROBATCHES}"
        )


def _real_stages(votes: Mapping[int, Counter[int]]) -> list[int]:
    sizes = {stage: counter.total() for stage, counter in votes.items()}
    median = statistics.median_low(sizes.values())
    return sorted(stage for stage, size in sizes.items() if 2 * size >= median)


def _vote_microbatches(seen: Mapping[tuple[int, Kind], set[int]]) -> int:
    # A stage may split B into I and W for some microbatches only, but F names every microbatch.
    counts = Counter(len(mbs) for (_, kind), mbs in seen.items() if kind is Kind.FORWARD)
    if not counts:
        counts = Counter(len(mbs) for mbs in seen.values())
    return max(counts, key=lambda n: (counts[n], n))


def _home(counter: Counter[int]) -> int:
    return max(counter, key=lambda rank: (counter[rank], -rank))
