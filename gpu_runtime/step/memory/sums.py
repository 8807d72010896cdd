"""
The sum of gradients over the M microbatches of an optimizer step. If the device can run the kernel,
one pass over all buffers computes the sum; otherwise separate additions do.

Per element of the result, `M - 1` separate additions read and write `3 (M - 1)` elements. The
kernel reads every buffer once, so it reads and writes `M + 1` elements. The kernel adds in the same
order as separate additions, and also rounds to the buffers' type after every term, so the bits are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_TERMS = 16
"""Largest number of terms per launch; a sum of more terms takes several launches."""
_MULTIPLE = 16
_CHECKED = 4096

Launcher = Callable[[Tensor, int, torch.dtype, int], None]
"""Arguments: a table of addresses (one row per matrix), the number of terms per row, the elements'
type, and the number of elements of the largest matrix."""


def add_up(sets: Sequence[Sequence[Tensor]]) -> None:
    """Add all later sets of buffers to the first set, one after another."""
    total = list(sets[0])
    for term in sets[1:]:
        torch._foreach_add_(total, list(term))


class Launch(NamedTuple):
    """
    One kernel launch, with a row of addresses per matrix. The sum is written to a row's first
    address.
    """

    rows: tuple[tuple[int, ...], ...]
    terms: int


def launches(sets: Sequence[Sequence[Tensor]]) -> tuple[Launch, ...]:
    """
    Return the kernel launches that add all sets to the first set, in order.

    Each row holds a matrix's number of elements and the addresses of its terms. A sum of more than
    `MOST_TERMS` terms takes several launches; each later launch continues from the result in the
    first buffer.
    """
    found = []
    begin = 1
    while begin < len(sets):
        part = (sets[0], *sets[begin : begin + MOST_TERMS - 1])
        rows = tuple(
            (terms[0].numel(), *(term.data_ptr() for term in terms))
            for terms in zip(*part, strict=True)
        )
        found.append(Launch(rows, len(part)))
        begin += MOST_TERMS - 1
    return tuple(found)


def suits(sets: Sequence[Sequence[Tensor]]) -> bool:
    """
    Whether the kernel can add the sets. All buffers must have one supported dtype, equal sizes, and
    be contiguous and aligned.
    """
    first = sets[0][0]
    return first.dtype in DTYPES and all(
        term.dtype == first.dtype
        and term.device == first.device
        and term.numel() == own.numel()
        and term.is_contiguous()
        and term.numel() % _MULTIPLE == 0
        and term.data_ptr() % _MULTIPLE == 0
        for terms in sets
        for own, term in zip(sets[0], terms, strict=True)
    )


def compiled(num_sets: int, dtype: torch.dtype, device: torch.device) -> Launcher:
    """
    Compile the kernel for sums of `num_sets` terms, and compare its result with separate additions
    on a small example.

    Raises:
        RuntimeError: The kernel's result differs in bits from the result of separate additions.
        Exception: Any error of the compiler, for example if a part of it is missing.
    """
    from .sums_kernel import launch

    drawn = torch.Generator().manual_seed(0)
    sets = [[torch.randn(_CHECKED, generator=drawn).to(device, dtype)] for _ in range(num_sets)]
    by_adds = [[term.clone() for term in terms] for terms in sets]
    add_up(by_adds)
    for part in launches(sets):
        launch(torch.tensor(part.rows, device=device), part.terms, dtype, _CHECKED)
    if not torch.equal(sets[0][0], by_adds[0][0]):
        raise RuntimeError("one pass over the gradients gives other bits than separate additions")
    return launch


@attrs.define(eq=False)
class OrderedSum:
    """
    Adds up the buffers of one stage, with the kernel if the device and the buffers support it.

    Args:
        device: Device of the buffers.
        launch: The compiled kernel. With None, sets are added one after another.
        obstacle: Why the kernel is missing, in one line.
    """

    device: torch.device
    launch: Launcher | None = None
    obstacle: str = "not asked for"
    _addresses: list[int] = attrs.field(init=False, factory=list)
    _tables: list[tuple[Tensor, int]] = attrs.field(init=False, factory=list)
    _most: int = attrs.field(init=False, default=0)

    @classmethod
    def prepared(cls, num_sets: int, dtype: torch.dtype, device: torch.device) -> OrderedSum:
        """
        Compile the kernel now, before the first step; if compilation fails, keep the reason and use
        `add_up`.
        """
        if num_sets < 2 or device.type != "cuda" or dtype not in DTYPES:
            return cls(device, None, f"{num_sets} sets of {dtype} on {device}")
        try:
            return cls(device, compiled(num_sets, dtype, device), "")
        except Exception as error:  # a compiler can fail in any way; additions give the same bits
            return cls(device, None, f"{type(error).__name__}: {error}".splitlines()[0])

    def __call__(self, sets: Sequence[Sequence[Tensor]]) -> None:
        """
        Add all later sets of buffers to the first set, in order.

        Args:
            sets: One set per microbatch, with one buffer per matrix. Each set contains the same
                matrices.
        """
        if len(sets) < 2:
            return
        if self.launch is None or not self._tabled(sets):
            add_up(sets)
            return
        for table, terms in self._tables:
            self.launch(table, terms, sets[0][0].dtype, self._most)

    def _tabled(self, sets: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the kernel can add the sets; if so, `_tables` is prepared for them."""
        addresses = [term.data_ptr() for terms in sets for term in terms]
        if addresses != self._addresses:
            parts = launches(sets) if suits(sets) else ()
            self._tables = [(self._on_device(part.rows), part.terms) for part in parts]
            self._most = max(term.numel() for term in sets[0])
            self._addresses = addresses
        return bool(self._tables)

    def _on_device(self, rows: Sequence[Sequence[int]]) -> Tensor:
        # Pinned, so that the host does not wait for the device.
        held = torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return held.to(self.device, non_blocking=True)
