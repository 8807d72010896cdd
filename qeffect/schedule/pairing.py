"""
Pairing disciplines: how a runtime decides which retained work a weight gradient consumes.

An input gradient leaves deferred work, which a later weight gradient consumes. A runtime that names
work by key cannot take the wrong work. A runtime without keys takes the work that its data
structure offers:

- `contract`: the work of the weight gradient's own stage and microbatch.
- `fifo`: the oldest work of the stage, as from a module's own queue of deferred work.
- `latest`: the work of the stage's most recent input gradient, as in Transformer Engine's graph
  API.
- `global`: the oldest work of the rank, with one queue for all stages.

Whether the offered work is right depends on the schedule alone, so `qeffect.schedule.check` decides
it before anything runs: dW presents the reference of the picked work, and the contract refuses the
reference of another tape. `B` is `I` then `W`, so a full backward may consume older deferred work.
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
    """How one rank pairs weight gradients with retained work."""

    def retain(self, work: Work) -> None:
        """Retain the work that an input gradient left."""

    def pick(self, work: Work) -> Work | None:
        """The work that the weight gradient of `work` consumes; `None` if no work is left."""


class ByContract:
    """Work by key: a weight gradient gets its own work."""

    def __init__(self) -> None:
        self._retained: set[Work] = set()

    def retain(self, work: Work) -> None:
        """Remember the work under its key."""
        self._retained.add(work)

    def pick(self, work: Work) -> Work | None:
        """
        The weight gradient's own work; `None` if that work is missing or was already consumed.
        """
        if work not in self._retained:
            return None
        self._retained.remove(work)
        return work


class OldestOfStage:
    """A queue per stage."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[Work]] = defaultdict(deque)

    def retain(self, work: Work) -> None:
        """Queue the work behind the stage's other work."""
        self._queues[work[0]].append(work)

    def pick(self, work: Work) -> Work | None:
        """The stage's oldest work."""
        queue = self._queues[work[0]]
        return queue.popleft() if queue else None


class LatestOfStage:
    """One item of work per stage, which every input gradient overwrites."""

    def __init__(self) -> None:
        self._latest: dict[int, Work] = {}

    def retain(self, work: Work) -> None:
        """Overwrite the stage's former work."""
        self._latest[work[0]] = work

    def pick(self, work: Work) -> Work | None:
        """The stage's latest work, even if it was already consumed."""
        return self._latest.get(work[0])


class OldestOfRank:
    """One queue for all stages of a rank."""

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()

    def retain(self, work: Work) -> None:
        """Queue the work behind all other work."""
        self._queue.append(work)

    def pick(self, work: Work) -> Work | None:
        """The rank's oldest work."""
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
    Return a new discipline for one rank.

    Raises:
        ScheduleError: The discipline is unknown.
    """
    if not isinstance(pairing, str) or pairing not in DISCIPLINES:
        raise ScheduleError(
            f"unknown pairing {shown(pairing)}; expected one of {', '.join(DISCIPLINES)}"
            f"{near(pairing, DISCIPLINES)}"
        )
    return DISCIPLINES[pairing]()
