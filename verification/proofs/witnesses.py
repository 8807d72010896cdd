"""
Show that no proof is vacuous: every path of every transition is taken from some state.

The search runs in a finite scope, where every quantifier is expanded and every query gets an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import z3

from qeffect.relations.constants import GRAD_BIT, INPUT_BITS, OUT_BIT, RESERVED, WGRAD_BIT

from ..coverage import COVERED, UNTAKEN
from ..symbolic import Path
from ..symbolic.solver import answer, new_solver
from ..symbolic.terms import Term, raw
from .finite import solver_of
from .goals import Obligation
from .obligations import Composition

__all__ = ["CONDITIONS", "witnesses"]

#: The conditions that `COVERED` names, as predicates of the memory and the flat arguments.
CONDITIONS: Final[Mapping[str, Callable[[Any, Callable[[str, str], Any]], Any]]] = {
    "": lambda st, argument: True,
    "reserved": lambda st, argument: st.consumers[argument("slot", "slot")] == RESERVED,
    "received in a free slot": lambda st, argument: (
        (st.consumers[argument("slot", "slot")] == 0)
        & (st.arrived[argument("slot", "slot")] & INPUT_BITS != 0)
    ),
    "free slot in flight": lambda st, argument: (
        (st.consumers[argument("ref.slot", "slot")] == 0)
        & (st.held[argument("ref.slot", "slot")] != 0)
    ),
    "last reader of others": lambda st, argument: (
        (st.consumers[argument("ref.slot", "slot")] != 0)
        & (st.consumers[argument("ref.slot", "slot")] & ~argument("bit", "mask") == 0)
        & (st.moving[argument("ref.slot", "slot")] & ~argument("bit", "mask") != 0)
    ),
    "last consumer of others": lambda st, argument: (
        (st.consumers[argument("ref.slot", "slot")] == WGRAD_BIT)
        & (st.moving[argument("ref.slot", "slot")] & (OUT_BIT | GRAD_BIT) != 0)
    ),
    "final for nobody": lambda st, argument: (
        (st.final[argument("stage", "stage")] == st.weight_epoch[argument("stage", "stage")])
        & (st.named[argument("stage", "stage")] != st.weight_epoch[argument("stage", "stage")])
    ),
    "first F after the last dI": lambda st, argument: (
        (st.dgrads[argument("stage", "stage")] == st.cells[argument("stage", "stage")])
        & (st.refreshed[st.domain_of[argument("stage", "stage")]] == argument("stage", "stage"))
        & (st.busy[st.domain_of[argument("stage", "stage")]] != 0)
    ),
    "evaluation under way": lambda st, argument: st.evaluating[argument("stage", "stage")] != 0,
    "contradiction": lambda st, argument: False,
}


def witnesses(composition: Composition) -> Iterator[Obligation]:
    """
    Yield, for every path of every transition, whether some state takes the path.

    The state must satisfy every invariant, and the arguments their assumptions. With all relations,
    no state should take a covered path: a path whose tests imply the condition of an entry of
    `COVERED` for its clause, or of an entry of `UNTAKEN`.

    Args:
        composition: A composition in a finite encoding.
    """
    words = composition.vocabulary
    solver = solver_of(composition)
    solver.set("auto_config", False)
    solver.set("relevancy", 0)
    for transition, paths in composition.every_path.items():
        assumed = words.assumed(transition)
        for path in paths:
            began = time.perf_counter()
            # Without push, since what the solver learns on one path helps on the next.
            verdict = answer(solver, (path.condition, *assumed))
            covered = not composition.omit and _is_covered(composition, path)
            yield Obligation(
                "is covered" if covered else "is taken",
                "witness",
                composition.name,
                transition,
                path.label,
                "z3",
                verdict,
                time.perf_counter() - began,
                expected="unsat" if covered else "sat",
            )


def _is_covered(composition: Composition, path: Path) -> bool:
    names = [
        *(
            entry.condition
            for entry in COVERED
            if (entry.transition, entry.clause) == (path.transition, path.clause)
        ),
        *(entry.condition for entry in UNTAKEN if entry.transition == path.transition),
    ]
    return any(_implies(path, _condition(composition, name)) for name in names)


def _condition(composition: Composition, name: str) -> Term:
    words, enc = composition.vocabulary, composition.encoding
    found = CONDITIONS[name](
        words.state(words.before), lambda flat, sort: enc.sym(enc.const(f"arg.{flat}", sort))
    )
    return raw(found)


def _implies(path: Path, condition: Term) -> bool:
    solver = new_solver("finite")
    solver.add(path.condition, z3.Not(condition))
    return answer(solver) == "unsat"
