"""What `tests.gpu.guard_gathers` concludes from its runs, without GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.blocks import load
from tests.gpu.guard_gathers import FAULTY, KEPT, RUNS, STEPS, found

NAMED = ["version.wrong-epoch", FAULTY, "F of stage 0, microbatch 0", "..."]


def runs() -> dict[str, list[dict[str, Any]]]:
    """What two ranks say if everything is as it should be."""
    said = {}
    for name, guard, what in RUNS:
        one: dict[str, Any] = {"steps": STEPS, "bits": {"w": what}, "quantized": 4}
        if guard == "on":
            one["violations"] = [] if what == "legal" else [NAMED]
        said[f"{name} {guard} {what}"] = [one, dict(one)]
    return said


def test_everything_is_found() -> None:
    assert all(found(runs()).values())


@pytest.mark.parametrize(
    ("name", "change", "missing"),
    [
        ("local on legal", {"violations": [NAMED]}, "legal runs are accepted"),
        ("full_iteration on legal", {"steps": STEPS - 1}, "legal runs are accepted"),
        ("virtual stages on legal", {"quantized": 0}, "parameters are quantized"),
        ("replicas on legal", {"bits": {"w": "other"}}, "the guard keeps the bits"),
        ("replicas on hooks off", {"violations": []}, "a gather that was left out is named"),
        (
            "replicas on hooks off",
            {"violations": [["order.reordered", FAULTY, "", ""]]},
            "a gather that was left out is named",
        ),
        (
            "replicas off hooks off",
            {"bits": {"w": "legal"}},
            "without the guard it changes bits in silence",
        ),
    ],
)
def test_one_thing_is_missing(name: str, change: dict[str, Any], missing: str) -> None:
    """A change of one rank's words is found, by the line that it belongs to."""
    said = runs()
    said[name][1] |= change
    lines = found(said)
    assert [line for line, right in lines.items() if not right] == [missing]


def test_the_kept_report() -> None:
    """It has every run, and everything was found, by the same code and again here."""
    report = load(KEPT)
    assert list(report["runs"]) == [" ".join(run) for run in RUNS]
    assert report["found"] == found(report["runs"])
    assert all(report["found"].values())
