"""
A head as TorchAO's `Float8Linear` with dynamic scaling, with dI and dW split, for every backend.

Each action casts the operands that it reads, each with a scale from its own amax. So the head has
no history, no scale that outlives an action and no weight cache: it has no state in a state domain,
and the order of actions does not change its bits. Casts and products are the library's own
functions in the library's own order, and its full backward (`Float8Linear`) is the oracle.

dI casts the weight again, as the library does, since the cast of F is not kept. dW multiplies the
input as cast in F by the output gradient as cast in dI; the library would cast the same values once
more.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .layers import LayerConfig
from .protocol import BackendError, Matrix, NonMatrix, WgradUnit

__all__ = ["DynamicHead", "library"]

_SPREAD = 0.02

Store = deque[tuple["DynamicHead", tuple[Any, Any]]]
"""Deferred operands in the order in which dI queued them."""


@cache
def library() -> SimpleNamespace:
    """
    The parts of TorchAO that are used, imported on first use.

    Raises:
        BackendError: TorchAO is not installed, or lacks a name that is used here.
    """
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole
    except (ImportError, OSError) as error:
        raise BackendError(
            f"TorchAO cannot be imported ({error}); install 'qeffect[torchao]', or use the head "
            "of the layers' own library"
        ) from error
    return SimpleNamespace(
        Config=Float8LinearConfig,
        Linear=Float8Linear,
        cast=hp_tensor_to_float8_dynamic,
        Role=GemmInputRole,
    )


class DynamicHead(torch.nn.Module):
    """
    Final norm and the product over the vocabulary.

    On a CPU the library emulates its products: operands in float8, multiplied in fp32.

    Args:
        config: Dimensions and type.
        vocabulary: Rows of the product.
        device: Device of the parameters.
        seed: Seed of the matrix, which is drawn on the CPU so that devices agree.

    Attributes:
        store: Where dI queues the deferred product; None for the library's own full backward.
        main_grad: Where the full backward adds the gradient; None for `.grad`.
        overwrite: Whether a full backward overwrites instead of adding.

    Raises:
        BackendError: TorchAO is not installed.
    """

    def __init__(
        self, config: LayerConfig, vocabulary: int, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        self._lib = library()
        self.name = "head"
        self.norm = torch.nn.LayerNorm(config.hidden, device=device, dtype=config.dtype)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(vocabulary, config.hidden, generator=generator) * _SPREAD
        self.weight = torch.nn.Parameter(values.to(device, config.dtype))
        self.unit = WgradUnit("head", (Matrix("head.weight", self.weight, 0, vocabulary),))
        linear = torch.nn.Linear(config.hidden, vocabulary, bias=False, device="meta")
        # Not a submodule: it shares this module's weight, which must be named only once.
        self._whole = (
            self._lib.Linear.from_float(linear, self._lib.Config(emulate=device.type == "cpu")),
        )
        self.store: Store | None = None
        self.main_grad: Tensor | None = None
        self.overwrite = False

    @property
    def linears(self) -> tuple[DynamicHead, ...]:
        """The one product."""
        return (self,)

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """The one unit."""
        return (self.unit,)

    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The norm's weight and bias."""
        named = self.norm.named_parameters()
        return tuple(NonMatrix(f"head.norm.{name}", parameter) for name, parameter in named)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of hidden states."""
        x = self.norm(x)
        if self.store is None:
            return self._full(x)
        logits: Tensor = _Split.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return logits

    def _full(self, x: Tensor) -> Tensor:
        """The library's own module over an alias of the weight; passes on the alias's gradient."""
        alias = self.weight.detach().requires_grad_()
        overwrite = self.overwrite

        def take(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            if self.main_grad is not None:
                self.write(gradient, self.main_grad, accumulate=not overwrite)
            elif self.weight.grad is None:
                self.weight.grad = gradient
            else:
                self.weight.grad.add_(gradient)

        alias.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        logits: Tensor = torch.func.functional_call(self._whole[0], {"weight": alias}, (x,))
        return logits

    def cast(self, tensor: Tensor, dtype: str, role: str) -> Any:
        """One operand in float8, scaled by its own amax, as the library casts it."""
        config = self._whole[0].config
        granted = getattr(config, f"cast_config_{dtype}")
        return self._lib.cast(
            tensor,
            granted.target_dtype,
            self._whole[0].linear_mm_config,
            gemm_input_role=self._lib.Role[role],
            scaling_granularity=granted.scaling_granularity,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )

    @staticmethod
    def product(wanted: Any, given: Any) -> Tensor:
        """dW: the gradient of the matrix, from the operands that F and dI have cast."""
        return torch.mm(wanted.t(), given)

    @staticmethod
    def write(value: Tensor, destination: Tensor, *, accumulate: bool) -> Tensor:
        """Store a gradient, or add it, as autograd adds to `.grad`."""
        return destination.add_(value) if accumulate else destination.copy_(value)

    def refresh(self) -> None:
        """Nothing: F reads the weight itself."""


class _Split(torch.autograd.Function):
    """The product and its dI; dW is queued in the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: DynamicHead) -> Tensor:
        given = head.cast(x, "input", "INPUT").reshape(-1, x.shape[-1])
        ctx.kept = given, head, head.store
        ctx.save_for_backward(weight)
        logits = torch.mm(given, head.cast(weight.t(), "weight", "WEIGHT"))
        return logits.reshape(*x.shape[:-1], logits.shape[-1])

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = output_gradients
        given, head, store = ctx.kept
        (weight,) = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        wanted = head.cast(flat, "grad_output", "GRAD_OUTPUT")
        dx = torch.mm(wanted, head.cast(weight.t(), "weight_for_grad_input", "WEIGHT").t())
        store.append((head, (wanted, given)))
        return dx.reshape(*gradient.shape[:-1], dx.shape[-1]), None, None
