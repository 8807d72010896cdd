"""
What follows from the raw numbers of a pipeline over ranks: totals, medians, ratios and bounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["BOUND_GOALS", "derive_scale"]

Raw = Mapping[str, Any]
_DIGITS = 4
BOUND_GOALS: Mapping[str, float] = {"h2048-s256-m4": 1.08, "h4096-s256-m8": 1.04}
"""By cell: how much longer than its bound a step may take, at most."""


def derive_scale(raw: Raw) -> dict[str, Any]:
    """Comparisons with their totals, and times with their ratios to native and to their bound."""
    native = {row["cell"]: row for row in raw["timed"] if row["side"] == "native"}
    return {
        "compared": [
            {
                "name": row["name"],
                "schedule": row["schedule"],
                "steps": row["steps"],
                "values": sum(n for n, _ in row["categories"].values()),
                "different": sum(bad for _, bad in row["categories"].values()),
            }
            for row in raw["compared"]
        ],
        "timed": [_timed(row, native.get(row["cell"])) for row in raw["timed"]],
    }


def _timed(row: Raw, native: Raw | None) -> dict[str, Any]:
    median = statistics.median(row["step_ms"])
    bound = row.get("bound_ms")
    found = {
        "cell": row["cell"],
        "side": row["side"],
        "schedule": row["schedule"],
        **{name: _spread(row[name]) for name in ("step_ms", "single_ms", "host_ms")},
        "bound_ms": None if bound is None else round(bound, _DIGITS),
        "over_bound": None if bound is None else round(median / bound, _DIGITS),
        "peak_bytes": max(row["peak_bytes"]),
        "construction_s": round(row["construction_s"], _DIGITS),
        "native_over_this": None,
        "above_native_bytes": None,
    }
    if own := row.get("in_order", {}).get("bound_ms"):
        found["in_order_bound_ms"] = round(own, _DIGITS)
        found["over_in_order"] = round(median / own, _DIGITS)
    if row.get("message_ms"):
        found["message_ms"] = round(row["message_ms"], _DIGITS)
    if busy := [own["kernels"] + own["copies"] for own in row.get("busy_ms", ())]:
        found["busiest_ms"] = round(max(busy), _DIGITS)
        found["over_busiest"] = round(median / max(busy), _DIGITS)
    if "final" in row:
        found["final_values"], found["final_different"] = row["final"]
    if native is not None and native is not row:
        theirs = statistics.median(native["step_ms"])
        found["native_over_this"] = round(theirs / median, _DIGITS)
        pairs = zip(row["peak_bytes"], native["peak_bytes"], strict=True)
        found["above_native_bytes"] = max(own - other for own, other in pairs)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, _DIGITS) for name, value in found.items()}
