"""
Runs: one scope, one reading, one report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from qeffect.engine.stage import Transitions
from qeffect.spec.predicates import Predicate

from ..coverage import refusal_name
from ..induction import INVARIANTS
from .findings import Findings, Occurrence, Stopwatch
from .plain import Exploration, explore
from .properties import Checker, claimed
from .report import ExploreReport, peak_rss_mb
from .scopes import Scope
from .symmetry import canonical_form
from .walker import Walker
from .witnesses import Guide

__all__ = ["plain_findings", "report_of", "run"]

Progress = Callable[[str], None]


def run(
    scope: Scope,
    *,
    batch: bool = False,
    symmetry: bool = False,
    progress: Progress | None = None,
    composed: Transitions | None = None,
    invariants: Iterable[Predicate] = INVARIANTS,
    witnesses: bool = True,
) -> ExploreReport:
    """
    Explore a scope.

    Args:
        scope: The scope.
        batch: Use the batch reading instead of the plain one.
        symmetry: Explore one state of each orbit.
        progress: Called with a progress line.
        composed: Transitions to run; the scope's own by default.
        invariants: Invariants to check in every state, as far as the scope keeps their columns.
        witnesses: Find a shortest schedule for every transition and refusal that occurs.

    Raises:
        ValueError: The batch reading cannot pack the scope's states.
        OutOfRangeError: A transition left a value that a packed state has no room for.

    >>> from qeffect.verification.explorer import pool_scope
    >>> run(pool_scope(1, 1, 1), symmetry=True).states
    5
    """
    walker = Walker(scope, composed)
    predicates = claimed(walker, invariants)
    if batch:
        from ..batch.findings import (
            find,  # NumPy and Z3, which a plain run needs not
        )
    else:
        find = _find
    found = find(walker, predicates, symmetry, progress, witnesses)
    return report_of(walker, found, "batch" if batch else "plain", symmetry, len(predicates))


def report_of(
    walker: Walker, found: Findings, reading: str, symmetry: bool, invariants: int
) -> ExploreReport:
    """
    Return what an exploration found as a report.

    Args:
        walker: The scope's memory and moves.
        found: What was found.
        reading: ``plain`` or ``batch``.
        symmetry: Whether one state stands for its orbit.
        invariants: How many invariants every state was checked against.
    """
    guide = Guide(walker, canonical_form(walker.scope, walker.memory) if symmetry else None)
    by_transition: Counter[str] = Counter()
    for index, count in found.accepted.items():
        by_transition[walker.moves[index].label] += count
    by_clause: Counter[str] = Counter()
    for (_, clause), count in found.refused.items():
        by_clause[clause] += count
    return ExploreReport(
        scope=walker.scope.name,
        reading=reading,
        symmetry=symmetry,
        states=found.states,
        transitions=by_transition.total(),
        refused=by_clause.total(),
        by_clause=dict(sorted(by_clause.items())),
        by_transition=dict(sorted(by_transition.items())),
        depth=found.depth,
        invariants=invariants,
        violation=_told(guide, found.violation),
        witnesses={name: guide.texts(seen) for name, seen in found.witnesses.items()},
        seconds=found.took[0],
        cpu_seconds=found.took[1],
        peak_rss_mb=peak_rss_mb(),
    )


def _told(guide: Guide, violation: tuple[str, Occurrence] | None) -> str | None:
    if violation is None:
        return None
    what, seen = violation
    return f"{what}, by {'; '.join(guide.texts(seen)) or 'the initial state'}"


def _find(
    walker: Walker,
    predicates: tuple[Predicate, ...],
    symmetry: bool,
    progress: Progress | None,
    witnesses: bool,
) -> Findings:
    """Explore with the plain reading."""
    canonical = canonical_form(walker.scope, walker.memory) if symmetry else None
    check = Checker(walker, predicates)
    watch = Stopwatch()
    found = explore(walker, check=check, canonical=canonical, progress=progress)
    return plain_findings(found, watch(), witnesses=witnesses)


def plain_findings(
    found: Exploration, took: tuple[float, float], *, witnesses: bool = True
) -> Findings:
    """Return what a plain exploration found."""
    walker = found.walker
    seen: dict[str, Occurrence] = {}
    if witnesses:
        for index, state in found.first_accepted.items():
            for name in walker.moves[index].steps:
                if name not in seen:
                    seen[name] = Occurrence(found.chain(state), index)
        for (index, clause), state in found.first_refused.items():
            name = refusal_name(walker.moves[index].steps, clause)
            if name not in seen:
                seen[name] = Occurrence(found.chain(state), index, clause)
    violation = None
    if found.violation is not None:
        told, state, move, refusal = found.violation
        violation = (told, Occurrence(found.chain(state), move, refusal))
    return Findings(
        states=len(found.parents),
        depth=found.depth,
        accepted=dict(enumerate(found.accepted)),
        refused=found.refused,
        took=took,
        witnesses=seen,
        violation=violation,
    )
