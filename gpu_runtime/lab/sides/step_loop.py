"""
Run optimizer steps over a runtime in the order of a schedule: Algorithm 1 of the paper as a loop.

The sides within one process run this loop: the step tables' columns, comparisons and capture-memory
trials. The loop is also an example of embedding: a pipeline runtime calls the same actions from its
own loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef

from ...backends.protocol import StageBackend
from ...runtime import Runtime
from ...step.optimizer import Optimizer
from ...step.plan.order import ComputeAction, Kind

__all__ = ["StepData", "StepLoop"]


class StepData(Protocol):
    """The data that stages receive if no other stage feeds them."""

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The inputs of a stage's F."""

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The output gradients of a stage's dI."""


@attrs.define(eq=False)
class StepLoop:
    """
    A loop that trains over a runtime, action by action.

    Args:
        runtime: The runtime; it needs `readers` if stages feed each other or hooks read tensors.
        workload: The data of stages that no other stage feeds.
        optimizer: The optimizer over the same stages.
        calls: The actions; by default the runtime's guarded actions.
        feeds: For each stage, the stage that it feeds; the workload feeds all other stages.
    """

    runtime: Runtime
    workload: StepData
    optimizer: Optimizer
    calls: Any = attrs.field(kw_only=True, default=None)
    feeds: Mapping[int, int] = attrs.field(kw_only=True, factory=dict)
    _fed_by: dict[int, int] = attrs.field(init=False)
    _reads: dict[int, bool] = attrs.field(init=False)
    _refreshed: set[int] = attrs.field(factory=set, init=False)
    _refs: dict[TapeKey, TapeRef] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.calls = self.calls or self.runtime.actions
        self._fed_by = {after: stage for stage, after in self.feeds.items()}
        self._reads = {
            index: any(spec.differentiable for spec in stage.inputs)
            for index, stage in self.runtime.stages.items()
        }

    def run(self, num_steps: int) -> None:
        """Train for some optimizer steps, from the runtime's epoch on."""
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        """Run one optimizer step."""
        self.actions()
        self.finish()

    def actions(self) -> None:
        """Run every action of one epoch."""
        self.begin()
        for step in self.runtime.order.steps:
            self.advance(step)

    def begin(self) -> None:
        """Forget the tapes of the last epoch, or of a failed attempt at this epoch."""
        self._refs.clear()
        self._refreshed.clear()

    def advance(self, step: ComputeAction) -> None:
        """Run one action; before a stage's first F, also refresh the stage's weight cache."""
        if step.kind is Kind.FORWARD and step.stage not in self._refreshed:
            self.calls.refresh(step.stage)
            self._refreshed.add(step.stage)
        self.act(step)

    def act(self, step: ComputeAction) -> None:
        """Run one F, dI or dW."""
        key = self.runtime.key(step.stage, step.microbatch)
        if step.kind is Kind.FORWARD:
            self._forward(key, step)
        elif step.kind is Kind.DGRAD:
            self._dgrad(key, step)
        else:
            members = self.runtime.plan.members(step.microbatch)
            if not members:
                return  # an earlier dW of its group takes it
            keys = [self.runtime.key(step.stage, m) for m in members]
            first, *others = [(one, self._refs[one]) for one in keys]
            self.calls.wgrad(*first, group=others)
            for one, ref in (first, *others):
                self.after_wgrad(one, ref)

    def ref(self, key: TapeKey) -> TapeRef:
        """The contract's reference to a tape (one forward's saved data) of this epoch."""
        return self._refs[key]

    def finish(self) -> None:
        """End an epoch: update the parameters and commit."""
        self.runtime.finish(self.optimizer)

    def after_forward(self, key: TapeKey, step: ComputeAction, outputs: Sequence[Tensor]) -> None:
        """Called with the outputs of a stage that feeds no other stage."""

    def after_dgrad(
        self, key: TapeKey, ref: TapeRef, step: ComputeAction, gradients: Sequence[Tensor]
    ) -> None:
        """Called with the input gradients of a stage whose input comes from no other stage."""

    def after_wgrad(self, key: TapeKey, ref: TapeRef) -> None:
        """Called after a dW."""

    def _forward(self, key: TapeKey, step: ComputeAction) -> None:
        calls, source = self.calls, self._fed_by.get(key.stage)
        if source is None:
            stage = self.runtime.stages[key.stage]
            inputs = self.workload.inputs(stage, key.epoch, key.microbatch)
            ref = self._refs[key] = calls.forward(key, inputs)
        else:
            before = self.runtime.key(source, key.microbatch)
            held = self._refs[before]
            ref = self._refs[key] = calls.forward(key, calls.outputs(before, held))
            calls.finish_outputs(before, held)
        if self.runtime.config.readers and key.stage not in self.feeds:
            self.after_forward(key, step, calls.outputs(key, ref))
            calls.finish_outputs(key, ref)

    def _dgrad(self, key: TapeKey, step: ComputeAction) -> None:
        calls, ref = self.calls, self._refs[key]
        calls.bind(key)
        source = self.feeds.get(key.stage)
        if source is None:
            stage = self.runtime.stages[key.stage]
            calls.dgrad(key, ref, self.workload.output_gradients(stage, key.epoch, key.microbatch))
        else:
            behind = self.runtime.key(source, key.microbatch)
            held = self._refs[behind]
            calls.dgrad(key, ref, calls.dgrads(behind, held))
            calls.finish_dgrads(behind, held)
        if not self.runtime.config.readers or key.stage in self._fed_by:
            return
        found: Sequence[Tensor] = calls.dgrads(key, ref) if self._reads[key.stage] else ()
        self.after_dgrad(key, ref, step, found)
        if found:
            calls.finish_dgrads(key, ref)
