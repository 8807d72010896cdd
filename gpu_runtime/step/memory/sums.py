"""
The sum of an epoch's gradients over its microbatches: one pass where a device allows, else adds.

`M - 1` additions over whole buffers move `3 (M - 1)` elements for each one of the result. A kernel
that reads every buffer once moves `M + 1`, and rounds to the buffers' type after every term, which
is what the additions do: the bits are the same, in the same order, in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_TERMS = 16
"""Terms of one launch; a longer sum is continued by the next."""
_MULTIPLE = 16
_CHECKED = 4096

Launcher = Callable[[Tensor, int, torch.dtype, int], None]
"""A table, its terms, the elements' type, the elements of the largest matrix."""


def add_up(sets: Sequence[Sequence[Tensor]]) -> None:
    """Add every further set of buffers to the first, one set after another."""
    total = list(sets[0])
    for term in sets[1:]:
        torch._foreach_add_(total, list(term))


class Launch(NamedTuple):
    """One launch: a row of addresses for each matrix, the first of which receives the sum."""

    rows: tuple[tuple[int, ...], ...]
    terms: int


def launches(sets: Sequence[Sequence[Tensor]]) -> tuple[Launch, ...]:
    """
    The launches that add all sets to the first, in their order.

    Each row is a matrix's number of elements and the addresses of its terms. Sums of more than
    `MOST_TERMS` terms go on from what the launch before left in the first buffer.
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
    """Whether the kernel can add these up: one type that it knows, whole, aligned, of one size."""
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
    Compile the kernel for sums of so many terms, and compare it with additions on a small sum.

    Raises:
        RuntimeError: It gave other bits than additions.
        Exception: Whatever the compiler raises where it, or what it needs, is missing.
    """
    from .sums_kernel import launch

    drawn = torch.Generator().manual_seed(0)
    sets = [[torch.randn(_CHECKED, generator=drawn).to(device, dtype)] for _ in range(num_sets)]
    by_adds = [[term.clone() for term in terms] for terms in sets]
    add_up(by_adds)
    for part in launches(sets):
        launch(torch.tensor(part.rows, device=device), part.terms, dtype, _CHECKED)
    if not torch.equal(sets[0][0], by_adds[0][0]):
        raise RuntimeError("one pass over the gradients gives other bits than additions")
    return launch


@attrs.define(eq=False)
class OrderedSum:
    """
    Adds up the buffers of one stage, in one launch where the device and the buffers allow.

    Args:
        device: Where the buffers live.
        launch: The compiled kernel; None adds one set after another.
        obstacle: Why there is no kernel, in a line.
    """

    device: torch.device
    launch: Launcher | None = None
    obstacle: str = "not asked for"
    _addresses: list[int] = attrs.field(init=False, factory=list)
    _tables: list[tuple[Tensor, int]] = attrs.field(init=False, factory=list)
    _most: int = attrs.field(init=False, default=0)

    @classmethod
    def prepared(cls, num_sets: int, dtype: torch.dtype, device: torch.device) -> OrderedSum:
        """Compile the kernel now, so that no step does; without one, say why and add."""
        if num_sets < 2 or device.type != "cuda" or dtype not in DTYPES:
            return cls(device, None, f"{num_sets} sets of {dtype} on {device}")
        try:
            return cls(device, compiled(num_sets, dtype, device), "")
        except Exception as error:  # a compiler can fail in any way; additions give the same bits
            return cls(device, None, f"{type(error).__name__}: {error}".splitlines()[0])

    def __call__(self, sets: Sequence[Sequence[Tensor]]) -> None:
        """
        Add every further set of buffers to the first, in order.

        Args:
            sets: The same matrices in each, by microbatch.
        """
        if len(sets) < 2:
            return
        if self.launch is None or not self._tabled(sets):
            add_up(sets)
            return
        for table, terms in self._tables:
            self.launch(table, terms, sets[0][0].dtype, self._most)

    def _tabled(self, sets: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the kernel suits the sets; then the tables are theirs."""
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
