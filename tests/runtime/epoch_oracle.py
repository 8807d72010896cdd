"""
An oracle for scales that are updated once per epoch: plain torch, written from the recipe's
description.

The oracle runs one microbatch after another, F and then a full backward, and has no stages, slots,
tapes, runtimes or backends. Its quantization is its own code:

* Every cast takes the maximum of its tensor's amax into the open entry of the tensor's history. *
The cast multiplies by the tensor's scale, saturates, and rounds to E4M3 (inputs and weights) or
E5M2 (output gradients). A product of two casts is exact in fp32 up to its sum, and is then
multiplied by both inverse scales. * The scales move once, at the end of an epoch: a scale is the
inverse of the largest amax of the last `length` epochs, rounded to fp32, times the format's largest
value. An amax of zero does not change the scale. * A weight is cast once per epoch, before its
first use.

Weight gradients add up in the order of microbatches, rounded to bf16 after each product; other
gradients add up in bf16. In a recipe with groups, the concatenated casts of several microbatches
are the operands of one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn, 448.0
E5M2 = torch.float8_e5m2, 57344.0
MOST_WALKS, SETTLED = 16, 2.0


class Gauge:
    """One tensor's scale and the amaxes of its last epochs, the newest last."""

    def __init__(self, kind: tuple[torch.dtype, float], length: int) -> None:
        self.kind, self.length = kind, length
        self.scale = torch.tensor(1.0)
        self.open = 0.0
        self.closed: list[float] = []

    def cast(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The quantized values as fp32, and the inverse scale."""
        dtype, limit = self.kind
        self.open = max(self.open, float(value.detach().abs().max()))
        scaled = torch.clamp(value.detach().float() * self.scale, -limit, limit)
        return scaled.to(dtype).float(), 1.0 / self.scale

    def move(self) -> None:
        """End an epoch."""
        largest = max(self.open, *self.closed[-(self.length - 1) :], 0.0)
        self.closed = [*self.closed, self.open][-(self.length - 1) :]
        self.open = 0.0
        if largest > 0.0 and math.isfinite(largest):
            self.scale = (1.0 / torch.tensor(largest)) * self.kind[1]


class Linear:
    """
    A matrix product with its three gauges, the weight as cast at the beginning of the epoch, and
    dW.
    """

    def __init__(self, weight: Tensor, bias: Tensor, length: int, group: int) -> None:
        self.weight, self.bias = weight, bias
        self.group = group
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.x, self.w = Gauge(E4M3, length), Gauge(E4M3, length)
        self.g = Gauge(E5M2, length)
        self.cached: tuple[Tensor, Tensor] | None = None
        self.total: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        made = _Multiply.apply(flat, self.bias, self)  # type: ignore[no-untyped-call]
        return made.reshape(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    def add(self, gradient: Tensor, x: Tensor, factor: Tensor) -> None:
        """Keep a microbatch's casts; multiply those of a whole group, add, and round."""
        self.kept.append((gradient, x))
        if len(self.kept) < self.group:
            return
        gradients, inputs = (torch.cat(one) for one in zip(*self.kept, strict=True))
        self.kept.clear()
        product = (gradients.t() @ inputs) * factor
        if self.total is None:
            self.total = product.bfloat16()
        else:
            self.total = (self.total.float() + product).bfloat16()


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, linear: Linear) -> Tensor:
        if linear.cached is None:
            linear.cached = linear.w.cast(linear.weight)
        quantized, inverse = linear.x.cast(x)
        weight, weight_inverse = linear.cached
        ctx.kept = linear, quantized, inverse, weight, weight_inverse
        made = (quantized @ weight.t()) * (inverse * weight_inverse)
        return (made + bias.detach().float()).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        linear, x, x_inverse, weight, weight_inverse = ctx.kept
        (gradient,) = gradients
        quantized, inverse = linear.g.cast(gradient)
        linear.add(quantized, x, inverse * x_inverse)
        dx = (quantized @ weight) * (inverse * weight_inverse)
        return dx.bfloat16(), gradient.float().sum(0).bfloat16(), None


class Oracle:
    """
    Layers, and AdamW over their parameters.

    Args:
        weights: Initial values by name: ``layers.0.qkv.weight`` and so on.
        heads: Attention heads.
        length: Epochs that a history covers.
        group: Microbatches whose weight gradient is one product.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], heads: int, length: int, group: int = 1
    ) -> None:
        self.heads = heads
        self.named = {
            name: value.detach().clone().requires_grad_() for name, value in weights.items()
        }
        self.linears = {
            name.removesuffix(".weight"): Linear(
                self.named[name], self.named[name.replace("weight", "bias")], length, group
            )
            for name, value in self.named.items()
            if value.dim() == 2
        }
        self.layers = sorted({int(name.split(".")[1]) for name in self.named})
        self.adamw = torch.optim.AdamW(self.named.values(), lr=1e-3, fused=True)

    def gauges(self) -> dict[str, Gauge]:
        """Every gauge, by the name of its product and of the tensor that it casts."""
        return {
            f"{name}.{kind}": getattr(linear, kind)
            for name, linear in self.linears.items()
            for kind in "xwg"
        }

    def forward(self, x: Tensor) -> Tensor:
        """F of all layers."""
        for n in self.layers:
            p = f"layers.{n}"
            mixed = self._attend(self.linears[f"{p}.qkv"](self._norm(x, f"{p}.norm1")))
            x = x + self.linears[f"{p}.proj"](mixed)
            hidden = functional.gelu(self.linears[f"{p}.fc1"](self._norm(x, f"{p}.norm2")))
            x = x + self.linears[f"{p}.fc2"](hidden)
        return x

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.named[f"{name}.weight"], self.named[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias)

    def _attend(self, qkv: Tensor) -> Tensor:
        sequence, batch, width = qkv.shape
        parts = qkv.chunk(3, -1)
        q, k, v = (p.view(sequence, batch, self.heads, -1).permute(1, 2, 0, 3) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(sequence, batch, width // 3)

    def run(self, batches: Sequence[Callable[[Oracle], None]]) -> None:
        """F and the full backward of every microbatch, in order."""
        for linear in self.linears.values():
            linear.cached = linear.total = None
        for batch in batches:
            batch(self)

    def calibrate(self, batches: Sequence[Callable[[Oracle], None]]) -> int:
        """Run the calibration passes before the first step of a run; return their number."""
        for number in range(1, MOST_WALKS + 1):
            for gauge in self.gauges().values():
                gauge.closed.clear()
            self.run(batches)
            self._drop()
            seen = all(gauge.open > 0.0 for gauge in self.gauges().values())
            before = {name: float(gauge.scale) for name, gauge in self.gauges().items()}
            self.move()
            moved = [float(gauge.scale) / before[name] for name, gauge in self.gauges().items()]
            if seen and all(1 / SETTLED <= factor <= SETTLED for factor in moved):
                return number
        return MOST_WALKS

    def step(self, batches: Sequence[Callable[[Oracle], None]]) -> None:
        """Run one epoch: all microbatches, AdamW, and the single update of the scales."""
        self.run(batches)
        for linear in self.linears.values():
            linear.weight.grad = linear.total
        self.adamw.step()
        self._drop()
        self.move()

    def move(self) -> None:
        """Move every scale once."""
        for gauge in self.gauges().values():
            gauge.move()

    def _drop(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


def state_of(oracle: Oracle) -> dict[str, Tensor]:
    """The oracle's scales and histories, under the names that a backend's stage gives them."""
    parts = ("qkv", "proj", "fc1", "fc2")
    found: dict[str, Tensor] = {}
    for n in oracle.layers:
        held = [oracle.linears[f"layers.{n}.{part}"] for part in parts]
        for way, gauges in (
            ("forward", [gauge for one in held for gauge in (one.x, one.w)]),
            ("backward", [one.g for one in held]),
        ):
            columns = [
                [gauge.open, *[0.0] * (gauge.length - 1 - len(gauge.closed)), *gauge.closed]
                for gauge in gauges
            ]
            found[f"layers.{n}.{way}.amax_history"] = torch.tensor(columns).t().contiguous()
            found[f"layers.{n}.{way}.scale"] = torch.stack([gauge.scale for gauge in gauges])
    return found
