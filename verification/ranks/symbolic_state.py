"""
The state of any number of ranks as Z3 arrays, on which the protocol's transitions run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import z3

from qeffect.spec.launches import LAUNCH_COLUMNS
from qeffect.spec.ranks import NOBODY, RANK_COLUMNS

from ..symbolic import Array, Encoding, Scalar, Sym, raw
from .protocol import RankTransition

__all__ = [
    "COLUMNS",
    "CONFIGURED",
    "ENCODING",
    "SymbolicState",
    "Symbols",
    "asked",
    "fresh",
    "initial",
    "run",
]

#: Ranks are an uninterpreted sort; everything else is an integer.
ENCODING: Final = Encoding(
    {
        "rank": z3.DeclareSort("Rank"),
        **dict.fromkeys(
            (
                *("one", "attempt", "name", "slot", "message"),
                *("place", "entry", "count", "int"),
            ),
            z3.IntSort(),
        ),
    },
    {},
)
#: The columns of both protocols: hosts agree on a commit, or each step is one launch.
COLUMNS: Final = {**RANK_COLUMNS, **LAUNCH_COLUMNS}
#: Columns whose entries are ranks.
_RANKED: Final = frozenset({"cause", "told", "lead", "reason", "failed_rank"})
#: Columns that no transition writes.
CONFIGURED: Final = frozenset({"messages", "total", "lead"})
#: Columns whose entries are `NOBODY` at first.
_NEVER: Final = frozenset(
    {
        *("life", "shard_life", "refused", "offered", "drawn_in", "seat", "drew", "name"),
        *("report", "part_round"),
    }
)

Symbols = Mapping[str, Any]


def fresh(prefix: str = "") -> Symbols:
    """Return an arbitrary state: each column is an array constant without constraints."""
    return {
        name: ENCODING.array(f"{prefix}{name}", indices, "rank" if name in _RANKED else "int")
        for name, (indices, _) in COLUMNS.items()
    }


def initial() -> Symbols:
    """Return the state before the first attempt: nothing has started, and every count is zero."""
    state = dict(fresh())
    for name, term in state.items():
        if name not in CONFIGURED | _RANKED:
            state[name] = _filled(term.sort(), NOBODY if name in _NEVER else 0)
    return state


def _filled(sort: Any, value: int) -> Any:
    if not isinstance(sort, z3.ArraySortRef):
        return z3.IntVal(value)
    return z3.K(sort.domain(), _filled(sort.range(), value))


class _Column(Array):
    """A column; the index `...` means every entry. A dropped column ignores writes."""

    __slots__ = ("dropped",)

    def __init__(self, term: Any, dropped: bool = False) -> None:
        super().__init__(term, {})
        self.dropped = dropped

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.dropped:
            return
        if index is ...:
            self.term = value.term
        else:
            super().__setitem__(index, value)


class SymbolicState:
    """
    The state of all ranks. Transitions read and write it; predicates read it.

    Args:
        symbols: A term for each column.
        without: Names of conditions to leave out, and ``COLUMN =`` for each write to leave out.
    """

    def __init__(self, symbols: Symbols, without: frozenset[str] = frozenset()) -> None:
        self.conditions: list[Any] = []
        self.asked: list[str] = []
        self._without = without
        self._bound = 0
        for name, term in symbols.items():
            column: Any = _Column(term, f"{name} =" in without)
            if COLUMNS[name][0] == ("one",):
                column = _One(z3.Select(term, 0), f"{name} =" in without)
            setattr(self, name, column)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def when(self, condition: Any) -> None:
        """Record a condition that makes a transition possible."""
        self.conditions.append(raw(condition))

    def need(self, name: str, condition: Any) -> None:
        """Record a condition of the protocol by name."""
        self.asked.append(name)
        if name not in self._without:
            self.conditions.append(raw(condition))

    def every(self, sorts: str, holds: Callable[..., Any]) -> Sym:
        """Return the condition that holds if a condition holds for all members of some sorts."""
        self._bound += 1
        bound = [
            ENCODING.const(f"every!{self._bound}!{number}", sort)
            for number, sort in enumerate(sorts.split())
        ]
        return Sym(z3.ForAll(bound, raw(holds(*(Sym(b, {}) for b in bound)))), {})

    def zeros(self, column: str) -> Any:
        """Return a row of zeros for a column."""
        return _filled(fresh()[column].sort().range(), 0)

    def symbols(self) -> Symbols:
        """The terms of all columns."""
        found = {}
        for name in COLUMNS:
            column = getattr(self, name)
            one = isinstance(column, Scalar)
            found[name] = z3.K(z3.IntSort(), column.term) if one else column.term
        return found


class _One(Scalar):
    """A column with one entry. A dropped column ignores writes."""

    __slots__ = ("dropped",)

    def __init__(self, term: Any, dropped: bool = False) -> None:
        super().__init__(term, {})
        self.dropped = dropped

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.dropped:
            super().__setitem__(index, value)


def asked(transition: RankTransition) -> list[str]:
    """Return the names of the conditions that a transition checks."""
    state = SymbolicState(fresh())
    transition.run(state, *(Sym(ENCODING.const(s, s), {}) for s in transition.arguments))
    return state.asked


def run(
    transition: RankTransition, symbols: Symbols, without: frozenset[str] = frozenset()
) -> tuple[list[Any], Symbols, list[Sym]]:
    """
    Run a transition from an arbitrary state.

    Returns:
        The transition's conditions, the state after the transition, and its arguments.
    """
    state = SymbolicState(symbols, without)
    arguments = [
        ENCODING.sym(ENCODING.const(f"arg.{number}", sort))
        for number, sort in enumerate(transition.arguments)
    ]
    transition.run(state, *arguments)
    return state.conditions, state.symbols(), arguments
