"""
The report of an exploration.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

from attrs import asdict, field, frozen

__all__ = ["ExploreReport", "peak_rss_mb"]


@frozen
class ExploreReport:
    """
    The report of an exploration.

    Args:
        scope: Name of the scope.
        symmetry: Whether states that differ only in the names of slots or cells (stage and
            microbatch) count as one.
        states: Number of distinct states, in normal form.
        transitions: Number of accepted moves (calls that the explorer tried); each is counted once
            per state.
        refused: Number of refused moves.
        by_clause: Number of refused moves for each clause.
        by_transition: Number of accepted moves for each label, such as ``forward`` or ``forward
            fails``.
        depth: Number of moves from the initial state to the farthest state.
        invariants: Number of invariants checked in every state.
        violation: The violation and a schedule that leads to it, or None.
        witnesses: A shortest schedule to each accepted transition and to each refusal; a refusal's
            name is ``transition: clause``.
        seconds: Wall-clock time of the exploration, without the search for witnesses.
        cpu_seconds: Processor time of the exploration; other programs on the machine affect it less
            than the wall-clock time.
        peak_rss_mb: Largest resident memory of the process so far, in MiB.
    """

    scope: str
    symmetry: bool
    states: int
    transitions: int
    refused: int
    by_clause: dict[str, int]
    by_transition: dict[str, int]
    depth: int
    invariants: int
    violation: str | None
    witnesses: dict[str, list[str]] = field(repr=False)
    seconds: float
    cpu_seconds: float
    peak_rss_mb: float

    @property
    def rate(self) -> float:
        """Accepted moves (calls that the explorer tried) per second."""
        return self.transitions / max(self.seconds, 1e-9)

    @property
    def attempted_rate(self) -> float:
        """Accepted and refused moves per second."""
        return (self.transitions + self.refused) / max(self.seconds, 1e-9)

    @property
    def cpu_rate(self) -> float:
        """Accepted moves per second of processor time."""
        return self.transitions / max(self.cpu_seconds, 1e-9)

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary."""
        rates = {
            "rate": self.rate,
            "attempted_rate": self.attempted_rate,
            "cpu_rate": self.cpu_rate,
        }
        return asdict(self) | rates


def peak_rss_mb() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
