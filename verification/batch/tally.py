"""
Counts of a batch exploration.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, field, frozen

from .drafts import Chunk

__all__ = ["Sighting", "Tally"]


@frozen
class Sighting:
    """The level and state of an occurrence, and its move, if any."""

    level: int
    state: tuple[int, ...]
    move: int | None


@define
class Tally:
    """
    Counts of what happened, each with one state in which it did.

    Args:
        level: Level of the states being expanded, set by the explorer.
        accepted: Number of acceptances of each move.
        refused: Number of refusals by (move, clause).
        first_path: The first sighting of each accepting path of a transition.
        first_refused: The first sighting of each refusal (move, clause).
        broken: The first violation, its sighting, and the clause if a refusal broke it.
    """

    level: int = 0

    accepted: Counter[int] = field(factory=Counter)
    refused: Counter[tuple[int, str]] = field(factory=Counter)
    first_path: dict[tuple[str, int], Sighting] = field(factory=dict)
    first_refused: dict[tuple[int, str], Sighting] = field(factory=dict)
    broken: tuple[str, Sighting, str | None] | None = None

    def sighting(self, chunk: Chunk, row: int, move: int | None) -> Sighting:
        """Return the sighting of a state of a chunk."""
        return Sighting(self.level, tuple(int(word[row]) for word in chunk.words), move)
