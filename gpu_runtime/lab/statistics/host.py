"""
Derive host times of single actions: each action's time minus the time of its bare replay (without
guards and copies), and the mean over all actions.

All numbers are microseconds of host time. A guarded action is an F, dI, dW or refresh. The calls
between actions (bind, read and finish) are divided among the actions of the step.

The host time of an action is also split into parts, each timed in separate steps. The launch is
subtracted from the executor's part; time that no part explains is called the action's own code.
Parts are medians of single calls, whose sum differs from the median of whole steps: the difference
is listed as the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .summary import Raw, exact_median, microseconds

GOAL_US = 12.0
"""
Goal for the host time of a guarded action minus its bare replay's, in the first cell, in
microseconds.
"""


def derive_host(columns: Mapping[str, Raw]) -> dict[str, Any]:
    """
    Figures of the columns whose actions were timed one by one; empty if there are no such columns.
    """
    return {
        name: derive_column(column["host_actions"])
        for name, column in columns.items()
        if column.get("host_actions")
    }


def derive_column(raw: Raw) -> dict[str, Any]:
    """
    Medians of each kind of call, and the cost of an action minus its bare replay.

    Args:
        raw: The measurements of `runner.host_times`.
    """
    steps, actions = raw["steps"], raw["actions"]
    kinds = {}
    for name, ns in raw["guarded_ns"].items():
        bare = raw["bare_ns"].get(name)
        kinds[name] = {
            "calls": len(ns) / steps,
            "us": microseconds(ns),
            "bare_us": microseconds(bare) if bare else None,
            "over_bare_us": round((exact_median(ns) - exact_median(bare)) / 1e3, 3)
            if bare
            else None,
        }
    found: dict[str, Any] = {"kinds": kinds, "copy_us": None, "of_an_action_us": None}
    if raw["copy_ns"]:
        found["copy_us"] = microseconds(raw["copy_ns"])
    if raw["bare_ns"]:
        guarded, bare = (_by_step(raw[key], steps) for key in ("guarded_ns", "bare_ns"))
        over = [(a - b) / actions for a, b in zip(guarded, bare, strict=True)]
        found["of_an_action_us"] = {**microseconds(over), "goal": GOAL_US}
    if raw.get("parts_ns"):
        parts = _parts(raw)
        if (whole := found["of_an_action_us"]) is not None:
            parts[REST] = round(whole["median"] - sum(parts.values()), 3)
        found["parts_us"] = parts
    return found


OWN = "own code"
"""An action's median minus the medians of all parts."""

REST = "rest"
"""The median over whole steps minus the sum of the medians of single calls."""


def _parts(raw: Raw) -> dict[str, float]:
    """
    Microseconds that each part contributes to the time of a mean action beyond its bare replay.
    """
    steps, actions = raw["steps"], raw["actions"]

    def of_an_action(times: Mapping[str, Sequence[int]]) -> float:
        each = [exact_median(ns) * len(ns) / steps for ns in times.values() if ns]
        return float(sum(each) / actions / 1e3)

    parts = {part: of_an_action(times) for part, times in raw["parts_ns"].items()}
    bare = of_an_action(raw["bare_ns"])
    # The executor's time includes the address check and the launch.
    parts["executor"] -= parts["addresses"] + bare
    parts[OWN] = of_an_action(raw["guarded_ns"]) - bare - sum(parts.values())
    return {part: round(us, 3) for part, us in parts.items()}


def _by_step(times: Mapping[str, Sequence[int]], steps: int) -> list[int]:
    """Total time of the calls of each step; every step makes the same calls."""
    totals = [0] * steps
    for ns in times.values():
        each = len(ns) // steps
        for n in range(steps):
            totals[n] += sum(ns[n * each : (n + 1) * each])
    return totals
