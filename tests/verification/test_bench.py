"""
The checked-in bench report holds every figure that the README shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import bench, main
from qeffect.verification.bench import ACTIONS, SCOPES
from qeffect.verification.scope_sizes import pool_states
from tests.docs.bench_block import Figure, figures, missed

REPORT = Path(__file__).parents[2] / "verification" / "reports" / "bench.json"
PROOFS = REPORT.with_name("proofs.json")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """The checked-in report."""
    found: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return found


def test_report_has_every_figure(data: dict[str, Any]) -> None:
    """The report has every row of the README's table, and no measured figure is zero."""
    rows = figures(data, json.loads(PROOFS.read_text(encoding="utf-8")))

    assert [] == [row.name for row in rows if not row.value > 0]
    assert len(rows) == len({row.name for row in rows})
    assert {"commit", "cpu", "cores", "python", "packages"} <= data["environment"].keys()
    assert not [name for name in data if name.endswith("_not_measured")]


def test_report_is_of_the_scopes_that_are_measured(data: dict[str, Any]) -> None:
    """The report names the scopes that the bench explores, with states and moves for each."""
    for name, scope in SCOPES.items():
        report = data[f"explore_{name}"]
        assert scope == report["scope"]
        assert 0 < report["states"] <= report["accepted"]
    assert data["explore_five_million_states"]["states"] >= 5_000_000
    for report in (data[n] for n in ("explore_pool_plain", "explore_pool_batch") if n in data):
        assert pool_states(4, 4, 3) == report["states"]


def test_report_agrees_with_itself(data: dict[str, Any]) -> None:
    """The worst guard is the largest, medians lie between their parts, every guard is counted."""
    by_action = data["guarded_action_us_by_action"]
    assert ACTIONS.keys() == by_action.keys() == data["guards_and_updates_by_action"].keys()
    assert min(by_action.values()) <= data["guarded_action_us"] <= max(by_action.values())
    assert data["bytes_per_live_tape"] == max(data["bytes_per_live_tape_by_slots"].values())
    assert data["proofs_worst_s"] <= data["proofs_solver_s"] <= data["proofs_s"]
    assert data["mutant_slowest_s"] <= data["mutant_s"] * data["mutants"]
    for parts in data["guards_and_updates_by_action"].values():
        assert min(parts.values()) > 0


def sample(**figure: Any) -> Figure:
    """A figure of two seconds."""
    return Figure(**{"name": "a mutant", "value": 2.0, "unit": "{:.2f} s", **figure})


@pytest.mark.parametrize(
    ("figure", "cells"),
    [
        (sample(), ("a mutant", "2.00 s", "-")),
        (sample(goal=2), ("a mutant", "2.00 s", "at most 2 s")),
        (sample(goal=1.5), ("a mutant", "**2.00 s**", "at most 1.5 s")),
        (sample(goal=2, least=True), ("a mutant", "2.00 s", "at least 2 s")),
        (
            sample(goal=2_500_000, least=True, unit="{:,.0f}/s", note=" here"),
            ("a mutant", "**2/s** here", "at least 2,500,000/s"),
        ),
    ],
)
def test_a_miss_is_seen(figure: Figure, cells: tuple[str, str, str]) -> None:
    """A figure on the wrong side of its goal is bold, and counted below the table."""
    assert cells == figure.cells()

    said = missed([figure], {})

    assert said.startswith("1 of 1 goals are missed") == figure.misses
    assert (said == "Every figure meets its goal.") == (not figure.misses)
    assert cells[1].startswith("**") == figure.misses


class Entry:
    """A part of the bench whose package lacks an import."""

    name = "upper"

    def load(self) -> Callable[[Callable[[str], None]], dict[str, Any]]:
        """Return the measurement, which fails like a missing import."""

        def measure(progress: Callable[[str], None]) -> dict[str, Any]:
            raise ModuleNotFoundError("No module named 'hypothesis'", name="hypothesis")

        return measure


def test_bench_names_the_extra_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the extras the kernel is measured; the output says what to install for the rest."""
    monkeypatch.setattr(bench, "entry_points", lambda group: [Entry()])
    monkeypatch.setattr(bench, "actions", lambda: {"refusal_us": 1.0})
    monkeypatch.setattr(bench, "schedules", dict)
    monkeypatch.setattr(bench.prices, "relations", lambda make, run: {})

    code = main(["bench", "--json"])

    out = json.loads(capsys.readouterr().out)
    assert 0 == code
    assert 1.0 == out["refusal_us"]
    assert (
        "the package hypothesis is missing: pip install 'qeffect[verify]'"
        == out["upper_not_measured"]
    )
