"""
Columns of Transformer Engine without this runtime: eager steps, the library's own graphs, and one
graph of a whole step.

The whole-step graph serves as a bound, not for training: its order and its data are fixed.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from ...backends.te import baselines as te_baselines
from ...backends.te.baselines import Chunking
from ...step.plan.order import Kind, Order
from .cells import BenchCell
from .columns import Settings

WARMUP_STEPS = 3


def full_backward_order(order: Order) -> list[tuple[bool, int, int]]:
    """
    Every F and full backward of an order. Each entry is a tuple: whether the action is an F, the
    position of its stage, and its microbatch.
    """
    position = {stage: n for n, stage in enumerate(order.stages)}
    return [
        (step.kind is Kind.FORWARD, position[step.stage], step.microbatch)
        for step in order.steps
        if step.kind is not Kind.WGRAD
    ]


@attrs.define(eq=False)
class _Training:
    """The layers, data and optimizer that all columns (ways to run a step) without this runtime
    share."""

    cell: BenchCell
    settings: Settings
    fused: bool = False
    capturable: bool = False
    layers: list[torch.nn.Module] = attrs.field(factory=list, init=False)
    matrices: list[torch.nn.Parameter] = attrs.field(factory=list, init=False)
    x: list[Tensor] = attrs.field(factory=list, init=False)
    dy: list[Tensor] = attrs.field(factory=list, init=False)
    actions: list[tuple[bool, int, int]] = attrs.field(factory=list, init=False)
    recipe: Any = attrs.field(default=None, init=False)
    optimizer: Any = attrs.field(default=None, init=False)

    def build(self) -> None:
        """Build layers with initial weights, inputs, output gradients and AdamW."""
        config = self.cell.config
        order = self.cell.order()
        if not self.cell.chained:
            raise ValueError(
                f"{self.cell.name}: expected stages that feed each other, because native columns "
                "time only such stages"
            )
        self.make_layers(order)
        self.actions = full_backward_order(order)
        torch.manual_seed(1)
        shape = (config.sequence, config.batch, config.hidden)
        for _ in range(self.cell.microbatches):
            self.x.append(torch.randn(shape, device=self.settings.device, dtype=config.dtype))
            self.dy.append(
                torch.randn(shape, device=self.settings.device, dtype=config.dtype) * 0.01
            )
        self.optimizer = torch.optim.AdamW(
            [p for one in self.layers for p in one.parameters()],
            lr=1e-4,
            fused=True,
            capturable=self.capturable,
        )

    def make_layers(self, order: Order) -> None:
        """
        Make the library's layers, with `main_grad` buffers if the library accumulates in them.
        """
        self.recipe = te_baselines.delayed_scaling(self.settings.history)
        self.layers = [
            te_baselines.layer(self.cell.config, fused=self.fused, seed=n)
            for n in range(len(order.stages))
        ]
        self.matrices = [p for one in self.layers for p in te_baselines.matrices(one)]
        if self.fused:
            for parameter in self.matrices:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which a forward runs."""
        return te_baselines.autocast(self.recipe)

    def update(self) -> None:
        """
        Run AdamW on `.grad`, or on `main_grad` if the library accumulates there; then drop the
        gradients.
        """
        if self.fused:
            for parameter in self.matrices:
                parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def walk(self, forward: Any) -> None:
        """
        Run every F and full backward in the table's order, with one autograd graph per stage.

        Args:
            forward: Function that is called with the stage's position, the microbatch, the input,
                and whether the F is the first F of its stage.
        """
        inputs: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        started: set[int] = set()
        last = len(self.layers) - 1
        for is_forward, n, m in self.actions:
            if is_forward:
                source = self.x[m] if n == 0 else outputs[n - 1, m]
                h = inputs[n, m] = source.detach().requires_grad_()
                with self.autocast():
                    outputs[n, m] = forward(n, m, h, n not in started)
                started.add(n)
            else:
                dy = self.dy[m] if n == last else inputs.pop((n + 1, m)).grad
                torch.autograd.backward(outputs.pop((n, m)), dy)
                if n == 0:
                    del inputs[0, m]

    def facts(self) -> Mapping[str, Any]:
        """No further numbers for the report."""
        return {}

    def close(self) -> None:
        """Drop every tensor."""
        self.layers.clear()
        self.matrices.clear()
        self.optimizer = None


@attrs.define(eq=False)
class Native(_Training):
    """Eager full backward with weight caching."""

    def warm(self) -> None:
        """Do nothing: native needs no warm-up."""

    def step(self) -> None:
        """Run one optimizer step."""
        self.walk(self._forward)
        self.update()

    def _forward(self, n: int, m: int, h: Tensor, first: bool) -> Tensor:
        y: Tensor = self.layers[n](h, is_first_microbatch=first)
        return y


@attrs.define(eq=False)
class WholeStep(Native):
    """The native step, update included, as one graph."""

    capturable: bool = True
    graph: Any = attrs.field(default=None, init=False)

    def warm(self) -> None:
        """Run the step on a side stream, then capture it there."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                super().step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        gc.disable()  # A graph that is collected during a capture ends the capture.
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                super().step()
        finally:
            gc.enable()
        torch.cuda.synchronize()

    def step(self) -> None:
        """Replay the graph of the step."""
        self.graph.replay()

    def facts(self) -> Mapping[str, Any]:
        """The number of graphs, which is one."""
        return {"graphs": 1}

    def close(self) -> None:
        """Drop the graph, then the memory that it uses."""
        self.graph = None
        super().close()


@attrs.define(eq=False)
class Graphed(_Training):
    """
    The library's `make_graphed_callables`, with one way to divide the layers into graphed
    callables.
    """

    chunking: Chunking = "chunks"
    by_microbatch: bool = False
    graphs: tuple[Any, ...] = attrs.field(default=(), init=False)

    def build(self) -> None:
        """Build what every column needs, with layers in the chosen order of actions."""
        super().build()
        if self.by_microbatch:
            positions = range(len(self.layers))
            self.actions = [
                (is_forward, n, m)
                for m in range(self.cell.microbatches)
                for is_forward, row in ((True, positions), (False, reversed(positions)))
                for n in row
            ]

    def warm(self) -> None:
        """Run the library's own warm-up and capture."""
        if self.chunking == "chunks":
            order = [(n + 1) if is_forward else -(n + 1) for is_forward, n, _ in self.actions]
        else:
            order = [1, -1] * self.cell.microbatches
        self.graphs = te_baselines.graphed(
            self.layers, self.x[0], self.cell.microbatches, order, self.chunking, self.recipe
        )
        self._zero()
        torch.cuda.synchronize()

    def step(self) -> None:
        """
        Run one optimizer step. The graphs always accumulate, so `main_grad` must be zero before the
        step.
        """
        if self.chunking == "chunks":
            self.walk(self._forward)
        else:
            self._walk_microbatches()
        self.update()
        self._zero()

    def _forward(self, n: int, m: int, h: Tensor, first: bool) -> Tensor:
        y: Tensor = self.graphs[n * self.cell.microbatches + m](h, is_first_microbatch=first)
        return y

    def _walk_microbatches(self) -> None:
        each = len(self.graphs) // self.cell.microbatches
        for m in range(self.cell.microbatches):
            y = self.x[m].detach().requires_grad_()
            with self.autocast():
                for forward in self.graphs[m * each : (m + 1) * each]:
                    y = forward(y, is_first_microbatch=m == 0)
            torch.autograd.backward(y, self.dy[m])

    def _zero(self) -> None:
        if self.fused:
            torch._foreach_zero_([p.main_grad for p in self.matrices])  # type: ignore[attr-defined]

    def facts(self) -> Mapping[str, Any]:
        """The number of graphs: a forward and a backward graph for each callable and microbatch."""
        return {"graphs": 2 * len(self.graphs), "chunking": self.chunking}

    def close(self) -> None:
        """Drop the graphs, then the memory that they use."""
        self.graphs = ()
        super().close()


def native_column(cell: BenchCell, settings: Settings, *, fused: bool) -> Native:
    """Native eager; gradients go into `.grad` or, with ``fused``, directly into `main_grad`."""
    return Native(cell, settings, fused)


def whole_step_column(cell: BenchCell, settings: Settings, *, fused: bool) -> WholeStep:
    """The column that runs the native step as one graph."""
    return WholeStep(cell, settings, fused)


def graphed_column(
    cell: BenchCell,
    settings: Settings,
    *,
    chunking: Chunking,
    fused: bool,
    by_microbatch: bool = False,
) -> Graphed:
    """
    The column of the library's own graphs. With `by_microbatch`, each microbatch finishes before
    the next microbatch begins.
    """
    return Graphed(cell, settings, fused, chunking=chunking, by_microbatch=by_microbatch)
