"""
Explore a scope and make its report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from qeffect.engine.stage import Transitions
from qeffect.spec.predicates import Predicate

from ..induction import INVARIANTS
from .exploration import Exploration, explore
from .report import ExploreReport, peak_rss_mb
from .scopes import Scope
from .space import Space
from .witnesses import Schedules, occurrences

__all__ = ["report_of", "run"]

Progress = Callable[[str], None]


def run(
    scope: Scope,
    *,
    symmetry: bool = False,
    progress: Progress | None = None,
    total: int = 0,
    composed: Transitions | None = None,
    invariants: Iterable[Predicate] = INVARIANTS,
    witnesses: bool = True,
) -> ExploreReport:
    """
    Explore a scope.

    Args:
        scope: The scope to explore.
        symmetry: Whether to explore only one state of each symmetry orbit.
        progress: Function that is called with progress lines.
        total: Expected number of states, for the progress lines; 0 if it is unknown.
        composed: Transitions to run; by default those of the scope.
        invariants: Invariants to check in every state. An invariant is left out if it reads a
            column (an array of the memory) that the states lack.
        witnesses: Whether to find a shortest schedule for every transition and refusal that occurs.

    Raises:
        ValueError: The scope's entries are too large to pack.
        OutOfRangeError: A transition produced a value outside the range of a packed state.

    >>> from qeffect.verification.explorer import pool_scope
    >>> run(pool_scope(1, 1, 1), symmetry=True).states
    5
    """
    space = Space(scope, composed)
    predicates = space.claimed(invariants)
    found = explore(space, predicates, symmetry=symmetry, progress=progress, total=total)
    return report_of(found, len(predicates), witnesses=witnesses)


def report_of(found: Exploration, invariants: int, *, witnesses: bool = True) -> ExploreReport:
    """
    Return the report of an exploration.

    Args:
        found: The finished exploration.
        invariants: Number of invariants that were checked in every state.
        witnesses: Whether to find a shortest schedule for every transition and refusal that
            occurred.
    """
    tally, moves = found.tally, found.engine.moves
    named = occurrences(found) if witnesses else {}
    broken = (tally.broken[1],) if tally.broken else ()
    schedules = Schedules(found, (*named.values(), *broken))
    texts = {seen: [str(s) for s in schedules.steps(seen)] for seen in (*named.values(), *broken)}
    violation = None
    if tally.broken:
        told, seen = tally.broken
        violation = f"{told}, by {'; '.join(texts[seen]) or 'the initial state'}"
    by_transition: Counter[str] = Counter()
    for index, count in tally.accepted.items():
        by_transition[moves[index].label] += count
    by_clause: Counter[str] = Counter()
    for (_, clause), count in tally.refused.items():
        by_clause[clause] += count
    return ExploreReport(
        scope=found.engine.scope.name,
        symmetry=found.canonical is not None,
        states=len(found.seen),
        transitions=by_transition.total(),
        refused=by_clause.total(),
        by_clause=dict(sorted(by_clause.items())),
        by_transition=dict(sorted(by_transition.items())),
        depth=found.depth,
        invariants=invariants,
        violation=violation,
        witnesses={name: texts[seen] for name, seen in named.items()},
        seconds=found.seconds,
        cpu_seconds=found.cpu_seconds,
        peak_rss_mb=peak_rss_mb(),
    )
