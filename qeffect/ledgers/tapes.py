"""
The tapes of a contract (what each F leaves for its dI and dW): reservations, gradient destinations,
readers, and dropped tapes.
"""

from __future__ import annotations

from collections.abc import Callable

from ..destinations import Destination
from ..explain import explain
from ..explanations.words import entries_of
from ..keys import TapeKey, TapeRef, reference
from ..refusals import Refused
from ..relations.constants import BACK_BIT, DGRAD_BIT, GRAD_BIT, IN_BIT, OUT_BIT, RESERVED
from ..tickets import Ticket
from .pool import Pool
from .runner import FAILURES, Runner

__all__ = ["Tapes"]

#: Begins or ends a transfer, given key, reference, whether a gradient moves, and link.
Transfer = Callable[[TapeKey, TapeRef, bool, int], None]


class Tapes:
    """
    All calls about tapes except F, dI and dW; `Contract` documents their refusals.

    Args:
        runner: Runs the transitions.
        pool: The free slots (sets of buffers); a released slot returns there.

    Attributes:
        read: Check that a stream may read a tape's output, or its input gradient.
        finish_read: Record that a read has ended; the last consumer frees the slot.
        post_receive: Check that a stream may receive into a tape's slot.
        finish_receive: Record that a message has arrived; this may free the slot of an aborted
            tape.
    """

    __slots__ = (
        "_arguments",
        "_bind",
        "_destination_of",
        "_memory",
        "_pool",
        "_runner",
        "finish_read",
        "finish_receive",
        "post_receive",
        "read",
    )

    read: Transfer
    finish_read: Transfer
    post_receive: Transfer
    finish_receive: Transfer

    def __init__(self, runner: Runner, pool: Pool) -> None:
        self._runner = runner
        self._pool = pool
        # Look-ups of `bind`, made once: every dI calls `bind`.
        self._memory, self._arguments = runner.memory, runner.arguments
        self._destination_of = runner.memory.destination_of
        self._bind = runner.transitions.bind
        self.read = self._moving("read", (OUT_BIT, GRAD_BIT))
        self.finish_read = self._moving("finish_read", (OUT_BIT, GRAD_BIT), ends=True)
        self.post_receive = self._moving("post_receive", (IN_BIT, BACK_BIT))
        self.finish_receive = self._moving("finish_receive", (IN_BIT, BACK_BIT), ends=True)

    def live(self) -> dict[TapeKey, TapeRef]:
        """Return the reference of every live tape, by its key."""
        st = self._runner.memory
        return {
            TapeKey(st.epoch_at[slot], *st.cell_at[slot]): self._reference(slot)
            for slot, mask in enumerate(st.consumers)
            if mask
        }

    def outstanding(self) -> tuple[Ticket, ...]:
        """Return every outstanding ticket (reservation), oldest first, rebuilt from the memory."""
        st = self._memory
        own, update = st.incarnation[0], st.optimizing[0]
        found = [Ticket("refresh", None, s, n, own) for s, n in entries_of(st.refreshing) if n]
        found += [Ticket("evaluation", None, s, n, own) for s, n in entries_of(st.evaluating) if n]
        if update:
            epochs = (epoch for _, epoch in entries_of(st.weight_epoch))  # all stages' is one
            found.append(Ticket("update", None, next(epochs), update, own))
        found += [self._ticket(slot) for slot, serial in enumerate(st.held) if serial]
        return tuple(sorted(found, key=lambda ticket: ticket.serial))

    def _ticket(self, slot: int) -> Ticket:
        st = self._memory
        mask, key = st.consumers[slot], TapeKey(st.epoch_at[slot], *st.cell_at[slot])
        forward = mask == RESERVED
        action = "F" if forward else "dI" if mask & DGRAD_BIT else "dW"
        ref = None if forward else self._reference(slot)
        return Ticket(action, key, slot, st.held[slot], st.incarnation[0], ref)

    def reference(self, key: TapeKey) -> TapeRef | None:
        """Return the reference of a key's live tape, or None."""
        st = self._runner.memory
        slot = st.slot_of.get(key.cell, -1)
        if slot < 0 or st.epoch_at[slot] != key.epoch:
            return None
        return self._reference(slot)

    def reserve(self, key: TapeKey, slot: int | None, link: int) -> TapeRef:
        """Claim a slot for a key before its forward."""
        arguments = self._runner.arguments
        arguments.key("reserve", key)
        arguments.link("reserve", link)
        if slot is None:
            slot = self._pool.next_slot(key)
        else:
            arguments.slot("reserve", key, slot)
        self._runner.apply("reserve", key, slot, link)
        self._pool.reserve(key, slot)
        self._runner.tell("reserve", (key, slot, link), None)
        return self._reference(slot)

    def skip(self, key: TapeKey) -> None:
        """Leave a key out of the walk (pass over the microbatches) that has not begun."""
        self._arguments.key("skip", key)
        self._runner.run("skip", key)

    def shorten(self, microbatches: int) -> None:
        """
        Leave microbatch number ``microbatches`` and all later ones out of the walk (pass over the
        microbatches). If one key is refused, no key is left out.
        """
        self._arguments.integer("shorten_walk", "microbatches", microbatches)
        most: dict[int, int] = {}
        for stage, microbatch, *_ in self._arguments.cells:
            most[stage] = max(most.get(stage, 0), microbatch + 1)
        if not 1 <= microbatches <= min(most.values()):
            raise ValueError(
                f"shorten_walk: expected 1 to {min(most.values())} microbatches, the fewest that "
                f"any stage has, found {microbatches}"
            )
        st = self._memory
        left_out = (cell for cell in self._arguments.cells if cell[1] >= microbatches)
        keys = [TapeKey(st.weight_epoch[cell[0]], *cell) for cell in left_out]
        rehearsal = st.copy()
        for key in keys:
            try:
                self._runner.transitions.skip(rehearsal, key)
            except Refused as refused:
                raise explain(refused, "skip", rehearsal, (key,)) from None
        for key in keys:
            self._runner.apply("skip", key)
        for key in keys:
            self._runner.tell("skip", (key,), None)

    def bind(self, key: TapeKey, destination: tuple[Destination, ...] | None) -> None:
        """Bind a key's destinations; by default the configured destinations."""
        if key.__class__ is not TapeKey or key.cell not in self._arguments.cells:
            self._arguments.key("bind", key)
        if destination is None:
            destination = self._destination_of[key.cell]
        try:
            self._bind(self._memory, key, destination)
        except FAILURES as error:
            raise self._runner.failure(error, "bind", (key, destination)) from None
        if self._runner.observer is not None:
            self._runner.observer("bind", (key, destination), None)

    def _moving(self, transition: str, bits: tuple[int, int], *, ends: bool = False) -> Transfer:
        """
        Return a function that begins or ends a transfer, with its look-ups bound.

        Each F and dI calls several such functions, so each look-up would cost measurable time.

        Args:
            transition: Name of the transition (contract call).
            bits: Bits of the forward and of the backward message.
            ends: Whether the call ends a transfer, after which the slot may be free.
        """
        runner, memory, reclaim = self._runner, self._memory, self._pool.reclaim
        arguments, function = runner.arguments, runner.transitions.functions[transition]
        num_slots, num_links, consumers = arguments.num_slots, arguments.num_links, memory.consumers
        forward, back = bits

        def run(key: TapeKey, ref: TapeRef, gradient: bool, link: int) -> None:
            if link.__class__ is not int or not 0 <= link < num_links:
                arguments.link(transition, link)
            if (
                key.__class__ is not TapeKey
                or ref.__class__ is not TapeRef
                or not 0 <= ref.slot < num_slots
            ):
                arguments.tape(transition, key, ref)
            bit = back if gradient else forward
            try:
                function(memory, key, ref, bit, link)
            except FAILURES as error:
                raise runner.failure(error, transition, (key, ref, bit, link)) from None
            if ends and consumers[ref.slot] == 0:
                reclaim(ref.slot)
            if runner.observer is not None:
                runner.observer(transition, (key, ref, bit, link), None)

        return run

    def drop(self, key: TapeKey, ref: TapeRef) -> None:
        """Abort one tape that has no action in flight."""
        self._runner.arguments.tape("drop", key, ref)
        self._drop(key, ref)
        self._runner.tell("drop", (key, ref), None)

    def _drop(self, key: TapeKey, ref: TapeRef) -> None:
        self._runner.apply("drop", key, ref)
        self._pool.reserved.pop(key.cell, None)
        self._pool.reclaim(ref.slot)

    def purge(self, epoch: int) -> int:
        """Abort every live tape of an epoch, or no tape; return the number of aborted tapes."""
        self._arguments.integer("purge", "epoch", epoch)
        tapes = [(key, ref) for key, ref in self.live().items() if key.epoch == epoch]
        rehearsal = self._runner.memory.copy()
        for key, ref in tapes:
            try:
                self._runner.transitions.drop(rehearsal, key, ref)
            except Refused as refused:
                raise explain(refused, "drop", rehearsal, (key, ref)) from None
        for key, ref in tapes:
            self._drop(key, ref)
        for key, ref in tapes:
            self._runner.tell("drop", (key, ref), None)
        return len(tapes)

    def _reference(self, slot: int) -> TapeRef:
        st = self._runner.memory
        return reference(slot, st.generation[slot], st.incarnation[0])
