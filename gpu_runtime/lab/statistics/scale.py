"""
Derive the figures of a pipeline over ranks: totals, medians, ratios and bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .paper import LARGE, SMALL
from .summary import DIGITS, Raw, busiest_ms, extremes, goal_row, ratio, rounded, step_ms

__all__ = ["BOUND_GOALS", "derive_scale"]

BOUND_GOALS: Mapping[str, float] = {SMALL: 1.08, LARGE: 1.04}
"""
Goal by cell: the step time divided by its lower bound (`runner.rank_parts.bound_ms`) is at most
this value.
"""
NATIVE_GOALS: Mapping[int, Mapping[str, float]] = {
    2: {SMALL: 12.0, LARGE: 7.3},
    4: {SMALL: 16.0, LARGE: 9.8},
}
"""
Goal by ranks and cell: the time of a native step divided by the time of one launch is at least this
value.
"""
REPLAYS_GOAL = 1.15
"""Goal: the step time of replays divided by the time of one launch is at most this value."""
HOST_GOAL_MS = 0.3
"""
Goal: the host time of one launch, guards included, is at most this value while the host is ahead of
its device.
"""
MEMORY_GOALS_GB: Mapping[str, float] = {SMALL: 0.5, LARGE: 1.0}
"""Goal by cell: the peak memory of replays minus native's is at most this value, in GB."""


def derive_scale(raw: Raw) -> dict[str, Any]:
    """Derive totals of comparisons, ratios of times to native and to the bound, and goals."""
    native = {row["cell"]: row for row in raw["timed"] if row["side"] == "native"}
    timed = [_timed(row, native.get(row["cell"])) for row in raw["timed"]]
    ranks = max((len(row["peak_bytes"]) for row in raw["timed"]), default=0)
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
        "timed": timed,
        "targets": _targets(timed, ranks),
    }


def _targets(timed: Sequence[Raw], ranks: int) -> list[dict[str, Any]]:
    """The goals that were measured, for every schedule."""
    found: list[dict[str, Any]] = []

    def judge(goal: str, row: Raw, bound: str, value: float | None, measured: float | None) -> None:
        if value is None or measured is None:
            return
        column = f"{row['side']}, {row['schedule']}"
        found.append(goal_row(goal, row["cell"], column, bound, value, measured))

    for row in timed:
        cell = row["cell"]
        if row["side"] == "one launch":
            native = NATIVE_GOALS.get(ranks, {}).get(cell)
            judge("native / this", row, "at least", native, row["native_over_this"])
            judge("over its bound", row, "at most", BOUND_GOALS.get(cell), row["over_bound"])
            host = HOST_GOAL_MS if cell in BOUND_GOALS else None
            took = row.get("host_ahead_ms", row["host_ms"])["median"]
            judge("host time, ms", row, "at most", host, took)
        if row["side"] == "guarded":
            whole = [
                one["step_ms"]["median"]
                for one in timed
                if (one["cell"], one["schedule"], one["side"])
                == (cell, row["schedule"], "one launch")
            ]
            over = ratio(row["step_ms"]["median"], whole[0]) if whole else None
            judge("replays over one launch", row, "at most", REPLAYS_GOAL, over)
            above = row["above_native_bytes"]
            above = ratio(above, 1e9)
            judge("GB above native", row, "at most", MEMORY_GOALS_GB.get(cell), above)
    return found


def _timed(row: Raw, native: Raw | None) -> dict[str, Any]:
    step = step_ms(row)
    bound = row.get("bound_ms")
    found = {
        "cell": row["cell"],
        "side": row["side"],
        "schedule": row["schedule"],
        **{name: extremes(row[name]) for name in ("step_ms", "single_ms", "host_ms")},
        **({"host_ahead_ms": extremes(row["host_ahead_ms"])} if "host_ahead_ms" in row else {}),
        "bound_ms": rounded(bound),
        "over_bound": None if bound is None else ratio(step, bound),
        "peak_bytes": max(row["peak_bytes"]),
        "construction_s": rounded(row["construction_s"]),
        "native_over_this": None,
        "above_native_bytes": None,
    }
    if own := row.get("in_order", {}).get("bound_ms"):
        found["in_order_bound_ms"] = rounded(own)
        found["over_in_order"] = ratio(step, own)
    if split := row.get("split"):
        found["longest_row_ms"] = rounded(max(rank["row_ms"] for rank in split))
        found["over_longest_row"] = ratio(step, found["longest_row_ms"])
        found["split"] = [_split(rank["launch"], rank["row"]) for rank in split]
    if row.get("message_ms"):
        found["message_ms"] = rounded(row["message_ms"])
    if (busiest := busiest_ms(row)) is not None:
        found["busiest_ms"] = rounded(busiest)
        found["over_busiest"] = ratio(step, busiest)
    if "final" in row:
        found["final_values"], found["final_different"] = row["final"]
    if native is not None and native is not row:
        found["native_over_this"] = ratio(step_ms(native), step)
        pairs = zip(row["peak_bytes"], native["peak_bytes"], strict=True)
        found["above_native_bytes"] = max(own - other for own, other in pairs)
    return found


def _split(launch: Raw, row: Raw) -> dict[str, float]:
    """
    Compare a rank's profiled step with a graph of the same rank's actions without messages.

    Returns:
        Times in milliseconds: `step`, and its four parts. `row` is the time of the graph without
        messages. `kernels` is the extra kernel time next to messages, including kernels that the
        graph lacks. `between` is the extra time between kernels. `awaited` is the time in which the
        rank waits for other ranks. `beside` is the time in which kernels and messages overlap.
    """
    found = {
        "step": launch["step"],
        "row": row["step"],
        "kernels": launch["busy"] - row["busy"],
        "between": launch["between"] - row["between"],
        "awaited": launch["awaited"] - row["awaited"],
        "beside": launch["beside"],
    }
    return {name: round(value, DIGITS) for name, value in found.items()}
