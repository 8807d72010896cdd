"""
Two kernels for the device's counters, of one thread block each: one counts an action, one compares
all counters.

Torch's own operations (in `counters.py`) give the same counts, but need four times as many
launches. Every captured action and every update contains one of these kernels, so the number of
launches matters.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _count(values, terms, factors, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE
    value = tl.load(values + offsets, mask=inside)
    term = tl.load(terms + offsets, mask=inside)
    factor = tl.load(factors + offsets, mask=inside)
    tl.store(values + offsets, value * factor + term, mask=inside)


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _compare(values, expected, read, skip, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE
    value = tl.load(values + offsets, mask=inside, other=0)
    wanted = tl.load(expected + offsets, mask=inside, other=0)
    differs = tl.max((value != wanted).to(tl.int32), axis=0)
    tl.store(read + offsets, value, mask=inside)
    tl.store(skip, differs.to(tl.float32))


def count(values: Tensor, terms: Tensor, factors: Tensor) -> None:
    """
    Multiply the counters by the factors and add the terms, in place; integers wrap around.

    Args:
        values: Counters, int64, on the device.
        terms: One int64 value per counter.
        factors: One int64 value per counter.
    """
    size = values.numel()
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _count[(1,)](values, terms, factors, SIZE=size, BLOCK=block_of(size), num_warps=1)


def compare(values: Tensor, expected: Tensor, read: Tensor, skip: Tensor) -> None:
    """
    Compare the counters with the expected values, and copy them into host memory.

    Args:
        values: Counters, int64, on the device.
        expected: One int64 value per counter, in pinned host memory.
        read: One int64 value per counter, in pinned host memory; overwritten.
        skip: Float32 scalar on the device; set to 1 if any counter differs, else 0.
    """
    size = values.numel()
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _compare[(1,)](values, expected, read, skip, SIZE=size, BLOCK=block_of(size), num_warps=1)


def block_of(size: int) -> Any:
    """Return the smallest power of two that is at least `size`, as the block size."""
    return triton.next_power_of_2(size)
