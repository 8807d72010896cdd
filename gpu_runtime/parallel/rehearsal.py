"""
A step of a pipeline without its device work: the guards of a step that is one launch.

The transitions are asked for by the code that asks for them in guarded replays, in the same order,
so that the contract cannot tell one from the other; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from qeffect.gpu_runtime.execute.eager import StageMemory
from qeffect.gpu_runtime.execute.reports import Effects
from qeffect.gpu_runtime.execute.streams import HostHandoff
from qeffect.gpu_runtime.memory.slots import Slot
from qeffect.gpu_runtime.parallel.channels import Message, Transfer
from qeffect.gpu_runtime.parallel.executor import Pipeline
from qeffect.gpu_runtime.plan.slots import WgradVariant
from qeffect.schedule.actions import Kind

__all__ = ["Recorded", "Rehearsal"]


class Recorded(Protocol):
    """What an executor of graphs holds of its captures."""

    @property
    def slots(self) -> Mapping[int, Any]:
        """By slot: what F, dI and each variant of dW reported."""

    @property
    def refreshed(self) -> Mapping[int, Effects]:
        """By stage: what its refresh reported."""

    def check_addresses(self, memory: StageMemory) -> None:
        """Require that nothing that graphs bake in has moved."""


class _Rehearsed:
    """An executor that runs nothing, and reports what the captures recorded."""

    marks_tail = True

    def __init__(self, recorded: Recorded) -> None:
        self.executor = recorded

    def refresh(self, memory: StageMemory) -> Effects:
        self.executor.check_addresses(memory)
        return self.executor.refreshed[memory.stage.index]

    def forward(self, memory: StageMemory, slot: Slot) -> Effects:
        found: Effects = self.executor.slots[slot.index].ran
        return found

    def dgrad(
        self, memory: StageMemory, slot: Slot, variant: WgradVariant
    ) -> tuple[tuple[str, ...], Effects]:
        found: tuple[tuple[str, ...], Effects] = self.executor.slots[slot.index].queued
        return found

    def wgrad(self, memory: StageMemory, slot: Slot, variant: WgradVariant) -> tuple[str, ...]:
        found: tuple[str, ...] = self.executor.slots[slot.index].covered[variant]
        return found


class _Silent:
    """Channels that post nothing; the graph does, in the order that was agreed on."""

    def send(self, tensor: Tensor, to: int, message: Message) -> Transfer:
        return Transfer(None, tensor, message.sent, to)

    def receive(self, into: Tensor, source: int, message: Message) -> Transfer:
        return Transfer(None, into, message.received, source)

    def wait(self, transfer: Transfer) -> None:
        """The graph waits."""


class Rehearsal:
    """
    Every transition of a step, through a pipeline's own actions, and no device work.

    Args:
        pipeline: The pipeline; its runtime's contract is asked and told.
        recorded: What the captures recorded of each action's effects.
    """

    def __init__(self, pipeline: Pipeline, recorded: Recorded) -> None:
        self.pipeline = pipeline
        self.executor = _Rehearsed(recorded)
        self.handoff = HostHandoff()
        self.channels = _Silent()

    def run(self) -> None:
        """
        Ask and tell the contract all that the step asks and tells, up to its commit.

        Raises:
            Refused: What the guarded step would raise.
        """
        pipeline, actions = self.pipeline, self.pipeline.runtime.actions
        held = actions.executor, actions.handoff, actions.fill, pipeline.channels
        actions.executor, actions.handoff, actions.fill = self.executor, self.handoff, _nothing
        pipeline.channels = self.channels  # type: ignore[assignment]
        try:
            with pipeline.runtime._reductions.unsent():
                self._transitions()
        finally:
            actions.executor, actions.handoff, actions.fill, pipeline.channels = held

    def commit(self) -> None:
        """
        Commit the epoch, as the update does.

        Raises:
            Refused: What `Runtime.update` would raise.
        """
        runtime = self.pipeline.runtime
        contract, link = runtime.contract, runtime.actions.links["main"]
        contract.enter(link)
        contract.commit_epoch(caller="main")
        contract.join(link)
        contract.wait(link)
        runtime._forget_gradients()

    def _transitions(self) -> None:
        pipeline, runtime = self.pipeline, self.pipeline.runtime
        contract, link = runtime.contract, runtime.actions.links["main"]
        final = set()
        for (index, m), passage in pipeline.passages.items():
            passage.key = runtime.key(index, m)
        pipeline.position = 0
        for act, passage, atom in pipeline.program:
            if atom.kind is Kind.REDUCE_GRAD:
                final.add(atom.stage)
                contract.enter(link)
                contract.finalize(atom.stage, link)
                if (reducer := runtime._guarded_reducer) is not None:
                    runtime._reductions.start_of(reducer, atom.stage, link)
                contract.wait(link)
            else:
                act(passage)
            pipeline.position += 1
        contract.enter(link)
        for index in runtime.memories:
            if index not in final:
                contract.finalize(index, link)
        if runtime.reducer is not None:
            runtime._reductions.end(runtime.reducer, link)
        contract.wait(link)


def _nothing(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy nothing: the graph does."""
