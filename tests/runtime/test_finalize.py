"""
The sum over microbatches without a device: the arguments of the kernel launch, and the result
without a kernel.

The tests in `tests/gpu` compare the kernel with separate additions on a GPU, bit for bit.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.step.memory import sums as finalize
from qeffect.gpu_runtime.step.memory.arena import Arena
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.step.memory.sums import MOST_TERMS, OrderedSum, add_up, launches, suits

from .helpers import TINY

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SHAPES = ((96, 32), (32, 32), (64, 16))


def drawn(num_sets: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Buffers of three matrices, by microbatch."""
    generator = torch.Generator().manual_seed(num_sets)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        for _ in range(num_sets)
    ]


def copies(sets: list[list[Tensor]]) -> list[list[Tensor]]:
    """The same bits elsewhere."""
    return [[term.clone() for term in terms] for terms in sets]


def perform(table: Tensor, terms: int, dtype: torch.dtype, most: int) -> None:
    """What the kernel does with a table, by reading and writing the addresses in it."""
    assert dtype == torch.float32
    for count, *addresses in table.tolist():
        assert terms == len(addresses)
        assert most >= count
        held = [
            torch.frombuffer((ctypes.c_float * count).from_address(a), dtype=dtype)
            for a in addresses
        ]
        for term in held[1:]:
            held[0].add_(term)


class TestTable:
    def test_a_row_is_a_size_and_addresses_in_order(self) -> None:
        """One launch for all matrices: each row has the elements, then every term's address."""
        sets = drawn(3)

        (launch,) = launches([sets[2], sets[0], sets[1]])

        assert 3 == launch.terms
        assert [shape[0] * shape[1] for shape in SHAPES] == [row[0] for row in launch.rows]
        assert launch.rows[1][1:] == tuple(sets[n][1].data_ptr() for n in (2, 0, 1))

    @pytest.mark.parametrize("num_sets", [2, 3, MOST_TERMS, MOST_TERMS + 1, 40])
    def test_every_term_once_and_in_order(self, num_sets: int) -> None:
        """A long sum goes on from the first buffer, and takes every further term once in order."""
        sets = drawn(num_sets)

        terms = [row for launch in launches(sets) for row in (launch.rows[0],)]

        assert {sets[0][0].data_ptr()} == {row[1] for row in terms}
        assert [a for row in terms for a in row[2:]] == [s[0].data_ptr() for s in sets[1:]]
        assert all(launch.terms <= MOST_TERMS for launch in launches(sets))

    @pytest.mark.parametrize("num_sets", [2, 5, 40])
    def test_a_launcher_that_obeys_the_table_gives_the_bits_of_additions(
        self, num_sets: int
    ) -> None:
        """Addresses, sizes and terms lead to the same sums in the same place, twice over."""
        sets = drawn(num_sets)
        expected = copies(sets)
        add_up(expected)
        summed = OrderedSum(CPU, perform, "")

        summed(sets)

        assert all(same_bits(a, b) for a, b in zip(expected[0], sets[0], strict=True))
        again = copies(sets)
        add_up(expected)
        summed(again)
        assert all(same_bits(a, b) for a, b in zip(expected[0], again[0], strict=True))

    def test_the_table_is_made_once_for_the_same_addresses(self) -> None:
        """Fixed buffers keep their table from epoch to epoch; other buffers get another."""
        sets = drawn(3)
        summed = OrderedSum(CPU, perform, "")
        summed(sets)
        first = summed._tables
        summed(sets)
        assert first is summed._tables

        summed([sets[1], sets[0], sets[2]])

        assert first is not summed._tables


class TestFallback:
    def test_a_cpu_adds(self) -> None:
        """Without a device nothing is compiled, the reason is kept, and the sum is the same."""
        sets = drawn(4, BF16)
        by_hand = [a + b + c + d for a, b, c, d in zip(*copies(sets), strict=True)]
        summed = OrderedSum.prepared(4, BF16, CPU)

        summed(sets)

        assert summed.launch is None
        assert "on cpu" in summed.obstacle
        assert all(same_bits(a, b) for a, b in zip(by_hand, sets[0], strict=True))

    def test_a_compiler_that_fails_leaves_additions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the compiler raises becomes a reason in one line, and sums go on."""

        def fail(*_: object) -> None:
            raise RuntimeError("no C compiler\nwith a second line")

        monkeypatch.setattr(finalize, "compiled", fail)

        summed = OrderedSum.prepared(4, BF16, torch.device("cuda", 0))

        assert summed.launch is None
        assert "RuntimeError: no C compiler" == summed.obstacle

    def test_a_compiler_that_is_missing_leaves_additions(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the compiler's package the kernel's module cannot be imported: additions."""
        import sys

        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setitem(sys.modules, "triton.language", None)
        monkeypatch.delitem(
            sys.modules, "qeffect.gpu_runtime.step.memory.sums_kernel", raising=False
        )

        with pytest.raises(ImportError):
            finalize.compiled(2, BF16, CPU)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda t: t[1:, :8],
            lambda t: t.flatten()[1:-15],
            lambda t: t.flatten()[:-1],
            lambda t: t.double(),
            lambda t: t.half(),
        ],
        ids=["strided", "unaligned", "odd size", "unknown type", "another type"],
    )
    def test_buffers_that_do_not_suit(self, spoil: object) -> None:
        """What the kernel's vector loads cannot read is left to additions."""
        assert callable(spoil)
        sets = drawn(2)
        assert suits(sets)

        sets[1][0] = spoil(sets[1][0])

        assert not suits(sets)

    def test_unsuitable_buffers_are_added(self) -> None:
        """A kernel that is there is not asked about what does not suit it."""
        sets = [[torch.ones(7)], [torch.ones(7)]]

        def refuse(*_: object) -> None:
            raise AssertionError("asked")

        OrderedSum(CPU, refuse, "")(sets)

        assert 14.0 == float(sets[0][0].sum())


class TestArena:
    def test_an_arena_says_why_it_adds(self) -> None:
        """The reason is there to be reported."""
        stage = ReferenceStage(0, ReferenceDomain(4), TINY)

        arena = Arena.for_stage(stage, "per_microbatch", 3, BF16)

        assert "3 sets of torch.bfloat16 on cpu" == arena.one_pass_obstacle
