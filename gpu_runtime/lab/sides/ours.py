"""
This runtime as columns: eager, or captured with one of the gradient destinations.

On a CPU the same columns run over the reference backend, so that everything but capture can be
tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import attrs
import torch
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef

from ...backends.protocol import StageBackend
from ...runtime import Counts, Runtime, RuntimeConfig
from ...step.memory.arena import Rule
from ...step.optimizer import Optimizer
from ...step.plan.order import Kind, Order
from ...step.plan.slots import Provisioning
from ..runner.host_times import times_of
from .cells import BenchCell
from .columns import Settings
from .unguarded import UnguardedActions, silence


class Actions(Protocol):
    """The actions that the step loop calls: the runtime's, with or without guards."""

    def refresh(self, stage: int) -> None:
        """Refresh a stage's weight cache."""

    def forward(self, key: TapeKey, inputs: Sequence[Tensor] | None = None) -> TapeRef:
        """F."""

    def bind(self, key: TapeKey) -> None:
        """Bind the destinations of a key."""

    def dgrad(
        self, key: TapeKey, ref: TapeRef, output_gradients: Sequence[Tensor] | None = None
    ) -> None:
        """dI."""

    def wgrad(self, key: TapeKey, ref: TapeRef) -> None:
        """dW."""

    def outputs(self, key: TapeKey, ref: TapeRef) -> Sequence[Tensor]:
        """What F left."""

    def finish_outputs(self, key: TapeKey, ref: TapeRef) -> None:
        """The reader of the outputs is done."""

    def dgrads(self, key: TapeKey, ref: TapeRef) -> Sequence[Tensor]:
        """What dI left."""

    def finish_dgrads(self, key: TapeKey, ref: TapeRef) -> None:
        """The reader of the input gradients is done."""


@attrs.define(eq=False)
class Ours:
    """
    One optimizer step through the runtime, each stage feeding the next.

    Args:
        cell: The workload.
        settings: History and device.
        destination: Where dW writes.
        provisioning: How slots are counted.
        captured: Replay graphs.
        guards: Run the guards; False exists for this benchmark only.
        counts: When what the device counts is compared; None counts nothing.
        two_streams: Call from a stream of the caller's own, so that every action crosses to the
            graph stream and back by events.
    """

    cell: BenchCell
    settings: Settings
    destination: Rule
    provisioning: Provisioning
    captured: bool
    guards: bool = True
    two_streams: bool = False
    counts: Counts | None = None
    order: Order = attrs.field(init=False)
    stages: list[StageBackend] = attrs.field(factory=list, init=False)
    x: list[Tensor] = attrs.field(factory=list, init=False)
    dy: list[Tensor] = attrs.field(factory=list, init=False)
    optimizer: Any = attrs.field(default=None, init=False)
    runtime: Any = attrs.field(default=None, init=False)
    actions: Any = attrs.field(default=None, init=False)
    before: dict[int, int] = attrs.field(factory=dict, init=False)
    after: dict[int, int] = attrs.field(factory=dict, init=False)

    def build(self) -> None:
        """Stages with their first weights, inputs, output gradients and AdamW."""
        self.order = self.cell.order()
        self.stages = self._make_stages()
        if self.cell.chained:
            self.after = dict(zip(self.order.stages, self.order.stages[1:], strict=False))
            self.before = {after: stage for stage, after in self.after.items()}
        spec = self.stages[0].inputs[0]
        torch.manual_seed(1)
        # Stages of a longer pipeline receive into the same memory in every microbatch.
        for _ in range(self.cell.microbatches if self.cell.chained else 1):
            self.x.append(torch.randn(spec.shape, device=spec.device, dtype=spec.dtype))
            self.dy.append(torch.randn(spec.shape, device=spec.device, dtype=spec.dtype) * 0.01)
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
        """The runtime itself: warm-up, slots, arenas, contract, capture."""
        self.runtime = Runtime(
            self.stages,
            self.order,
            RuntimeConfig(
                rule=self.destination,
                provisioning=self.provisioning,
                mode="replays" if self.captured else "eager",
                readers=True,
                feeds=self.after,
                counts=self.counts,
            ),
        )
        self.actions = self.runtime.actions
        if not self.guards:
            self.actions = UnguardedActions(self.runtime)
            silence(self.runtime)

    def step(self) -> None:
        """Every F, dI and dW of the order, then the update."""
        if self.two_streams:
            self._step()
        else:
            with self.runtime.caller_scope():
                self._step()

    def _step(self) -> None:
        runtime, actions = self.runtime, cast(Actions, self.actions)
        tapes: dict[tuple[int, int], tuple[TapeKey, TapeRef]] = {}
        refreshed: set[int] = set()
        for kind, stage, m in self.order.steps:
            if kind is Kind.FORWARD:
                if stage not in refreshed:
                    actions.refresh(stage)
                    refreshed.add(stage)
                key = runtime.key(stage, m)
                tapes[stage, m] = self._forward(actions, tapes, key)
            elif kind is Kind.DGRAD:
                self._dgrad(actions, tapes, *tapes[stage, m])
            else:
                actions.wgrad(*tapes[stage, m])
        runtime.finish(self.optimizer)

    def _forward(
        self,
        actions: Actions,
        tapes: Mapping[tuple[int, int], tuple[TapeKey, TapeRef]],
        key: TapeKey,
    ) -> tuple[TapeKey, TapeRef]:
        source = self.before.get(key.stage)
        if source is None:
            ref = actions.forward(key, (self.x[key.microbatch % len(self.x)],))
        else:
            fed_by = tapes[source, key.microbatch]
            ref = actions.forward(key, actions.outputs(*fed_by))
            actions.finish_outputs(*fed_by)
        if key.stage not in self.after:
            actions.outputs(key, ref)
            actions.finish_outputs(key, ref)
        return key, ref

    def _dgrad(
        self,
        actions: Actions,
        tapes: Mapping[tuple[int, int], tuple[TapeKey, TapeRef]],
        key: TapeKey,
        ref: TapeRef,
    ) -> None:
        actions.bind(key)
        source = self.after.get(key.stage)
        if source is None:
            actions.dgrad(key, ref, (self.dy[key.microbatch % len(self.dy)],))
        else:
            fed_by = tapes[source, key.microbatch]
            actions.dgrad(key, ref, actions.dgrads(*fed_by))
            actions.finish_dgrads(*fed_by)
        if key.stage not in self.before:
            actions.dgrads(key, ref)
            actions.finish_dgrads(key, ref)

    def host_actions(self, steps: int, synchronize: Callable[[], None]) -> Mapping[str, Any]:
        """Host time of every call of some steps, and of their bare replays; only `close` after."""
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
        """Drop the graphs before their memory."""
        self.actions = self.runtime = self.optimizer = None
        self.stages.clear()


def captured(
    cell: BenchCell,
    settings: Settings,
    *,
    destination: Rule,
    provisioning: Provisioning,
    guards: bool = True,
    two_streams: bool = False,
    counts: Counts | None = None,
) -> Ours:
    """Captured on a GPU, eager on a CPU."""
    return Ours(
        cell,
        settings,
        destination,
        provisioning,
        captured=settings.device != "cpu",
        guards=guards,
        two_streams=two_streams,
        counts=counts,
    )


def eager(cell: BenchCell, settings: Settings, *, destination: Rule) -> Ours:
    """Eager, with guards and live slots."""
    return Ours(cell, settings, destination, "live", captured=False)
