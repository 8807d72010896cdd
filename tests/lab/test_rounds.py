"""
Rounds of a side: how many rounds run, which rounds count, and what is reported of the other rounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.lab.runner import timing
from qeffect.gpu_runtime.lab.runner.timing import MOST, RoundPlan, time_side
from qeffect.gpu_runtime.ranks.membership import Member


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time a side whose rounds on this rank and on another take given milliseconds a step."""

    def run(plan: RoundPlan, own: list[float], others: list[float]) -> dict[str, Any]:
        mine, theirs = iter(own), iter(others)

        def gather(member: Member, value: Any) -> list[Any]:
            if isinstance(value, float):
                return [value, next(theirs)]
            back, *rest = value
            return [value, (others[: len(back)], *rest)]

        monkeypatch.setattr(timing, "all_gather", gather)
        monkeypatch.setattr(timing, "meet_idle", lambda member: None)
        monkeypatch.setattr(
            timing, "back_to_back_s", lambda step, wait, steps: next(mine) * steps / 1e3
        )
        monkeypatch.setattr(timing, "single_step_s", lambda step, wait: (0.001, 0.002))
        member = Member(0, 2, 0, torch.device("cpu"), None)
        return time_side(member, lambda: None, plan, construction_s=0.0, facts={})

    return run


def test_as_many_as_asked_for(timed: Any) -> None:
    """The slower rank's time counts in each round; the report has no entry about agreement of
    rounds."""
    found = timed(RoundPlan(2, 4), [10.0, 20.0], [15.0, 5.0])

    assert [15.0, 20.0] == pytest.approx(found["step_ms"])
    assert 2 == len(found["single_ms"]) == len(found["host_ms"])
    assert "settled" not in found


def test_rounds_are_added_until_three_agree(timed: Any) -> None:
    """Those before are kept apart; it is the slower rank of a round that has to agree."""
    own = [200.0, 150.0, 100.0, 90.0, 90.0]
    found = timed(RoundPlan(3, 4, settles=True), own, [50.0, 50.0, 50.0, 101.0, 102.0])

    assert [100.0, 101.0, 102.0] == pytest.approx(found["step_ms"])
    assert [200.0, 150.0] == pytest.approx(found["earlier_ms"])
    assert found["settled"] is True


def test_of_more_rounds_the_last_three_count(timed: Any) -> None:
    """Rounds that do not agree are earlier ones, however many were asked for."""
    own = [200.0, 150.0, 100.0, 101.0, 102.0]
    found = timed(RoundPlan(5, 4, settles=True), own, [0.0] * 5)

    assert [100.0, 101.0, 102.0] == pytest.approx(found["step_ms"])
    assert [200.0, 150.0] == pytest.approx(found["earlier_ms"])
    assert found["settled"] is True


def test_it_ends_where_they_never_agree(timed: Any) -> None:
    """If rounds never agree, the measurement ends after the largest allowed number, and the report
    notes this."""
    own = [100.0 + 10 * n for n in range(MOST)]
    found = timed(RoundPlan(3, 4, settles=True), own, [0.0] * MOST)

    assert own[-3:] == pytest.approx(found["step_ms"])
    assert own[:-3] == pytest.approx(found["earlier_ms"])
    assert found["settled"] is False


def test_fewer_rounds_than_have_to_agree_are_left_alone(timed: Any) -> None:
    """Who asks for one round has no time for nine."""
    found = timed(RoundPlan(1, 4, settles=True), [10.0], [5.0])

    assert [10.0] == pytest.approx(found["step_ms"])
    assert "settled" not in found
