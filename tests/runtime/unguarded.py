"""
F, dI and dW over a backend without any guard, as in a runtime that never asks the contract.

These runs test the backend's numerics, and what goes wrong if a guard is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import StageBackend, Tape, matrices
from qeffect.gpu_runtime.lab.comparisons.native import record_outputs, record_step, record_sum
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.lab.comparisons.workload import Workload, by_index
from qeffect.gpu_runtime.step.memory.arena import Arena, Rule, by_matrix
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import ComputeAction, Kind, Order


@attrs.define(eq=False)
class UnguardedRun:
    """Split training over some stages without guards. Each microbatch has a tape (the data that its
    F leaves) of its own."""

    stages: Sequence[StageBackend]
    order: Order
    workload: Workload
    rule: Rule
    dtype: torch.dtype
    optimizer: Optimizer
    recording: Recording | None = None
    refresh_all_at_start: bool = False
    _arenas: dict[int, Arena] = attrs.field(factory=dict, init=False)
    _tapes: dict[tuple[int, int], Tape] = attrs.field(factory=dict, init=False)
    _non_matrix: dict[int, dict[str, Tensor]] = attrs.field(factory=dict, init=False)
    _written: dict[int, int] = attrs.field(factory=dict, init=False)
    _cache_epoch: dict[int, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        for stage in self.stages:
            self._arenas[stage.index] = Arena.for_stage(
                stage, self.rule, self.order.num_microbatches, self.dtype
            )

    def run(self, num_steps: int) -> None:
        """Train for some optimizer steps."""
        for number in range(num_steps):
            self.step(number)

    def step(self, number: int) -> None:
        """One optimizer step."""
        stages = by_index(self.stages)
        self._written = dict.fromkeys(stages, 0)
        self._non_matrix = {}
        seen: set[int] = set()
        if self.refresh_all_at_start:
            for stage in self.stages:
                self._refresh(stage, number)
                seen.add(stage.index)
        for action in self.order.steps:
            stage = stages[action.stage]
            if action.kind is Kind.FORWARD:
                if stage.index not in seen:
                    self._refresh(stage, number)
                    seen.add(stage.index)
                self._forward(stage, number, action)
            elif action.kind is Kind.DGRAD:
                self._dgrad(stage, number, action)
            else:
                self._wgrad(stage, number, action)
        self._update(number)

    def _refresh(self, stage: StageBackend, number: int) -> None:
        stage.refresh_cache()
        self._cache_epoch[stage.index] = number

    def _forward(self, stage: StageBackend, number: int, action: ComputeAction) -> None:
        tape = self._tapes[stage.index, action.microbatch] = stage.new_tape(action.microbatch)
        inputs = [spec.buffer() for spec in stage.inputs]
        with torch.no_grad():
            for buffer, value in zip(
                inputs, self.workload.inputs(stage, number, action.microbatch), strict=True
            ):
                buffer.copy_(value)
        outputs = stage.forward(tape, inputs)
        if (r := self.recording) is not None:
            where = f"step {number} {action}"
            record_outputs(r, where, outputs)
            r.add("versions", f"{where} weight epoch", number)
            r.add("versions", f"{where} cache epoch", self._cache_epoch[stage.index])
            r.add("versions", f"{where} cache is current", int(stage.cache_is_current()))
            r.add_state(where, live_state(stage.domain))

    def _dgrad(self, stage: StageBackend, number: int, action: ComputeAction) -> None:
        tape = self._tapes[stage.index, action.microbatch]
        stage.bind(tape, self._arenas[stage.index].destinations(action.microbatch))
        result = stage.dgrad(tape, self.workload.output_gradients(stage, number, action.microbatch))
        assert len(result.queued) == len(stage.units)
        named = dict(zip((p.name for p in stage.non_matrix), result.non_matrix, strict=True))
        held = self._non_matrix.setdefault(stage.index, {})
        for name, gradient in named.items():
            held[name] = held[name] + gradient if name in held else gradient
        if (r := self.recording) is not None:
            where = f"step {number} {action}"
            r.add_all("input gradients", where, {str(n): g for n, g in enumerate(result.inputs)})
            place = f"step {number} stage {stage.index} m{action.microbatch}"
            r.add_all("microbatch gradients", place, named)
            r.add_state(where, live_state(stage.domain))

    def _wgrad(self, stage: StageBackend, number: int, action: ComputeAction) -> None:
        tape = self._tapes.pop((stage.index, action.microbatch))
        accumulate = self.rule == "accumulate" and self._written[stage.index] > 0
        result = stage.wgrad(tape, accumulate=accumulate)
        assert tuple(sorted(result.covered)) == tuple(sorted(m.name for m in matrices(stage)))
        self._written[stage.index] += 1
        if self.rule == "copied":
            self._arenas[stage.index].keep_copies(action.microbatch, result.by_unit)
        if (r := self.recording) is not None:
            if self.rule == "accumulate":
                record_sum(r, stage, number, self._written[stage.index], result.by_unit)
            else:
                place = f"step {number} stage {stage.index} m{action.microbatch}"
                r.add_all("microbatch gradients", place, by_matrix(stage.units, result.by_unit))

    def _update(self, number: int) -> None:
        gradients = {}
        for stage in self.stages:
            total = self._arenas[stage.index].total(
                self.order.microbatches(stage.index, Kind.DGRAD)
            )
            gradients[stage.index] = {
                **by_matrix(stage.units, total),
                **self._non_matrix[stage.index],
            }
        record_step(self.recording, number, self.stages, gradients, before_update=True)
        self.optimizer.step(gradients)
        for arena in self._arenas.values():
            arena.start_epoch()
        record_step(self.recording, number, self.stages, gradients, optimizer=self.optimizer)
