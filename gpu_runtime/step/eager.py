"""
Executors run F (forward), dI (input gradient), dW (weight gradient) and the refresh of a weight
cache, once the contract has accepted the action.

An executor only runs actions: it does not ask the contract, and it does not know which epoch or
microbatch an action belongs to. `EagerExecutor` calls the backend. `GraphExecutor`
(`step/graphs.py`) replays CUDA graphs of the same calls. `LaunchExecutor`
(`step/launch_executor.py`) calls the backend while a whole step is captured. `GuardedActions`
(`step/actions.py`) asks the contract before it calls an executor, so the same checks apply to all
executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from qeffect.relations.constants import OVERWRITES

from ..backends.protocol import StageBackend, Wgrads, WgradUnit, matrices
from .effects import Effects, StageReports
from .memory.arena import Arena
from .memory.counters import DeviceCounters
from .memory.slots import Slot, SlotTable
from .plan.slots import SlotPlan, WgradVariant

_data_ptr = Tensor.data_ptr


@attrs.define(eq=False)
class StageMemory:
    """
    All memory that the runtime holds for one stage.

    Args:
        stage: The stage, as the backend computes it.
        table: The slots of the stage (sets of buffers for one microbatch each).
        arena: The stage's destinations of matrix gradients.
        slot_of: By microbatch, the index of its slot in the process's pool of slots.
        variants: By microbatch, to which memory its dW writes, and whether it overwrites or adds.
        later_variants: The same as `variants`, for the later walks (passes over the rank's actions)
            of an epoch; empty if an epoch has one walk.
        places: For each set of destinations (the memory that dW writes), a number computed from its
            addresses (`qeffect.counts.located`); empty if all sets have the same number.
        reports: What the stage's backend reports about its actions, such as scaling updates.
        sums: Sums of the stage's non-matrix gradients over the microbatches, added in the order of
            dI.
        all_units: Names of the stage's units (deferred matrix products), in the order in which dI
            queues them.
        all_matrices: Names of the stage's matrices, sorted. Once the contract exists, this
            attribute is the contract's own tuple object, because the contract compares it by
            identity.
        shared: Units whose destination another stage also writes.
        groups: For each microbatch, all microbatches whose dW run as one product with it, including
            itself; empty if the dW of an earlier microbatch includes this microbatch.
        kept: Each microbatch's non-matrix gradients, which are summed in the order of microbatches
            at the end of the step. None if dI adds these gradients to `sums` directly. This is done
            if dI runs in the order of microbatches, or if the order does not matter.
    """

    stage: StageBackend
    table: SlotTable
    arena: Arena
    slot_of: Sequence[int]
    variants: Sequence[WgradVariant]
    reports: StageReports = attrs.field(factory=StageReports)
    shared: frozenset[str] = frozenset()
    later_variants: Sequence[WgradVariant] = ()
    places: Sequence[int] = ()
    groups: Sequence[tuple[int, ...]] = attrs.field(kw_only=True)
    kept: dict[int, tuple[Tensor, ...]] | None = None
    sums: list[Tensor] = attrs.field(init=False)
    all_units: tuple[str, ...] = attrs.field(init=False)
    all_matrices: tuple[str, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # -0.0 is the identity of addition for every float, -0.0 included; 0.0 is not.
        self.sums = [torch.full_like(p.parameter, -0.0).detach() for p in self.stage.non_matrix]
        self.all_units = tuple(unit.name for unit in self.stage.units)
        self.all_matrices = tuple(sorted(m.name for m in matrices(self.stage)))

    def addresses(self) -> dict[str, int]:
        """
        The addresses of state, buffers and sums that captured graphs contain. `bind` compares all
        other addresses.
        """
        found = dict(self.stage.addresses())
        for slot in self.table:
            for kind, held in (("input", slot.inputs), ("gradient", slot.output_gradients)):
                for n, tensor in enumerate(held):
                    found[f"buffer:slot {slot.index}.{kind}.{n}"] = tensor.data_ptr()
        for owner, total in zip(self.stage.non_matrix, self.sums, strict=True):
            found[f"sum:{owner.name}"] = total.data_ptr()
        return found

    def located(self, destination: int) -> int:
        """
        Return the number of a set of destinations, as in `places`; 0 for the library's own memory.
        """
        return self.places[destination] if 0 <= destination < len(self.places) else 0

    def address_probe(self) -> Callable[[], list[int]]:
        """
        Return a fast function for the check of `addresses`, as `StageBackend.address_probe` does
        for the stage's own addresses.
        """
        stage = self.stage.address_probe()

        def look() -> list[int]:
            found = [*stage()]
            for slot in self.table:
                found += map(_data_ptr, slot.inputs)
                found += map(_data_ptr, slot.output_gradients)
            found += map(_data_ptr, self.sums)
            return found

        return look

    def open_epoch(self) -> None:
        """Empty the sums. The refresh, a stage's first action in an epoch, calls this method."""
        for total in self.sums:
            total.fill_(-0.0)

    def keep(self, microbatch: int, slot: Slot) -> None:
        """
        Keep a microbatch's non-matrix gradients after its dI, if `kept` is not None.
        """
        if self.kept is not None:
            self.kept[microbatch] = tuple(gradient.clone() for gradient in slot.non_matrix)

    def summed(self) -> list[Tensor]:
        """
        Return the sums of the step's non-matrix gradients. Gradients in `kept` are added in this
        call, in the order of microbatches.
        """
        if self.kept is not None:
            self.open_epoch()
            for microbatch in sorted(self.kept):
                torch._foreach_add_(self.sums, list(self.kept[microbatch]))
        return self.sums

    def start_epoch(self) -> None:
        """Release the gradients that were kept in the last epoch (optimizer step)."""
        self.arena.start_epoch()
        if self.kept is not None:
            self.kept.clear()

    @classmethod
    def allocate(
        cls,
        stage: StageBackend,
        plan: SlotPlan,
        arena: Arena,
        first: int,
        reports: StageReports | None = None,
        shared: frozenset[str] = frozenset(),
    ) -> StageMemory:
        """
        Allocate the slots (sets of buffers for one microbatch each) that the plan assigns to a
        stage.

        Args:
            stage: The stage, as the backend computes it.
            plan: The number of slots per stage, and the slot of each microbatch.
            arena: The memory to which the stage's gradients are written.
            first: Index of the stage's first slot in the process's pool of slots.
            reports: What the stage's backend reports about its actions; None if it reports nothing.
            shared: Units whose destination another stage also writes.
        """
        microbatches = range(plan.order.num_microbatches)
        variants = tuple(plan.variant(stage.index, m, arena.rule) for m in microbatches)
        return cls(
            stage,
            SlotTable(stage, first, plan.num_slots[stage.index]),
            arena,
            tuple(first + plan.slot_of[stage.index, m] for m in microbatches),
            variants,
            reports or StageReports(),
            shared,
            tuple(variant.adding() for variant in variants) if plan.walks > 1 else (),
            groups=tuple(map(plan.members, microbatches)),
        )

    def evidence(self, names: Iterable[str]) -> tuple[str, ...]:
        """
        Return matrix names in the form in which they are reported to the contract. If each matrix
        of the stage occurs exactly once, the result is the contract's own tuple.
        """
        found = tuple(sorted(names))
        return self.all_matrices if found == self.all_matrices else found

    def evidence_of(self, units: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the units' matrices, as they are reported to the contract."""
        if tuple(units) == self.all_units:
            return self.all_matrices
        by_name: dict[str, WgradUnit] = {unit.name: unit for unit in self.stage.units}
        return self.evidence(m.name for name in units for m in by_name[name].matrices)


class Executor(Protocol):
    """Runs actions on the memory of slots (sets of buffers for one microbatch each)."""

    marks_tail: bool
    """
    Whether each action itself marks the end of its work on the graph stream
    (`Handoff.record_tail`), as a captured graph does. If False, the caller marks the end.
    """

    def refresh(self, memory: StageMemory) -> Effects:
        """
        Quantize the stage's weights into their caches, and begin the stage's epoch (optimizer
        step).
        """

    def forward(self, memory: StageMemory, slot: Slot) -> Effects:
        """Run F on the slot's input buffers, and leave the outputs in the slot."""

    def dgrad(
        self, memory: StageMemory, slot: Slot, variant: WgradVariant
    ) -> tuple[tuple[str, ...], Effects]:
        """
        Run dI on the slot's gradient buffers. Return the matrices whose dW was queued, and dI's
        effects.
        """

    def wgrad(
        self,
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
    ) -> tuple[str, ...]:
        """
        Run dW of one slot (one microbatch's buffers), or of several slots as one product. The
        variant says to which memory dW writes.

        Return the matrices whose gradients were computed.
        """


class EagerExecutor:
    """
    An executor that calls the backend.

    Args:
        counters: Counters that the device increments with every action; None counts nothing.
    """

    marks_tail = False

    def __init__(self, counters: DeviceCounters | None = None) -> None:
        self.counters = counters

    def _count(
        self, action: str, place: int, writes: int = OVERWRITES, destination: int = 0
    ) -> None:
        if self.counters is not None:
            self.counters.ran(action, place, writes, destination)

    def refresh(self, memory: StageMemory) -> Effects:
        """Refresh the weight cache, and empty the gradient sums."""
        memory.stage.refresh_cache()
        memory.open_epoch()
        self._count("refresh", memory.stage.index)
        return Effects(memory.reports.take_filled())

    def forward(self, memory: StageMemory, slot: Slot) -> Effects:
        """Run F."""
        reports = memory.reports
        before = reports.updates()
        outputs = memory.stage.forward(slot.tape, slot.inputs)
        slot.outputs = tuple(output.detach() for output in outputs)
        self._count("F", slot.index)
        drawn = slot.tape.drawn[0] if reports.source.draws and slot.tape.drawn else None
        return Effects(reports.take_filled(), reports.since(before), draws=drawn)

    def dgrad(
        self, memory: StageMemory, slot: Slot, variant: WgradVariant
    ) -> tuple[tuple[str, ...], Effects]:
        """Set the memory to which dW will write, then run dI."""
        reports = memory.reports
        before = reports.updates()
        bound = memory.arena.buffers(variant.destination)
        memory.stage.bind(slot.tape, bound)
        result = memory.stage.dgrad(slot.tape, slot.output_gradients)
        if memory.kept is None:
            torch._foreach_add_(memory.sums, list(result.non_matrix))
        slot.dgrads = result.inputs
        slot.non_matrix = result.non_matrix
        self._count("dI", slot.index)
        draws = result.draws if reports.source.recomputes else None
        weight = result.weight if reports.source.weights else None
        scales = reports.token(result.scales)
        effects = Effects(None, reports.since(before), scales, draws, weight)
        return memory.evidence_of(result.queued), effects

    def wgrad(
        self,
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
    ) -> tuple[str, ...]:
        """Run dW."""
        return self.wgrad_keeping(memory, slot, variant, others, keep=False)

    def wgrad_keeping(
        self,
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
        *,
        keep: bool,
    ) -> tuple[str, ...]:
        """
        Run dW. With `keep` its deferred work is not dropped, so that another variant can be
        captured.
        """
        result = self.run_work(memory, slot, variant, others, keep=keep)
        self._count("dW", slot.index, variant.writes, memory.located(variant.destination))
        return memory.evidence(result.covered)

    @staticmethod
    def run_work(
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
        *,
        keep: bool,
    ) -> Wgrads:
        """
        Run one variant of the dW work that the tapes of the slots contain (a tape is the data that
        F keeps). With `keep` the work stays on the tapes.
        """
        slot.tape.bound = memory.arena.buffers(variant.destination)
        given: dict[str, Any] = {"joining": memory.shared} if variant.joins else {}
        if others:  # a backend without grouped dW lacks this argument
            given["others"] = [other.tape for other in others]
        result = memory.stage.wgrad(slot.tape, accumulate=variant.accumulate, keep=keep, **given)
        slot.wgrads = {} if memory.arena.direct else result.by_unit
        return result
