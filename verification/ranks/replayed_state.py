"""
The state of the ranks whose logs are replayed; it is sparse and unbounded, and writes can be
undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from qeffect.refusals import Refused
from qeffect.spec.launches import LAUNCH_COLUMNS
from qeffect.spec.ranks import NOBODY, RANK_COLUMNS

from .concrete_state import NEVER, Impossible, Total

__all__ = ["ReplayedState", "UnlikeError", "same"]


class UnlikeError(Exception):
    """A value in a log differs from the model."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found


def same(what: str, expected: Any, found: Any) -> None:
    """
    Require that a value in a log equals the value in the model.

    Raises:
        UnlikeError: The values differ.
    """
    if expected != found:
        raise UnlikeError(f"{what} {expected}", f"{what} {found}")


class _Column:
    """A column of the state; an entry that was never written has the column's initial value."""

    __slots__ = ("entries", "first", "indices", "journal")

    def __init__(self, indices: int, first: int, journal: list[Any]) -> None:
        self.entries: dict[Any, int] = {}
        self.indices = indices
        self.first = first
        self.journal = journal

    def __getitem__(self, index: Any) -> Any:
        if self.indices > 1 and isinstance(index, int):
            return {at[1:]: held for at, held in self.entries.items() if at[0] == index}
        return self.entries.get(index, self.first)

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is ...:
            self._become(dict(value.entries))
        elif isinstance(value, dict):  # a row
            rest = {at: held for at, held in self.entries.items() if at[0] != index}
            self._become(rest | {(index, *at): held for at, held in value.items()})
        else:
            self.journal.append((self, index, self.entries.get(index)))
            self.entries[index] = int(value)

    def _become(self, entries: dict[Any, int]) -> None:
        self.journal.append((self, ..., self.entries))
        self.entries = entries


class ReplayedState:
    """
    A state that the transitions of both protocols (guarded steps and launched steps) read and
    write.

    Args:
        ranks: Number of ranks.
        messages: Number of messages in a step, by (sender, receiver).
    """

    def __init__(self, ranks: int, messages: Mapping[tuple[int, int], int]) -> None:
        self.ranks = range(ranks)
        self._journal: list[Any] = []
        for name, (indices, _) in {**RANK_COLUMNS, **LAUNCH_COLUMNS}.items():
            first = NOBODY if name in NEVER else 0
            setattr(self, name, _Column(len(indices), first, self._journal))
        self.total = Total(messages)
        for pair, count in messages.items():
            self.messages[pair] = count

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def when(self, condition: Any) -> None:
        """
        Require a condition that makes a transition possible.

        Raises:
            Impossible: The condition does not hold.
        """
        if not condition:
            raise Impossible

    def need(self, name: str, condition: Any) -> None:
        """
        Check a condition of the protocol.

        Raises:
            Refused: The condition does not hold.
        """
        if not condition:
            raise Refused(f"ranks.{name}")

    def every(self, sorts: str, holds: Callable[..., Any]) -> bool:
        """Return whether a condition holds for all ranks and all messages of their open steps."""
        members = {"rank": lambda: self.ranks, "place": self._places, "entry": self._entries}
        spaces = [members[sort]() for sort in sorts.split()]
        return all(holds(*given) for given in product(*spaces))

    def _places(self) -> range:
        """Return the message positions of the current steps; all earlier messages have ended."""
        pairs = [*product(self.ranks, self.ranks)]
        first = min(min(self.sent_before[p], self.taken_before[p]) for p in pairs)
        return range(first, max(max(self.sent[p], self.taken[p]) for p in pairs))

    def _entries(self) -> range:
        """Return the message positions of a launch."""
        return range(max(self.total.messages.values(), default=0))

    def zeros(self, column: str) -> dict[Any, int]:
        """Return a row of zeros for a column."""
        return {}

    def mark(self) -> int:
        """Return a mark of the current state, to which `back` can return."""
        return len(self._journal)

    def keep(self) -> None:
        """Forget all marks."""
        self._journal.clear()

    def back(self, mark: int) -> None:
        """Undo every write since a mark."""
        while len(self._journal) > mark:
            column, index, held = self._journal.pop()
            if index is ...:
                column.entries = held
            elif held is None:
                del column.entries[index]
            else:
                column.entries[index] = held
