"""Stages of one process that feed each other: the runtime declares these edges to its contract."""

from __future__ import annotations

import pytest

from qeffect import Refused
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.gpu_runtime.step.plan.rows import Row, walked
from qeffect.schedule.tables import read_fixture

from .helpers import TINY, reference_stages

ORDER = Order.parse("0F0 1F0 1I0 1W0 0I0 0W0")


def test_what_feeds_what_reaches_the_contract() -> None:
    """F of the fed stage is refused before its input is made."""
    config = RuntimeConfig(feeds={0: 1}, provisioning="live")
    runtime = Runtime(reference_stages(ORDER, 4, TINY), ORDER, config)

    assert [1, None] == [own.feeds for own in runtime.contract.stages]
    with pytest.raises(Refused, match=r"ownership\.input-not-made in check_forward"):
        runtime.contract.check_forward(runtime.key(1, 0))


def test_a_row_feeds_the_next_stage_of_its_rank() -> None:
    """Rank 1 of ZB-V at PP=2 has stages 1 and 2, without a message between them."""
    table = walked(read_fixture("ScheduleZBVZeroBubble_pp2_vpp2_m4.comms.csv"))

    assert {1: 2} == dict(Row.of(table, 1).feeds)
