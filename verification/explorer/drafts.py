"""
Many states at a time, column by column (array by array). A chunk holds explored states; a draft
holds the states that a move (a call that the explorer tries) leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .packing import Packing, Words
from .program import Value

__all__ = ["Chunk", "Draft", "narrowed"]

Rows = NDArray[np.intp]


def narrowed(value: Value, rows: Rows | None) -> Value:
    """Return a value for the states at these positions of a chunk only; None keeps all states."""
    if rows is None or not isinstance(value, np.ndarray):
        return value
    return value.take(rows)


class Chunk:
    """
    Some states of the current level of an exploration.

    Args:
        packing: How states are packed into integers.
        words: The states, each packed into 64-bit integers.
    """

    __slots__ = ("_entries", "_packing", "known", "size", "words")

    def __init__(self, packing: Packing, words: Words) -> None:
        self._packing = packing
        self.words = words
        self.size = words.shape[1]
        self._entries = packing.unpack(words)
        self.known: dict[Any, Value] = {}

    def entry(self, column: str, index: int) -> Value:
        """Return an entry of a column."""
        value = self._entries.get((column, index))
        return self._packing.constant(column, index) if value is None else value

    def width(self, column: str) -> int:
        """Return the number of entries of a column."""
        return self._packing.width(column)


class Draft:
    """
    Some states of a chunk while a move (a call that the explorer tries) changes them.

    Args:
        chunk: The chunk that the states come from.
        rows: The positions of the states in the chunk; None for all positions.
        pinned: Entries of the state that have one value in all these states because the move
            requires this value.
        changed: Entries that the move has changed so far, with their new values.
    """

    __slots__ = ("_taken", "changed", "chunk", "pinned", "rows")

    def __init__(
        self,
        chunk: Chunk,
        rows: Rows | None,
        pinned: Mapping[tuple[str, int], int],
        changed: dict[tuple[str, int], Value],
    ) -> None:
        self.chunk = chunk
        self.rows = rows
        self.pinned = pinned
        self.changed = changed
        self._taken: dict[tuple[str, int], Value] = {}

    @property
    def first_row(self) -> int:
        """The position in the chunk of one of the states."""
        return 0 if self.rows is None else int(self.rows[0])

    def entry(self, column: str, index: int) -> Value:
        """Return the current value of a column's entry in each state."""
        key = (column, index)
        if key in self.changed:
            return self.changed[key]
        return self.before(key)

    def before(self, key: tuple[str, int]) -> Value:
        """Return the value of an entry before the move."""
        try:
            return self._taken[key]
        except KeyError:
            value = self.pinned.get(key)
            if value is None:
                value = narrowed(self.chunk.entry(*key), self.rows)
            self._taken[key] = value
            return value

    def width(self, column: str) -> int:
        """Return the number of entries of a column."""
        return self.chunk.width(column)

    def narrow(self, rows: Rows) -> Draft:
        """Return a draft of the states with these row numbers."""
        return Draft(
            self.chunk,
            rows if self.rows is None else self.rows.take(rows),
            self.pinned,
            {key: narrowed(value, rows) for key, value in self.changed.items()},
        )

    def words(self, packing: Packing) -> Words:
        """Return the current states, packed."""
        source = self.chunk.words
        words = source.copy() if self.rows is None else source.take(self.rows, axis=1)
        for key, after in self.changed.items():
            if key in packing.fields:
                before = self.before(key)
                if before is not after:
                    packing.move(words, key, before, after)
        return words
