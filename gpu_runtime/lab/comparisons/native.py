"""
The reference: a backend's own full backward, run in the same order of F and dI as the candidate.

The reference uses the library as an ordinary user would: with autograd's full backward, `.grad` or
fused `main_grad`, and a weight cache that the first microbatch refreshes. The reference has no
slots, tapes or guards, and skips dW, because a full backward includes dW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import attrs
import torch
from torch import Tensor

from ...backends.epoch_scales import begin_forward, move_scales
from ...backends.protocol import BackendError, StageBackend, parameters
from ...step.memory.arena import by_matrix
from ...step.memory.numerical_state import live_state
from ...step.optimizer import Gradients, Optimizer
from ...step.plan.order import ComputeAction, Kind, Order
from .recording import Recording
from .workload import Workload, by_index

NativeRule = Literal["grad", "main_grad", "dgrad_order", "wgrad_order"]

_EXACT = ("dgrad_order", "wgrad_order")


def rule_for(
    order: Order, destination_rule: str, dtype: torch.dtype = torch.bfloat16
) -> NativeRule:
    """
    The native accumulation that forms the same sum as a destination rule (how dW adds up the
    gradients of the microbatches).

    The rules `copied` and bf16 `per_microbatch` match `.grad`, because both also sum rounded
    gradients in the order of dI. `accumulate` matches fused `main_grad` under two conditions. The
    dWs of every stage follow in the order of its dIs. The first dW, in which the library
    overwrites, belongs to the microbatch whose F came first. All other rules match the full
    backward's unrounded gradients, summed in the order of dI (fp32 `per_microbatch`) or of dW
    (`accumulate`). Only some backends can produce unrounded gradients.
    """
    if destination_rule == "per_microbatch" and dtype == torch.float32:
        return "dgrad_order"
    if destination_rule != "accumulate":
        return "grad"
    starts_alike = all(
        order.microbatches(s, Kind.DGRAD)[0] == order.microbatches(s, Kind.FORWARD)[0]
        for s in order.stages
    )
    return "main_grad" if order.wgrads_follow_dgrads and starts_alike else "wgrad_order"


@attrs.define(eq=False)
class NativeRun:
    """
    Full-backward training over some stages.

    Args:
        stages: All stages that share the FP8 state (the state domain).
        order: The candidate's order; its dW actions are skipped.
        workload: The input data and output gradients of each step.
        rule: How matrix gradients accumulate over microbatches.
        dtype: Data type of `main_grad` buffers.
        optimizer: The optimizer, made over the same stages.
        recording: Recording that receives the results, or None to record nothing.
    """

    stages: Sequence[StageBackend]
    order: Order
    workload: Workload
    rule: NativeRule
    dtype: torch.dtype
    optimizer: Optimizer
    recording: Recording | None = None
    _main_grads: dict[int, dict[str, Tensor]] = attrs.field(factory=dict, init=False)
    _kept: dict[tuple[int, int], dict[str, Tensor]] = attrs.field(factory=dict, init=False)
    _cache_epoch: dict[int, int] = attrs.field(factory=dict, init=False)
    _num_added: dict[int, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if self.rule in _EXACT and any(s.domain.name != "reference" for s in self.stages):
            raise BackendError(
                "Transformer Engine's full backward adds every microbatch to main_grad and "
                "rounds there, so no gradient of a single microbatch is left to sum in this "
                "order; compare with eager execution of separate dI and dW"
            )
        for stage in self.stages:
            if self.rule == "main_grad":
                self._main_grads[stage.index] = empty_sums(stage, self.dtype)
            stage.native_bind(self._main_grads.get(stage.index))

    def run(self, num_steps: int) -> None:
        """Train for some optimizer steps."""
        for step in range(num_steps):
            self.step(step)

    def step(self, number: int) -> None:
        """Run one optimizer step: every F and dI in order, then the update."""
        stages = by_index(self.stages)
        live: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        seen: set[int] = set()
        self._num_added.clear()
        for action in self.order.steps:
            stage = stages[action.stage]
            where = f"step {number} {action}"
            if action.kind is Kind.FORWARD:
                live[stage.index, action.microbatch] = self._forward(
                    stage, number, action, first=stage.index not in seen, where=where
                )
                seen.add(stage.index)
            elif action.kind is Kind.DGRAD:
                inputs, outputs = live.pop((stage.index, action.microbatch))
                self._backward(stage, number, action, inputs, outputs, where)
                if self.rule == "dgrad_order":
                    self._accumulate(stage, number, action.microbatch)
            elif self.rule == "wgrad_order":
                self._accumulate(stage, number, action.microbatch)
        self._update(number)

    def _forward(
        self, stage: StageBackend, number: int, action: ComputeAction, *, first: bool, where: str
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        drawn = self.workload.inputs(stage, number, action.microbatch)
        inputs = tuple(
            value.requires_grad_() if spec.differentiable else value
            for value, spec in zip(drawn, stage.inputs, strict=True)
        )
        if first:
            self._cache_epoch[stage.index] = number
        begin_forward(stage.domain, number, action.microbatch)
        outputs = stage.native_forward(inputs, first=first)
        if (r := self.recording) is not None:
            record_outputs(r, where, outputs)
            r.add("versions", f"{where} weight epoch", number)
            r.add("versions", f"{where} cache epoch", self._cache_epoch[stage.index])
            r.add("versions", f"{where} cache is current", int(stage.cache_is_current()))
            r.add_state(where, live_state(stage.domain))
        return inputs, outputs

    def _backward(
        self,
        stage: StageBackend,
        number: int,
        action: ComputeAction,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        where: str,
    ) -> None:
        if self.rule in _EXACT:
            self._kept[stage.index, action.microbatch] = empty_sums(stage, torch.float32)
            stage.native_bind(self._kept[stage.index, action.microbatch])
        seen: dict[str, Tensor] = {}
        hooks = []
        if self.recording is not None:
            for name, parameter in parameters(stage).items():
                hook = partial(_keep, seen, name)
                hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        torch.autograd.backward(
            outputs, list(self.workload.output_gradients(stage, number, action.microbatch))
        )
        for handle in hooks:
            handle.remove()
        if (r := self.recording) is not None:
            found = (x.grad for x in inputs if x.grad is not None)
            r.add_all("input gradients", where, {str(n): g for n, g in enumerate(found)})
            place = f"step {number} stage {stage.index} m{action.microbatch}"
            r.add_all("microbatch gradients", place, seen)
            r.add_state(where, live_state(stage.domain))
        if self.rule == "main_grad":
            self._record_sum(stage, number)

    def _accumulate(self, stage: StageBackend, number: int, microbatch: int) -> None:
        kept = self._kept.pop((stage.index, microbatch))
        if self.rule == "dgrad_order" and self.recording is not None:
            place = f"step {number} stage {stage.index} m{microbatch}"
            self.recording.add_all("microbatch gradients", place, by_matrix(stage.units, kept))
        into = self._main_grads.setdefault(stage.index, empty_sums(stage, self.dtype))
        for name, value in kept.items():
            into[name].copy_(torch.add(into[name], value))
        if self.rule == "wgrad_order":
            self._record_sum(stage, number)

    def _record_sum(self, stage: StageBackend, number: int) -> None:
        added = self._num_added[stage.index] = self._num_added.get(stage.index, 0) + 1
        if self.recording is not None:
            record_sum(self.recording, stage, number, added, self._main_grads[stage.index])

    def _sums(self, stage: StageBackend) -> dict[str, Tensor]:
        return self._main_grads.get(stage.index, {})

    def _update(self, number: int) -> None:
        gradients = {s.index: native_gradients(s, self._sums(s)) for s in self.stages}
        record_step(self.recording, number, self.stages, gradients, before_update=True)
        self.optimizer.step(gradients)
        move_scales(self.stages[0].domain)
        for stage in self.stages:
            drop_gradients(stage, self._sums(stage))
        record_step(self.recording, number, self.stages, gradients, optimizer=self.optimizer)


def empty_sums(stage: StageBackend, dtype: torch.dtype) -> dict[str, Tensor]:
    """
    For each weight-gradient unit, an empty buffer of the unit's shape that will hold the sum of its
    gradients.
    """
    # -0.0 is the identity of addition for every float, -0.0 included; 0.0 is not.
    device = stage.domain.device
    return {u.name: torch.full(u.shape, -0.0, dtype=dtype, device=device) for u in stage.units}


def native_gradients(stage: StageBackend, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    The gradients after full backwards: `.grad` of each parameter. If `sums` is not empty, the
    gradients of matrices come from `sums` instead.

    Raises:
        BackendError: A parameter has no gradient.
    """
    named = parameters(stage)
    found = {name: p.grad for name, p in named.items() if p.grad is not None}
    if sums:
        found.update(by_matrix(stage.units, sums))
    if missing := sorted(named.keys() - found.keys()):
        raise BackendError(
            "expected a gradient of every parameter after native backward, found none for "
            f"{missing[0]}"
        )
    return {name: found[name] for name in named}


def drop_gradients(stage: StageBackend, sums: Mapping[str, Tensor]) -> None:
    """Clear the gradients and the summed gradients of a stage after an update."""
    for parameter in parameters(stage).values():
        parameter.grad = None
    for total in sums.values():
        total.fill_(-0.0)


def _keep(into: dict[str, Tensor], name: str, gradient: Tensor | None) -> None:
    # A gradient that was fused into main_grad reaches the hook as None.
    if gradient is not None:
        into[name] = gradient.detach().clone()


def record_outputs(recording: Recording, where: str, outputs: Sequence[Tensor]) -> None:
    """Record the outputs of an F, and for each output its scalar loss: half its mean square."""
    recording.add_all("outputs", where, {str(n): y for n, y in enumerate(outputs)})
    losses = [y.detach().float().square().mean() / 2 for y in outputs]
    recording.add_all("loss", where, {str(n): loss for n, loss in enumerate(losses)})


def record_sum(
    recording: Recording, stage: StageBackend, number: int, added: int, sums: Mapping[str, Tensor]
) -> None:
    """Record the buffers of summed gradients after the given number of gradients was added."""
    place = f"step {number} stage {stage.index} after {added}"
    recording.add_all("microbatch gradients", place, by_matrix(stage.units, sums))


def record_step(
    recording: Recording | None,
    number: int,
    stages: Sequence[StageBackend],
    gradients: Gradients,
    *,
    before_update: bool = False,
    optimizer: Optimizer | None = None,
) -> None:
    """
    Record an optimizer step; both sides of a comparison call this function.

    Args:
        recording: Recording that receives the results, or None to record nothing.
        number: Number of the step.
        stages: All stages of the run.
        gradients: The optimizer's gradients.
        before_update: If true, record gradients, numerical state and caches; if false, record
            parameters and optimizer state after the update.
        optimizer: The optimizer, whose state is recorded after the update.
    """
    if recording is None:
        return
    where = f"step {number}"
    if before_update:
        for index, named in gradients.items():
            recording.add_all("parameter gradients", f"{where} stage {index}", named)
        recording.add_state(where, live_state(stages[0].domain))
        for stage in stages:
            recording.add_all("caches", f"{where} stage {stage.index}", stage.cached_weights())
        return
    for stage in stages:
        recording.add_all("parameters", f"{where} stage {stage.index}", parameters(stage))
    if optimizer is not None:
        recording.add_all("AdamW state", where, optimizer.state_tensors())
