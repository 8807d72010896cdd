"""
The state space of a scope: its transitions, its moves, and the columns that make up a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from qeffect.engine.stage import STATE, Transitions, transitions
from qeffect.spec.predicates import Predicate

from ..claims import speaks_of
from ..column_reads import ColumnReads
from .cone import dependence, visible_columns
from .frames import Maker
from .scopes import Scope, configuration, members_in, sizes

__all__ = ["Space"]


class Space:
    """
    The state space of a scope.

    Args:
        scope: The scope to explore.
        composed: Transitions to run; by default those of the scope. A test passes mutants.
        also: Columns (arrays of the memory) that a state must include although no guard reads them.

    Attributes:
        transitions: The transitions that are explored.
        moves: The moves to try: calls of the contract, with their arguments.
        right: Positions of the moves whose arguments are all right.
        kept: Names of the columns that make up a state: all columns that a guard can read.
        written: Names of the columns that some transition of the scope writes.
    """

    def __init__(
        self, scope: Scope, composed: Transitions | None = None, also: Iterable[str] = ()
    ) -> None:
        self.scope = scope
        self.transitions = transitions(scope.omit) if composed is None else composed
        self.moves = tuple(Maker(scope, self.transitions).all())
        self.right = [index for index, move in enumerate(self.moves) if move.right]
        found = [dependence(self.transitions.functions[n], scope.off) for n in scope.transitions]
        asked = {column for move in self.moves for column, _ in move.reads}
        self.kept = frozenset(visible_columns(found).union(asked, also) & STATE.keys())
        self.written = frozenset().union(*(one.writes for one in found))

    def initial(self) -> dict[str, list[int]]:
        """Return the initial value of every column (array of the memory) that a transition can
        write."""
        n = sizes(self.scope)
        return {name: [column.number] * n[column.index] for name, column in STATE.items()}

    def claimed(self, predicates: Iterable[Predicate]) -> tuple[Predicate, ...]:
        """
        Return the predicates that can be checked: those that read only columns (arrays of the
        memory) which states keep.

        A column that no transition of the scope writes may be read too, although it is not part of
        a state. A predicate about indices that the scope lacks, such as buckets without reductions,
        is left out.
        """
        relations = frozenset(self.transitions.relations)
        members = members_in(self.scope)
        memory = SimpleNamespace(**configuration(self.scope), **self.initial())
        chosen = []
        for predicate in predicates:
            empty = any(len(members[sort]) == 0 for sort in predicate.variables.values())
            if speaks_of(predicate, relations) and not empty:
                watched = ColumnReads(memory)
                predicate.function(watched, *(0 for _ in predicate.variables))
                if watched.read & self.written <= self.kept:
                    chosen.append(predicate)
        return tuple(chosen)
