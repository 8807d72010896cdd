"""A kernel that writes matrices side by side into one, at the speed of memory (`packing`)."""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

MOST_BLOCKS = 8
"""Matrices per launch: the kernel takes their addresses as arguments, as graphs need them."""
_WIDEST = 128
_WORDS = 1024


# Only the width is specialized: then a launch on one small matrix compiles the kernel for all.
@triton.jit(do_not_specialize=["height", "total"])  # type: ignore[untyped-decorator,misc,unused-ignore]
def _side_by_side(  # type: ignore[no-untyped-def]
    out,
    block_0,
    block_1,
    block_2,
    block_3,
    block_4,
    block_5,
    block_6,
    block_7,
    height,
    width,
    total,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(2)
    block = block_0
    if place == 1:
        block = block_1
    if place == 2:
        block = block_2
    if place == 3:
        block = block_3
    if place == 4:
        block = block_4
    if place == 5:
        block = block_5
    if place == 6:
        block = block_6
    if place == 7:
        block = block_7
    # `packing.suits` asks for addresses that are multiples of 16: loads are vectors then.
    block = tl.multiple_of(block, 16)
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (rows < height) & (columns < width)
    words = tl.load(block + (rows * width + columns), mask=inside)
    stride = width * total
    tl.store(out + (rows * stride + (place * width + columns)), words, mask=inside)


def launch(blocks: Sequence[Tensor], out: Tensor) -> None:
    """
    Write matrices side by side.

    Args:
        blocks: Contiguous matrices of one shape, of int64 words, at multiples of 16 bytes.
        out: Contiguous matrix of as many rows, as wide as all blocks together.
    """
    height, width = blocks[0].shape
    columns = min(triton.next_power_of_2(width), _WIDEST)
    rows = _WORDS // columns
    for begin in range(0, len(blocks), MOST_BLOCKS):
        part = list(blocks[begin : begin + MOST_BLOCKS])
        unused = [part[0]] * (MOST_BLOCKS - len(part))
        grid = (triton.cdiv(height, rows), triton.cdiv(width, columns), len(part))
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _side_by_side[grid](
                out[:, begin * width :],
                *part,
                *unused,
                height,
                width,
                len(blocks),
                ROWS=rows,
                COLUMNS=columns,
                num_warps=4,
            )
