"""
A language model head for every backend. dI and dW are separate, and the head has no FP8 scaling
state.

F and dI read the weight directly, not from a cache, and no action uses a scale of another action.
Therefore the order of actions does not change the head's bits. `SplitHead` computes in the dtype of
the activations (bf16), as most models do. `DynamicHead` casts to FP8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .layers import LayerConfig
from .norms import norm_of
from .protocol import Matrix, NonMatrix, WgradUnit

__all__ = ["SplitHead"]

_SPREAD = 0.02

Store = deque[tuple["SplitHead", tuple[Any, Any]]]
"""Deferred operands in the order in which dI queued them."""

Join = Callable[[Sequence[Sequence[Any]]], Sequence[Any]]
"""Function that joins the operands of several microbatches into the operands of one product."""


class SplitHead(torch.nn.Module):
    """
    The final norm and the matrix product over the vocabulary.

    Args:
        config: Dimensions and dtype of the layers.
        vocabulary: Number of tokens in the vocabulary: the rows of the head's matrix.
        device: Device of the parameters.
        seed: Seed of the initial matrix, which is drawn on the CPU so that all devices get the same
            bits.

    Attributes:
        store: The queue into which dI puts the deferred product. None if one full backward computes
            both gradients.
        main_grad: The tensor to which the full backward adds the gradient; None for `.grad`.
        overwrite: Whether a full backward overwrites `main_grad` instead of adding.
    """

    def __init__(
        self, config: LayerConfig, vocabulary: int, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        self.name = "head"
        self.norm = norm_of(config, device)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(vocabulary, config.hidden, generator=generator) * _SPREAD
        self.weight = torch.nn.Parameter(values.to(device, config.dtype))
        self.unit = WgradUnit("head", (Matrix("head.weight", self.weight, 0, vocabulary),))
        self.store: Store | None = None
        self.main_grad: Tensor | None = None
        self.overwrite = False

    @property
    def linears(self) -> tuple[SplitHead, ...]:
        """The head's only product."""
        return (self,)

    @property
    def units(self) -> tuple[WgradUnit, ...]:
        """The head's only unit (deferred matrix product)."""
        return (self.unit,)

    def non_matrix(self) -> tuple[NonMatrix, ...]:
        """The norm's weight, and its bias if it has one."""
        named = self.norm.named_parameters()
        return tuple(NonMatrix(f"head.norm.{name}", parameter) for name, parameter in named)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of hidden states."""
        x = self.norm(x)
        if self.store is None:
            return self._full(x)
        logits: Tensor = _Split.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return logits

    def _full(self, x: Tensor) -> Tensor:
        """
        Run the library's own product with an alias of the weight, and pass on the alias's gradient.
        """
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
        return self.whole(x, alias)

    def whole(self, x: Tensor, weight: Tensor) -> Tensor:
        """
        Run torch's own product; in a `DynamicHead`, TorchAO's. Its backward computes both gradients
        at once. Tests compare this full backward with the split backward.
        """
        return functional.linear(x, weight)

    def cast(self, tensor: Tensor, dtype: str, role: str) -> Any:
        """
        Convert one operand to the form in which the products read it.

        Args:
            tensor: The operand.
            dtype: The library's name of the cast: `input`, `weight`, `weight_for_grad_input` or
                `grad_output`.
            role: The library's name for the operand's role in a product.
        """
        return tensor

    @staticmethod
    def product(wanted: Any, given: Any) -> Tensor:
        """Compute dW: the gradient of the matrix, from the operands that F and dI have cast."""
        return torch.mm(wanted.t(), given)

    @property
    def join(self) -> Join | None:
        """
        The function that joins the operands of several microbatches; None if each microbatch has
        its own scale.
        """
        return _one_behind_the_other

    @staticmethod
    def write(value: Tensor, destination: Tensor, *, accumulate: bool) -> Tensor:
        """
        Write a gradient to the destination tensor, or add it to the tensor, as autograd adds to
        `.grad`.
        """
        return destination.add_(value) if accumulate else destination.copy_(value)

    def refresh(self) -> None:
        """Do nothing, because F reads the weight directly and not from a cache."""


def _one_behind_the_other(operands: Sequence[Sequence[Any]]) -> list[Tensor]:
    """
    Concatenate the rows (tokens) of all microbatches, in order, for each operand of the product.
    """
    return [torch.cat(list(parts)) for parts in zip(*operands, strict=True)]


class _Split(torch.autograd.Function):
    """The product with its dI; the backward queues dW in the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: SplitHead) -> Tensor:
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
