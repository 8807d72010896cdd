"""
The checked-in reports of the runtime by kind, and the spelling of their figures.
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
    """The machine and versions of a runtime report, in a line."""
    e = report["environment"]
    return (
        f"{e['gpu']}, driver {e['driver']}, torch {package(e, 'torch')}, Transformer Engine "
        f"{package(e, 'transformer-engine')}"
    )


def stale_reads(report: Mapping[str, Any]) -> str:
    """Stale reads after one-way and after two-way handoffs between streams."""
    found = report["derived"]["handoffs"]
    one, two = found["one-way"], found["two-way"]
    return (
        f"{one['stale']} of {one['checks']} checks read stale data after a one-way handoff, "
        f"{two['stale']} of {two['checks']} after a two-way handoff, in {one['processes']} fresh "
        "processes each"
    )


def ratio(value: Any) -> str:
    """Spell a ratio, or a median of ratios."""
    if isinstance(value, Mapping):
        value = value.get("median")
    return "-" if value is None else f"{value:.2f}x"


def milliseconds(value: float | None) -> str:
    """Spell a time in ms, or a dash for a time that was not measured."""
    return "-" if value is None else f"{value:.2f}"
