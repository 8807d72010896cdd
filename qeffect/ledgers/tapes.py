"""
The tapes of a contract: reservations, destinations, readers, and tapes that are dropped.
"""

from __future__ import annotations

from ..destinations import Destination
from ..explain import explain
from ..keys import TapeKey, TapeRef, reference
from ..refusals import Refused
from ..relations.constants import GRAD_BIT, OUT_BIT
from .pool import Pool
from .runner import Runner

__all__ = ["Tapes"]


class Tapes:
    """
    What is asked and told of a tape beside its F, dI and dW; the refusals are `Contract`'s.

    Args:
        runner: Runs the transitions.
        pool: The free slots, into which a released one goes back.
    """

    __slots__ = ("_pool", "_runner")

    def __init__(self, runner: Runner, pool: Pool) -> None:
        self._runner = runner
        self._pool = pool

    def live(self) -> dict[TapeKey, TapeRef]:
        """Every live tape: its key and the reference that names it."""
        st = self._runner.memory
        return {
            TapeKey(st.epoch_at[slot], *st.cell_at[slot]): self._reference(slot)
            for slot, mask in enumerate(st.consumers)
            if mask
        }

    def reserve(self, key: TapeKey, slot: int | None) -> TapeRef:
        """Claim a slot for a key before its forward."""
        arguments = self._runner.arguments
        arguments.key("reserve", key)
        if slot is None:
            slot = self._pool.next_slot(key)
        else:
            arguments.slot("reserve", key, slot)
        self._runner.run("reserve", key, slot)
        self._pool.reserve(key, slot)
        return self._reference(slot)

    def bind(self, key: TapeKey, destination: tuple[Destination, ...] | None) -> None:
        """Bind a key's destinations; by default the configured ones."""
        self._runner.arguments.key("bind", key)
        if destination is None:
            destination = self._runner.memory.destination_of[key.cell]
        self._runner.run("bind", key, destination)

    def read(self, key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> None:
        """Check that a stream may read a tape's output, or its input gradient."""
        self._runner.arguments.link("read", link)
        self._runner.arguments.tape("read", key, ref)
        self._runner.run("read", key, ref, GRAD_BIT if gradient else OUT_BIT, link)

    def finish_read(self, key: TapeKey, ref: TapeRef, gradient: bool) -> None:
        """Tell that a reader is done; the last consumer frees the slot."""
        self._runner.arguments.tape("finish_read", key, ref)
        self._runner.run("finish_read", key, ref, GRAD_BIT if gradient else OUT_BIT)
        self._pool.reclaim(ref.slot)

    def drop(self, key: TapeKey, ref: TapeRef) -> None:
        """Abort one tape that has no action in flight."""
        self._runner.arguments.tape("drop", key, ref)
        self._runner.run("drop", key, ref)
        self._pool.reserved.pop(key.cell, None)
        self._pool.reclaim(ref.slot)

    def purge(self, epoch: int) -> int:
        """Abort every live tape of an epoch, or none of them; return how many there were."""
        tapes = [(key, ref) for key, ref in self.live().items() if key.epoch == epoch]
        rehearsal = self._runner.memory.copy()
        for key, ref in tapes:
            try:
                self._runner.transitions.drop(rehearsal, key, ref)
            except Refused as refused:
                raise explain(refused, "drop", rehearsal, (key, ref)) from None
        for key, ref in tapes:
            self.drop(key, ref)
        return len(tapes)

    def _reference(self, slot: int) -> TapeRef:
        st = self._runner.memory
        return reference(slot, st.generation[slot], st.incarnation[0])
