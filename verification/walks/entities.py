"""
The parts of a shadow (a record of a process's calls): tapes, slots, stages, domains, pools, links.

A domain is a set of stages whose FP8 scales are updated together. A pool is memory that captured
graphs share. A link is a pair of a caller's stream and a graph stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from attrs import define, field, frozen

from qeffect import StageConfig, TapeKey, TapeRef, Ticket

__all__ = ["USES", "Domain", "Flight", "Link", "Pool", "Reduction", "Slot", "Stage", "Tape"]

#: What reads a tape, or a slot whose tape is lost: its readers, and the dW of another tape.
USES: Final = frozenset({"out", "grad", "group"})


@define
class Tape:
    """
    A tape: its key, the actions and readers for which it still waits, and the messages that have
    arrived for it.
    """

    key: TapeKey
    waits: set[str]
    arrived: set[str] = field(factory=set)

    @property
    def claimed(self) -> bool:
        """Whether a key has claimed the slot, but the key's forward has not succeeded yet."""
        return "F" in self.waits


@define
class Slot:
    """
    A slot (set of buffers), which can hold one tape.

    ``wrote`` is the time of the latest replay that wrote the output or input gradient. ``vacated``
    is the time of the latest replay of an earlier tape. ``moving`` has the running transfers, and
    the entry ``group`` while the dW of another tape takes this tape; ``mover`` is the key and
    generation to which these belong. ``ended`` is the link and time of the latest end of a transfer
    or of a copy into the slot. ``scaled_at`` is the number of scaling updates before the slot's F,
    and ``drawn_at`` is the position at which that F began to draw random numbers.
    """

    index: int
    stage: int
    pool: int
    releases: int = 0
    tape: Tape | None = None
    flight: int | None = None
    wrote: int = 0
    vacated: int = 0
    moving: set[str] = field(factory=set)
    mover: tuple[TapeKey, int] | None = None
    ended: tuple[int, int] = (0, 0)
    scaled_at: int = 0
    drawn_at: int | None = None


@define
class Stage:
    """A stage and its actions since its weights were last updated."""

    config: StageConfig
    cached: int | None = None
    filling: int | None = None
    forwards: int = 0
    dgrads: int = 0
    wgrads: int = 0
    spoiled: bool = False
    final: bool = False
    wrote: int = 0
    evaluating: int | None = None
    weights: list[tuple[int, int]] = field(factory=list)


@define
class Reduction:
    """The reduction of a bucket since the weights were last updated."""

    stages: tuple[int, ...]
    running: bool = False
    done: bool = False


@define
class Domain:
    """
    The scaling state of a domain, and its graph stream.

    ``gathered`` counts the F and dI since the domain's once-per-epoch scales last moved.
    ``drained`` is the time at which the host last saw the domain's device work finish;
    ``evaluated`` is the time at which its latest evaluation was committed.
    """

    updates: int = 0
    of_walk: int = 0
    rolled_at: int = 0
    gathered: int = 0
    drawn: set[int] = field(factory=set)
    running: set[int] = field(factory=set)
    poisoned: bool = False
    refreshed: int | None = None
    device: bool = False
    drained: int = 0
    replayed: int = 0
    evaluated: int = 0


@define
class Pool:
    """A capture-memory pool: its number of tapes, and what was replayed since it was empty."""

    tapes: int = 0
    replayed: list[int] = field(factory=list)

    def keeps_order(self, rank: int) -> bool:
        """Whether every graph replayed since the pool was empty was captured earlier."""
        return self.tapes == 0 or all(earlier < rank for earlier in self.replayed)


@define
class Link:
    """
    A pair of caller's stream and graph stream, with three times: when the caller last enqueued
    work, when the graph stream last waited for the caller, and when the caller last waited for the
    graph stream.

    ``saw_update`` says whether the caller has waited for the latest update through the graph
    stream.
    """

    domain: int
    caller: Hashable
    submitted: int = 0
    joined: int = 0
    waited: int = 0
    saw_update: bool = True


@frozen
class Flight:
    """An action between its check and its end; ``group`` names the other tapes that a dW takes."""

    ticket: Ticket
    stage: int
    slot: int | None
    filling: bool = False
    group: tuple[tuple[TapeKey, TapeRef], ...] = ()
