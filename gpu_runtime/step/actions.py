"""
F, dI, dW and the cache refresh as guarded actions: check, act, commit.

Every action crosses to the graph stream and back, asks the kernel before it touches memory, and
tells the kernel after. A refusal changes nothing. An exception while acting, or evidence that falls
short, fails the step: its tape and every other outstanding tape of the state domain are aborted at
once (paper, IV-E), the epoch is spoiled and, for F, dI and a refresh, the state domain is poisoned,
because the library rolls its scales even when F raises. The same code runs eager and captured: only
the executor differs.

What an action of a configured key needs is looked up once, at construction (`_Place`): beside a
graph's launch of two microseconds, looking it up again would show.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs
from torch import Tensor

from qeffect.contract import Contract, Ticket
from qeffect.keys import Cell, TapeKey, TapeRef
from qeffect.refusals import Refused
from qeffect.relations.constants import RESERVED

from ..backends.protocol import BackendError
from .eager import StageMemory
from .effects import UNREPORTED, Effects
from .memory.slots import Slot
from .performer import Performer
from .plan.slots import WgradVariant


@attrs.frozen(eq=False)
class _Place:
    """
    What an action on one microbatch of one stage touches.

    Args:
        memory: The stage's memory.
        index: The slot that the plan gives the microbatch, in the process's pool; None for a
            microbatch without one, which is left to the kernel to refuse.
        variant: What its dW does.
        opens: Whether its dW overwrites what its stage shares with another one; None where it
            shares nothing.
    """

    memory: StageMemory
    index: int | None
    variant: WgradVariant | None
    opens: bool | None = None


@attrs.define(eq=False)
class GuardedActions:
    """
    The actions of one process.

    Args:
        contract: The kernel's contract of the process.
        memories: Physical memory by stage.
        performer: Performs the physical part of each action.
        links: The kernel's link of each caller.
        broken: Why no action may run any more, where that is so.
    """

    contract: Contract
    memories: Mapping[int, StageMemory]
    performer: Performer
    links: Mapping[Hashable, int]
    broken: str | None = None
    _places: dict[Cell, _Place] = attrs.field(init=False, factory=dict)
    _slots: dict[int, Slot] = attrs.field(init=False, factory=dict)
    _versioned: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._versioned = "version" in self.contract.transitions.relations
        for stage, memory in self.memories.items():
            self._slots.update((slot.index, slot) for slot in memory.table)
            for m, (index, variant) in enumerate(zip(memory.slot_of, memory.variants, strict=True)):
                opens = not variant.accumulate and not variant.joins if memory.shared else None
                self._places[stage, m, 0, 0] = _Place(memory, index, variant, opens)

    def refresh(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Refresh a stage's weight cache; once an epoch, directly before its first F.

        A backend without a cache leaves the version relation out; this then only opens the stage's
        epoch, and the kernel is not asked.

        Raises:
            Refused: A clause of version, order or completion; `version.fill-missing` when the
                backend reports that not every cache was filled.
        """
        memory = self._memory(stage)
        contract, performer = self.contract, self.performer
        handoff, executor = performer.handoff, performer.executor
        link = self.links[caller]
        back = handoff.cross()
        try:
            contract.enter(link)
            ticket = contract.check_refresh(stage, link) if self._versioned else None
            try:
                effects = executor.refresh(memory)
                if not executor.marks_tail:
                    handoff.record_tail()
            except BaseException:
                if ticket is not None:
                    self._abort(ticket, None)
                raise
            if ticket is not None:
                self._commit(ticket, None, (), effects)
        finally:
            handoff.cross_back(back)
        contract.wait(link)

    def reserve(self, key: TapeKey, *, caller: Hashable = "main") -> TapeRef:
        """
        Claim a key's slot before its F, so that `caller` can fill `input_buffers`.

        Raises:
            Refused: A clause of ownership, version or completion.
        """
        return self.contract.reserve(key, self._place(key).index, link=self.links[caller])

    def input_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """
        The buffers that F of a reserved key reads, to be filled in place.

        Raises:
            BackendError: The key has reserved no slot, or its F has run.
        """
        return self._owned(key, reserved=True).input_views

    def gradient_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """
        The buffers that dI of a forwarded key reads, to be filled in place.

        Raises:
            BackendError: The key has no tape, or its F has not run.
        """
        return self._owned(key, reserved=False).output_gradients

    def post_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, caller: Hashable = "main"
    ) -> tuple[Tensor, ...]:
        """
        Begin to receive a tape's input, or the gradient of its output, for a stage that does.

        Args:
            key: The execution's name; for an input it has reserved its slot.
            ref: What `reserve` or `forward` returned.
            gradient: Receive the gradient of the output.
            caller: Name of the calling stream.

        Returns:
            The static buffers to receive into.

        Raises:
            Refused: A clause of ownership or completion.
        """
        self.contract.post_receive(key, ref, gradient=gradient, link=self.links[caller])
        slot = self._left(ref)
        return slot.output_gradients if gradient else slot.input_views

    def finish_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, caller: Hashable = "main"
    ) -> None:
        """
        Say that a message has arrived whole, or that the caller's stream has waited for it.

        Raises:
            Refused: A clause of ownership or completion.
        """
        self.contract.finish_receive(key, ref, gradient=gradient, link=self.links[caller])

    def forward(
        self,
        key: TapeKey,
        inputs: Sequence[Tensor] | None = None,
        *,
        token: int | None = None,
        caller: Hashable = "main",
    ) -> TapeRef:
        """
        F: run a stage on one microbatch.

        Args:
            key: The execution's name.
            inputs: What it takes; None when `input_buffers` were filled in place.
            token: The effect token that the caller threads; None takes the domain's own.
            caller: Name of the calling stream.

        Returns:
            The reference that dI, dW and readers must present with the key.

        Raises:
            Refused: A clause of ownership, version, order, capture or completion; at the end
                `order.scaling-updates` or `version.fill-unasked` when the backend reports that F
                updated scales not once, or filled caches.
            BackendError: The inputs are not what the stage takes; nothing was touched.
        """
        place = self._places.get(key.cell)
        if place is None or self.broken is not None:
            place = self._place(key)
        memory = place.memory
        if inputs is not None:
            memory.table.inputs.check(inputs)
        contract, performer = self.contract, self.performer
        handoff, executor = performer.handoff, performer.executor
        link = self.links[caller]
        back = handoff.cross()
        try:
            contract.enter(link)
            ticket = contract.check_forward(key, slot=place.index, token=token, link=link)
            slot = self._slots[ticket.slot]
            try:
                if inputs is not None:
                    performer.fill(slot.input_views, inputs)
                effects = executor.forward(memory, slot)
                if not executor.marks_tail:
                    handoff.record_tail()
            except BaseException:
                self._abort(ticket, slot)
                raise
            ref = self._commit(ticket, slot, (), effects)
        finally:
            handoff.cross_back(back)
        contract.wait(link)
        assert ref is not None  # a committed F always has a reference
        return ref

    def dgrad(
        self,
        key: TapeKey,
        ref: TapeRef,
        output_gradients: Sequence[Tensor] | None = None,
        *,
        token: int | None = None,
        caller: Hashable = "main",
    ) -> None:
        """
        dI: input and non-matrix gradients; the matrix work stays on the tape.

        Args:
            key: The execution's name.
            ref: What its F returned.
            output_gradients: Gradients of its outputs; None when `gradient_buffers` were filled.
            token: The effect token that the caller threads; None takes the domain's own.
            caller: Name of the calling stream.

        Raises:
            Refused: A clause of ownership, version, order, arena, capture or completion, or
                `ownership.work-not-queued` when the library deferred less than every matrix;
                `order.scaling-updates` or `order.wrong-scales` when the backend reports that dI
                updated scales not once, or used those of another F.
            BackendError: The gradients are not what the stage takes; nothing was touched.
        """
        place = self._places.get(key.cell)
        if place is None or self.broken is not None:
            place = self._place(key)
        memory = place.memory
        if output_gradients is not None:
            memory.table.output_gradients.check(output_gradients)
        contract, performer = self.contract, self.performer
        handoff, executor = performer.handoff, performer.executor
        link = self.links[caller]
        back = handoff.cross()
        try:
            contract.enter(link)
            ticket = contract.check_dgrad(key, ref, token=token, link=link)
            slot = self._slots[ticket.slot]
            try:
                if output_gradients is not None:
                    performer.fill(slot.output_gradients, output_gradients)
                queued, effects = executor.dgrad(memory, slot, memory.variants[key.microbatch])
                if not executor.marks_tail:
                    handoff.record_tail()
            except BaseException:
                self._abort(ticket, slot)
                raise
            self._commit(ticket, slot, queued, effects)
        finally:
            handoff.cross_back(back)
        contract.wait(link)

    def bind(self, key: TapeKey) -> None:
        """
        Bind a key's gradient destinations; must precede its dI.

        Raises:
            Refused: `arena.mismatch` when a destination is no longer the memory that was
                configured, `arena.duplicate-bind`, `arena.spoiled` or `version.wrong-epoch`.
        """
        place = self._places.get(key.cell)
        if place is None or self.broken is not None:
            place = self._known(key)
        self.contract.bind(key, place.memory.arena.present(key.microbatch))

    def wgrad(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> None:
        """
        dW: run the tape's deferred work into the key's destination, and release the tape.

        Raises:
            Refused: A clause of ownership, version, arena, capture or completion, or
                `ownership.matrix-coverage` when not every matrix was covered exactly once.
        """
        place = self._places.get(key.cell)
        if place is None or self.broken is not None:
            place = self._known(key)
        memory, variant = place.memory, place.variant
        assert variant is not None  # a known key has a slot, and its dW something to do
        arena, microbatch = memory.arena, key.microbatch
        contract, performer = self.contract, self.performer
        handoff, executor = performer.handoff, performer.executor
        link = self.links[caller]
        back = handoff.cross()
        try:
            contract.enter(link)
            ticket = contract.check_wgrad(
                key,
                ref,
                destination=arena.present(microbatch),
                first=not variant.accumulate,
                first_of_tied=place.opens,
                link=link,
            )
            slot = self._slots[ticket.slot]
            try:
                covered = executor.wgrad(memory, slot, variant)
                if not arena.direct:
                    arena.keep_copies(microbatch, slot.wgrads)
                    handoff.record_tail()
                elif not executor.marks_tail:  # a graph has marked its own
                    handoff.record_tail()
            except BaseException:
                self._abort(ticket, slot)
                raise
            self._commit(ticket, slot, covered)
        finally:
            handoff.cross_back(back)
        contract.wait(link)

    def outputs(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> Sequence[Tensor]:
        """
        What F left, for a stage that is configured to have a reader; call `finish_outputs` after.

        Raises:
            Refused: A clause of ownership, or `completion.graph-to-caller`.
        """
        self.contract.read(key, ref, link=self.links[caller])
        return self._left(ref).outputs

    def finish_outputs(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> None:
        """
        Say that the reader of the outputs is done.

        Its work has been submitted to the caller's stream, or that stream has waited for it.

        Raises:
            Refused: A clause of ownership or completion.
        """
        self.contract.finish_read(key, ref, link=self.links[caller])

    def dgrads(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> Sequence[Tensor]:
        """What dI left, for a stage with a gradient reader; call `finish_dgrads` after."""
        self.contract.read(key, ref, gradient=True, link=self.links[caller])
        return self._left(ref).dgrads

    def finish_dgrads(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> None:
        """Say that the reader of the input gradients is done; otherwise as `finish_outputs`."""
        self.contract.finish_read(key, ref, gradient=True, link=self.links[caller])

    # Inside

    def _memory(self, stage: int) -> StageMemory:
        if self.broken is not None:
            raise BackendError(self.broken)
        try:
            return self.memories[stage]
        except KeyError:
            raise BackendError(
                f"no stage {stage} in this process; it has {sorted(self.memories)}"
            ) from None

    def _place(self, key: TapeKey) -> _Place:
        """What a key's actions touch; a microbatch without a slot is the kernel's to refuse."""
        memory = self._memory(key.stage)
        return self._places.get(key.cell) or _Place(memory, None, None)

    def _known(self, key: TapeKey) -> _Place:
        place = self._places.get(key.cell)
        if place is not None and self.broken is None:
            return place
        memory = self._memory(key.stage)
        # A block or an invocation that was never configured is the kernel's to refuse.
        place = self._places.get((key.stage, key.microbatch, 0, 0))
        if place is not None:
            return place
        raise BackendError(
            f"{key}: stage {key.stage} runs microbatches 0 to {len(memory.slot_of) - 1}"
        )

    def _left(self, ref: TapeRef) -> Slot:
        """The slot of a reference that the kernel has just accepted."""
        if self.broken is not None:
            raise BackendError(self.broken)
        return self._slots[ref.slot]

    def _owned(self, key: TapeKey, *, reserved: bool) -> Slot:
        """The slot that a key owns, before or after its F."""
        self._known(key)
        ref = self.contract.reference(key)
        if ref is None:
            raise BackendError(f"{key} owns no slot, so it has no buffers; reserve or forward it")
        waits = self.contract.memory.consumers[ref.slot] == RESERVED
        if waits != reserved:
            wrong = "its forward has run" if reserved else "its forward has not run"
            raise BackendError(f"{key} has no such buffers in slot {ref.slot}: {wrong}")
        return self._slots[ref.slot]

    def _enter(self, caller: Hashable) -> int:
        link = self.links[caller]
        self.performer.handoff.wait_for_caller()
        self.contract.enter(link)
        return link

    def _leave(self, link: int) -> None:
        self.performer.handoff.caller_waits()
        self.contract.wait(link)

    def _commit(
        self,
        ticket: Ticket,
        slot: Slot | None,
        evidence: tuple[str, ...],
        effects: Effects = UNREPORTED,
    ) -> TapeRef | None:
        """Tell the kernel what an action did; evidence that falls short fails the step."""
        names, updates, scales = effects
        filled = None
        if names:  # a cast reads the weights there and then: those of the current epoch
            filled = [(name, self.contract.epoch) for name in names]
        try:
            return self.contract.commit(
                ticket, evidence, filled=filled, updates=updates, scales=scales
            )
        except BaseException:
            # The kernel aborts a ticket whose own evidence fails.
            if slot is not None:
                self._discard(ticket.key, slot)
            self.abort_outstanding()
            raise

    def abort_outstanding(self) -> int:
        """
        Abort every outstanding tape of the process: the step has failed (paper, III-A and IV-E).

        An action that fails does this itself. A loop calls it when something else of the step has
        failed, a transfer for one. The epoch can then no longer commit; `Runtime.rebuild` begins it
        again.

        Returns:
            How many tapes there were.
        """
        aborted = 0
        for key, ref in self.contract.live().items():
            try:
                self.contract.drop(key, ref)
            except Refused:
                # Another action holds it; that action's end, or the rebuild, is its end.
                continue
            self._discard(key, self._slots[ref.slot])
            aborted += 1
        return aborted

    def _abort(self, ticket: Ticket, slot: Slot | None) -> None:
        self.contract.abort(ticket)
        if slot is not None:
            self._discard(ticket.key, slot)
        self.abort_outstanding()

    def _discard(self, key: TapeKey | None, slot: Slot) -> None:
        """Drop what an aborted tape retains, and its half-written copy."""
        slot.tape.clear()
        slot.forget()
        if key is not None:
            self.memories[key.stage].arena.spoil(key.microbatch)
