"""
The reports of a guard in manner ``report``. A guard reports the first violation of each clause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import attrs

from qeffect.refusals import Refused

__all__ = ["LOGGER", "Manner", "OnViolation", "Reports", "Violation"]

Manner = Literal["refuse", "report"]
"""How a guard acts on a violation: ``refuse`` raises; ``report`` never raises and never blocks."""

#: Where violations are logged, as errors.
LOGGER = logging.getLogger("qeffect.guards")


@attrs.frozen
class Violation:
    """
    A violation of the contract.

    Args:
        clause: The clause that was violated.
        rank: Rank of the process in its pipeline.
        step: Number of the guarded step, from 0.
        action: The action that was checked, in the framework's notation.
        found: What the guard found.
        expected: What the contract requires.
        cause: The likely cause; empty if it is unknown.
        remedy: What to do; empty if it is unknown.
    """

    clause: str
    rank: int
    step: int
    action: str
    found: str
    expected: str
    cause: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, refused: Refused, rank: int, step: int, action: str) -> Violation:
        """Convert a refusal to a violation."""
        r = refused.record()
        return cls(r.clause, rank, step, action, r.found, r.expected, r.cause, r.remedy)

    def __str__(self) -> str:
        said = (
            f"{self.clause} on pipeline rank {self.rank}, step {self.step}, at {self.action}: "
            f"found {self.found}; expected {self.expected}"
        )
        if self.cause or self.remedy:
            said += "."
        if self.cause:
            said += f" Likely cause: {self.cause}"
        if self.remedy:
            said += f" What to do: {self.remedy}"
        return said


OnViolation = Callable[[Violation], Any]
"""Called with the first violation of each clause."""


class Reports:
    """
    The violations that a guard in manner ``report`` has found.

    Args:
        call: Function that is called with the first violation of each clause. An error that it
            raises is logged.

    Attributes:
        violations: The first violation of each clause, in the order in which they were found.
    """

    def __init__(self, call: OnViolation | None = None) -> None:
        self.violations: dict[str, Violation] = {}
        self._call = call
        self._failed = False

    def add(self, violation: Violation) -> None:
        """Report a violation if it is the first violation of its clause."""
        if violation.clause in self.violations:
            return
        self.violations[violation.clause] = violation
        LOGGER.error("%s", violation)
        if self._call is None:
            return
        try:
            self._call(violation)
        except Exception:
            LOGGER.exception("the callable on_violation raised; the run goes on")

    def fail(self, error: Exception, place: str) -> None:
        """Log that the guard itself failed. Only the first failure is logged."""
        if not self._failed:
            self._failed = True
            LOGGER.error(
                "the guard failed at %s and checks nothing until the next step: %s: %s",
                place,
                type(error).__name__,
                error,
            )
