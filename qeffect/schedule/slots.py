"""
Which slot each tape uses, and how many are live at once: one walk for every planner.

A tape is live from its forward, or from where its input is received into its slot, until its last
reader has run. Who reads it is the caller's to say: its weight gradient always, a send of its
output where a table shows messages, the next local stage where one stage feeds another. Slots
belong to a stage, because a slot's captured graphs do.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs

from .actions import Kind

Step = tuple[Kind, int, int]
"""What runs, its stage and its microbatch."""

Tape = tuple[int, int]
"""A stage and a microbatch."""

Readers = Mapping[Step, Sequence[Tape]]
"""The tapes that each step reads for the last time on its own account."""


@attrs.frozen
class Assignment:
    """
    What a walk over one rank's steps found.

    Args:
        slot_of: The slot of each tape, counted within its stage.
        num_slots: Slots of each stage that has a forward.
        peaks: The most tapes of each such stage that are live at once.
        peak: The most tapes of all stages together that are live at once.
    """

    slot_of: Mapping[Tape, int]
    num_slots: Mapping[int, int]
    peaks: Mapping[int, int]
    peak: int


def own_readers(steps: Iterable[Step], kinds: Iterable[Kind] = (Kind.WGRAD,)) -> Readers:
    """
    Readers that read the tape they are named after: every step of some kinds.

    Args:
        steps: What runs.
        kinds: The kinds of step that a tape lives for.
    """
    wanted = frozenset(kinds)
    return {(kind, stage, m): ((stage, m),) for kind, stage, m in steps if kind in wanted}


def assign(
    steps: Iterable[Step],
    readers: Readers,
    *,
    reuse: bool = True,
    begins: Iterable[Kind] = (Kind.FORWARD,),
) -> Assignment:
    """
    Walk over one rank's steps: the lowest free slot at F, free again after the last reader.

    Because the lowest free slot is taken, a stage needs exactly as many slots as it has tapes live
    at once.

    >>> F, W = Kind.FORWARD, Kind.WGRAD
    >>> steps = [(F, 0, 0), (F, 0, 1), (W, 0, 0), (F, 0, 2), (W, 0, 1), (W, 0, 2)]
    >>> made = assign(steps, own_readers(steps))
    >>> [made.slot_of[0, m] for m in range(3)], made.num_slots, made.peak
    ([0, 1, 0], {0: 2}, 2)

    Args:
        steps: The rank's steps in order; kinds that are neither F nor a reader are passed over.
        readers: Which tapes each step reads. A tape that nobody reads stays live.
        reuse: False gives every microbatch a slot of its own, as the paper does.
        begins: Kinds of step that take a slot; a tape takes its own at the first of them.
    """
    takes = frozenset(begins)
    left = Counter(tape for read in readers.values() for tape in read)
    free: dict[int, list[int]] = defaultdict(list)
    slot_of: dict[Tape, int] = {}
    live: Counter[int] = Counter()
    num_slots: Counter[int] = Counter()
    peaks: Counter[int] = Counter()
    peak = total = 0
    for step in steps:
        kind, stage, microbatch = step
        if kind in takes and (stage, microbatch) not in slot_of:
            slot = microbatch
            if reuse:
                slot = heapq.heappop(free[stage]) if free[stage] else num_slots[stage]
            slot_of[stage, microbatch] = slot
            num_slots[stage] = max(num_slots[stage], slot + 1)
            live[stage] += 1
            total += 1
            peaks[stage] = max(peaks[stage], live[stage])
            peak = max(peak, total)
        for tape in readers.get(step, ()):
            left[tape] -= 1
            if left[tape] == 0 and tape in slot_of:
                live[tape[0]] -= 1
                total -= 1
                heapq.heappush(free[tape[0]], slot_of[tape])
    return Assignment(slot_of, dict(num_slots), dict(peaks), peak)
