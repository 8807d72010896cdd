"""
F (forward), dI (input gradient), dW (weight gradient) and the cache refresh as guarded actions. The
contract checks an action, the action runs, and the contract records its result.

Every action runs on the graph stream. The graph stream first waits for the caller's stream, and
afterwards the caller's stream waits for the action. An action asks the contract before it touches
memory. Afterwards the action reports evidence to the contract, such as the matrices whose gradients
a dW wrote. A refusal before the action changes nothing. After an exception during the action, or
after incomplete evidence, the step fails. All tapes (the data that each F keeps for its dI and dW)
are aborted at once (paper, IV-E), and the epoch (the optimizer step) can no longer commit. After a
failed F, dI or refresh the FP8 scales are invalid too, because the library rolls its amax histories
even when F raises. The same code runs for eager and captured actions; only the executor differs.

A graph launch takes only two microseconds, so lookups in every action would take noticeable time.
Therefore the constructor does all lookups once, for each stage and microbatch (`_Place`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
from torch import Tensor

from qeffect.contract import Contract, Ticket
from qeffect.keys import Cell, TapeKey, TapeRef
from qeffect.refusals import Refused
from qeffect.relations.constants import RESERVED
from qeffect.text import shown

from ..backends.epoch_scales import begin_forward
from ..backends.protocol import BackendError, StateDomain
from .eager import StageMemory
from .effects import UNREPORTED, Effects
from .evaluation import evaluated
from .memory.slots import Slot
from .performer import Performer
from .plan.slots import WgradVariant


@attrs.frozen(eq=False)
class _Place:
    """
    The memory and the dW variants that the actions on one microbatch of one stage use.

    Args:
        memory: All memory that the runtime holds for the stage.
        index: The slot (set of buffers) that the plan gives the microbatch, as an index in the
            process's pool; None for a microbatch without a slot, which the kernel refuses.
        variant: Where and how the microbatch's dW writes.
        opens: Whether the microbatch's dW overwrites the destinations that its stage shares with
            another stage; None if the stage shares no destination.
        later: Where and how the microbatch's dW writes in later walks (passes over the rank's
            actions) of an epoch; None if an epoch has one walk.
        group: The microbatches, this one included, whose dW runs as one product; empty if the dW of
            another microbatch includes this microbatch.
    """

    memory: StageMemory
    index: int | None
    variant: WgradVariant | None
    opens: bool | None = None
    later: WgradVariant | None = None
    group: tuple[int, ...] = ()


#: Why no action may run after an update that failed half way.
HALF_UPDATED: Final = (
    "an update of the weights failed half way, or used gradients in which a fault was found only "
    "later: some weights may be wrong; load a checkpoint into a new runtime"
)


def _pairs(group: Any) -> tuple[tuple[TapeKey, TapeRef], ...]:
    """
    Turn a group into a tuple of pairs. The given group may be a generator, which can be read only
    once.

    Raises:
        TypeError: The group is not a collection of pairs of key and reference.
    """
    found: tuple[tuple[Any, Any], ...] | None = None
    with suppress(TypeError, ValueError):
        found = tuple((key, ref) for key, ref in group)
    if found is None or any([*map(type, pair)] != [TapeKey, TapeRef] for pair in found):
        raise TypeError(
            "wgrad: expected a group of pairs (key, ref), one for each other microbatch of the "
            f"group, found {shown(group)}; for a dW of one microbatch, pass no group"
        )
    return found


def _microbatches(key: TapeKey, group: Sequence[tuple[TapeKey, TapeRef]]) -> Iterator[int]:
    """Return the microbatches of a group of tapes (each what one F left for its dI and dW). -1
    stands for a tape whose stage, block or invocation differs from that of `key`."""
    for other, _ in group:
        same = (other.stage, other.block, other.invocation) == (
            key.stage,
            key.block,
            key.invocation,
        )
        yield other.microbatch if same else -1


def _not_grouped(
    key: TapeKey, group: Sequence[tuple[TapeKey, TapeRef]], expected: tuple[int, ...]
) -> str:
    """Return the error message for a dW whose tapes are not a group of the configuration."""
    where = f"dW of stage {key.stage}"
    if not expected:
        return (
            f"{where}: microbatch {key.microbatch} has no dW of its own, because another "
            "microbatch's dW includes it; pass its key and reference in the group= of that dW"
        )
    found = [key.microbatch, *(other.microbatch for other, _ in group)]
    others = [str(other) for other, _ in group if other.stage != key.stage]
    return (
        f"{where}: expected one dW of microbatches {list(expected)}, which the configuration "
        f"groups, found {others or found}; pass the other microbatches of the group as "
        "group=[(key, ref), ...]"
    )


@attrs.define(eq=False)
class GuardedActions:
    """
    The guarded actions of one process.

    Args:
        contract: The contract of the process.
        memories: Physical memory by stage.
        performer: Performs the physical part of each action.
        links: By caller, the contract's number for the pair of the caller's stream and the graph
            stream.
    """

    contract: Contract
    memories: Mapping[int, StageMemory]
    performer: Performer
    links: Mapping[Hashable, int]
    _places: dict[Cell, _Place] = attrs.field(init=False, factory=dict)
    _slots: dict[int, Slot] = attrs.field(init=False, factory=dict)
    _versioned: bool = attrs.field(init=False)
    # Columns of the contract, which every action reads.
    _half_updated: list[int] = attrs.field(init=False)
    _walk: list[int] = attrs.field(init=False)
    # The state domain, if its dropout asks for the microbatch of each F.
    _named: StateDomain | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._half_updated = self.contract.memory.half_updated
        self._walk = self.contract.memory.walk
        self._versioned = "version" in self.contract.transitions.relations
        domains = [memory.stage.domain for memory in self.memories.values()]
        self._named = next((d for d in domains if hasattr(d, "begin_forward")), None)
        for stage, memory in self.memories.items():
            self._slots.update((slot.index, slot) for slot in memory.table)
            for m, (index, variant) in enumerate(zip(memory.slot_of, memory.variants, strict=True)):
                opens = not variant.accumulate and not variant.joins if memory.shared else None
                later = memory.later_variants[m] if memory.later_variants else None
                group = memory.groups[m]
                self._places[stage, m, 0, 0] = _Place(memory, index, variant, opens, later, group)

    def refresh(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Refresh a stage's cache of FP8 weights. Call this method once per epoch, directly before the
        stage's first F.

        If the backend has no such cache, the refresh only begins the stage's epoch. The contract is
        then not asked.

        Raises:
            Refused: The call violates one of the contract's clauses on version, order or
                completion, or the backend reports that a cache was not filled
                (`version.fill-missing`).
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
        Claim the slot (a microbatch's buffers) of a key (an epoch, stage and microbatch) before F
        runs. The caller can then fill `input_buffers`.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership, version or
                completion.
        """
        return self.contract.reserve(key, self._place(key).index, link=self.links[caller])

    def await_graph(self, caller: Hashable) -> None:
        """Declare that a caller's stream waits for all work that the graph stream has so far."""
        self.contract.wait(self.links[caller])

    def join(self, caller: Hashable) -> None:
        """Declare that the graph stream waits for all work that a caller's stream has so far."""
        self.contract.join(self.links[caller])

    def fill_inputs(self, key: TapeKey, inputs: Sequence[Tensor]) -> None:
        """
        Copy the inputs of a reserved key (an epoch, stage and microbatch) into its slot (buffers),
        on the current stream.

        Raises:
            BackendError: The inputs differ from the stage's specifications, or the key has not
                reserved a slot.
        """
        self._memory(key.stage).table.inputs.check(inputs)
        self.performer.fill(self.input_buffers(key), inputs)

    def input_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """
        Return the buffers from which F of a reserved key (an epoch, stage and microbatch) will
        read. The caller fills these buffers in place.

        Raises:
            BackendError: The key has not reserved a slot, or its F has already run.
        """
        return self._owned(key, reserved=True).input_views

    def gradient_buffers(self, key: TapeKey) -> tuple[Tensor, ...]:
        """
        Return the buffers from which dI of a key (an epoch, stage and microbatch) will read. The
        caller fills these buffers in place after F.

        Raises:
            BackendError: The key has no tape, or its F has not run yet.
        """
        return self._owned(key, reserved=False).output_gradients

    def post_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, caller: Hashable = "main"
    ) -> tuple[Tensor, ...]:
        """
        Begin to receive a microbatch's input or output gradient. The stage must be configured to
        receive it.

        Args:
            key: The epoch, stage and microbatch of the message. To receive an input, first reserve
                the slot of this key.
            ref: The reference that `reserve` or `forward` returned.
            gradient: Receive the output gradient instead of the input.
            caller: Name of the caller's stream.

        Returns:
            The static buffers to receive into.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership or completion.
        """
        self.contract.post_receive(key, ref, gradient=gradient, link=self.links[caller])
        slot = self._slot_of(ref)
        return slot.output_gradients if gradient else slot.input_views

    def finish_receive(
        self, key: TapeKey, ref: TapeRef, *, gradient: bool = False, caller: Hashable = "main"
    ) -> None:
        """
        Declare that a message has arrived completely, or that the caller's stream waits for its
        arrival.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership or completion.
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
            key: Names the epoch, stage and microbatch.
            inputs: The stage's inputs; None if `input_buffers` were filled in place.
            token: The effect token: how many F and dI of the state domain have run since the last
                restart, as the caller counts them. The contract refuses the F if its own count
                differs. With None the counts are not compared.
            caller: Name of the caller's stream.

        Returns:
            The reference that dI, dW and readers must present with the key.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership, version, order,
                capture or completion. After F has run, the contract also checks the backend's
                reports. Examples are `order.scaling-updates` (F did not update the scales exactly
                once) and `version.fill-unasked` (F filled caches).
            BackendError: The inputs do not match what the stage takes; nothing was changed.
        """
        place = self._places.get(key.cell)
        if place is None or self._half_updated[0]:
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
                if self._named is not None:
                    drawn = key.microbatch + self._walk[0] * len(memory.slot_of)
                    begin_forward(self._named, key.epoch, drawn)
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
        dI: compute the input gradients, and the gradients of parameters that are not matrices. The
        work for dW stays on the tape.

        Args:
            key: Names the epoch, stage and microbatch.
            ref: The reference that F of the same key returned.
            output_gradients: Gradients of the stage's outputs; None if `gradient_buffers` were
                filled in place.
            token: As in `forward`.
            caller: Name of the caller's stream.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership, version, order,
                arena, capture or completion. After dI has run, the contract also checks the
                backend's reports. Examples are `ownership.work-not-queued` (the library did not
                defer every matrix), `order.scaling-updates` (dI did not update the scales exactly
                once), `order.wrong-scales` (dI used another F's scales) and `epoch.other-parts`
                (the divisor of the loss has changed).
            BackendError: The gradients do not match what the stage takes; nothing was changed. Or
                the library deferred a wrong number of matrix products, and the tape was aborted.
                Transformer Engine's backend raises this error before dI is reported to the
                contract.
        """
        place = self._places.get(key.cell)
        if place is None or self._half_updated[0]:
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
                memory.keep(key.microbatch, slot)
                if not executor.marks_tail:
                    handoff.record_tail()
            except BaseException:
                self._abort(ticket, slot)
                raise
            self._commit(ticket, slot, queued, effects)
        finally:
            handoff.cross_back(back)
        contract.wait(link)

    def evaluate(
        self, stage: int, inputs: Sequence[Tensor], *, caller: Hashable = "main"
    ) -> tuple[Tensor, ...]:
        """
        Run a stage's forward for evaluation, between any two actions of the step.

        The backend runs eagerly and in separate memory, also in mode ``replays``. Afterwards the
        scaling state and the weight cache are unchanged.

        Args:
            stage: Index of the stage.
            inputs: The stage's inputs, with the shapes and types of a microbatch.
            caller: Name of the caller's stream.

        Returns:
            The outputs, detached.

        Raises:
            Refused: The call violates one of the contract's clauses on version, order, completion
                or epoch, for example `version.refresh-interrupted` between a refresh and the
                stage's first F. Two clauses are checked after the forward. `order.scaling-updates`
                is violated if scaling state was not restored. `version.fill-unasked` is violated if
                the forward filled a cache.
            BackendError: The inputs do not match what the stage takes; nothing was changed.
        """
        memory = self._memory(stage)
        memory.table.inputs.check(inputs)
        contract, handoff, link = self.contract, self.performer.handoff, self.links[caller]
        cached = contract.memory.cache_epoch[stage] == contract.epoch or not self._versioned
        back = handoff.cross()
        try:
            contract.enter(link)
            ticket = contract.check_evaluation(stage, link, cached=cached)
            try:
                outputs, effects = evaluated(memory, self.memories.values(), inputs, cached=cached)
                handoff.record_tail()
            except BaseException:
                self._abort(ticket, None)
                raise
            self._commit(ticket, None, (), effects)
        finally:
            handoff.cross_back(back)
        contract.wait(link)
        return outputs

    def bind(self, key: TapeKey) -> None:
        """
        Set the memory to which dW of a key (an epoch, stage and microbatch) will write its
        gradients. Call this method before dI of the key.

        Raises:
            Refused: The call violates a clause of the contract, for example `arena.mismatch` (a
                destination is no longer the configured memory), `arena.duplicate-bind` or
                `version.wrong-epoch`.
        """
        place = self._places.get(key.cell)
        if place is None or self._half_updated[0]:
            place = self._known(key)
        self.contract.bind(key, place.memory.arena.present(key.microbatch))

    def wgrad(
        self,
        key: TapeKey,
        ref: TapeRef,
        *,
        group: Sequence[tuple[TapeKey, TapeRef]] = (),
        caller: Hashable = "main",
    ) -> None:
        """
        dW: compute a microbatch's weight gradients, write them to the memory that `bind` has set,
        and release the tape.

        Args:
            key: Names the epoch, stage and microbatch.
            ref: The reference that F of the same key returned.
            group: Key and reference of each other microbatch of the group, in ascending order, if
                `RuntimeConfig.group` is above 1. One matrix product then computes the dW of the
                whole group.
            caller: Name of the caller's stream.

        Raises:
            TypeError: The group is not a collection of pairs of key and reference.
            Refused: The call violates one of the contract's clauses on ownership, version, order,
                arena, capture or completion; `ownership.matrix-coverage` if dW did not compute each
                matrix's gradient exactly once.
            BackendError: The microbatches are not a group of the configuration; nothing was
                changed.
        """
        place = self._places.get(key.cell)
        if place is None or self._half_updated[0]:
            place = self._known(key)
        found: tuple[int, ...] = (key.microbatch,)
        if group != ():
            group = _pairs(group)
            found += tuple(_microbatches(key, group))
        if found != place.group:
            raise BackendError(_not_grouped(key, group, place.group))
        memory, variant, opens = place.memory, place.variant, place.opens
        if self._walk[0]:
            variant, opens = place.later, None if opens is None else False
        assert variant is not None  # a known key has a slot and a variant for each walk
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
                first_of_tied=opens,
                link=link,
                group=group,
            )
            slot = self._slots[ticket.slot]
            others = [(k, self._slots[r.slot]) for k, r in group]
            try:
                covered = executor.wgrad(memory, slot, variant, [other for _, other in others])
                if not arena.direct:
                    arena.keep_copies(microbatch, slot.wgrads)
                    handoff.record_tail()
                elif not executor.marks_tail:  # a graph has marked its own tail
                    handoff.record_tail()
            except BaseException:
                self._abort(ticket, slot, others)
                raise
            self._commit(ticket, slot, covered, others=others)
        finally:
            handoff.cross_back(back)
        contract.wait(link)

    def outputs(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> Sequence[Tensor]:
        """
        Return the outputs of F. The stage must be configured with an output reader. Call
        `finish_outputs` after the read.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership, or the clause
                `completion.graph-to-caller`.
        """
        self.contract.read(key, ref, link=self.links[caller])
        return self._slot_of(ref).outputs

    def finish_outputs(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> None:
        """
        Declare that the reader of F's outputs has finished.

        Call this method once the caller's stream contains the reader's work or waits for this work.

        Raises:
            Refused: The call violates one of the contract's clauses on ownership or completion.
        """
        self.contract.finish_read(key, ref, link=self.links[caller])

    def dgrads(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> Sequence[Tensor]:
        """
        Return the input gradients of dI. The stage must be configured with a gradient reader. Call
        `finish_dgrads` after the read.
        """
        self.contract.read(key, ref, gradient=True, link=self.links[caller])
        return self._slot_of(ref).dgrads

    def finish_dgrads(self, key: TapeKey, ref: TapeRef, *, caller: Hashable = "main") -> None:
        """
        Declare that the reader of the input gradients has finished, as `finish_outputs` does for
        outputs.
        """
        self.contract.finish_read(key, ref, gradient=True, link=self.links[caller])

    @property
    def broken(self) -> str | None:
        """The reason why no further action may run; None if actions may run."""
        return HALF_UPDATED if self._half_updated[0] else None

    # Inside

    def _memory(self, stage: int) -> StageMemory:
        if self._half_updated[0]:
            raise BackendError(HALF_UPDATED)
        try:
            return self.memories[stage]
        except KeyError:
            raise BackendError(
                f"no stage {stage} in this process; it has {sorted(self.memories)}"
            ) from None

    def _place(self, key: TapeKey) -> _Place:
        """
        Return the memory that the actions of a key (an epoch, stage and microbatch) use; the
        contract refuses a microbatch without a slot.
        """
        memory = self._memory(key.stage)
        return self._places.get(key.cell) or _Place(memory, None, None)

    def _known(self, key: TapeKey) -> _Place:
        place = self._places.get(key.cell)
        if place is not None and not self._half_updated[0]:
            return place
        memory = self._memory(key.stage)
        # The kernel refuses a block or an invocation that was never configured.
        place = self._places.get((key.stage, key.microbatch, 0, 0))
        if place is not None:
            return place
        raise BackendError(
            f"{key} is unknown: stage {key.stage} runs microbatches 0 to {len(memory.slot_of) - 1}"
        )

    def _slot_of(self, ref: TapeRef) -> Slot:
        """Return the slot (set of buffers) that a reference names; the contract has just accepted
        the reference."""
        if self._half_updated[0]:
            raise BackendError(HALF_UPDATED)
        return self._slots[ref.slot]

    def _owned(self, key: TapeKey, *, reserved: bool) -> Slot:
        """
        Return the slot (set of buffers) that a key (an epoch, stage and microbatch) owns;
        `reserved` selects the state before F instead of after F.
        """
        self._known(key)
        ref = self.contract.reference(key)
        if ref is None:
            raise BackendError(
                f"{key} owns no slot, so it has no buffers; reserve a slot for it, or run its F"
            )
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
        others: Sequence[tuple[TapeKey, Slot]] = (),
    ) -> TapeRef | None:
        """Report to the contract what an action did; incomplete evidence fails the step."""
        names, updates, scales, draws, weight = effects
        filled = None
        if names:  # a cast reads the weights immediately: those of the current epoch
            filled = [(name, self.contract.epoch) for name in names]
        try:
            return self.contract.commit(
                ticket,
                evidence,
                filled=filled,
                updates=updates,
                scales=scales,
                draws=draws,
                weight=weight,
            )
        except BaseException:
            # The kernel has aborted the ticket whose evidence failed.
            self._discard_all(ticket, slot, others)
            self.abort_outstanding()
            raise

    def abort_outstanding(self) -> int:
        """
        Abort every unfinished tape (the data that an F keeps for its dI and dW) of the process
        after a failed step (paper, III-A and IV-E).

        A failed action calls this method itself. Call this method if another part of the step
        fails, for example a transfer. The epoch can then no longer commit; `Runtime.rebuild`
        restarts the epoch.

        Returns:
            Number of aborted tapes.
        """
        aborted = 0
        for key, ref in self.contract.live().items():
            try:
                self.contract.drop(key, ref)
            except Refused:
                # Another action holds the tape; that action's end, or the rebuild, releases it.
                continue
            self._discard(key, self._slots[ref.slot])
            aborted += 1
        return aborted

    def _abort(
        self, ticket: Ticket, slot: Slot | None, others: Sequence[tuple[TapeKey, Slot]] = ()
    ) -> None:
        self.contract.abort(ticket)
        self._discard_all(ticket, slot, others)
        self.abort_outstanding()

    def _discard_all(
        self, ticket: Ticket, slot: Slot | None, others: Sequence[tuple[TapeKey, Slot]]
    ) -> None:
        """Drop the work of a failed action's tape, and of the other tapes in the same group."""
        if slot is not None:
            self._discard(ticket.key, slot)
        for key, other in others:
            self._discard(key, other)

    def _discard(self, key: TapeKey | None, slot: Slot) -> None:
        """Drop the work of an aborted tape, and the half-written copy of its gradients."""
        slot.tape.clear()
        slot.forget()
        if key is not None:
            self.memories[key.stage].arena.spoil(key.microbatch)
