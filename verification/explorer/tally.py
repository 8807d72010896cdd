"""
The counts of an exploration: accepted moves, refusals and violations.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, field, frozen

from .drafts import Chunk

__all__ = ["Sighting", "State", "Tally"]


#: A packed state.
State = tuple[int, ...]


@frozen
class Sighting:
    """
    An event of an exploration and its first state.

    Args:
        level: Level of the state: the number of moves of a shortest schedule to the state.
        state: The state in which the event occurred.
        move: Position, in the list of moves, of the move (call) that occurred; None if the event is
            that a predicate fails in the state.
        clause: Clause by which the move was refused; None if the move was accepted.
    """

    level: int
    state: State
    move: int | None
    clause: str | None = None


@define
class Tally:
    """
    Counts of events, each with one state in which the event occurred.

    Args:
        level: Level of the states being expanded, set by the explorer.
        accepted: For each move (a call that the explorer tries), how often it was accepted.
        refused: For each (move, clause), how often the clause refused the move.
        first_path: The first sighting of each accepting path of a transition.
        first_refused: The first sighting of each refusal (move, clause).
        broken: The first violation and its sighting.
    """

    level: int = 0

    accepted: Counter[int] = field(factory=Counter)
    refused: Counter[tuple[int, str]] = field(factory=Counter)
    first_path: dict[tuple[str, int], Sighting] = field(factory=dict)
    first_refused: dict[tuple[int, str], Sighting] = field(factory=dict)
    broken: tuple[str, Sighting] | None = None

    def sighting(
        self, chunk: Chunk, row: int, move: int | None = None, clause: str | None = None
    ) -> Sighting:
        """Return the sighting of a state of a chunk."""
        state = tuple(int(word[row]) for word in chunk.words)
        return Sighting(self.level, state, move, clause)

    def breaks(self, told: str, sighting: Sighting) -> None:
        """Record a violation, unless one is recorded already."""
        if self.broken is None:
            self.broken = told, sighting
