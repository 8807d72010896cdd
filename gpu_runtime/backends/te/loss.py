"""The mean cross entropy of logits, computed by Transformer Engine's kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .domain import library

__all__ = ["mean_cross_entropy"]

_CHUNK = 1 << 18
"""Number of elements that one block of the library's product multiplies."""


@cache
def _overwrites(function: Callable[..., Tensor]) -> bool:
    """Whether the library's function can overwrite the logits: 2.20 can; 2.18 and 2.19 cannot."""
    return "overwrite_input" in inspect.signature(function).parameters


class _Mean(torch.autograd.Function):
    """
    The mean, with the kernels of Transformer Engine 2.18: F also computes the logits' gradient, in
    fp32.

    The library's own backward multiplies this gradient by the loss's gradient in one pass, and
    autograd rounds the product in a second pass. Here one pass does both. The bits are the same,
    except that the library's product takes subnormal numbers for zero.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        run = library().cross_entropy_forward
        mean, gradient = run(logits, targets, 0.0, True, None, -100)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        found: Tensor = mean
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        product = torch.empty_like(gradient, dtype=ctx.dtype)
        # The flag would tell of values that are not finite; they are multiplied too.
        flag = torch.zeros(1, dtype=torch.int32, device=gradient.device)
        tensors = [[gradient], [product]]
        library().multi_tensor_scale_tensor(_CHUNK, flag, tensors, output_gradients[0])
        return product, None


def mean_cross_entropy(logits: Tensor, targets: Tensor, *, overwrite: bool = False) -> Tensor:
    """
    Compute the mean negative log likelihood of a microbatch, in fp32. The backward can run only
    once.

    Args:
        logits: A bf16 or fp32 tensor, with the vocabulary as last dimension. The forward does not
            change the logits.
        targets: The token that follows each position, int64. A position with the value -100 is left
            out.
        overwrite: Whether the backward may write the logits' gradient over the logits. From version
            2.20 on, the library then does not copy the logits.
    """
    rows, flat = logits.reshape(1, -1, logits.shape[-1]), targets.reshape(1, -1)
    function = library().te.parallel_cross_entropy
    if _overwrites(function):
        overwrite = overwrite and rows.is_contiguous()  # as the library requires
        mean: Tensor = function(rows, flat, reduce_loss=True, overwrite_input=overwrite)
    else:
        mean = _Mean.apply(rows, flat)  # type: ignore[no-untyped-call]
    return mean.reshape(())
