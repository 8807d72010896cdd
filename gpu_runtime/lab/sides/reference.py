"""
The reference backend's own full backward as a column, so that the tables run without a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from ...backends.protocol import StageBackend, parameters
from ...backends.reference import ReferenceDomain, ReferenceStage
from ...step.plan.order import Kind, Order
from .cells import BenchCell
from .columns import Settings


@attrs.define(eq=False)
class NativeReference:
    """Eager full backward into `.grad`, each stage feeding the next."""

    cell: BenchCell
    settings: Settings
    order: Order = attrs.field(init=False)
    stages: dict[int, StageBackend] = attrs.field(factory=dict, init=False)
    x: list[Tensor] = attrs.field(factory=list, init=False)
    dy: list[Tensor] = attrs.field(factory=list, init=False)
    optimizer: Any = attrs.field(default=None, init=False)

    def build(self) -> None:
        """Stages, data, AdamW."""
        self.order = self.cell.order()
        domain = ReferenceDomain(self.settings.history)
        self.stages = {
            index: ReferenceStage(index, domain, self.cell.config, seed=index)
            for index in self.order.stages
        }
        for stage in self.stages.values():
            stage.native_bind(None)
        spec = self.stages[self.order.stages[0]].inputs[0]
        torch.manual_seed(1)
        for _ in range(self.cell.microbatches):
            self.x.append(torch.randn(spec.shape, dtype=spec.dtype))
            self.dy.append(torch.randn(spec.shape, dtype=spec.dtype) * 0.01)
        named = [p for stage in self.stages.values() for p in parameters(stage).values()]
        self.optimizer = torch.optim.AdamW(named, lr=1e-4, fused=True)

    def warm(self) -> None:
        """Nothing before the first step."""

    def step(self) -> None:
        """One optimizer step."""
        inputs: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        started: set[int] = set()
        for kind, stage, m in self.order.steps:
            if kind is Kind.FORWARD:
                before = outputs.get((stage - 1, m), self.x[m])
                h = inputs[stage, m] = before.detach().requires_grad_()
                (outputs[stage, m],) = self.stages[stage].native_forward(
                    (h,), first=stage not in started
                )
                started.add(stage)
            elif kind is Kind.DGRAD:
                fed_by = inputs.get((stage + 1, m))
                dy = self.dy[m] if fed_by is None else fed_by.grad
                torch.autograd.backward(outputs[stage, m], dy)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def facts(self) -> Mapping[str, Any]:
        """Nothing beyond the cell."""
        return {}

    def close(self) -> None:
        """Drop every tensor."""
        self.stages.clear()


def native_column(cell: BenchCell, settings: Settings) -> NativeReference:
    """The reference backend's native column."""
    return NativeReference(cell, settings)
