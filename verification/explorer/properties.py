"""
The specification's invariants over flat memory: those that a scope claims, and a fast check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from attrs import define, field

from qeffect.engine.stage import STATE
from qeffect.spec.predicates import Predicate

from ..column_reads import ColumnReads
from ..judging import instances, speaks_of
from .flat import FlatMemory
from .scopes import members_in
from .walker import Walker

__all__ = ["Checker", "claimed"]

_KNOWN_MAX = 200_000  # remembered verdicts of one group; more would cost more than asking again


def _columns(predicate: Predicate, memory: FlatMemory) -> frozenset[str]:
    """Columns that a predicate reads."""
    watched = ColumnReads(memory)
    predicate.function(watched, *(0 for _ in predicate.variables))
    return frozenset(watched.read)


def claimed(walker: Walker, predicates: Iterable[Predicate]) -> tuple[Predicate, ...]:
    """
    Return the predicates that read only columns which a scope has and keeps.

    A column that no transition of the scope writes counts as kept, although no state holds it. A
    predicate over a sort without members, such as buckets without reductions, is left out.
    """
    relations = frozenset(walker.transitions.relations)
    written = walker.written
    members = members_in(walker.scope)
    chosen = []
    for predicate in predicates:
        empty = any(len(members[sort]) == 0 for sort in predicate.variables.values())
        if speaks_of(predicate, relations) and not empty:
            asked = _columns(predicate, walker.memory) & STATE.keys()
            if asked <= walker.kept | (STATE.keys() - written):
                chosen.append(predicate)
    return tuple(chosen)


@define
class _Group:
    """Predicates over the same columns; their verdict is cached by the columns' values."""

    instances: tuple[tuple[str, Callable[..., Any], tuple[int, ...]], ...]
    key: Callable[[Any], Any]
    known: dict[Any, str | None] = field(factory=dict)


@define
class Checker:
    """
    Finds a predicate that a walker's memory breaks.

    Args:
        walker: The walker whose memory is checked.
        predicates: The predicates that must hold.
    """

    walker: Walker
    predicates: tuple[Predicate, ...]
    _groups: list[_Group] = field(init=False)

    def __attrs_post_init__(self) -> None:
        by_columns: dict[frozenset[str], list[Predicate]] = {}
        for predicate in self.predicates:
            asked = _columns(predicate, self.walker.memory) & self.walker.kept
            by_columns.setdefault(asked, []).append(predicate)
        self._groups = [self._group(asked, found) for asked, found in by_columns.items()]

    def _group(self, asked: frozenset[str], found: list[Predicate]) -> _Group:
        layout = self.walker.memory.layout
        where = sorted(offset for column in asked for offset in layout[column])
        asked_of = tuple(
            (predicate.name, predicate.function, values)
            for predicate in found
            for values in instances(predicate, members_in(self.walker.scope))
        )
        key = itemgetter(*where) if where else lambda _: None
        return _Group(asked_of, key)

    def __call__(self, memory: Any) -> str | None:
        """Return the name of a predicate that the memory breaks, or None."""
        buffer = memory.buffer
        for group in self._groups:
            key = group.key(buffer)
            try:
                broken = group.known[key]
            except KeyError:
                broken = self._ask(group, memory)
                if len(group.known) < _KNOWN_MAX:
                    group.known[key] = broken
            if broken is not None:
                return broken
        return None

    @staticmethod
    def _ask(group: _Group, memory: Any) -> str | None:
        for name, function, values in group.instances:
            if not function(memory, *values):
                return name
        return None
