"""
The reference backend's own full backward as a column, so that the tables can run without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from ...backends.protocol import StageBackend, parameters
from ...backends.reference import ReferenceDomain, ReferenceStage
from ...step.plan.order import Order
from .cells import BenchCell
from .columns import Settings
from .library import Native


@attrs.frozen(eq=False)
class _StageLayer:
    """A stage with the call signature of the library's layer."""

    stage: StageBackend

    def __call__(self, h: Tensor, *, is_first_microbatch: bool) -> Tensor:
        (y,) = self.stage.native_forward((h,), first=is_first_microbatch)
        return y

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return parameters(self.stage).values()


@attrs.define(eq=False)
class NativeReference(Native):
    """Eager full backward into `.grad`, each stage feeding the next."""

    stages: dict[int, StageBackend] = attrs.field(factory=dict, init=False)

    def make_layers(self, order: Order) -> None:
        """Make the stages, which share one FP8 state (a state domain)."""
        domain = ReferenceDomain(self.settings.history)
        config = self.cell.config
        for index in order.stages:
            stage = self.stages[index] = ReferenceStage(index, domain, config, seed=index)
            stage.native_bind(None)
            self.layers.append(_StageLayer(stage))  # type: ignore[arg-type]

    def autocast(self) -> AbstractContextManager[Any]:
        """An empty context, because the stages handle their scales themselves."""
        return nullcontext()


def native_column(cell: BenchCell, settings: Settings) -> NativeReference:
    """The column (a way to run a step) with the reference backend's native training."""
    return NativeReference(cell, settings)
