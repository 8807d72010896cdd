"""
Columns that run this runtime: eager, or captured with one of the gradient destinations.

On a CPU, the same columns run over the reference backend, so that everything except capture can be
tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from ...backends.protocol import StageBackend
from ...runtime import Counts, Mode, Runtime, RuntimeConfig, mode_on
from ...step.memory.arena import Rule
from ...step.optimizer import Optimizer
from ...step.plan.order import Order
from ...step.plan.slots import Provisioning
from ..runner.host_times import times_of
from .cells import BenchCell
from .columns import Settings
from .step_loop import StepLoop
from .unguarded import UnguardedActions, remove_contract


@attrs.frozen
class FixedData:
    """
    Data that consist of the same tensors in every step.

    Args:
        x: Inputs by microbatch; if there are fewer inputs than microbatches, the inputs repeat.
        dy: Output gradients by microbatch; if there are fewer than microbatches, they repeat.
    """

    x: list[Tensor] = attrs.field(factory=list)
    dy: list[Tensor] = attrs.field(factory=list)

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> tuple[Tensor, ...]:
        """The input of a microbatch."""
        return (self.x[microbatch % len(self.x)],)

    def output_gradients(
        self, stage: StageBackend, step: int, microbatch: int
    ) -> tuple[Tensor, ...]:
        """The output gradient of a microbatch."""
        return (self.dy[microbatch % len(self.dy)],)


@attrs.define(eq=False)
class Ours:
    """
    A column (a way to run a step) that runs each optimizer step through the runtime; each stage
    feeds the next stage.

    Args:
        cell: The layer dimensions and the order of actions to run.
        settings: Length of amax histories, device, and the other settings of the report.
        destination: Which memory a weight-gradient action (dW) writes to.
        provisioning: Rule for the number of slots (sets of buffers for one microbatch) of a stage.
        mode: How a step runs: `eager`, `replays` or `one launch`.
        guards: Whether the guards run; False exists only for this benchmark.
        counts: When the counters in device memory are compared; None for no counters.
        two_streams: Whether steps are called from a separate stream of the caller, so that every
            action crosses to the graph stream and back by events.
    """

    cell: BenchCell
    settings: Settings
    destination: Rule
    provisioning: Provisioning
    mode: Mode
    guards: bool = True
    two_streams: bool = False
    counts: Counts | None = None
    order: Order = attrs.field(init=False)
    stages: list[StageBackend] = attrs.field(factory=list, init=False)
    data: FixedData = attrs.field(factory=FixedData, init=False)
    optimizer: Any = attrs.field(default=None, init=False)
    runtime: Any = attrs.field(default=None, init=False)
    loop: Any = attrs.field(default=None, init=False)
    feeds: dict[int, int] = attrs.field(factory=dict, init=False)

    def build(self) -> None:
        """Build stages with initial weights, inputs, output gradients and AdamW."""
        self.order = self.cell.order()
        self.stages = self._make_stages()
        if self.cell.chained:
            self.feeds = dict(zip(self.order.stages, self.order.stages[1:], strict=False))
        spec = self.stages[0].inputs[0]
        torch.manual_seed(1)
        # Stages of a longer pipeline receive every microbatch into the same memory.
        for _ in range(self.cell.microbatches if self.cell.chained else 1):
            self.data.x.append(torch.randn(spec.shape, device=spec.device, dtype=spec.dtype))
            self.data.dy.append(
                torch.randn(spec.shape, device=spec.device, dtype=spec.dtype) * 0.01
            )
        self.optimizer = Optimizer(self.stages, lr=1e-4)

    def _make_stages(self) -> list[StageBackend]:
        config = self.cell.config
        if self.settings.device == "cpu":
            from ...backends.reference import ReferenceDomain, ReferenceStage

            reference = ReferenceDomain(self.settings.history)
            return [
                cast(StageBackend, ReferenceStage(index, reference, config, seed=index))
                for index in self.order.stages
            ]
        from ...backends.te.domain import TransformerEngineDomain
        from ...backends.te.stage import TransformerEngineStage

        domain = TransformerEngineDomain(history_length=self.settings.history)
        fuse = self.destination != "copied"
        return [
            cast(
                StageBackend,
                TransformerEngineStage(
                    index, domain, config, fuse_wgrad_accumulation=fuse, seed=index
                ),
            )
            for index in self.order.stages
        ]

    def warm(self) -> None:
        """
        Build the runtime: warm up, then make slots, arenas and the contract, and capture the
        graphs.
        """
        self.runtime = Runtime(
            self.stages,
            self.order,
            RuntimeConfig(
                rule=self.destination,
                provisioning=self.provisioning,
                mode=self.mode,
                readers=True,
                feeds=self.feeds,
                counts=self.counts,
            ),
        )
        self.loop = StepLoop(self.runtime, self.data, self.optimizer, feeds=self.feeds)
        if not self.guards:
            self.loop.calls = UnguardedActions(self.runtime)
            remove_contract(self.runtime)

    def step(self) -> None:
        """Run every F, dI and dW of the order, then the update."""
        if self.two_streams:
            self.loop.step()
        else:
            with self.runtime.caller_scope():
                self.loop.step()

    def host_actions(self, steps: int, synchronize: Callable[[], None]) -> Mapping[str, Any]:
        """
        Host time of every call in some steps, and of the bare graph replays of these steps.
        Afterwards only `close` may be called.
        """
        return times_of(self, synchronize, steps)

    def facts(self) -> Mapping[str, Any]:
        """Reserved resources, and the number of guarded actions."""
        memories = self.runtime.memories.values()
        report = getattr(self.runtime.executor, "report", None)
        return {
            "slots": sum(self.runtime.plan.num_slots.values()),
            "graphs": 0 if report is None else report.num_graphs,
            "arena_bytes": sum(memory.arena.num_bytes for memory in memories),
            "buffer_bytes": sum(memory.table.num_bytes for memory in memories),
            "unit_bytes": [
                2 * unit.shape[0] * unit.shape[1] for stage in self.stages for unit in stage.units
            ],
            "guarded_actions": len(self.order.steps) + len(self.order.stages),
            "warmup_s": None if report is None else report.warmup_seconds,
            "capture_s": None if report is None else report.capture_seconds,
            "phases_s": {} if report is None else dict(report.phases),
            "one_pass_obstacles": sorted({m.arena.one_pass_obstacle for m in memories}),
        }

    def close(self) -> None:
        """Drop the graphs, then the memory that they use."""
        self.loop = self.runtime = self.optimizer = None
        self.stages.clear()


def captured_column(
    cell: BenchCell,
    settings: Settings,
    *,
    destination: Rule,
    provisioning: Provisioning,
    guards: bool = True,
    two_streams: bool = False,
    counts: Counts | None = None,
) -> Ours:
    """This runtime's column: captured on a GPU, eager on a CPU."""
    return Ours(
        cell,
        settings,
        destination,
        provisioning,
        mode_on(settings.device),
        guards=guards,
        two_streams=two_streams,
        counts=counts,
    )


def eager_column(cell: BenchCell, settings: Settings, *, destination: Rule) -> Ours:
    """This runtime's eager column (a way to run a step), with guards. It has slots for live
    microbatches only."""
    return Ours(cell, settings, destination, "live", "eager")
