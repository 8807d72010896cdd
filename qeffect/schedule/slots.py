"""
Assign a slot (set of buffers) to each tape (what a forward leaves for its backward), in one pass
over a rank's actions, and count the peak of live tapes.

A tape is live from its forward, or from the receive of its input into its slot, until its last
reader has run. The caller names the readers. The weight gradient is always a reader. Other readers
are the sends, if the table shows messages, and a neighbour stage on the same rank. A slot belongs
to one stage, because the slot's captured graphs belong to one stage.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs

from .actions import SEND_WAITS, SENDS, Kind
from .index import Event

Tape = tuple[int, int]
"""A stage and a microbatch."""

Readers = Mapping[Event, Sequence[Tape]]
"""The tapes that each action reads; a tape's slot is free after all actions that read the tape."""


@attrs.frozen
class Assignment:
    """
    The slots and the peaks of live tapes of one rank.

    Args:
        slot_of: For each tape, the index of its slot within the tape's stage.
        num_slots: Number of slots of each stage that has a forward.
        peaks: Peak number of live tapes of each stage that has a forward.
        peak: Peak number of live tapes of all stages together.
    """

    slot_of: Mapping[Tape, int]
    num_slots: Mapping[int, int]
    peaks: Mapping[int, int]
    peak: int


def own_readers(steps: Iterable[Event], kinds: Iterable[Kind] = (Kind.WGRAD,)) -> Readers:
    """
    Return the tapes that each action reads; a reader reads only the tape of its own stage and
    microbatch.

    Args:
        steps: The rank's actions.
        kinds: The kinds of actions that are readers.
    """
    wanted = frozenset(kinds)
    return {(kind, stage, m): ((stage, m),) for kind, stage, m in steps if kind in wanted}


def assign(
    steps: Iterable[Event],
    readers: Readers,
    *,
    reuse: bool = True,
    begins: Iterable[Kind] = (Kind.FORWARD,),
) -> Assignment:
    """
    Assign slots to one rank's tapes: F takes the lowest free slot, and the last reader frees it.

    Because F takes the lowest free slot, a stage needs exactly as many slots as its peak of live
    tapes.

    >>> F, W = Kind.FORWARD, Kind.WGRAD
    >>> steps = [(F, 0, 0), (F, 0, 1), (W, 0, 0), (F, 0, 2), (W, 0, 1), (W, 0, 2)]
    >>> made = assign(steps, own_readers(steps))
    >>> [made.slot_of[0, m] for m in range(3)], made.num_slots, made.peak
    ([0, 1, 0], {0: 2}, 2)

    Args:
        steps: The rank's actions in order; actions that neither take nor read a slot are ignored.
        readers: The tapes that each action reads. A tape without readers stays live.
        reuse: Whether slots are reused; without reuse each microbatch has its own slot, as in the
            paper.
        begins: Kinds of actions that take a slot; a tape takes its slot at the first of them.
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


def assign_walked(steps: Sequence[Event], *, awaits_sends: bool, reuse: bool = True) -> Assignment:
    """
    Assign slots to one rank's tapes as QEffect's own runtime does.

    A tape takes its slot at the receive of its input or, without a receive, at its forward. The
    slot becomes free after the tape's weight gradient and sends. If the next stage is on the same
    rank, its forward must also have run. If the previous stage is on the same rank, its dI must
    also have run.

    Args:
        steps: The rank's computations and messages, in order.
        awaits_sends: Whether the table says where sends end; otherwise a send ends where it is
            posted.
        reuse: Whether slots are reused.
    """
    ends = SEND_WAITS if awaits_sends else SENDS
    local = {stage for _, stage, _ in steps}
    readers: dict[Event, list[Tape]] = {}
    for kind, stage, microbatch in steps:
        read = [stage] if kind is Kind.WGRAD or kind in ends else []
        if kind is Kind.FORWARD and stage - 1 in local:
            read.append(stage - 1)
        if kind is Kind.DGRAD and stage + 1 in local:
            read.append(stage + 1)
        if read:
            readers[kind, stage, microbatch] = [(one, microbatch) for one in read]
    return assign(steps, readers, reuse=reuse, begins=(Kind.RECV_F, Kind.FORWARD))
