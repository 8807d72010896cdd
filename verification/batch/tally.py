"""
What happened while a batch exploration ran.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, field, frozen

from .drafts import Chunk

__all__ = ["Sighting", "Tally"]


@frozen
class Sighting:
    """Where something was seen: the level and the state, and which move did it, if one did."""

    level: int
    state: tuple[int, ...]
    move: int | None


@define
class Tally:
    """
    What happened, counted, with one state for each thing that did.

    Args:
        level: Level of the states being expanded, set by the explorer.
        accepted: Accepted moves by move.
        refused: Refused moves by (move, clause).
        first_path: Where an accepting path of a transition was first taken.
        first_refused: Where each (move, clause) was first refused.
        broken: What was first found broken, where, and the clause if a refusal broke it.
    """

    level: int = 0

    accepted: Counter[int] = field(factory=Counter)
    refused: Counter[tuple[int, str]] = field(factory=Counter)
    first_path: dict[tuple[str, int], Sighting] = field(factory=dict)
    first_refused: dict[tuple[int, str], Sighting] = field(factory=dict)
    broken: tuple[str, Sighting, str | None] | None = None

    def sighting(self, chunk: Chunk, row: int, move: int | None) -> Sighting:
        """Say where something was seen."""
        return Sighting(self.level, tuple(int(word[row]) for word in chunk.words), move)
