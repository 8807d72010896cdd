"""
The free slots of one stage: a stack from which any slot can be taken at the same cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

__all__ = ["FreeSlots"]


class FreeSlots(list[int]):
    """
    Free slots, the next one to use last.

    Each slot's place in the list is remembered, so that a chosen one is found without a search and
    the last one moves into its gap. The place of a slot that is not free is left as it was: it is
    believed only where the list agrees.

    Args:
        slots: Consecutive slot indices, all of them free.

    >>> free = FreeSlots([0, 1, 2])
    >>> free[-1], free.take(1), free.take(1), sorted(free)
    (0, True, False, [0, 2])
    """

    __slots__ = ("_first", "_place")

    def __init__(self, slots: Iterable[int]) -> None:
        super().__init__(reversed(tuple(slots)))
        self._first = self[-1] if self else 0
        self._place = array("q", range(len(self) - 1, -1, -1))

    def take(self, slot: int) -> bool:
        """Remove a slot; return whether it was free."""
        place = self._place[slot - self._first]
        if place >= len(self) or self[place] != slot:
            return False
        last = self.pop()
        if last != slot:
            self[place] = last
            self._place[last - self._first] = place
        return True

    def put(self, slot: int) -> None:
        """Add a slot that became free, as the next one to use."""
        self._place[slot - self._first] = len(self)
        self.append(slot)

    def retire(self, slot: int) -> None:
        """Add a slot whose generations are exhausted, as the last one to use."""
        self.put(slot)
        first = self[0]
        self[0], self[-1] = slot, first
        self._place[first - self._first], self._place[slot - self._first] = len(self) - 1, 0
