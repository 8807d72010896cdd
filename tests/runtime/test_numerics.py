"""
The guarded runtime against the backend's own full backward, bit for bit, at every action and step.

Native is first compared with itself, because a comparison is only as good as the repeatability of
its reference. Runs without one guard come last, to show which faults the comparison can find.
"""

from __future__ import annotations

import pytest
import torch

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.lab.comparisons.native import rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import compare
from qeffect.gpu_runtime.step.memory.arena import Rule
from qeffect.gpu_runtime.step.plan.order import Kind
from qeffect.gpu_runtime.step.plan.slots import PROVISIONINGS
from tests.profiles import by_profile, few

from .helpers import LARGE, SMALL, TINY, assert_same, guarded, native, unguarded
from .orders import SCHEDULES, TABLE_ROWS, random_order, table_order

BF16, FP32 = torch.bfloat16, torch.float32
SPLIT_QKV = LayerConfig(hidden=128, ffn=256, heads=2, sequence=64, fused_qkv=False)


@pytest.mark.parametrize("history", [4, 16, 64])
def test_native_gives_the_same_bits_twice(history: int) -> None:
    """The oracle gives the same bits twice."""
    order = table_order("ScheduleZBVZeroBubble", 1)

    first, second = (native(order, history, "copied", BF16, 5) for _ in range(2))

    assert_same(first, second)


# Every row of every table with every history; destinations and QKV spread over them so that each
# pair of a destination with a history, a schedule, a QKV or a type occurs.
CASES = [
    (*TABLE_ROWS[0], 4, "copied", BF16, SMALL),
    (*TABLE_ROWS[0], 16, "accumulate", FP32, SPLIT_QKV),
    (*TABLE_ROWS[0], 64, "per_microbatch", BF16, SMALL),
    (*TABLE_ROWS[1], 4, "accumulate", BF16, SMALL),
    (*TABLE_ROWS[1], 16, "per_microbatch", BF16, SPLIT_QKV),
    (*TABLE_ROWS[1], 64, "copied", BF16, SMALL),
    (*TABLE_ROWS[2], 4, "per_microbatch", BF16, SMALL),
    (*TABLE_ROWS[2], 16, "copied", BF16, SPLIT_QKV),
    (*TABLE_ROWS[2], 64, "accumulate", FP32, SMALL),
    (*TABLE_ROWS[3], 4, "copied", BF16, SPLIT_QKV),
    (*TABLE_ROWS[3], 16, "accumulate", BF16, SMALL),
    (*TABLE_ROWS[3], 64, "per_microbatch", BF16, SPLIT_QKV),
    (*TABLE_ROWS[4], 4, "accumulate", FP32, SMALL),
    (*TABLE_ROWS[4], 16, "per_microbatch", BF16, SMALL),
    (*TABLE_ROWS[4], 64, "copied", BF16, SPLIT_QKV),
    (*TABLE_ROWS[5], 4, "per_microbatch", BF16, SPLIT_QKV),
    (*TABLE_ROWS[5], 16, "copied", BF16, SMALL),
    (*TABLE_ROWS[5], 64, "accumulate", BF16, SPLIT_QKV),
]


@pytest.mark.parametrize(
    ("name", "rank", "history", "rule", "dtype", "config"),
    few(
        CASES, range(0, len(CASES), 4), range(2, len(CASES), 4)
    ),  # dev: every schedule, history and rule
)
def test_every_step_of_a_row_has_the_bits_of_native(
    name: str, rank: int, history: int, rule: Rule, dtype: torch.dtype, config: LayerConfig
) -> None:
    """
    20 steps of a rank's row: every tensor of every action and step has the same bits.

    A step moves a history by four entries. The profile dev runs each history once round, and on.
    """
    order = table_order(name, rank)
    steps = by_profile(dev=history // 4 + 3, ci=20)

    reference = native(order, history, rule, dtype, steps, config)
    candidate = guarded(order, history, rule, dtype, steps, config)

    assert assert_same(reference, candidate).compared > 400 * steps


@pytest.mark.parametrize("rule", ["copied", "per_microbatch", "accumulate"])
@pytest.mark.parametrize("seed", few([0, 1, 3, 4], dev=[0, 2]))
def test_random_orders_have_the_bits_of_native(seed: int, rule: Rule) -> None:
    """Random non-LIFO orders, dW out of the order of dI: the same bits in both provisionings."""
    order = random_order(seed)
    assert not order.wgrads_follow_dgrads
    dtype = FP32 if seed % 2 else BF16

    reference = native(order, 16, rule, dtype, 6, TINY)

    for provisioning in PROVISIONINGS:
        assert_same(reference, guarded(order, 16, rule, dtype, 6, TINY, provisioning=provisioning))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.nightly) for n in SCHEDULES[:-1]),
        pytest.param(SCHEDULES[-1], marks=pytest.mark.ci),
    ],
)
def test_a_larger_size_has_the_bits_of_native(name: str) -> None:
    """One row of each schedule at a larger size, where other kernels are chosen."""
    order = table_order(name, 1)

    reference = native(order, 4, "accumulate", FP32, 2, LARGE)
    candidate = guarded(order, 4, "accumulate", FP32, 2, LARGE)

    assert_same(reference, candidate)


def test_guards_change_nothing() -> None:
    """The same split run with and without the kernel gives the same bits."""
    order = random_order(3)

    assert_same(
        unguarded(order, 16, "accumulate", FP32, 4, TINY),
        guarded(order, 16, "accumulate", FP32, 4, TINY),
    )


def test_layers_of_a_stage_are_one_interval_of_scaling_state() -> None:
    """A stage of two layers has one interval of scaling state, not two."""
    order = table_order("ScheduleZBVZeroBubble", 0)

    reference = native(order, 4, "accumulate", FP32, 4, TINY, num_layers=2)
    candidate = guarded(order, 4, "accumulate", FP32, 4, TINY, num_layers=2)

    assert_same(reference, candidate)


def test_the_native_sum_depends_on_the_order_of_wgrads() -> None:
    """Which native sum is the same as a destination's depends on the order of dW."""
    follows = table_order("ScheduleZBVZeroBubble", 1)
    crossed = random_order(1)

    assert "grad" == rule_for(follows, "copied") == rule_for(crossed, "per_microbatch")
    assert "main_grad" == rule_for(follows, "accumulate")
    assert "wgrad_order" == rule_for(crossed, "accumulate")
    assert "dgrad_order" == rule_for(follows, "per_microbatch", FP32)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_follow_dgrads(name: str) -> None:
    """In torch's tables every stage's dW runs in the order of its dI."""
    for rank in (0, 1):
        order = table_order(name, rank)

        assert order.wgrads_follow_dgrads
        assert order.num_microbatches == len(order.microbatches(order.stages[0], Kind.FORWARD))


class TestNegativeControls:
    """The comparison finds what it should: each of these is a run without one guard."""

    @pytest.mark.parametrize("history", [16, pytest.param(64, marks=pytest.mark.ci)])
    def test_refresh_all_at_epoch_start(self, history: int) -> None:
        """Refreshing every chunk at the start of an epoch puts amaxes into the wrong interval."""
        order = table_order("ScheduleZBVZeroBubble", 0)
        reference = native(order, history, "copied", BF16, 20)

        def early(run: object) -> None:
            run.refresh_all_at_start = True  # type: ignore[attr-defined]

        candidate = unguarded(order, history, "copied", BF16, 20, change=early)

        assert compare(reference, candidate)["amax histories"].mismatched > 0

    def test_order_of_the_domain(self) -> None:
        """Swapping two F of different chunks changes numbers: the domain is shared."""
        order = random_order(2)
        steps = list(order.steps)
        n = next(
            n
            for n in range(len(steps) - 1)
            if steps[n].kind is steps[n + 1].kind is Kind.FORWARD
            and steps[n].stage != steps[n + 1].stage
        )
        steps[n], steps[n + 1] = steps[n + 1], steps[n]
        swapped = type(order)(tuple(steps))

        result = compare(
            native(order, 16, "copied", BF16, 3, TINY),
            unguarded(swapped, 16, "copied", BF16, 3, TINY),
        )

        assert result["amax histories"].mismatched > 0

    def test_order_of_the_sum(self) -> None:
        """Summing gradients in another order of microbatches changes parameters."""
        order = random_order(1)
        reference = native(order, 4, "copied", BF16, 2, TINY)
        candidate = native(order, 4, "accumulate", BF16, 2, TINY)

        result = compare(reference, candidate)

        assert result["parameter gradients"].mismatched > 0
