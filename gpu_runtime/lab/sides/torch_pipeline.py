"""
The reference side of comparisons: torch's own pipeline, whose stages run native's F and full
backward.

`dw_builder` is torch's hook for deferred weight gradients. Here the hook defers nothing: dI is the
full backward and W is empty, so that F and dI of a rank run in the schedule's order, as in the
guarded pipeline. This side uses none of our slots, tapes, guards or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from qeffect.schedule.torch_tables import SINGLE

from ...backends.epoch_scales import begin_forward, move_scales, moves_once
from ...backends.protocol import BackendError, StageBackend
from ...step.calibration import Calibration, calibrate
from ...step.memory.arena import Rule
from ...step.memory.numerical_state import live_state, preserving
from ...step.optimizer import Gradients, Optimizer
from ...step.plan.order import Order
from ..comparisons.native import (
    drop_gradients,
    empty_sums,
    native_gradients,
    record_step,
    rule_for,
)
from ..comparisons.recording import Recording

__all__ = ["NativePipeline"]

Batch = Callable[[int, int], tuple[Tensor, Tensor]]
"""Input and target of a step's microbatch."""


class _Forward(torch.nn.Module):
    """A stage's ordinary forward; the first forward of a step refreshes the weight cache."""

    def __init__(self, stage: StageBackend) -> None:
        super().__init__()
        self.backend, self.first = stage, True

    def forward(self, hidden: Tensor) -> Tensor:
        (out,) = self.backend.native_forward((hidden,), first=self.first)
        self.first = False
        return out


class _Stage(PipelineStage):
    """
    A stage of torch's pipeline that also records outputs and gradients, and determines where full
    backwards put gradients.
    """

    def __init__(self, owner: NativePipeline, stage: StageBackend, **options: Any) -> None:
        super().__init__(_Forward(stage), stage.index, dw_builder=self._deferred, **options)
        self.owner, self.backend, self.at = owner, stage, 0
        assert isinstance(self.submod, _Forward)
        self.forwards = self.submod
        self.sums: dict[str, Tensor] = {}
        if owner.rule == "main_grad":
            self.sums = empty_sums(stage, owner.dtype)
            stage.native_bind(self.sums)
        elif owner.rule == "grad":
            stage.native_bind(None)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin_forward(self.owner.domain, self.owner.number, self.owner.drawn + fwd_chunk_id)
        out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.owner.note(
            self, f"F{self.owner.drawn + fwd_chunk_id}", "outputs", () if self.is_last else (out,)
        )
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.at = m = bwd_chunk_id
        if self.owner.rule == "wgrad_order":
            kept = self.owner.kept[self.stage_index, m] = empty_sums(self.backend, torch.float32)
            self.backend.native_bind(kept)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        found = () if self.is_first else self.bwd_cache[m]
        self.owner.note(self, f"I{self.owner.drawn + m}", "input gradients", found)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """
        Leave out messages of this rank to itself, which gloo cannot send.

        Before its first step torch 2.11 exchanges a number with the rank of each neighbouring stage
        to open connections. In a schedule such as ZB-V, a neighbouring stage can be on this rank
        itself, which needs no connection.
        """
        own = self.group_rank
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]

    def _deferred(self) -> Callable[[], None]:
        m = self.at
        return lambda: self._add(m)

    def _add(self, m: int) -> None:
        kept = self.owner.kept.pop((self.stage_index, m), {})
        if kept and not self.sums:
            self.sums = empty_sums(self.backend, self.owner.dtype)
        for name, value in kept.items():
            self.sums[name].copy_(torch.add(self.sums[name], value))


class NativePipeline:
    """
    Native training of one rank under one of torch's schedule classes.

    Args:
        schedule: Name of torch's schedule class.
        stages: Fresh stages of the rank; the pipeline's last stage lacks its loss, which torch
            computes.
        num_stages: Stages of the whole pipeline.
        order: The rank's actions in the order of the schedule's table. This order determines how
            gradients are summed.
        microbatches: Microbatches of a step, over all runs of the schedule.
        walks: How often a step runs the schedule before its update, each time over an equal part of
            the microbatches.
        batch: The input and target of each microbatch.
        loss: Function that maps the last stage's output and the target to a scalar.
        group: A process group of the pipeline's ranks.
        rule: Which memory the guarded side's dW (weight-gradient action) writes to.
        dtype: Data type of accumulated gradients.
        recording: Recording that receives the results, or None to record nothing.
        reduce: Function that takes the gradients of all stages before the update, and returns the
            factor of the update, or None.
        optimizer: Function that makes the optimizer over the stages.
    """

    def __init__(
        self,
        schedule: str,
        stages: Sequence[StageBackend],
        num_stages: int,
        order: Order,
        microbatches: int,
        batch: Batch,
        loss: Callable[[Tensor, Tensor], Tensor],
        group: Any,
        *,
        rule: Rule = "accumulate",
        dtype: torch.dtype = torch.bfloat16,
        walks: int = 1,
        recording: Recording | None = None,
        reduce: Callable[[Gradients], Tensor | None] | None = None,
        optimizer: Callable[[list[StageBackend]], Optimizer] = Optimizer,
    ) -> None:
        self.stages, self.batch, self.microbatches = list(stages), batch, microbatches // walks
        self.walks, self.drawn = walks, 0  # microbatches of the walks before
        self.recording, self.reduce = recording, reduce
        self.dtype = dtype
        self.rule = rule_for(order, rule, dtype)
        exact = self.rule in ("wgrad_order", "dgrad_order")
        if self.rule == "dgrad_order" or (exact and stages[0].domain.name != "reference"):
            raise BackendError(
                "the library's own backward adds gradients as the schedule runs and keeps no "
                f"gradient of a single microbatch, so it cannot sum by rule {self.rule}; compare "
                "another schedule or rule"
            )
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.number = 0
        self.domain = stages[0].domain
        with preserving(self.domain):
            for stage in stages:
                stage.warm()
        self.piped = [
            _Stage(
                self,
                stage,
                num_stages=num_stages,
                device=self.domain.device,
                input_args=stage.inputs[0].buffer(),
                output_args=stage.outputs[0].buffer(),
                group=group,
            )
            for stage in stages
        ]
        cls = getattr(torch_schedules, schedule)
        alone = schedule in SINGLE
        self.schedule = cls(
            self.piped[0] if alone else self.piped,
            self.microbatches,
            loss_fn=loss,
            scale_grads=False,
        )
        self.optimizer = optimizer(self.stages)
        self._losses: dict[int, list[Tensor]] = {}

    @property
    def losses(self) -> list[list[float]]:
        """The losses of every step so far, by step and microbatch."""
        return [self.losses_of(step) for step in sorted(self._losses)]

    def losses_of(self, step: int) -> list[float]:
        """
        The losses of a step by microbatch, on the rank of the last stage; waits for the device.
        """
        return [float(loss) for loss in self._losses[step]]

    def note(
        self, stage: _Stage, action: str, category: Any, found: Sequence[Tensor | None]
    ) -> None:
        """Record an action's output and the state after it."""
        if self.recording is None:
            return
        where = f"step {self.number} {stage.stage_index}{action}"
        named = {str(n): value for n, value in enumerate(found) if value is not None}
        self.recording.add_all(category, where, named)
        self.recording.add_state(where, live_state(self.domain))

    def _walked(self) -> list[Tensor]:
        """Run the schedule once; return the losses by microbatch, on the rank of the last stage."""
        data = [self.batch(self.number, self.drawn + m) for m in range(self.microbatches)]
        x, target = (torch.cat(part) for part in zip(*data, strict=True))
        losses: list[Tensor] = []
        inputs = (x,) if any(p.is_first for p in self.piped) else ()
        options: dict[str, Any] = {}
        if any(p.is_last for p in self.piped):
            options = {"target": target, "losses": losses}
        self.schedule.step(*inputs, **options, return_outputs=False)
        return losses

    def calibrate(
        self, share: Callable[[], None], agree: Callable[[bool], bool]
    ) -> Calibration | None:
        """
        If scales move (are updated) once per step, calibrate them before the first step; otherwise
        do nothing.

        Args:
            share: Function that is called before scales move, if replicas share their scaling
                state.
            agree: Function that takes whether this process's scales have converged, and returns
                whether the scales of all processes have converged.
        """
        if not moves_once(self.domain):
            return None
        recording, self.recording = self.recording, None

        def walk() -> None:
            for piped in self.piped:
                piped.forwards.first = True
            for walk in range(self.walks):
                self.drawn = walk * self.microbatches
                self._walked()
            for piped in self.piped:
                drop_gradients(piped.backend, piped.sums)
            share()

        found = calibrate(self.domain, walk, agree)
        self.recording = recording
        return found

    def step(self) -> None:
        """Run one optimizer step."""
        losses: list[Tensor] = []
        for piped in self.piped:
            piped.forwards.first = True
        for walk in range(self.walks):
            self.drawn = walk * self.microbatches
            losses += self._walked()
        # Losses are read on demand, so that a step does not wait for them.
        self._losses[self.number] = [loss.detach() for loss in losses]
        gradients = {p.stage_index: native_gradients(p.backend, p.sums) for p in self.piped}
        scale = None if self.reduce is None else self.reduce(gradients)
        record_step(self.recording, self.number, self.stages, gradients, before_update=True)
        self.optimizer.step(gradients, **({} if scale is None else {"scale": scale}))
        move_scales(self.domain)
        for piped in self.piped:
            drop_gradients(piped.backend, piped.sums)
        record_step(self.recording, self.number, self.stages, gradients, optimizer=self.optimizer)
        self.number += 1
