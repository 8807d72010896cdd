"""
The pool: the free slots (sets of buffers), and the slots that keys have reserved before their
forward.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..engine.concrete_memory import Memory
from ..engine.freelist import FreeSlots
from ..keys import Cell, TapeKey

__all__ = ["Pool"]


class Pool:
    """
    The free slots of every stage.

    Args:
        memory: The contract's memory; a slot is free if no consumer (such as dW) still needs its
            tape.
        slots: For each stage, the indices of its slots.

    Attributes:
        free: For each stage, its free slots.
        reserved: For each cell (a key without its epoch), the slot that the cell's key reserved.
    """

    __slots__ = ("_memory", "_slots", "free", "reserved")

    def __init__(self, memory: Memory, slots: Mapping[int, tuple[int, ...]]) -> None:
        self._memory = memory
        self._slots = slots
        self.free: dict[int, FreeSlots] = {}
        self.reserved: dict[Cell, int] = {}
        self.reset()

    def reset(self) -> None:
        """Make every slot free, as after a restore."""
        self.free.update({stage: FreeSlots(own) for stage, own in self._slots.items()})
        self.reserved.clear()

    def next_slot(self, key: TapeKey) -> int:
        """Return a slot to reserve; if no slot is free, a slot that the guards will refuse."""
        free = self.free[key.stage]
        return free.next if free else int(self._memory.slot_of[key.cell])

    def reserve(self, key: TapeKey, slot: int) -> None:
        """Record that a key reserved a slot."""
        self.free[key.stage].take(slot)
        self.reserved[key.cell] = slot

    def reclaim(self, slot: int) -> None:
        """Return a slot to the pool if no consumer and no transfer needs the slot any more."""
        st = self._memory
        if st.consumers[slot] == 0 and st.moving[slot] == 0:
            free = self.free[st.slot_stage[slot]]
            if st.generation[slot] == st.generation_max[0]:
                free.retire(slot)
            else:
                free.put(slot)
