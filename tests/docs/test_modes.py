"""Every row of the tested modes that disagrees is explained on the page."""

from __future__ import annotations

import pytest

from qeffect.gpu_runtime.lab.comparisons.modes import FRAMEWORKS
from tests.docs.blocks import ROOT
from tests.docs.modes_block import EXPLAINED, why
from tests.docs.reading import files

REPORTS = dict(files("modes"))


def test_every_framework_has_a_report() -> None:
    assert set(FRAMEWORKS) == {r["configuration"]["framework"] for r in REPORTS.values()}


@pytest.mark.parametrize("name", REPORTS)
def test_each_disagreement_is_explained(name: str) -> None:
    """A silent difference, a false alarm or a changed bit cannot be explained away."""
    framework = REPORTS[name]["configuration"]["framework"]
    rows = REPORTS[name]["derived"]["rows"]

    assert rows
    assert [] == [row for row in rows if why(framework, row) is None]


def test_each_explanation_is_of_a_row() -> None:
    used = {
        (framework, text)
        for report in REPORTS.values()
        for row in report["derived"]["rows"]
        for framework, text, _ in EXPLAINED
        if framework == report["configuration"]["framework"]
        if any(text in said for said in (*row["clauses"], row.get("said", "")))
    }

    assert {(framework, text) for framework, text, _ in EXPLAINED} == used


def test_an_unknown_end_has_no_explanation() -> None:
    row = {"end": "silent difference", "clauses": []}

    assert why("torch", row) is None
    assert why("torch", {**row, "end": "found", "clauses": ["order.reordered"]}) is None
    assert "" == why("torch", {**row, "end": "same"})
    assert (ROOT / "docs" / "modes.md").exists()
