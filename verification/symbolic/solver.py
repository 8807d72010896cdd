"""
The only module that makes Z3 solvers, sets their options and asks them.

Only ``unsat`` is a proof, and only ``sat`` is a counterexample; ``unknown`` always counts as a
failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import z3

from .terms import Term

__all__ = ["EFFORT", "TIMEOUT", "Kind", "answer", "new_solver"]

#: Milliseconds for one question with quantifiers. It stops a solver that EFFORT does not stop.
TIMEOUT: Final = 120_000
#: Maximum effort for one question with quantifiers, in Z3's own units, which do not depend on the
#: load of the machine; about ten seconds.
EFFORT: Final = 12_000_000

#: The kind of questions. ``quantified``: lemmas for any number of members; their instances are
#: found by matching terms, without a model search. ``finite``: members are named, and every
#: question is free of quantifiers. ``bits``: bit vectors only.
Kind = Literal["quantified", "finite", "bits"]


def new_solver(kind: Kind, *, seed: int = 0, timeout: int = TIMEOUT, effort: int = EFFORT) -> Any:
    """
    Return a new Z3 solver.

    Args:
        kind: The kind of questions that the solver will get.
        seed: Seed of the solver's random choices; used only for quantified questions.
        timeout: Timeout in milliseconds for one quantified question. Other questions always end.
        effort: Limit for one quantified question, in Z3's resource units.
    """
    if kind == "finite":
        return z3.SimpleSolver()
    if kind == "bits":
        return z3.SolverFor("QF_FD")
    solver = z3.Solver()
    solver.set("auto_config", False)
    solver.set("mbqi", False)
    solver.set("timeout", timeout)
    solver.set("rlimit", effort)
    solver.set("random_seed", seed)
    return solver


def answer(solver: Any, assumptions: Sequence[Term] = ()) -> str:
    """Return ``sat``, ``unsat`` or ``unknown`` for a solver's formulas under some assumptions."""
    return str(solver.check(*assumptions))
