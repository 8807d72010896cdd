"""
The free slots (sets of buffers) of one stage: a stack from which any slot can be removed in
constant time.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["FreeSlots"]


class FreeSlots(dict[int, None]):
    """
    Free slots in the order in which they became free; the slot that became free last is used next.

    A dictionary keeps this order and removes any key in one call, without a search.

    Args:
        slots: Indices of free slots (sets of buffers for one microbatch), in the order in which to
            use them.

    >>> free = FreeSlots([0, 1, 2])
    >>> free.next, free.take(1), free.take(1), sorted(free)
    (0, True, False, [0, 2])
    """

    __slots__ = ()

    def __init__(self, slots: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(reversed(tuple(slots))))

    @property
    def next(self) -> int:
        """The slot to use next; at least one slot must be free."""
        return next(reversed(self))

    def take(self, slot: int) -> bool:
        """Remove a slot; return whether it was free."""
        return self.pop(slot, _TAKEN) is None

    def put(self, slot: int) -> None:
        """Add a slot that became free; it is used next."""
        self[slot] = None

    def retire(self, slot: int) -> None:
        """Add a slot that has reached its last generation (count of releases); it is used last."""
        others = tuple(self)
        self.clear()
        self.update(dict.fromkeys((slot, *others)))


_TAKEN: None = object()  # type: ignore[assignment]  # a value that no key has
