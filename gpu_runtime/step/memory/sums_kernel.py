"""
A kernel for finalize. It sums the buffers of many matrices in order, and reads each buffer once.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

BLOCK = 2048
_ELEMENTS = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def _sum_in_order(table, TERMS: tl.constexpr, ELEMENT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = table + tl.program_id(1) * (TERMS + 1)
    # `finalize.suits` asks that sizes and addresses are multiples of 16: loads are vectors then.
    count = tl.multiple_of(tl.load(row), 16)
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = offsets < count
    first = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(ELEMENT)), 16)
    total = tl.load(first + offsets, mask=inside)
    for n in tl.static_range(1, TERMS):
        term = tl.multiple_of(tl.load(row + 1 + n).to(tl.pointer_type(ELEMENT)), 16)
        value = tl.load(term + offsets, mask=inside)
        # Rounded after every term, as separate additions do.
        total = (total.to(tl.float32) + value.to(tl.float32)).to(ELEMENT)
    tl.store(first + offsets, total, mask=inside)


def launch(table: Tensor, terms: int, dtype: Any, most: int) -> None:
    """
    Add up the terms of every matrix. The table contains the addresses of the terms; the sum is
    written to the first address.

    Args:
        table: For each matrix, one line of numbers: its number of elements, then the addresses of
            the terms of its sum, in order.
        terms: Number of terms in the sum of each matrix.
        dtype: Type of the elements.
        most: Elements of the largest matrix.
    """
    grid = (triton.cdiv(most, BLOCK), table.shape[0])
    element = _ELEMENTS[str(dtype).removeprefix("torch.")]
    with torch.cuda.device_of(table):  # type: ignore[no-untyped-call]
        _sum_in_order[grid](table, TERMS=terms, ELEMENT=element, SIZE=BLOCK, enable_fp_fusion=False)
