"""
The kinds of fields in a training file: type, default, unit, allowed values, and whether a resume
may change the field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from ..ranks.job import NAMES

__all__ = [
    "COUNT",
    "FREE",
    "SAME",
    "SEED",
    "cut",
    "flag",
    "fraction",
    "name",
    "number",
    "one_of",
    "schedule",
    "text",
    "times",
    "whole",
]

SIZE = 2**20
"""Largest value of a dimension, and of a number of ranks, stages, layers or microbatches."""
COUNT = 2**53
"""Largest number of steps and of windows."""
SEED = 2**63 - 1
"""Largest seed."""
NUMBER = 1e9
"""Largest value of a field that is a number."""

SAME = "must stay the same"
"""A run that resumes with another value is refused."""
FREE = "may change"
"""A run may resume with another value."""


def _field(
    default: Any,
    kind: str,
    expected: str,
    allowed: str,
    fits: Callable[[Any], bool],
    *,
    unit: str = "",
    resume: str = FREE,
    most: float | None = None,
) -> Any:
    """
    Declare a field with its type, default, unit and allowed values.

    Args:
        default: The field's default; a list is copied for each table.
        kind: The field's type, in TOML's terms.
        expected: The allowed values, as text for error messages.
        allowed: The allowed values, as text for docs/configuration.md.
        fits: Function that says whether a value is allowed.
        unit: The unit of the value; empty without a unit.
        resume: Whether a run that resumes from a checkpoint may change the field.
        most: The largest allowed value, for error messages.
    """
    known = {
        "kind": kind,
        "expected": expected,
        "allowed": allowed,
        "fits": fits,
        "unit": unit,
        "resume": resume,
        "most": most,
    }
    if isinstance(default, list):
        return attrs.field(factory=lambda: list(default), metadata=known)
    return attrs.field(default=default, metadata=known)


def whole(default: int, least: int = 1, most: int = SIZE, **known: Any) -> Any:
    """Declare a whole number between two limits, both included."""
    fits = lambda v: type(v) is int and least <= v <= most  # noqa: E731 - one of many alike
    expected = f"a whole number of at least {least}"
    return _field(default, "integer", expected, f"{least:,} to {most:,}", fits, most=most, **known)


def fraction(default: float, **known: Any) -> Any:
    """Declare a number of at least 0 and below 1."""
    fits = lambda v: type(v) in (int, float) and 0 <= v < 1  # noqa: E731 - one of many alike
    expected, allowed = "a number of at least 0 and below 1", "0 to below 1"
    return _field(default, "number", expected, allowed, fits, **known)


def number(default: float, *, positive: bool = False, **known: Any) -> Any:
    """Declare a finite number of at least 0; with `positive`, above 0."""

    def fits(value: Any) -> bool:
        is_number = type(value) in (int, float) and value <= NUMBER
        return is_number and (value > 0 if positive else value >= 0)

    least = "above 0" if positive else "of at least 0"
    allowed = f"{'above 0' if positive else '0'} to {NUMBER:,.0f}"
    return _field(default, "number", f"a number {least}", allowed, fits, most=NUMBER, **known)


def flag(default: bool, **known: Any) -> Any:
    """Declare a boolean: true or false."""
    fits = lambda v: type(v) is bool  # noqa: E731 - one of many alike
    return _field(default, "boolean", "true or false", "true, false", fits, **known)


def text(default: str, **known: Any) -> Any:
    """Declare a string without NUL characters, such as a path."""
    fits = lambda v: type(v) is str and "\0" not in v  # noqa: E731 - one of many alike
    return _field(default, "string", "a text", "any without NUL", fits, **known)


def name(default: str, **known: Any) -> Any:
    """Declare a short name that fits into a line of a log."""
    fits = lambda v: type(v) is str and len(v) <= 64 and v.isprintable()  # noqa: E731
    expected, allowed = (
        "a printable text of at most 64 characters",
        "at most 64 printable characters",
    )
    return _field(default, "string", expected, allowed, fits, **known)


def one_of(default: str, *options: str, **known: Any) -> Any:
    """Declare a field that takes one of several strings."""
    shown = ", ".join(map(repr, options))
    allowed = ", ".join(f"`{option}`" for option in options)
    fits = lambda v: type(v) is str and v in options  # noqa: E731 - one of many alike
    return _field(default, "string", f"one of {shown}", allowed, fits, **known)


def schedule(default: str, **known: Any) -> Any:
    """Declare a schedule: a short name, or the name of a schedule class of torch."""

    def fits(value: Any) -> bool:
        return type(value) is str and (value in NAMES or value.startswith("Schedule"))

    expected = f"one of {', '.join(NAMES)}, or a schedule class of torch"
    allowed = f"{', '.join(f'`{name}`' for name in NAMES)}, or a schedule class of torch"
    return _field(default, "string", expected, allowed, fits, **known)


def cut(**known: Any) -> Any:
    """
    Declare how layers are divided into stages: the name of a rule, or the number of layers of each
    stage.
    """

    def fits(value: Any) -> bool:
        if type(value) is list:
            return bool(value) and all(type(n) is int and 1 <= n <= SIZE for n in value)
        return value in ("even", "balanced", "measured")

    expected = "'even', 'balanced', 'measured', or a list of layers per stage"
    allowed = f"`even`, `balanced`, `measured`, or a list of each stage's layers, 1 to {SIZE:,}"
    return _field("even", "string or list of integers", expected, allowed, fits, **known)


def stages(**known: Any) -> Any:
    """Declare a choice of stages: none, all, or the numbers of some stages."""

    def fits(value: Any) -> bool:
        if type(value) is list:
            distinct = all(type(n) is int and 0 <= n <= SIZE for n in value)
            return bool(value) and distinct and len(set(value)) == len(value)
        return value in ("none", "all")

    expected = "'none', 'all', or a list of different stage numbers, which begin at 0"
    allowed = "`none`, `all`, or a list of different stage numbers"
    return _field("none", "string or list of integers", expected, allowed, fits, **known)


def times(**known: Any) -> Any:
    """Declare a list of times, one for each layer."""

    def fits(value: Any) -> bool:
        return type(value) is list and all(
            type(one) in (int, float) and 0 < one <= NUMBER for one in value
        )

    allowed = f"each above 0 to {NUMBER:,.0f}; empty, or one for each layer"
    return _field([], "list of numbers", "a list of numbers above 0", allowed, fits, **known)
