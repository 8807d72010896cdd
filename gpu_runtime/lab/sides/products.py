"""
Measure the weight gradients of one layer's four matrices, once with one matrix product per
microbatch, and once with one product for all microbatches.

Transformer Engine multiplies FP8 operands with fixed scales, in replays of CUDA graphs. The
distance of each result from a sum in fp64 shows how grouping changes the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.layers import LayerConfig
from ...backends.te import joining
from ...backends.te.product import quantized_operands, wgrad
from ...step.memory.numerical_state import same_bits
from ..runner.rank_parts import device_ms

__all__ = ["DESTINATIONS", "product_rows"]

DESTINATIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Data types of gradient destinations, by name."""


def product_rows(config: LayerConfig, microbatches: int) -> Iterator[dict[str, Any]]:
    """
    Measure one layer on the current CUDA device; this function needs Transformer Engine.

    Args:
        config: Dimensions of the layer.
        microbatches: Number of microbatches in the group.

    Yields: For each type of destination, three times in milliseconds, summed over the matrices:
        `each` (one product per microbatch), `join` (joining the operands) and `one` (one product
        for all microbatches). Also the relative distances of the results of `each` and `one` from
        the sum in fp64, and the number of matrices for which both results have the same bits.
    """
    tokens = config.sequence * config.batch
    shapes = matrices_of(config)
    for name, dtype in DESTINATIONS.items():
        times = dict.fromkeys(("each", "join", "one"), 0.0)
        apart = {"each": [0.0, 0.0], "one": [0.0, 0.0]}
        same = 0
        for rows, width in shapes:
            drawn = [quantized_operands(tokens, rows, width, seed=n) for n in range(microbatches)]
            each, one = (
                torch.zeros(rows, width, dtype=dtype, device=drawn[0][0].device) for _ in range(2)
            )
            joined = joining.join(drawn)
            times["each"] += _replayed(lambda: _add_all(drawn, each))  # noqa: B023
            times["join"] += _replayed(lambda: joining.join(drawn))  # noqa: B023
            times["one"] += _replayed(lambda: wgrad(joined, one, accumulate=False))  # noqa: B023
            _add_all(drawn, each)
            wgrad(joined, one, accumulate=False)
            exact = _exact(drawn)
            for kind, found in (("each", each), ("one", one)):
                apart[kind][0] += float((found.double() - exact).square().sum())
                apart[kind][1] += float(exact.square().sum())
            same += same_bits(each, one)
        yield {
            "dtype": name,
            "tokens": tokens,
            "microbatches": microbatches,
            "matrices": len(shapes),
            "ms": times,
            "apart": {kind: (a / b) ** 0.5 for kind, (a, b) in apart.items()},
            "same_bits": same,
        }


def matrices_of(config: LayerConfig) -> list[tuple[int, int]]:
    """Rows and columns of a layer's four matrices: QKV, projection, FC1 and FC2."""
    h, ffn = config.hidden, config.ffn
    return [(3 * h, h), (h, h), (ffn, h), (h, ffn)]


def _add_all(drawn: Sequence[Sequence[Any]], out: Tensor) -> None:
    for n, operands in enumerate(drawn):
        wgrad(operands, out, accumulate=n > 0)


def _exact(drawn: Sequence[Sequence[Any]]) -> Tensor:
    """The weight gradient in fp64."""
    total: Any = 0.0
    for x, gradient in drawn:
        left, right = (one.dequantize(dtype=torch.float32).double() for one in (gradient, x))
        total = total + left.t() @ right
    found: Tensor = total
    return found


def _replayed(act: Callable[[], object]) -> float:
    """Device time of a captured call in milliseconds."""
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return device_ms(graph.replay)
