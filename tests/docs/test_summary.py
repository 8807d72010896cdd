"""
The reports that the runtime page's short tables use, and the rows of a partial report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.docs import scale_block, summary_block
from tests.runtime import report_samples as samples


def timed(pp: int, date: str, *, whole: bool, steps: bool = True) -> Mapping[str, Any]:
    """A report of a pipeline with chosen numbers, ranks and date."""
    report = samples.scale_report()
    report["configuration"] |= {"pp": pp, "vpp": 2}
    report["environment"] = {**report["environment"], "date": date}
    native, launch = report["derived"]["timed"]
    guarded = {**launch, "side": "guarded", "over_bound": 1.5}
    return {
        **report,
        "complete": whole,
        "derived": {**report["derived"], "timed": [native, guarded, launch] * steps},
    }


def test_the_complete_step_is_of_the_last_whole_report() -> None:
    """For each number of ranks the last complete report is shown; an incomplete report only if no
    complete report exists."""
    found = [
        ("old.json", timed(2, "1", whole=True)),
        ("new.json", timed(2, "2", whole=True)),
        ("cut.json", timed(2, "3", whole=False)),
        ("four.json", timed(4, "1", whole=False)),
        ("bits.json", timed(4, "4", whole=True, steps=False)),
    ]
    chosen = {pp: name for pp, (name, _) in summary_block.whole(found).items()}
    assert chosen == {2: "new.json", 4: "four.json"}


def test_a_side_that_was_not_timed_has_no_number() -> None:
    """The row stays, with the numbers that exist."""
    report = timed(2, "1", whole=True)
    kept = [row for row in report["derived"]["timed"] if row["side"] == "guarded"]
    without = {**report, "derived": {**report["derived"], "timed": kept}}
    *_, full = "\n".join(summary_block.complete([("a.json", report)])).splitlines()
    *_, rest = "\n".join(summary_block.complete([("a.json", without)])).splitlines()
    assert " - |" not in full
    assert rest.count(" - |") == 2


def test_a_part_that_is_added_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new part comes last, for each report that has its data."""
    monkeypatch.setattr(
        scale_block, "PARTS", (*scale_block.PARTS, lambda name, _: iter([f"more of {name}"]))
    )
    found = [(name, timed(2, "1", whole=True)) for name in ("a.json", "b.json")]
    said = [part for part in scale_block.pipelines(found) if part.startswith(("###", "more"))]
    assert said == [
        "### a.json: 2 ranks",
        "more of a.json",
        "### b.json: 2 ranks",
        "more of b.json",
    ]
