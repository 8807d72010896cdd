"""
What `tests.gpu.guard_megatron` concludes from its runs, without GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.docs.blocks import load
from tests.gpu.guard_megatron import GPU_FAULTS, KEPT, LONG_STEPS, RUNS, STEPS, between, found
from tests.megatron.faults import FAULTS

#: Times of which the median and the tenth percentile count, not the steps that are 20% dearer.
PRICE = {
    "off": [84.0] * 7 + [90.0] * 4,
    "on": [84.3] * 7 + [110.0] * 4,
    "calls": [85.0] * 3 + [91.0] * 8,
}
RIGHT, STALE = ["right"] * STEPS, ["right", "right", *["stale"] * (STEPS - 2)]


def reported(name: str, clause: str | None = None) -> dict[str, Any]:
    """What a rank says of a fault that it names."""
    expected = FAULTS[name].clause
    return {"expected": expected, "violations": [[clause or expected, 1, "F of stage 1"]]}


def runs() -> dict[str, list[dict[str, Any]]]:
    """What two ranks say if everything is as it should be."""
    said: dict[str, list[dict[str, Any]]] = {}
    for mode, manner, what in RUNS:
        one: dict[str, Any] = {"losses": STALE if mode == "local" else RIGHT}
        if what == "price":
            one = PRICE
        elif what == "long":
            one = {"steps": LONG_STEPS, "epochs": LONG_STEPS if mode == "none" else 4}
        elif what == "faults":
            one = {"faults": {name: reported(name) for name in GPU_FAULTS}}
        elif (mode, manner) == ("local", "report"):
            one["violations"] = ["version.stale-cache on pipeline rank 0, step 2, ..."]
        said[f"{mode} {manner} {what}"] = [one, dict(one)]
    said["local refuse losses"] = [{"refused": ["version.stale-cache", 2, ""]}, {"tail": []}]
    return said


def test_the_limits_of_the_median_price() -> None:
    """Of 200 rounds the 86th and the 115th difference."""
    rounds = list(range(200))
    said = {"on": [90.0 + n * 16e-3 for n in reversed(rounds)], "off": [90.0] * 200}
    assert between(said) == pytest.approx((85.0, 114.0))
    said["off"] = [90.0 + n * 16e-3 for n in reversed(rounds)]
    assert between(said) == pytest.approx((0.0, 0.0))


def test_everything_is_found() -> None:
    assert all(found(runs()).values())


@pytest.mark.parametrize(
    ("name", "change", "missing"),
    [
        ("none off losses", {"losses": STALE}, "the guard keeps the losses"),
        ("full_iteration refuse losses", {"refused": ["x", 3]}, "legal modes are not refused"),
        ("transformer_engine refuse losses", {"losses": []}, "legal modes are not refused"),
        ("full_iteration refuse losses", {"losses": STALE}, "legal modes have the same losses"),
        ("local off losses", {"losses": RIGHT}, "local graphs fall behind unguarded"),
        ("local report losses", {"violations": []}, "reported stale"),
        ("local report losses", {"losses": RIGHT}, "reporting keeps the losses"),
        ("local refuse losses", {"refused": ["order.reordered", 2]}, "refused stale"),
        ("full_iteration refuse long", {"steps": 999}, "a thousand steps are not refused"),
        ("none refuse long", {"epochs": 4}, "a thousand steps are not refused"),
        ("none report faults", {"faults": {}}, "every fault is named"),
        (
            "none report faults",
            {"faults": {name: reported(name, "order.reordered") for name in GPU_FAULTS}},
            "every fault is named",
        ),
        ("none refuse price", {"on": [85.0] * 11}, "price at most 1% of a quiet step"),
        (
            "none refuse price",
            {"on": [84.0] * 5 + [85.0] * 6},
            "price at most 1% of the median step",
        ),
        (
            "none refuse price",
            {"on cpu": [60.5] * 11},
            "price at most 30 us for an F or a B",
        ),
        ("none refuse price", {"off": []}, "price at most 1% of a quiet step"),
    ],
)
def test_what_is_missing_is_named(name: str, change: dict[str, Any], missing: str) -> None:
    said = runs()
    for rank in said[name]:
        rank.update(change)

    assert found(said)[missing] is False


@pytest.mark.parametrize("name", [name for name in runs() if name != "local refuse losses"])
def test_a_rank_without_a_report_counts_as_missing(name: str) -> None:
    """A run that timed out has said nothing."""
    said: dict[str, Callable[[], Any] | Any] = runs()
    said[name] = [{"tail": ["no end"]}, {"tail": ["no end"]}]

    assert not all(found(said).values())


def test_the_kept_report_names_its_commit_and_misses_only_the_price() -> None:
    """Its verdicts are drawn from its runs again, as the page draws them."""
    kept = load(KEPT)

    assert len(kept["environment"]["commit"]) == 40
    assert {name for name, right in found(kept["runs"]).items() if not right} == {
        "price at most 1% of the median step",
        "price at most 30 us for an F or a B",
    }
