"""
A memory that records which entries the transitions (contract calls) of a step read and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..engine.concrete_memory import Memory

__all__ = ["TracedColumn", "TracedMemory"]


class TracedColumn:
    """
    A copy of a column (array of the state) that records which entries are read before they are
    written, and which are written.
    """

    __slots__ = ("entries", "read", "written")

    def __init__(self, entries: Any) -> None:
        self.entries = entries.copy()
        self.read: dict[Any, None] = {}
        self.written: dict[Any, None] = {}

    def indices(self) -> Iterator[Any]:
        return iter(self.entries if isinstance(self.entries, dict) else range(len(self.entries)))

    def __getitem__(self, index: Any) -> Any:
        if index not in self.written:
            self.read[index] = None
        return self.entries[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.written[index] = None
        self.entries[index] = value


class TracedMemory:
    """A copy of a memory whose columns record which entries are read and written."""

    def __init__(self, memory: Memory, names: Iterable[str]) -> None:
        self.columns = {name: TracedColumn(getattr(memory, name)) for name in names}
        vars(self).update(self.columns)

    @staticmethod
    def every(column: TracedColumn, value: Any) -> bool:
        return all(column[index] == value for index in column.indices())

    @staticmethod
    def fill(column: TracedColumn, value: Any) -> None:
        for index in column.indices():
            column[index] = value
