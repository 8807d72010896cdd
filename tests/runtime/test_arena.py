"""Physical gradient destinations: sizes, identity and sums."""

from __future__ import annotations

import pytest
import torch

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.step.memory.arena import RULES, Arena, Rule
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

from .helpers import TINY

FP32 = torch.float32
STAGE = ReferenceStage(0, ReferenceDomain(4), TINY)
ONE_SET = 2 * sum(unit.shape[0] * unit.shape[1] for unit in STAGE.units)


class TestMemory:
    @pytest.mark.parametrize("num_microbatches", [2, 8])
    @pytest.mark.parametrize("rule", RULES)
    def test_only_the_per_microbatch_arena_grows_with_microbatches(
        self, rule: Rule, num_microbatches: int
    ) -> None:
        """Only the per-microbatch arena grows with the number of microbatches."""
        expected = {"copied": 0, "per_microbatch": num_microbatches, "accumulate": 1}[rule]

        arena = Arena.for_stage(STAGE, rule, num_microbatches, torch.bfloat16)

        assert expected * ONE_SET == arena.num_bytes

    def test_an_unknown_rule_is_refused_with_the_choices(self) -> None:
        """An unknown rule is refused with the choices."""
        with pytest.raises(ValueError, match="choose copied, per_microbatch, accumulate"):
            Arena.for_stage(STAGE, "in_place", 2, torch.bfloat16)  # type: ignore[arg-type]


class TestPresent:
    def test_the_kernel_was_configured_with_what_it_finds(self) -> None:
        """What the arena presents is what the kernel was configured with, while nothing moved."""
        arena = Arena.for_stage(STAGE, "per_microbatch", 2, torch.bfloat16)

        assert arena.configured() == (*arena.present(0), *arena.present(1))
        assert arena.present(1) is arena.present(1)

    def test_split_qkv_is_adjacent(self) -> None:
        """Query, key and value are adjacent rows of one destination."""
        config = LayerConfig(hidden=32, ffn=64, heads=2, sequence=16, fused_qkv=False)
        stage = ReferenceStage(0, ReferenceDomain(4), config)

        found = {d.matrix: d for d in Arena.for_stage(stage, "accumulate", 2, FP32).configured()}

        q, k, v = (found[f"layers.0.qkv.{part}_weight"] for part in "qkv")
        assert q.address + q.nbytes == k.address
        assert k.address + k.nbytes == v.address
        assert (32, 32) == q.shape == k.shape == v.shape

    @pytest.mark.parametrize("field", ["shape", "dtype", "address"])
    def test_swapped_memory_is_described_as_it_is_now(self, field: str) -> None:
        """Memory that was swapped under the arena is described as it is now."""
        arena = Arena.for_stage(STAGE, "accumulate", 2, torch.bfloat16)
        before = arena.present(0)
        buffer = (arena.destinations(0) or {})["layers.0.fc1"]

        buffer.data = {
            "shape": buffer.data.reshape(32, 64),
            "dtype": buffer.data.half(),
            "address": buffer.data.clone(),
        }[field]

        assert [field] == [
            name
            for name in ("shape", "dtype", "device", "address")
            if any(
                getattr(a, name) != getattr(b, name) and (name != "address" or field == "address")
                for a, b in zip(before, arena.present(0), strict=True)
            )
        ]

    def test_copied_is_symbolic(self) -> None:
        """Copied gradients have no address to check, only a matrix and a microbatch."""
        arena = Arena.for_stage(STAGE, "copied", 2, torch.bfloat16)

        assert {0} == {d.nbytes for d in arena.configured()}
        assert {0, 1} == {d.microbatch for d in arena.configured()}


class TestTotal:
    def test_another_order_is_another_sum(self) -> None:
        """The sum is taken in the order given, and another order is another result."""
        arena = Arena.for_stage(STAGE, "per_microbatch", 3, torch.bfloat16)
        again = Arena.for_stage(STAGE, "per_microbatch", 3, torch.bfloat16)
        for m in range(3):
            drawn = torch.Generator().manual_seed(m)
            for a, b in zip(
                (arena.destinations(m) or {}).values(),
                (again.destinations(m) or {}).values(),
                strict=True,
            ):
                value = torch.randn(a.shape, generator=drawn).bfloat16()
                a.copy_(value)
                b.copy_(value)
        by_hand = [(arena.destinations(m) or {})["layers.0.fc1"].clone() for m in range(3)]

        forward, backward = arena.total([0, 1, 2]), again.total([2, 1, 0])

        assert same_bits(by_hand[0] + by_hand[1] + by_hand[2], forward["layers.0.fc1"])
        assert not same_bits(forward["layers.0.fc1"], backward["layers.0.fc1"])

    def test_copies_are_released(self) -> None:
        """Copies live for one epoch."""
        arena = Arena.for_stage(STAGE, "copied", 1, torch.bfloat16)
        names = [unit.name for unit in STAGE.units]
        arena.keep_copies(0, {name: torch.ones(2) for name in names})
        assert set(names) == arena.total([0]).keys()

        arena.start_epoch()

        with pytest.raises(KeyError):
            arena.total([0])
