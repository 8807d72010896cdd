"""
Find the columns (arrays of the contract's state) that a predicate reads. A predicate never
branches, so one evaluation of it reads all of these columns.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ColumnReads"]


class ColumnReads:
    """
    A memory that records which of its columns (arrays of the contract's state) are read.

    Args:
        memory: The memory that holds the columns.

    >>> from types import SimpleNamespace
    >>> watched = ColumnReads(SimpleNamespace(consumers={0: 3}, held={0: 0}))
    >>> watched.consumers[0], watched.read
    (3, {'consumers'})
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._memory, name)
