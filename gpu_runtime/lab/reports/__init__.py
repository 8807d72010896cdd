"""
The checked-in reports of measurements and their schema. A command writes every number; none is
edited by hand.

`qeffect runtime compare` and each kind of `qeffect runtime report` write a report with `--out`. The
raw part of a report holds what was measured. The derived part holds the figures that
`qeffect.gpu_runtime.lab.statistics.derive` computes from the raw part; a test computes these
figures again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qeffect.report import UnusableError, read_json

FOLDER = Path(__file__).parent
SCHEMA_PATH = FOLDER / "report.schema.json"


def schema() -> dict[str, Any]:
    """The JSON schema that every report follows."""
    read: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    return read


def paths(folder: Path = FOLDER) -> list[Path]:
    """Every report of a folder, without the schema."""
    return sorted(p for p in folder.glob("*.json") if p.name != SCHEMA_PATH.name)


def load(folder: Path = FOLDER, *, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """
    Yield the reports of a folder, of one kind or of all kinds.

    Raises:
        UnusableError: A file cannot be read, or is not a report.
    """
    for path in paths(folder):
        report = read_json(path)
        if not isinstance(report, dict) or not isinstance(report.get("derived"), dict):
            raise UnusableError(f"{path}: expected a report, found JSON without its derived part")
        if kind is None or report.get("kind") == kind:
            yield report


def cells(found: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """
    The derived figures and raw measurements of each cell (a workload, such as `h2048-s256-m4`) in
    some reports of step times. Each cell appears once.

    A cell that is in several reports is taken from the report with the most columns, so that its
    ratios come from one run. Among reports with equally many columns, the first is taken.
    """
    widest: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for report in found:
        for derived, raw in zip(report["derived"]["cells"], report["raw"]["cells"], strict=True):
            known = widest.get(derived["cell"])
            if len(derived["columns"]) > (len(known[0]["columns"]) if known else 0):
                widest[derived["cell"]] = derived, raw
    return [*widest.values()]
