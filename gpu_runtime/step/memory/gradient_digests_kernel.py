"""A kernel that computes the digest of a tensor in one pass (see `gradient_digests.py`)."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from .word_hash import FIRST, LOW, PLACE, SECOND, SHIFT

SIZE = 4096
"""Words per thread block."""
_PLACE, _FIRST, _SECOND = tl.constexpr(PLACE), tl.constexpr(FIRST), tl.constexpr(SECOND)
_SHIFT, _LOW = tl.constexpr(SHIFT), tl.constexpr(LOW)


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _digest(words, total, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = offsets < count
    word = tl.load(words + offsets, mask=inside, other=0).to(tl.int64)
    mixed = word ^ (offsets * _PLACE)
    mixed = (mixed ^ ((mixed >> _SHIFT) & _LOW)) * _FIRST
    mixed = (mixed ^ ((mixed >> _SHIFT) & _LOW)) * _SECOND
    mixed = mixed ^ ((mixed >> _SHIFT) & _LOW)
    own = tl.sum(tl.where(inside, mixed, tl.zeros_like(mixed)), axis=0)
    tl.atomic_add(total, own, sem="relaxed")


def add_digest(words: Tensor, total: Tensor) -> None:
    """
    Add a tensor's digest to a number on the device.

    Args:
        words: The tensor's bits as a contiguous one-dimensional tensor of integers.
        total: The number to which the digest is added: an int64 scalar; sums wrap around.
    """
    if words.numel():
        grid = (triton.cdiv(words.numel(), SIZE),)
        with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
            _digest[grid](words, total, words.numel(), SIZE=SIZE, num_warps=8)
