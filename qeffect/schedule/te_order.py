"""
Read Transformer Engine's `_order` lists, as `make_graphed_callables` takes them.

An entry names a model chunk, counted from one: `+chunk` is its forward, `-chunk` its backward, and
`-chunk - 0.5` the weight gradient that an earlier `-chunk` deferred. Entries do not name
microbatches: the k-th entry of a kind and chunk is microbatch k, as in Transformer Engine. A chunk
defers either all of its weight gradients or none. If a chunk defers its weight gradients, its
`-chunk` entries are only input gradients.

A list describes a single rank without messages, so the checks across ranks do not apply.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from .actions import Action, Kind, Schedule, ScheduleError, shorten
from .infer import MAX_ENTRIES, schedule_of

MAX_CHUNKS = 4096


def te_order(order: str | Iterable[float | int | str], *, source: str = "te-order") -> Schedule:
    """
    Read an `_order` list as a schedule of one rank; its stages are the chunks, counted from zero.

    >>> [str(action) for action in te_order("1,1,-1,-1.5,-1,-1.5").rows[0]]
    ['0F0', '0F1', '0I0', '0W0', '0I1', '0W1']

    Args:
        order: The entries as numbers, or as text with commas or blanks between them; the text may
            have brackets.
        source: Origin of the entries, for messages.

    Raises:
        ScheduleError: An entry is not one of these numbers, or a chunk has different numbers of
            forwards, backwards and deferred weight gradients.
    """
    entries = _split(order) if isinstance(order, str) else list(order)
    if not entries:
        raise ScheduleError(f"{source}: empty; expected entries such as 1,1,-1,-1")
    if len(entries) > MAX_ENTRIES:
        raise ScheduleError(f"{source}: more than the limit of {MAX_ENTRIES} entries")
    steps = [_entry(entry, step) for step, entry in enumerate(entries)]
    deferred = {chunk for kind, chunk in steps if kind is Kind.WGRAD}
    counts: Counter[tuple[Kind, int]] = Counter()
    row: list[Action] = []
    for kind, chunk in steps:
        if kind is Kind.DGRAD and chunk not in deferred:
            kind = Kind.BACKWARD
        row.append(Action(kind, chunk, counts[kind, chunk]))
        counts[kind, chunk] += 1
    _check_counts(counts, source)
    return schedule_of(
        [row],
        source=source,
        num_stages=max(chunk for _, chunk in counts) + 1,
        complete=False,
        notes=("this format does not name microbatches; they are counted for each chunk",),
    )


def _split(text: str) -> list[str]:
    """Split a text at commas or white space; an empty entry between two commas is refused later."""
    entries = text.strip().strip("[]()").strip().removesuffix(",").split(",")
    return [word for entry in entries for word in entry.split() or [""]] if any(entries) else []


def _entry(entry: object, step: int) -> tuple[Kind, int]:
    try:
        value = float(str(entry))
    except ValueError:
        value = math.nan
    half = value < 0 and (2 * value) % 2 == 1
    if not math.isfinite(value) or value == 0 or not (value.is_integer() or half):
        raise ScheduleError(
            f"entry {shorten(str(entry))!r} is not +chunk, -chunk or -chunk-0.5 "
            "(chunks are numbered from 1)",
            rank=0,
            step=step,
            entry=str(entry),
        )
    chunk = math.floor(abs(value)) - 1
    if not 0 <= chunk < MAX_CHUNKS:
        raise ScheduleError(
            f"entry {shorten(str(entry))!r} must name a chunk between 1 and {MAX_CHUNKS}",
            rank=0,
            step=step,
            entry=str(entry),
        )
    return (Kind.FORWARD if value > 0 else Kind.WGRAD if half else Kind.DGRAD), chunk


def _check_counts(counts: Counter[tuple[Kind, int]], source: str) -> None:
    if not any(kind is Kind.FORWARD for kind, _ in counts):
        raise ScheduleError(f"{source}: no forward entry; expected some +chunk")
    for chunk in sorted({chunk for _, chunk in counts}):
        by_kind = {kind: n for (kind, c), n in counts.items() if c == chunk}
        forwards = by_kind.get(Kind.FORWARD, 0)
        for kind, name in (
            (Kind.BACKWARD, f"-{chunk + 1}"),
            (Kind.DGRAD, f"-{chunk + 1}"),
            (Kind.WGRAD, f"-{chunk + 1}.5"),
        ):
            if by_kind.get(kind, forwards) != forwards:
                raise ScheduleError(
                    f"{source}: chunk {chunk + 1} has unequal numbers of entries: +{chunk + 1}: "
                    f"{forwards}, {name}: {by_kind[kind]}; microbatches cannot be counted"
                )
        if Kind.BACKWARD not in by_kind and Kind.DGRAD not in by_kind:
            raise ScheduleError(f"{source}: chunk {chunk + 1} has no backward -{chunk + 1}")
