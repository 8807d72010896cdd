"""
The suite's three profiles: how many examples Hypothesis draws and which rows of test matrices
run.

``dev`` is the default. ``ci`` runs if the variable CI is set. HYPOTHESIS_PROFILE selects any of the
three. ``dev`` leaves out tests marked ``ci``; ``ci`` and ``nightly`` run them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from hypothesis import HealthCheck, settings

__all__ = ["NAMES", "PROFILE", "REASON", "THINNED", "by_profile", "described", "few", "load"]

T = TypeVar("T")

NAMES: Final = ("dev", "ci", "nightly")

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
"""The profile of this run."""

REASON: Final = (
    "set by HYPOTHESIS_PROFILE"
    if os.environ.get("HYPOTHESIS_PROFILE")
    else "CI is set"
    if os.environ.get("CI")
    else "the default"
)
"""Why this profile was chosen."""

THINNED: Final = PROFILE == "dev"
"""Whether this run leaves out tests marked ``ci``."""

_ANY: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large),
}
if not os.access(Path.cwd(), os.W_OK):
    # Hypothesis warns if it cannot save failing examples, and every warning fails a test.
    _ANY["database"] = None

settings.register_profile("dev", max_examples=25, stateful_step_count=20, **_ANY)
settings.register_profile(
    "ci", max_examples=150, stateful_step_count=40, derandomize=True, print_blob=True, **_ANY
)
settings.register_profile(
    "nightly", max_examples=2_000, stateful_step_count=60, print_blob=True, **_ANY
)


def load() -> None:
    """
    Load this run's Hypothesis profile.

    Raises:
        ValueError: HYPOTHESIS_PROFILE is not a profile of the suite.
    """
    if PROFILE not in NAMES:
        raise ValueError(f"HYPOTHESIS_PROFILE is {PROFILE!r}; choose from {', '.join(NAMES)}")
    settings.load_profile(PROFILE)


def described() -> str:
    """The profile, why it was chosen and what it includes, in one line."""
    examples = settings.get_profile(PROFILE).max_examples
    rows = "matrices without the rows marked ci" if THINNED else "matrices with the rows marked ci"
    return f"profile: {PROFILE} ({REASON}): {examples} examples, {rows}"


def by_profile(dev: T, ci: T) -> T:
    """Return the first value under ``dev``, the second under ``ci`` and ``nightly``."""
    return dev if THINNED else ci


def few(cases: Iterable[Any], dev: Collection[int], ci: Collection[int] | None = None) -> list[Any]:
    """
    Return the cases of a test matrix as parameters, marked by the profiles that run them.

    Args:
        cases: Cases; a tuple has a value for each parameter.
        dev: Positions of the cases that ``dev`` runs.
        ci: Positions of the cases that ``ci`` runs in addition; by default all others. The
            remaining cases are marked ``nightly``, which runs all cases.
    """
    made = []
    for n, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        rest = pytest.mark.ci if ci is None or n in ci else pytest.mark.nightly
        made.append(pytest.param(*values, marks=() if n in dev else rest))
    return made
