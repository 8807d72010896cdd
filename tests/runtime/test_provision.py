"""The plan of slots is a pure function of the order of actions."""

from __future__ import annotations

import pytest

from qeffect.gpu_runtime.step.plan.order import Kind, Order
from qeffect.gpu_runtime.step.plan.slots import (
    PROVISIONINGS,
    Provisioning,
    WgradVariant,
    plan_slots,
)

from .orders import TABLE_ROWS, random_order, table_order


def check_plan(order: Order, provisioning: Provisioning) -> None:
    """No two live tapes of a stage share a slot."""
    plan = plan_slots(order, provisioning)
    tenant: dict[tuple[int, int], int] = {}
    for kind, stage, microbatch in order.steps:
        slot = stage, plan.slot_of[stage, microbatch]
        if kind is Kind.FORWARD:
            assert slot not in tenant
            tenant[slot] = microbatch
        else:
            assert microbatch == tenant[slot]
        if kind is Kind.WGRAD:
            del tenant[slot]


class TestPlan:
    @pytest.mark.parametrize("provisioning", PROVISIONINGS)
    @pytest.mark.parametrize("seed", range(20))
    def test_no_slot_has_two_tenants(self, seed: int, provisioning: Provisioning) -> None:
        """No slot has two tenants, whatever the order."""
        check_plan(random_order(seed, num_microbatches=6), provisioning)

    @pytest.mark.parametrize(("name", "rank"), TABLE_ROWS)
    def test_live_is_the_peak(self, name: str, rank: int) -> None:
        """Live provisioning reserves exactly the order's peak of live tapes, per stage."""
        order = table_order(name, rank)

        assert order.peaks == dict(plan_slots(order).num_slots)

    @pytest.mark.parametrize("microbatches", [2, 4, 8, 16, 32])
    def test_flat_where_live_tapes_are(self, microbatches: int) -> None:
        """On a ZB-V rank live slots saturate, the paper's provisioning grows with M."""
        order = table_order("ScheduleZBVZeroBubble", 1, microbatches=microbatches)

        live = sum(plan_slots(order).num_slots.values())
        paper = sum(plan_slots(order, "static").num_slots.values())

        assert live <= 5
        assert 2 * microbatches == paper

    def test_fed_tapes_wait_for_their_readers(self) -> None:
        """A fed stage's slot waits until the stage before has read its input gradient."""
        order = Order.parse("0F0 1F0 1I0 1W0 0F1 1F1 0I0 0W0 1I1 1W1 0I1 0W1")

        alone = plan_slots(order)
        chained = plan_slots(order, feeds={0: 1})

        assert {0: 2, 1: 1} == dict(alone.num_slots)
        assert {0: 2, 1: 2} == dict(chained.num_slots)

    def test_too_few_slots(self) -> None:
        """Too few slots are refused with the number that the order needs."""
        order = table_order("ScheduleZBVZeroBubble", 1)

        with pytest.raises(ValueError, match="stage 1 has 2 slots, but this order needs 3"):
            plan_slots(order, available={1: 2, 2: 2})

    def test_an_unknown_provisioning_is_refused_with_the_choices(self) -> None:
        """An unknown provisioning is refused with the choices."""
        with pytest.raises(ValueError, match="choose live or static"):
            plan_slots(random_order(0), "all")  # type: ignore[arg-type]


class TestVariants:
    def test_only_the_first_wgrad_of_a_stage_overwrites(self) -> None:
        """Only the slot of a stage's first dW overwrites; slots that do both have both."""
        order = Order.parse("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2")
        plan = plan_slots(order)

        found = plan.products(0, "accumulate")

        first, adding = WgradVariant(0, False), WgradVariant(0, True)
        assert found == (((0,), first), ((0,), adding), ((1,), adding))

    def test_a_live_slot_writes_for_each_microbatch_it_serves(self) -> None:
        """A live slot writes the destinations of each microbatch that it serves."""
        plan = plan_slots(Order.parse("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"))

        found = [v for slots, v in plan.products(0, "per_microbatch") if slots == (0,)]

        assert found == [WgradVariant(0, False), WgradVariant(2, False)]

    def test_copied_gradients_need_one_variant(self) -> None:
        """Copied gradients leave the library's memory the same way each time."""
        plan = plan_slots(random_order(1))

        assert {WgradVariant(-1, False)} == {v for _, v in plan.products(0, "copied")}
