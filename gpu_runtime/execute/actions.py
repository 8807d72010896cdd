"""
F, dI, dW and the cache refresh as guarded actions: check, act, commit.

Every action crosses to the graph stream and back, asks the kernel before it touches memory, and
tells the kernel after. An exception in between aborts the tape, spoils the epoch and, for F, dI and
a refresh, poisons the state domain, because the library rolls its scales even when F raises. The
same code runs eager and captured: only the executor differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs
from torch import Tensor

from qeffect.contract import Contract, Ticket
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.execute.eager import Executor, StageMemory
from qeffect.gpu_runtime.execute.streams import Handoff
from qeffect.gpu_runtime.memory.slots import Slot, check_values, fill
from qeffect.keys import TapeKey, TapeRef


@attrs.define(eq=False)
class GuardedActions:
    """
    The actions of one process.

    Args:
        contract: The kernel's contract of the process.
        memories: Physical memory by stage.
        executor: Who performs.
        handoff: The graph stream.
        links: The kernel's link of each caller.
    """

    contract: Contract
    memories: Mapping[int, StageMemory]
    executor: Executor
    handoff: Handoff
    links: Mapping[Hashable, int]
    unusable: str | None = None

    def refresh(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Refresh a stage's weight cache; once an epoch, directly before its first F.

        A backend without a cache leaves the version relation out; this then only opens the stage's
        epoch, and the kernel is not asked.

        Raises:
            Refused: A clause of version, order or completion.
        """
        memory = self._memory(stage)
        link = self._enter(caller)
        ticket = None
        if "version" in self.contract.transitions.relations:
            ticket = self.contract.check_refresh(stage, link)
        try:
            with self.handoff.scope():
                self.executor.refresh(memory)
                self._mark()
        except BaseException:
            if ticket is not None:
                self._abort(ticket, memory, None)
            raise
        if ticket is not None:
            self.contract.commit(ticket)
        self._leave(link)

    def reserve(self, key: TapeKey) -> TapeRef:
        """
        Claim a key's slot before its F, so that a receive can fill `input_buffers`.

        Raises:
            Refused: A clause of ownership, version or order.
        """
        return self.contract.reserve(key, self._slot_index(self._memory(key.stage), key))

    def input_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """The buffers that F of a reserved key reads, to be filled in place."""
        return self._slot(key).input_views

    def gradient_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """The buffers that dI of a live key reads, to be filled in place."""
        return self._slot(key).output_gradients

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
            Refused: A clause of ownership, version, order, capture or completion.
            BackendError: The inputs are not what the stage takes; nothing was touched.
        """
        memory = self._memory(key.stage)
        if inputs is not None:
            check_values(inputs, memory.stage.inputs, "inputs", key.stage)
        link = self._enter(caller)
        ticket = self.contract.check_forward(
            key, slot=self._slot_index(memory, key), token=token, link=link
        )
        slot = memory.table[ticket.slot]
        try:
            with self.handoff.scope():
                if inputs is not None:
                    fill(slot.input_views, inputs)
                self.executor.forward(memory, slot)
                self._mark()
        except BaseException:
            self._abort(ticket, memory, slot)
            raise
        ref = self.contract.commit(ticket)
        assert ref is not None  # a committed F always has a reference
        self._leave(link)
        return ref

    def input_gradient(
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
                `ownership.work-not-queued` when the library deferred less than every matrix.
            BackendError: The gradients are not what the stage takes; nothing was touched.
        """
        memory = self._memory(key.stage)
        if output_gradients is not None:
            check_values(
                output_gradients, memory.table.gradient_specs, "output gradients", key.stage
            )
        link = self._enter(caller)
        ticket = self.contract.check_dgrad(key, ref, token=token, link=link)
        slot = memory.table[ticket.slot]
        try:
            with self.handoff.scope():
                if output_gradients is not None:
                    fill(slot.output_gradients, output_gradients)
                queued = self.executor.input_gradient(memory, slot, memory.variants[key.microbatch])
                self._mark()
        except BaseException:
            self._abort(ticket, memory, slot)
            raise
        self._commit(ticket, queued, memory, slot)
        self._leave(link)

    def bind(self, key: TapeKey) -> None:
        """
        Bind a key's gradient destinations; must precede its dI.

        Raises:
            Refused: `arena.mismatch` when a destination is no longer the memory that was
                configured, `arena.duplicate-bind`, `arena.unusable` or `version.wrong-epoch`.
        """
        memory = self._memory(key.stage)
        self._known(memory, key)
        self.contract.bind(key, memory.arena.present(key.microbatch))

    def weight_gradient(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> None:
        """
        dW: run the tape's deferred work into the key's destination, and release the tape.

        Raises:
            Refused: A clause of ownership, version, arena, capture or completion, or
                `ownership.matrix-coverage` when not every matrix was covered exactly once.
        """
        memory = self._memory(key.stage)
        self._known(memory, key)
        variant = memory.variants[key.microbatch]
        link = self._enter(caller)
        ticket = self.contract.check_wgrad(
            key,
            ref,
            destination=memory.arena.present(key.microbatch),
            first=not variant.accumulate,
            link=link,
        )
        slot = memory.table[ticket.slot]
        try:
            with self.handoff.scope():
                covered = self.executor.weight_gradient(memory, slot, variant)
                if not memory.arena.direct:
                    memory.arena.keep_copies(key.microbatch, slot.weight_gradients)
                self._mark(after_copies=not memory.arena.direct)
        except BaseException:
            self._abort(ticket, memory, slot)
            raise
        self._commit(ticket, covered, memory, slot)
        self._leave(link)

    def outputs(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> Sequence[Tensor]:
        """
        What F left, for a stage that is configured to have a reader; call `finish_outputs` after.

        Raises:
            Refused: A clause of ownership, or `completion.graph-to-caller`.
        """
        self.contract.read(key, ref, link=self.links[caller])
        return self._memory(key.stage).table[ref.slot].outputs

    def finish_outputs(self, key: TapeKey, ref: TapeRef) -> None:
        """Say that the reader of the outputs is done: its work has been submitted or awaited."""
        self.contract.finish_read(key, ref)

    def input_gradients(
        self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main"
    ) -> Sequence[Tensor]:
        """What dI left, for a stage with a gradient reader; call `finish_input_gradients` after."""
        self.contract.read(key, ref, gradient=True, link=self.links[caller])
        return self._memory(key.stage).table[ref.slot].input_gradients

    def finish_input_gradients(self, key: TapeKey, ref: TapeRef) -> None:
        """Say that the reader of the input gradients is done."""
        self.contract.finish_read(key, ref, gradient=True)

    # Inside

    def _memory(self, stage: int) -> StageMemory:
        if self.unusable is not None:
            raise BackendError(self.unusable)
        try:
            return self.memories[stage]
        except KeyError:
            raise BackendError(
                f"no stage {stage} in this process; it has {sorted(self.memories)}"
            ) from None

    @staticmethod
    def _slot_index(memory: StageMemory, key: TapeKey) -> int | None:
        # A microbatch that has no slot is left to the kernel, which names its key.
        known = key.microbatch < len(memory.slot_of)
        return memory.slot_of[key.microbatch] if known else None

    @staticmethod
    def _known(memory: StageMemory, key: TapeKey) -> None:
        if key.microbatch >= len(memory.slot_of):
            raise BackendError(
                f"{key}: stage {key.stage} runs microbatches 0 to {len(memory.slot_of) - 1}"
            )

    def _slot(self, key: TapeKey) -> Slot:
        memory = self._memory(key.stage)
        self._known(memory, key)
        return memory.table[memory.slot_of[key.microbatch]]

    def _enter(self, caller: Hashable) -> int:
        link = self.links[caller]
        self.contract.submit(caller)
        self.handoff.wait_for_caller()
        self.contract.join(link)
        return link

    def _leave(self, link: int) -> None:
        self.handoff.caller_waits()
        self.contract.wait(link)

    def _mark(self, *, after_copies: bool = False) -> None:
        """Mark the tail, unless a graph has done so and nothing came after it."""
        if after_copies or not self.executor.marks_tail:
            self.handoff.record_tail()

    def _abort(self, ticket: Ticket, memory: StageMemory, slot: Slot | None) -> None:
        self.contract.abort(ticket)
        self._discard(ticket, memory, slot)

    def _commit(
        self, ticket: Ticket, evidence: Sequence[str], memory: StageMemory, slot: Slot
    ) -> None:
        try:
            self.contract.commit(ticket, evidence)
        except BaseException:
            # The kernel aborts a ticket whose own evidence fails.
            self._discard(ticket, memory, slot)
            raise

    @staticmethod
    def _discard(ticket: Ticket, memory: StageMemory, slot: Slot | None) -> None:
        if slot is not None:
            slot.tape.clear()
            slot.forget()
        if ticket.key is not None:
            memory.arena.spoil(ticket.key.microbatch)
