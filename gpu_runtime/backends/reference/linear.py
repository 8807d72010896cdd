"""
A linear layer with FP8 operands. Its weight gradient is computed in the backward, or deferred to
dW.

Each layer is one matrix product, and therefore one `WgradUnit`, with one weight or several stacked
weights (split QKV). The weight is quantized into a cache at fixed addresses. F and dI read this
cache; dW does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..protocol import BackendError, Matrix, WgradUnit
from .scaling import QuantizedTensor, ReferenceDomain, ScalingState

Store = deque[tuple["ScaledLinear", tuple[QuantizedTensor, QuantizedTensor]]]
"""Deferred operands in the order in which dI queued them; a plain queue, as in Transformer
Engine.
"""


def product(
    a: QuantizedTensor, b: QuantizedTensor, *, a_t: bool = False, b_t: bool = False
) -> Tensor:
    """
    Multiply two FP8 operands in fp32. Their conversion to fp32 is exact, and the result is
    multiplied by both scales once.
    """
    left = a.data.float()
    right = b.data.float()
    result = (left.t() if a_t else left) @ (right.t() if b_t else right)
    return result.mul_(a.scale_inv * b.scale_inv)


def joined(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate the rows of several operands. All operands must have the same scale."""
    return QuantizedTensor(torch.cat([part.data for part in parts]), parts[0].scale_inv)


def write_gradient(value: Tensor, destination: Tensor, *, accumulate: bool) -> None:
    """
    Write an fp32 gradient to the destination tensor, or add it to the tensor. The result is rounded
    once, as in a fused product.
    """
    if accumulate:
        destination.copy_(torch.add(destination, value))
    else:
        destination.copy_(value)


class ScaledLinear(torch.nn.Module):
    """
    One FP8 product `x @ weight.t() + bias`.

    Args:
        name: The product's name within the stage.
        sizes: Number of rows of each stacked weight, by the weight's name.
        width: Number of input features.
        domain: The state domain (stages whose scales are updated together), which updates the
            product's scales.
        scaling: Forward and backward scaling state of the transformer layer that contains the
            product.
        first_index: Index of the product's input in the forward state; the weight has the next
            index. In the backward state, the output gradient has half this index.
        bias: Whether the product has a bias.
    """

    def __init__(
        self,
        name: str,
        sizes: Mapping[str, int],
        width: int,
        domain: ReferenceDomain,
        scaling: tuple[ScalingState, ScalingState],
        first_index: int,
        dtype: torch.dtype,
        generator: torch.Generator,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.domain = domain
        self.scaling_forward, self.scaling_backward = scaling
        self.index = first_index
        device = domain.device
        stacked = torch.randn(sum(sizes.values()), width, generator=generator) * 0.02
        rows: list[Matrix] = []
        start = 0
        for piece, size in sizes.items():
            stop = start + size
            weight = torch.nn.Parameter(stacked[start:stop].to(device, dtype))
            self.register_parameter(f"{piece}weight", weight)
            if bias:
                zeros = torch.zeros(size, device=device, dtype=dtype)
                self.register_parameter(f"{piece}bias", torch.nn.Parameter(zeros))
            rows.append(Matrix(f"{name}.{piece}weight", weight, start, stop))
            start = stop
        self.unit = WgradUnit(name, tuple(rows))
        self.pieces = tuple(sizes)
        self.biased = bias
        self.cache = QuantizedTensor(
            torch.zeros(start, width, device=device, dtype=self.scaling_forward.dtype),
            torch.ones((), device=device),
        )
        self.store: Store | None = None
        self.main_grad: Tensor | None = None
        self.overwrite = False
        self.quantized_at = 0
        self._filled = (self.cache, 0)

    def tie(self, other: ScaledLinear) -> None:
        """
        Use the weight of another product. Each product keeps its own cache and scales.

        Raises:
            BackendError: One of the two products stacks several weights, or the shapes differ.
        """
        mine, theirs = self.unit.matrices, other.unit.matrices
        if len(mine) > 1 or len(theirs) > 1 or mine[0].parameter.shape != theirs[0].parameter.shape:
            raise BackendError(
                f"cannot tie the weights of {self.unit.name} and {other.unit.name}: expected one "
                "matrix each, of equal shape"
            )
        (piece,) = self.pieces
        self.register_parameter(f"{piece}weight", theirs[0].parameter)
        own = attrs.evolve(mine[0], parameter=theirs[0].parameter)
        self.unit = attrs.evolve(self.unit, matrices=(own,))

    @staticmethod
    def product(wanted: QuantizedTensor, quantized: QuantizedTensor) -> Tensor:
        """Compute dW from the operands that dI retained."""
        return deferred_product(wanted, quantized)

    @staticmethod
    def join(
        operands: Sequence[tuple[QuantizedTensor, QuantizedTensor]],
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """
        Make the operands of one product from the operands of several microbatches with the same
        scales.
        """
        first, second = zip(*operands, strict=True)
        return joined(first), joined(second)

    @property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """The stacked weights."""
        return tuple(matrix.parameter for matrix in self.unit.matrices)

    @property
    def biases(self) -> tuple[torch.nn.Parameter, ...]:
        """The stacked biases; empty without a bias."""
        pieces = self.pieces if self.biased else ()
        return tuple(self.get_parameter(f"{piece}bias") for piece in pieces)

    def refresh(self) -> None:
        """
        Quantize the weight into the cache, in place. The next update of the scales takes the
        weight's amax (largest absolute value) into account.
        """
        with torch.no_grad():
            fresh = self.scaling_forward.quantize(torch.cat(self.weights), self.index + 1)
            self.cache.data.copy_(fresh.data)
            self.cache.scale_inv.copy_(fresh.scale_inv)
        cache, fills = self._filled
        self._filled = (self.cache, fills + 1 if cache is self.cache else 1)

    def take_fills(self) -> int:
        """Return how often the host has filled the current cache since the last call."""
        cache, fills = self._filled
        self._filled = (self.cache, 0)
        return fills if cache is self.cache else 0

    def forward(self, x: Tensor) -> Tensor:
        """Run F; all leading dimensions are flattened into rows."""
        flat = x.reshape(-1, x.shape[-1])
        result: Tensor = _Product.apply(flat, self, *self.weights, *self.biases)  # type: ignore[no-untyped-call]
        return result.view(*x.shape[:-1], result.shape[-1])

    def quantize_gradient(self, gradient: Tensor) -> QuantizedTensor:
        """
        Record the amax (largest absolute value) of an output gradient, and quantize the gradient.
        dI changes no other state of this product.
        """
        return self.scaling_backward.quantize(gradient, self.index // 2)


class _Product(torch.autograd.Function):
    """
    The product with its dI and dW. dW is computed at once, added to `main_grad`, or deferred.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear: ScaledLinear, *parameters: torch.nn.Parameter
    ) -> Tensor:
        scaling, domain = linear.scaling_forward, linear.domain
        if (again := domain.recomputing) is not None:
            quantized = scaling.requantize(x, linear.index, again.scales[id(scaling)])
        else:
            quantized = scaling.quantize(x, linear.index)
            linear.quantized_at = domain.rolls
        ctx.at = domain.rolls if again is None else again.at
        if not domain.in_forward:  # dI recomputes: it uses what is quantized here
            domain.use_scales(ctx.at)
        # A checkpoint recomputes what is saved for backward; live factors change before.
        ctx.live = None if scaling.live is None else quantized
        if ctx.live is None:
            ctx.save_for_backward(quantized.data, quantized.scale_inv)
        ctx.kept = (linear, linear.store, linear.overwrite)
        ctx.rolls = linear.domain.claim_first()
        ctx.dtype = x.dtype
        result = product(quantized, linear.cache, b_t=True)
        if linear.biased:
            result.add_(torch.cat(parameters[len(linear.pieces) :]))
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = output_gradients
        linear, store, overwrite = ctx.kept
        quantized = QuantizedTensor(*ctx.saved_tensors) if ctx.live is None else ctx.live
        wanted = linear.quantize_gradient(gradient)
        live = ctx.live is not None
        linear.domain.use_scales(linear.quantized_at if live else ctx.at)
        if live:  # dW must use the factors that dI reads here
            quantized = QuantizedTensor(quantized.data, quantized.scale_inv.clone())
        dx = product(wanted, linear.cache).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        biases: tuple[Tensor, ...] = ()
        if linear.biased:
            db = gradient.float().sum(0).to(ctx.dtype)
            biases = tuple(db[m.start : m.stop] for m in linear.unit.matrices)
        weights: tuple[Tensor | None, ...] = (None,) * len(linear.pieces)
        if store is not None:
            store.append((linear, (wanted, quantized)))
        else:
            value = product(wanted, quantized, a_t=True)
            if linear.main_grad is not None:
                write_gradient(value, linear.main_grad, accumulate=not overwrite)
            else:
                rounded = value.to(ctx.dtype)
                weights = tuple(rounded[m.start : m.stop] for m in linear.unit.matrices)
        if ctx.rolls:
            linear.domain.roll(forward=False)
        return dx, None, *weights, *biases


def deferred_product(wanted: QuantizedTensor, quantized: QuantizedTensor) -> Tensor:
    """Compute the weight gradient of one unit (matrix product) from the operands that dI kept."""
    return product(wanted, quantized, a_t=True)
