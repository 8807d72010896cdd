"""
Derive figures of steps that run twice: how bit flips ended, how many ended wrongly, and what the
second run costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .summary import exact_median

__all__ = ["derive_second_runs"]


def derive_second_runs(raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    Count bit flips by place and result, and compute the ratios of times.

    A flip is `wrong` in three cases: the flip ended neither as stopped nor as harmless; a weight
    was updated in spite of the stop; or the restarted step has other bits than an undisturbed step.
    Flips for which no memory was found are not counted.
    """
    flips = [one for one in raw["flips"] if one["flipped"]]
    ends: dict[str, Counter[str]] = {}
    for one in flips:
        key = f"{one['steps']}: {one['kind']}"
        ends.setdefault(key, Counter())[one["end"].partition(":")[0]] += 1
    return {
        "flips": len(flips),
        "stopped": sum(one["end"] == "stopped" for one in flips),
        "harmless": sum(one["end"] == "harmless" for one in flips),
        "wrong": sum(map(_wrong, flips)),
        "ends": {key: dict(sorted(found.items())) for key, found in sorted(ends.items())},
        "prices": [_price(one) for one in raw["prices"]],
    }


def _wrong(flip: Mapping[str, Any]) -> bool:
    return (
        flip["end"] not in ("stopped", "harmless")
        or bool(flip.get("updated"))
        or flip.get("undisturbed") is False
    )


def _price(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Medians of all rounds: milliseconds per step, and ratios to steps that never run twice."""
    rounds = measured["rounds"]
    off = rounds["off"]
    return {
        "what": measured["what"],
        "mode": measured["mode"],
        "ms": {name: exact_median(each) for name, each in rounds.items()},
        "ratio": {
            name: exact_median(one / base for one, base in zip(each, off, strict=True))
            for name, each in rounds.items()
            if name != "off"
        },
    }
