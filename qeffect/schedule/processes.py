"""
The event engine of the dry runs: each process runs until it waits for an event.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Processes"]

E = TypeVar("E", bound=Hashable)


class Processes(Generic[E]):
    """
    Runs processes that wait for each other's events.

    A process is an iterator. It yields an event that it waits for, and continues after the event
    has happened. Processes run in the order in which they became ready, each until it waits or
    ends. So equal inputs give equal runs.

    >>> engine = Processes[str]()
    >>> def first():
    ...     yield "b"
    ...     print("first")
    >>> def second():
    ...     print("second")
    ...     engine.happen("b")
    ...     yield "c"
    >>> engine.run([first(), second()])
    second
    first
    {1: 'c'}
    """

    def __init__(self) -> None:
        self._ready: deque[int] = deque()
        self._waiting: dict[E, list[int]] = defaultdict(list)

    def happen(self, event: E) -> None:
        """Mark an event as happened; its waiting processes become ready, first waiter first."""
        self._ready.extend(self._waiting.pop(event, ()))

    def run(self, processes: Iterable[Iterator[E]]) -> dict[int, E]:
        """
        Run processes until each has ended or waits for an event that never happens.

        Returns:
            For each process that has not ended, by its position in `processes`, the event that the
            process waits for.
        """
        every = list(processes)
        self._ready.extend(range(len(every)))
        stopped: dict[int, E] = {}
        while self._ready:
            number = self._ready.popleft()
            stopped.pop(number, None)
            for event in every[number]:
                stopped[number] = event
                self._waiting[event].append(number)
                break
        return dict(sorted(stopped.items()))
