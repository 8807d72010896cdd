"""
One pass over gradient buffers on a device gives the bits of separate additions, wherever the sum is
used.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.step.memory.arena import Arena, Rule
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.step.memory.sums import DTYPES, MOST_TERMS, OrderedSum, add_up

pytestmark = pytest.mark.gpu

SHAPES = ((96, 32), (32, 32), (1, 16), (4097, 48), (2048, 2048))
ODD = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 3.3e38, -3.3e38)


def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def drawn(num_sets: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Buffers with ordinary values, and with every pair of odd ones among them."""
    generator = torch.Generator().manual_seed(num_sets)
    sets = [
        [(torch.randn(shape, generator=generator) * 3).to(dtype) for shape in SHAPES]
        for _ in range(num_sets)
    ]
    for n, a in enumerate(ODD):
        for m, b in enumerate(ODD):
            sets[0][0][n, m], sets[1][0][n, m] = a, b
    return [[term.to(device()) for term in terms] for terms in sets]


@pytest.mark.parametrize("num_sets", [2, 3, 8, MOST_TERMS, MOST_TERMS + 1, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_additions(dtype: torch.dtype, num_sets: int) -> None:
    """One pass and additions in the same order: every bit of every sum; terms are left alone."""
    sets = drawn(num_sets, dtype)
    by_adds = [[term.clone() for term in terms] for terms in sets]
    summed = OrderedSum.prepared(num_sets, dtype, device())
    assert "" == summed.obstacle

    summed(sets)
    add_up(by_adds)

    assert summed._tables
    for terms, expected in zip(sets, by_adds, strict=True):
        for a, b in zip(terms, expected, strict=True):
            assert same_bits(a, b)


def test_another_order_is_another_sum() -> None:
    """The comparison can fail: terms in another order round differently."""
    sets = drawn(8, torch.bfloat16)
    by_adds = [[term.clone() for term in terms] for terms in sets]
    OrderedSum.prepared(8, torch.bfloat16, device())([sets[0], *sets[:0:-1]])
    add_up(by_adds)

    assert not same_bits(sets[0][4], by_adds[0][4])


@pytest.mark.parametrize("rule", ["per_microbatch", "copied"])
def test_an_arena_sums_in_one_pass(rule: Rule) -> None:
    """An arena's total has the bits of additions by hand, epoch after epoch, without its adds."""
    stage = ReferenceStage(0, ReferenceDomain(4, device()), LayerConfig(32, 64, 2, 16))
    arena = Arena.for_stage(stage, rule, 4, torch.bfloat16)
    assert "" == arena.one_pass_obstacle
    order = (2, 0, 3, 1)
    for epoch in range(3):
        generator = torch.Generator().manual_seed(epoch)
        for microbatch in range(4):
            written = {
                unit.name: torch.randn(unit.shape, generator=generator).to(device(), torch.bfloat16)
                for unit in stage.units
            }
            if rule == "copied":
                arena.keep_copies(microbatch, written)
            else:
                for name, buffer in (arena.destinations(microbatch) or {}).items():
                    buffer.copy_(written[name])
        by_hand = [[t.clone() for t in arena.written(m).values()] for m in order]
        add_up(by_hand)

        total = arena.total(order)

        assert all(same_bits(a, b) for a, b in zip(by_hand[0], total.values(), strict=True))
        arena.start_epoch()
