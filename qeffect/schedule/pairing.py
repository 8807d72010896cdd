"""
Pairing disciplines: how a runtime decides which retained work a weight gradient consumes.

The computation of an input gradient (dI) leaves work (the operands of the deferred dW), and a later
weight gradient (dW) consumes this work. A runtime that finds work by its key cannot take the wrong
work. A runtime without keys takes the work that its data structure offers:

- `contract`: the work of the weight gradient's own stage and microbatch.
- `fifo`: the oldest work of the stage, as in a module with its own queue of deferred work.
- `latest`: the work of the stage's most recent input gradient, as in Transformer Engine's graph
  API.
- `global`: the oldest work of the rank, with one queue for all stages.

Whether the offered work is right depends only on the schedule. So `qeffect.schedule.check` can test
this before anything runs. In the check, each dW presents the reference of the tape that holds the
offered work, and the contract refuses a wrong tape. A full backward `B` counts as `I` then `W`, so
its dW may also get older work.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from ..text import near, shown
from .actions import ScheduleError

Work = tuple[int, int]
"""A stage and a microbatch."""


class Discipline(Protocol):
    """A rule by which one rank chooses the retained work for each weight gradient."""

    def retain(self, work: Work) -> None:
        """Store the work that an input gradient left."""

    def pick(self, work: Work) -> Work | None:
        """Return the work that the dW of this stage and microbatch gets; `None` if none is left."""


class ByContract:
    """Pairing by key: each weight gradient gets the work of its own stage and microbatch."""

    def __init__(self) -> None:
        self._retained: set[Work] = set()

    def retain(self, work: Work) -> None:
        """Store the work under its key."""
        self._retained.add(work)

    def pick(self, work: Work) -> Work | None:
        """
        Return the weight gradient's own work; `None` if it is missing or was already consumed.
        """
        if work not in self._retained:
            return None
        self._retained.remove(work)
        return work


class OldestOfStage:
    """Pairing with one queue of retained work per stage."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[Work]] = defaultdict(deque)

    def retain(self, work: Work) -> None:
        """Append the work to the stage's queue."""
        self._queues[work[0]].append(work)

    def pick(self, work: Work) -> Work | None:
        """Remove and return the stage's oldest work."""
        queue = self._queues[work[0]]
        return queue.popleft() if queue else None


class LatestOfStage:
    """Pairing with one stored item of work per stage; every input gradient overwrites the item."""

    def __init__(self) -> None:
        self._latest: dict[int, Work] = {}

    def retain(self, work: Work) -> None:
        """Overwrite the stage's stored work."""
        self._latest[work[0]] = work

    def pick(self, work: Work) -> Work | None:
        """Return the stage's latest work, even if it was already consumed."""
        return self._latest.get(work[0])


class OldestOfRank:
    """Pairing with one queue of retained work for all stages of a rank."""

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()

    def retain(self, work: Work) -> None:
        """Append the work to the rank's queue."""
        self._queue.append(work)

    def pick(self, work: Work) -> Work | None:
        """Remove and return the rank's oldest work."""
        return self._queue.popleft() if self._queue else None


DISCIPLINES: Mapping[str, Callable[[], Discipline]] = MappingProxyType(
    {
        "contract": ByContract,
        "fifo": OldestOfStage,
        "latest": LatestOfStage,
        "global": OldestOfRank,
    }
)


def discipline(pairing: str) -> Discipline:
    """
    Return a new pairing discipline for one rank.

    Raises:
        ScheduleError: No discipline has this name.
    """
    if not isinstance(pairing, str) or pairing not in DISCIPLINES:
        raise ScheduleError(
            f"unknown pairing {shown(pairing)}; expected one of {', '.join(DISCIPLINES)}"
            f"{near(pairing, DISCIPLINES)}"
        )
    return DISCIPLINES[pairing]()
