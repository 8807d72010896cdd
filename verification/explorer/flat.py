"""
Flat memory: one byte for each entry, so that freezing and undoing a state is copying bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from qeffect.engine.stage import STATE
from qeffect.relations.columns import CONFIG

from .scopes import Scope, configuration, sizes

__all__ = ["TICKETS", "FlatMemory", "offsets"]

#: Columns that hold tickets in flight, or 0.
TICKETS: Final = ("held", "busy", "refreshing", "filling", "writing", "optimizing")


def offsets(scope: Scope, kept: Iterable[str]) -> dict[str, range]:
    """Return where the entries of each kept column lie; columns of tickets come first."""
    n = sizes(scope)
    chosen = set(kept)
    found: dict[str, range] = {}
    end = 0
    for name, column in sorted(STATE.items(), key=lambda item: item[0] not in TICKETS):
        if name in chosen:
            found[name] = range(end, end + n[column.index])
            end += n[column.index]
    return found


class FlatMemory:
    """
    The contract's memory for small scopes, in one array of signed bytes.

    Every kept column is a view into ``buffer``. A column that no guard can see is kept outside of
    it, where transitions may write it but no state remembers it.

    Args:
        scope: What is explored.
        kept: Names of the columns that make a state.

    Raises:
        ValueError: (while running) A value does not fit in a signed byte.
    """

    __slots__ = ("buffer", "layout", "stage_of", *CONFIG, *STATE)

    layout: Mapping[str, range]

    def __init__(self, scope: Scope, kept: Iterable[str]) -> None:
        n = sizes(scope)
        self.layout = offsets(scope, kept)
        total = max((r.stop for r in self.layout.values()), default=0)
        self.buffer = memoryview(bytearray(total))
        whole = self.buffer.cast("b")
        for name, values in configuration(scope).items():
            setattr(self, name, values)
        for name, column in STATE.items():
            initial = column.number
            if name in self.layout:
                where = self.layout[name]
                view = whole[where.start : where.stop]
                setattr(self, name, view)
                self.fill(view, initial)
            else:
                setattr(self, name, [initial] * n[column.index])

    @staticmethod
    def every(column: Any, value: int) -> bool:
        """Whether every entry of a column equals the value."""
        for entry in column:  # noqa: SIM110 - a generator costs more than this short loop
            if entry != value:
                return False
        return True

    @staticmethod
    def fill(column: Any, value: int) -> None:
        """Set every entry of a column to the value."""
        for index in range(len(column)):
            column[index] = value

    def freeze(self) -> bytes:
        """Return the state as it is now."""
        return self.buffer.tobytes()

    def thaw(self, state: bytes) -> None:
        """Go back to a state."""
        self.buffer[:] = state

    def read(self) -> dict[str, list[int]]:
        """Return the kept columns as plain lists."""
        return {name: list(getattr(self, name)) for name in self.layout}
