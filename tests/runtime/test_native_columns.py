"""
The loops of the native columns over a layer that needs no device: which graph runs when, and the
resulting sums.

The layer has the library's signature and the library's two ways to return a weight gradient. A
graph is the layer itself, handed out in the library's documented order. Only a device can show the
numbers of the real library; a wrong index or a forgotten reset would show here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.te import baselines as te_baselines
from qeffect.gpu_runtime.lab.sides import library as native_columns
from qeffect.gpu_runtime.lab.sides.cells import TINY
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

from . import toys


class Product(torch.autograd.Function):
    """A product whose weight gradient is returned, or added to or put into `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, owner: Any, first: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.first = owner, first
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        if not ctx.owner.fused:
            return dy @ weight, gradient, None, None
        main = ctx.owner.weight.main_grad
        main.copy_(gradient if ctx.first else main + gradient)
        return dy @ weight, None, None, None


class Layer(torch.nn.Module):
    """A residual product with a bias, under the signature of the library's layer."""

    def __init__(self, config: LayerConfig, fused: bool, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (config.hidden, config.hidden)
        self.weight = torch.nn.Parameter(
            torch.randn(shape, generator=generator).mul(0.1).to(config.dtype)
        )
        self.bias = torch.nn.Parameter(torch.zeros(config.hidden, dtype=config.dtype))
        self.fused = fused
        self.firsts: list[bool] = []

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        self.firsts.append(bool(is_first_microbatch))
        y: Tensor = Product.apply(hidden, self.weight, self, bool(is_first_microbatch))
        return hidden + y + self.bias


@attrs.define
class Graphs:
    """Stands in for `make_graphed_callables`: checks the lists, and hands out the layer itself."""

    replayed: list[tuple[int, bool]] = attrs.field(factory=list)
    order: Sequence[int] = ()

    def __call__(
        self,
        callables: tuple[Any, ...],
        samples: tuple[tuple[Tensor], ...],
        *,
        _order: list[int],
        _num_layers_per_chunk: list[int],
        cache_quantized_params: bool,
        enabled: bool,
        **others: Any,
    ) -> tuple[Any, ...]:
        chunks = max(_order)
        microbatches = len(_order) // chunks // 2
        assert chunks == len(_num_layers_per_chunk)
        assert len(callables) == sum(_num_layers_per_chunk)
        assert len(samples) == len(callables) * microbatches
        assert all(sample.requires_grad for (sample,) in samples)
        assert cache_quantized_params
        assert enabled
        self.order = _order
        owners: list[Any] = []
        start = 0
        for count in _num_layers_per_chunk:
            owners += list(callables[start : start + count]) * microbatches
            start += count
        return tuple(self._graph(n, owner) for n, owner in enumerate(owners))

    def _graph(self, n: int, owner: Any) -> Any:
        def replay(x: Tensor, *, is_first_microbatch: bool) -> Tensor:
            self.replayed.append((n, is_first_microbatch))
            # A graph accumulates always: the flag is not part of it.
            y: Tensor = owner(x, is_first_microbatch=False)
            return y

        return replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """The library replaced by a layer and graphs that need no device."""
    made = Graphs()
    monkeypatch.setattr(
        te_baselines,
        "library",
        lambda: SimpleNamespace(te=SimpleNamespace(make_graphed_callables=made), version="2.18.0"),
    )
    monkeypatch.setattr(te_baselines, "missing_imports", lambda names: [])
    monkeypatch.setattr(te_baselines, "delayed_scaling", lambda history: None)
    monkeypatch.setattr(te_baselines, "autocast", lambda recipe: nullcontext())
    monkeypatch.setattr(
        te_baselines, "layer", lambda config, *, fused, seed: Layer(config, fused, seed)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def trained(column: Any, steps: int = 3) -> list[Tensor]:
    """Parameters after some steps."""
    column.build()
    column.warm()
    for _ in range(steps):
        column.step()
    return [p.detach().clone() for one in column.layers for p in one.parameters()]


def test_native_is_the_gradient_of_the_whole_chain(graphs: Graphs) -> None:
    """Stage by stage in the table's order gives the gradients of one backward through both."""
    column = native_columns.native_column(TINY, toys.SETTINGS, fused=False)
    column.build()
    column.walk(column._forward)
    seen = [p.grad for one in column.layers for p in one.parameters()]

    reference = [Layer(TINY.config, False, seed) for seed in (0, 1)]
    for x, dy in zip(column.x, column.dy, strict=True):
        torch.autograd.backward(reference[1](reference[0](x)), dy)
    expected = [p.grad for one in reference for p in one.parameters()]
    assert 4 == len(seen)
    for gradient, wanted in zip(seen, expected, strict=True):
        assert wanted is not None
        assert gradient is not None
        assert same_bits(wanted, gradient)


def test_only_a_stages_first_forward_refreshes_its_cache(graphs: Graphs) -> None:
    """Once a step for each stage, on the first microbatch."""
    column = native_columns.native_column(TINY, toys.SETTINGS, fused=False)
    trained(column, steps=2)
    for one in column.layers:
        assert [True, False, False, False] * 2 == one.firsts  # type: ignore[comparison-overlap]


def test_both_native_rules_train_alike(graphs: Graphs) -> None:
    """Overwriting `main_grad` on the first microbatch is what dropping `.grad` is."""
    plain = trained(native_columns.native_column(TINY, toys.SETTINGS, fused=False))
    fused = trained(native_columns.native_column(TINY, toys.SETTINGS, fused=True))
    assert all(same_bits(a, b) for a, b in zip(plain, fused, strict=True))
    start = [p for seed in (0, 1) for p in Layer(TINY.config, False, seed).parameters()]
    assert not any(same_bits(a, b) for a, b in zip(plain, start, strict=True))


CHUNKINGS = [
    {"chunking": "chunks"},
    {"chunking": "chunks", "by_microbatch": True},
    {"chunking": "layers"},
    {"chunking": "model"},
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", CHUNKINGS, ids=lambda how: "-".join(map(str, how.values())))
def test_graphed_columns_train_as_native_does(graphs: Graphs, how: Any, fused: bool) -> None:
    """Every chunking sums the same gradients; graphs that always accumulate start from zero."""
    native = trained(native_columns.native_column(TINY, toys.SETTINGS, fused=False))
    graphed = trained(native_columns.graphed_column(TINY, toys.SETTINGS, fused=fused, **how))
    assert all(same_bits(a, b) for a, b in zip(native, graphed, strict=True))


@pytest.mark.parametrize("how", CHUNKINGS, ids=lambda how: "-".join(map(str, how.values())))
def test_graphs_replay_in_the_order_of_their_capture(graphs: Graphs, how: Any) -> None:
    """The library captures by chunk and count in `_order`; each graph is replayed at that place."""
    column = native_columns.graphed_column(TINY, toys.SETTINGS, fused=False, **how)
    trained(column, steps=2)

    per_chunk = 2 if how["chunking"] == "layers" else 1
    captured, seen = [], dict.fromkeys(graphs.order, 0)
    for chunk in graphs.order:
        if chunk > 0:
            base = (chunk - 1) * TINY.microbatches * per_chunk + seen[chunk] * per_chunk
            captured += list(range(base, base + per_chunk))
            seen[chunk] += 1
    assert captured * 2 == [n for n, _ in graphs.replayed]
    assert len(captured) == len(column.graphs)


def test_graphs_refresh_the_cache_on_each_chunks_first_microbatch(graphs: Graphs) -> None:
    """The flag goes to the library beside the graph, once a step and chunk."""
    trained(
        native_columns.graphed_column(TINY, toys.SETTINGS, chunking="chunks", fused=False), steps=1
    )
    assert {0, TINY.microbatches} == {n for n, first in graphs.replayed if first}


def test_independent_stages_are_refused(graphs: Graphs) -> None:
    """Native columns chain their stages; a rank's row of a longer pipeline does not."""
    column = native_columns.native_column(
        attrs.evolve(TINY, chained=False), toys.SETTINGS, fused=False
    )
    with pytest.raises(ValueError, match="expected stages that feed each other"):
        column.build()
