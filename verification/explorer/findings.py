"""
The findings of either reading, in terms of plain states, for the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from attrs import field, frozen

__all__ = ["Findings", "Occurrence", "Stopwatch"]


class Stopwatch:
    """Measures wall time and processor time since its construction."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def __call__(self) -> tuple[float, float]:
        """Return the seconds of both so far."""
        wall, processor = self._started
        return time.perf_counter() - wall, time.process_time() - processor


@frozen
class Occurrence:
    """
    An accepted move, a refusal or a broken invariant, and where it occurred.

    Args:
        chain: Representatives of the states on a shortest path to it, the initial state first.
        move: Position of the move; None for a state that breaks an invariant.
        clause: Clause of the refusal, or None when the move was accepted.
    """

    chain: Sequence[bytes]
    move: int | None
    clause: str | None = None


@frozen
class Findings:
    """
    What an exploration found.

    Args:
        states: Distinct states.
        depth: Length of the longest shortest path to a state.
        accepted: Number of acceptances of each move.
        refused: Number of refusals by (move, clause).
        took: Wall time and processor time, in seconds.
        witnesses: The first occurrence of each name.
        violation: The violation and its occurrence, or None.
    """

    states: int
    depth: int
    accepted: Mapping[int, int]
    refused: Mapping[tuple[int, str], int]
    took: tuple[float, float]
    witnesses: Mapping[str, Occurrence] = field(factory=dict)
    violation: tuple[str, Occurrence] | None = None
