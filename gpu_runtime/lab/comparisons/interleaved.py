"""
Compare interleaved stages under Transformer Engine's own graphs with native eager, bit by bit.

Two open reports, NVIDIA/Megatron-LM#5966 and NVIDIA-NeMo/Megatron-Bridge#2096, describe this case:
the loss of a rank with several chunks under `make_graphed_callables` turns into NaN, and no cause
is published. In this module, a side is one way to use the library's graphs for a rank's row of
Interleaved 1F1B. The library relies on three conditions and checks none of these conditions. First,
graphs are replayed in the order of their capture. Second, with reused buffers, a chunk's messages
end before the next chunk's backward ends. Third, with reused buffers, nobody keeps a gradient that
a replay returned. Autograd breaks the third condition, because autograd stores the first gradient
in `.grad` without a copy and adds later gradients to it. Each wrong side breaks one condition.
Every side runs in its own process, because the FP8 state is per process.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.schedule.torch_tables import torch_schedule

from ...backends.layers import LayerConfig
from ...step.memory.numerical_state import raw_bits
from ...step.plan.order import Order
from ..sides.library import full_backward_order

__all__ = ["GRAPH_USES", "GraphUse", "differences", "record_side"]

CONFIG = LayerConfig(256, 512, 2, 128)
RANK, PP, CHUNKS, MICROBATCHES = 0, 2, 2, 8
"""Rank 0 of two ranks, with two chunks of one layer each and eight microbatches."""

STEPS = 6
HISTORY = 16


@attrs.frozen
class GraphUse:
    """
    One way to run a rank's actions of the schedule.

    Args:
        name: Name of this use in the report.
        what: Description of this use, in a sentence.
        graphs: Whether the library's CUDA graphs run the rank's actions.
        reuse: Whether the library reuses buffers.
        captured_by: The rank in whose order of actions the graphs are captured; by default the rank
            that runs them.
        taken: Whether each parameter gradient is added to a separate buffer at once, as Megatron
            does, instead of staying in `.grad`.
        late: How many forwards or backwards later a result is read, as a message in flight would
            read it.
        breaks: The condition that this use breaks; None for a correct use.
    """

    name: str
    what: str
    graphs: bool = True
    reuse: bool = False
    taken: bool = False
    captured_by: int = RANK
    late: int = 0
    breaks: str | None = None


GRAPH_USES = (
    GraphUse("native", "native eager", graphs=False),
    GraphUse("native again", "native eager, once more", graphs=False),
    GraphUse("graphs", "captured and replayed in the row's order"),
    GraphUse(
        "graphs, late",
        "captured and replayed in the row's order, each result read two actions later",
        late=2,
    ),
    GraphUse(
        "reuse, taken",
        "buffers reused, results read at once, gradients accumulated separately at once",
        reuse=True,
        taken=True,
    ),
    GraphUse(
        "reuse, kept",
        "buffers reused, results read at once, gradients kept in .grad",
        reuse=True,
        breaks="arena",
    ),
    GraphUse(
        "reuse, one late",
        "buffers reused, gradients accumulated separately at once, results read an action later",
        reuse=True,
        taken=True,
        late=1,
        breaks="ownership",
    ),
    GraphUse(
        "reuse, two late",
        "buffers reused, gradients accumulated separately at once, results read two actions later",
        reuse=True,
        taken=True,
        late=2,
        breaks="ownership",
    ),
    GraphUse(
        "exchanged",
        "captured in the other rank's order, replayed in this rank's order",
        captured_by=1,
        breaks="capture",
    ),
)
"""Every way to run a rank's row of the schedule, the reference first."""


@attrs.define
class _Record:
    """Digests of a run's results, and the name of the first result with a non-finite value."""

    digests: dict[str, str] = attrs.field(factory=dict)
    not_finite: str | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        held = tensor.detach().cpu()
        self.digests[name] = hashlib.sha256(raw_bits(held).numpy().tobytes()).hexdigest()[:16]
        if self.not_finite is None and not bool(torch.isfinite(held).all()):
            self.not_finite = name


@attrs.define
class _Late:
    """Results that are read some actions after they are available."""

    record: _Record
    after: int
    waiting: deque[tuple[str, Tensor]] = attrs.field(factory=deque)

    def give(self, name: str, tensor: Tensor) -> None:
        self.waiting.append((name, tensor.detach()))
        while len(self.waiting) > self.after:
            self.record.add(*self.waiting.popleft())

    def end(self) -> None:
        while self.waiting:
            self.record.add(*self.waiting.popleft())


def actions_of(rank: int) -> list[tuple[bool, int, int]]:
    """Every F and full backward of a rank's line in the schedule table, in the form that
    `full_backward_order` returns."""
    table = torch_schedule("ScheduleInterleaved1F1B", pp=PP, vpp=CHUNKS, microbatches=MICROBATCHES)
    return full_backward_order(Order.of_rank(table, rank))


def record_side(side: GraphUse) -> dict[str, Any]:
    """
    Train a few steps and return digests of every output, gradient and parameter.

    Raises:
        Exception: Any error of the library.
    """
    from ...backends.te import baselines

    recipe = baselines.delayed_scaling(HISTORY)
    layers = [baselines.layer(CONFIG, fused=False, seed=n) for n in range(CHUNKS)]
    shape = (CONFIG.sequence, CONFIG.batch, CONFIG.hidden)
    drawn = torch.Generator("cuda").manual_seed(1)

    def draw() -> Tensor:
        return torch.randn(shape, device="cuda", dtype=CONFIG.dtype, generator=drawn)

    cells = [(n, m) for n in range(CHUNKS) for m in range(MICROBATCHES)]
    forwards: Callable[[int, int], Any] = lambda n, m: layers[n]  # noqa: E731
    if side.graphs:
        order = [n + 1 if forward else -(n + 1) for forward, n, _ in actions_of(side.captured_by)]
        graphs = baselines.graphed(
            layers, draw(), MICROBATCHES, order, "chunks", recipe, reuse=side.reuse
        )
        forwards = lambda n, m: graphs[n * MICROBATCHES + m]  # noqa: E731
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    if side.taken:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_take)  # type: ignore[no-untyped-call]
    drawn.manual_seed(2)
    record = _Record()
    row = actions_of(RANK)
    for step in range(STEPS):
        given = {cell: draw() for cell in cells}
        gradients = {cell: draw() * 0.01 for cell in cells}
        late = _Late(record, side.late)
        for name, tensor in _run(row, recipe, forwards, given, gradients):
            late.give(f"step {step} {name}", tensor)
        late.end()
        for n, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                if side.taken:
                    parameter.grad, parameter.held = parameter.held, None  # type: ignore[attr-defined]
                assert parameter.grad is not None
                record.add(f"step {step} gradient {n} {name}", parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for n, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            record.add(f"parameter {n} {name}", parameter)
    return {"digests": record.digests, "not_finite": record.not_finite}


def _take(parameter: Tensor) -> None:
    """Add a gradient to the parameter's separate buffer, and clear `.grad`."""
    assert parameter.grad is not None
    held = getattr(parameter, "held", None)
    parameter.held = parameter.grad.clone() if held is None else held.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def _run(
    row: list[tuple[bool, int, int]],
    recipe: Any,
    forwards: Callable[[int, int], Any],
    given: Mapping[tuple[int, int], Tensor],
    gradients: Mapping[tuple[int, int], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """
    Run every F and full backward of a step; yield each output and input gradient once it is
    available.
    """
    from ...backends.te import baselines

    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    started: set[int] = set()
    for forward, n, m in row:
        cell = n, m
        if forward:
            inputs[cell] = given[cell].clone().requires_grad_()
            with baselines.autocast(recipe):
                y = forwards(n, m)(inputs[cell], is_first_microbatch=n not in started)
            outputs[cell] = y
            started.add(n)
            yield f"output {n} {m}", y
        else:
            torch.autograd.backward(outputs.pop(cell), gradients[cell])
            found = inputs.pop(cell).grad
            assert found is not None
            yield f"input gradient {n} {m}", found


def differences(reference: Mapping[str, str], found: Mapping[str, str]) -> dict[str, Any]:
    """
    The number of digests that differ, the number compared, and the name of the first differing
    digest.
    """
    names = [name for name in reference if reference[name] != found.get(name)]
    return {
        "compared": len(reference),
        "different": len(names),
        "first": names[0] if names else None,
    }
