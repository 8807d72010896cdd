"""
The statistics that every report shares: medians, extremes, spreads, ratios, and goals.

Numbers are rounded to four decimal places. A number that was not measured is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "DIGITS",
    "Raw",
    "busiest_ms",
    "exact_median",
    "extremes",
    "goal_row",
    "largest",
    "median",
    "microseconds",
    "ratio",
    "rounded",
    "spread",
    "step_ms",
    "totals",
]

Raw = Mapping[str, Any]
"""A part of a report, as plain JSON data."""
DIGITS = 4


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """
    Round a number; None stays None.

    >>> rounded(1.23456), rounded(None)
    (1.2346, None)
    """
    return None if value is None else round(value, digits)


def exact_median(values: Iterable[float]) -> float:
    """
    The median without rounding, for further calculation.

    >>> exact_median([1, 2, 4]), exact_median([1, 2])
    (2, 1.5)

    Raises:
        statistics.StatisticsError: There are no values.
    """
    return statistics.median(values)


def median(values: Iterable[float]) -> float | None:
    """
    The rounded median; None if there are no values.

    >>> median([1, 2, 4]), median([])
    (2, None)
    """
    held = list(values)
    return rounded(exact_median(held)) if held else None


def largest(values: Iterable[float]) -> float | None:
    """The largest value; None if there are no values."""
    return max(values, default=None)


def ratio(top: float | None, bottom: float, digits: int = DIGITS) -> float | None:
    """
    `top` divided by `bottom`, rounded; None if `top` is None or `bottom` is zero.

    >>> ratio(2.0, 3.0), ratio(None, 3.0), ratio(2.0, 0.0)
    (0.6667, None, None)
    """
    return None if top is None or not bottom else round(top / bottom, digits)


def extremes(values: Sequence[float]) -> dict[str, float]:
    """
    Median, minimum and maximum.

    >>> extremes([1.0, 2.0, 4.0])
    {'median': 2.0, 'min': 1.0, 'max': 4.0}
    """
    found = {"median": exact_median(values), "min": min(values), "max": max(values)}
    return {name: round(value, DIGITS) for name, value in found.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """
    Median, minimum, maximum, and spread: the distance between minimum and maximum as a fraction of
    the median.

    >>> spread([1.0, 2.0, 4.0])
    {'median': 2.0, 'min': 1.0, 'max': 4.0, 'spread': 1.5}
    """
    width = (max(values) - min(values)) / exact_median(values)
    return {**extremes(values), "spread": round(width, DIGITS)}


def microseconds(ns: Sequence[float]) -> dict[str, float]:
    """
    Median, minimum, maximum and interquartile range in microseconds, from values in nanoseconds.

    >>> microseconds([1000, 2000, 4000, 5000])
    {'median': 3.0, 'min': 1.0, 'max': 5.0, 'middle_half': 2.0}
    """
    ordered = sorted(ns)
    quarter = len(ordered) // 4
    return {
        "median": round(exact_median(ordered) / 1e3, 3),
        "min": round(ordered[0] / 1e3, 3),
        "max": round(ordered[-1] / 1e3, 3),
        "middle_half": round((ordered[-1 - quarter] - ordered[quarter]) / 1e3, 3),
    }


def totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """
    Add up counts by name.

    >>> totals([{"a": 1}, {"a": 2, "b": 3}])
    {'a': 3, 'b': 3}
    """
    found: dict[str, int] = {}
    for count in counts:
        for key, value in count.items():
            found[key] = found.get(key, 0) + value
    return found


def step_ms(row: Raw) -> float:
    """The median step time, over all rounds, of a side (such as native) over ranks, in
    milliseconds."""
    return float(exact_median(row["step_ms"]))


def busiest_ms(row: Raw) -> float | None:
    """
    Milliseconds of kernels and copies per step on the busiest rank; None if there is no profile.
    """
    return largest(rank["kernels"] + rank["copies"] for rank in row.get("busy_ms", ()))


def goal_row(
    goal: str, cell: str, column: str, bound: str, value: float, measured: float
) -> dict[str, Any]:
    """
    One goal beside its measurement.

    Args:
        goal: What is measured, in words.
        cell: The workload that was measured, by the name of its cell.
        column: The way to run a step: the name of a column, or the side and its schedule.
        bound: `at most` or `at least`.
        value: The number that the goal asks for.
        measured: The number that was measured.
    """
    return {
        "goal": goal,
        "cell": cell,
        "column": column,
        "bound": bound,
        "value": value,
        "measured": measured,
        "met": measured <= value if bound == "at most" else measured >= value,
    }
