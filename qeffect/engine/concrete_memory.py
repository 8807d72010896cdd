"""
The concrete memory: one plain list or dictionary per column (array) of the contract's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..relations.columns import CONFIG, Column
from .stage import STATE

__all__ = ["Memory", "Snapshot"]

#: A memory's contents as plain values, comparable with ``==``.
Snapshot = dict[str, tuple[Any, ...]]


class Memory:
    """
    Every column as a list; a column that is indexed by cells (keys without their epoch) is a
    dictionary.

    Args:
        columns: For each name, the column that the transitions over this memory use.
        sorts: For each type of index, such as ``slot``, the number of its members; for ``cell``,
            the cells themselves.
        config: Value of each configured column, with one entry per member of the column's index
            type.
    """

    __slots__ = ("_names", *CONFIG, *STATE)

    def __init__(
        self,
        columns: Mapping[str, Column],
        sorts: Mapping[str, int | Iterable[Any]],
        config: Mapping[str, Any],
    ) -> None:
        self._names = tuple(columns)
        for name, column in columns.items():
            members = sorts[column.index]
            if column.initial is None and name in CONFIG:
                setattr(self, name, config[name])
            elif isinstance(members, int):
                any_one = column.initial is None and column.values in ("link", "caller")
                setattr(self, name, [0 if any_one else column.initial] * members)
            else:
                setattr(self, name, dict.fromkeys(members, column.initial))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a column (a list or a dictionary)."""

    @staticmethod
    def every(column: Any, value: Any) -> bool:
        """Return whether every entry of a column equals the value."""
        if isinstance(column, dict):
            return all(entry == value for entry in column.values())
        return bool(column.count(value) == len(column))

    @staticmethod
    def fill(column: Any, value: Any) -> None:
        """Set every entry of a column to the value."""
        if isinstance(column, dict):
            for index in column:
                column[index] = value
        else:
            column[:] = [value] * len(column)

    def copy(self) -> Memory:
        """Return a memory with the same contents, for example to try a transition on."""
        twin = object.__new__(Memory)
        twin._names = self._names
        for name in self._names:
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def assign(self, other: Memory) -> None:
        """Copy the contents of another memory; this memory's columns stay the same objects."""
        for name in self._names:
            column, entries = getattr(self, name), getattr(other, name)
            if isinstance(column, dict):
                column.update(entries)
            else:
                column[:] = entries

    def snapshot(self) -> Snapshot:
        """Return the contents as plain values; equal memories have equal snapshots."""
        result: Snapshot = {}
        for name in self._names:
            column = getattr(self, name)
            result[name] = tuple(column.items()) if isinstance(column, dict) else tuple(column)
        return result
