"""
Questions to the solver in a finite scope: every quantifier is expanded, so every question gets an
answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import z3

from ..symbolic.solver import answer, new_solver
from .obligations import Composition

__all__ = ["SCOPE", "refuted", "solver_of"]

#: Members of each sort: enough for two tapes of one stage and a tape of another, and for a
#: destination that two stages share, besides a separate destination for each.
SCOPE: Final[Mapping[str, int]] = {
    "slot": 3,
    "cell": 3,
    "stage": 2,
    "domain": 2,
    "link": 2,
    "caller": 2,
    "pool": 2,
    "buffer": 3,
    "bucket": 2,
    "opaque": 2,
}


def solver_of(composition: Composition) -> Any:
    """Return a solver that assumes every predicate that holds in each state before a transition."""
    words = composition.vocabulary
    solver = new_solver("finite")
    solver.add(words.counted())
    for claim in (*words.configuration(), *words.invariants(words.before)):
        solver.add(list(words.close(claim)))
    return solver


def refuted(composition: Composition, transition: str, solver: Any) -> Iterator[str]:
    """
    Yield the predicates that some accepting path of a transition breaks, from some state.

    Args:
        composition: The contract's composition, or a mutant's.
        transition: The transition.
        solver: The result of ``solver_of`` for a composition with the same relations and encoding.
    """
    words = composition.vocabulary
    for path in composition.paths[transition]:
        if path.clause is not None:
            continue
        claims = [
            *words.disturbed(words.after(path)),
            *words.steps(transition),
            *words.changes(path),
        ]
        denials = [words.denied(claim) for claim in claims]
        solver.push()
        solver.add(path.condition, *words.assumed(transition))
        failing = []
        if answer(solver, [z3.Or(denials)]) == "sat":
            pairs = zip(claims, denials, strict=True)
            failing = [claim.name for claim, denied in pairs if answer(solver, [denied]) == "sat"]
        solver.pop()
        yield from failing
