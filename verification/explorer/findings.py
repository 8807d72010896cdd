"""
Findings: what either reading hands over for the report, in terms of plain states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from attrs import field, frozen

__all__ = ["Findings", "Occurrence", "Stopwatch"]


class Stopwatch:
    """Measures wall time and processor time from its making on."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def __call__(self) -> tuple[float, float]:
        """Return the seconds of both so far."""
        wall, processor = self._started
        return time.perf_counter() - wall, time.process_time() - processor


@frozen
class Occurrence:
    """
    One thing that was seen.

    Args:
        chain: Representatives of the states on a shortest way to where it was, the initial one
            first.
        move: Position of the move that did it there; None for a state that breaks an invariant.
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
        depth: Length of the longest shortest way to a state.
        accepted: Accepted moves by move.
        refused: Refused moves by (move, clause).
        took: Wall time and processor time, in seconds.
        witnesses: Where each name was first seen.
        violation: What was broken, and where; or None.
    """

    states: int
    depth: int
    accepted: Mapping[int, int]
    refused: Mapping[tuple[int, str], int]
    took: tuple[float, float]
    witnesses: Mapping[str, Occurrence] = field(factory=dict)
    violation: tuple[str, Occurrence] | None = None
