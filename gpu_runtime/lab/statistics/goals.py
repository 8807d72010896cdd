"""
The goals of the speed and memory tables, and each measured number beside its goal.

Missed goals are listed in the same way as met goals; `reports/README.md` gives the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from .host import GOAL_US
from .summary import goal_row

GB = 1e9
DIRECT = ("ours_per_microbatch", "ours_accumulate")
"""Captured columns in which dW writes directly into the gradient destinations."""


@attrs.frozen
class Goal:
    """
    One goal of the tables.

    Args:
        name: What is measured, in words.
        bound: `at most` or `at least`.
        value: The number that the measurement must reach.
        cells: Names of the cells (workloads) with this goal.
        columns: Names of the columns (ways to run a step) with this goal.
        read: Function that reads the measured number of a column from the cell's derived figures.
    """

    name: str
    bound: Literal["at most", "at least"]
    value: float
    cells: tuple[str, ...]
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], float | None]

    def judge(self, cell: Mapping[str, Any], column: str) -> dict[str, Any] | None:
        """
        The measured number beside the goal; None if the number was not measured.

        A column that never breaks even misses the goal; its number is None.
        """
        measured = self.read(cell, column)
        if measured is None:
            return None
        found = goal_row(self.name, cell["cell"], column, self.bound, self.value, measured)
        return {**found, "measured": None} if math.isinf(measured) else found


def _entry(*path: str) -> Callable[[Mapping[str, Any], str], float | None]:
    def read(cell: Mapping[str, Any], column: str) -> float | None:
        return _number(cell["columns"].get(column), path)

    return read


def _number(value: Any, path: Sequence[str]) -> float | None:
    """The number at a path; None if the path ends early."""
    for key in path:
        if value is None:
            return None
        value = value.get(key)
    return None if value is None else float(value)


def _host_us(cell: Mapping[str, Any], column: str) -> float | None:
    # Older reports did not time single actions.
    host = cell.get("host", {}).get(column)
    over = None if host is None else host["of_an_action_us"]
    return None if over is None else float(over["median"])


def _in_gb(cell: Mapping[str, Any], column: str) -> float | None:
    found = _entry("above_native_bytes", "largest")(cell, column)
    return None if found is None else round(found / GB, 4)


def _break_even(cell: Mapping[str, Any], column: str) -> float | None:
    entry = cell["columns"].get(column)
    if entry is None or cell["fastest_native"] is None:
        return None
    steps = entry["break_even_steps"]
    return math.inf if steps is None else float(steps)


def _growth(cell: Mapping[str, Any], column: str) -> float | None:
    kinds = [_entry("growth_bytes", kind)(cell, column) for kind in ("allocated", "reserved")]
    return max((k for k in kinds if k is not None), default=None)


def _of_cell(*path: str) -> Callable[[Mapping[str, Any], str], float | None]:
    def read(cell: Mapping[str, Any], column: str) -> float | None:
        return _number(cell, path)

    return read


FIRST, SECOND, THIRD = "h2048-s256-m4", "h4096-s256-m8", "h4096-s4096-m4"
ALL = (FIRST, SECOND, THIRD)
ONE = ("ours_accumulate",)

_native = _entry("native_over_this", "median")
_te = _entry("te_graphs_over_this", "median")

GOALS: tuple[Goal, ...] = (
    Goal("step over the floor", "at most", 1.10, ALL, ONE, _entry("over_floor", "ratio")),
    Goal(
        "step over its own kernels",
        "at most",
        1.10,
        ALL,
        ("ours_per_microbatch",),
        _entry("over_own_kernels"),
    ),
    Goal(
        "step over one graph of the native step",
        "at most",
        1.05,
        ALL,
        ONE,
        _entry("over_whole_step", "median"),
    ),
    Goal("speedup over native", "at least", 7.0, (FIRST,), DIRECT, _native),
    Goal("speedup over native", "at least", 5.0, (SECOND,), DIRECT, _native),
    Goal("speedup over native", "at least", 1.0, (THIRD,), DIRECT, _native),
    Goal("speedup over TE's own graphs", "at least", 1.8, (FIRST,), DIRECT, _te),
    Goal("speedup over TE's own graphs", "at least", 1.12, (SECOND,), DIRECT, _te),
    Goal(
        "per_microbatch over copied",
        "at least",
        1.13,
        (SECOND,),
        ("ours_per_microbatch",),
        _of_cell("copied_over_per_microbatch", "median"),
    ),
    Goal(
        "step with guards over without",
        "at most",
        1.01,
        (FIRST,),
        ONE,
        _of_cell("guards", "step_on_over_off", "median"),
    ),
    Goal(
        "step counted by the device over uncounted",
        "at most",
        1.015,
        (FIRST,),
        ONE,
        _of_cell("device_counts", "step_on_over_off", "median"),
    ),
    Goal(
        "step counted and compared by the device over uncounted",
        "at most",
        1.015,
        (FIRST,),
        ONE,
        _of_cell("late_counts", "step_on_over_off", "median"),
    ),
    Goal(
        "host time of a guarded action over its bare replay, µs",
        "at most",
        GOAL_US,
        (FIRST,),
        ONE,
        _host_us,
    ),
    Goal("peak memory above native, GB", "at most", 0.4, (FIRST,), DIRECT, _in_gb),
    Goal("peak memory above native, GB", "at most", 2.5, (SECOND,), DIRECT, _in_gb),
    Goal("persistent growth, bytes", "at most", 0.0, ALL, DIRECT, _growth),
    Goal(
        "construction, warm-up and capture included, s",
        "at most",
        0.5,
        ALL,
        DIRECT,
        _entry("construction_s"),
    ),
    Goal("break-even with native, steps", "at most", 18, (FIRST,), DIRECT, _break_even),
    Goal(
        "break-even with native, steps",
        "at most",
        10,
        (SECOND,),
        DIRECT,
        _break_even,
    ),
    Goal(
        # In the third cell an activation is as large as a square matrix, so its copies count too.
        "copies of a matrix gradient's size in a step",
        "at most",
        0.0,
        ALL,
        DIRECT,
        _entry("matrix_copies", "per_step"),
    ),
)
"""The goals of a step-table report."""


def judge_cells(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every goal that was measured, whether met or missed."""
    by_name = {cell["cell"]: cell for cell in cells}
    found = (
        goal.judge(by_name[name], column)
        for goal in GOALS
        for name in goal.cells
        if name in by_name
        for column in goal.columns
    )
    return [entry for entry in found if entry is not None]


def judge_sweep(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Judge resources when slots are provisioned for live tapes only: while the number of live tapes
    stays the same, more microbatches must not need more resources.

    The number of graphs and the arena bytes must stay equal; peak memory may rise by at most one
    granule of the allocator (2 MiB).
    """
    granule = 2 * 1024 * 1024
    found: list[dict[str, Any]] = []
    live = [p for p in points if p["provisioning"] == "live"]
    for tapes in sorted({p["sum_of_stage_peaks"] for p in live}):
        flat = sorted(
            (p for p in live if p["sum_of_stage_peaks"] == tapes), key=lambda p: p["microbatches"]
        )
        if len(flat) < 2:
            continue
        first, last = flat[0], flat[-1]
        where = f"M {first['microbatches']} to {last['microbatches']}, stage peaks of {tapes} tapes"
        for key, allowed in (("graphs", 0), ("arena_bytes", 0)):
            rise = last[key] - first[key]
            found.append(_flat(key, where, rise, allowed))
        if first["peak_bytes"] is not None and last["peak_bytes"] is not None:
            rise = max(
                last["peak_bytes"][k] - first["peak_bytes"][k] for k in ("allocated", "reserved")
            )
            found.append(_flat("peak bytes", where, rise, granule))
    return found


def _flat(what: str, where: str, rise: int, allowed: int) -> dict[str, Any]:
    return goal_row(f"live slots: rise of {what}", where, "live", "at most", allowed, rise)
