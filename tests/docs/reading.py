"""
The checked-in reports of the runtime by kind, and how their figures are spelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qeffect.report import package
from tests.docs.blocks import RUNTIME_REPORTS, load


def files(kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the checked-in reports of a kind with the names of their files."""
    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if data.get("kind") == kind:
            yield path.name, data


def reports(kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the checked-in reports of a kind."""
    for _, data in files(kind):
        yield data


def dated(*kinds: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Reports of some kinds with the names of their files, in the order of their making."""
    found = [pair for kind in kinds for pair in files(kind)]
    return sorted(found, key=lambda pair: str(pair[1]["environment"]["date"]))


def machine_of(report: Mapping[str, Any]) -> str:
    """Say in a line what a runtime report was measured on; the commit is in the list of reports."""
    e = report["environment"]
    return (
        f"{e['gpu']}, driver {e['driver']}, torch {package(e, 'torch')}, Transformer Engine "
        f"{package(e, 'transformer-engine')}"
    )


def ratio(value: Any) -> str:
    """Spell a ratio, or a median of ratios."""
    if isinstance(value, Mapping):
        value = value.get("median")
    return "-" if value is None else f"{value:.2f}x"


def milliseconds(value: float | None) -> str:
    """Spell a time, or a dash where nothing measured it."""
    return "-" if value is None else f"{value:.2f}"
