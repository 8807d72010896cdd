"""The mean cross entropy of logits, computed by Transformer Engine's kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial

from torch import Tensor

from .domain import library

__all__ = ["mean_cross_entropy"]


@cache
def _in_graphs(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Wrap the library's function so that it returns the mean and can be captured in a graph."""
    # 2.18 has to be told of graphs; 2.20 has not, and warns of the option.
    told = "overwrite_input" not in inspect.signature(function).parameters
    return partial(function, reduce_loss=True, **({"is_cg_capturable": True} if told else {}))


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """
    Compute the mean negative log likelihood of a microbatch, in fp32; only one backward is
    possible.

    Args:
        logits: A bf16 or fp32 tensor, with the vocabulary as last dimension; F does not change the
            logits.
        targets: The token that follows each position, int64; -100 leaves a position out.
    """
    mean = _in_graphs(library().te.parallel_cross_entropy)
    found = mean(logits.reshape(1, -1, logits.shape[-1]), targets.reshape(1, -1))
    return found.reshape(())
