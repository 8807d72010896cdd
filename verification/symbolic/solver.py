"""
The one place where a Z3 solver is made, with its settings, and asked.

Only ``unsat`` is a proof, and only ``sat`` a counterexample: ``unknown`` counts as a failure
wherever an answer is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import z3

from .terms import Term

__all__ = ["EFFORT", "TIMEOUT", "Kind", "answer", "new_solver"]

#: Milliseconds for one question with quantifiers. It ends a solver that EFFORT does not end.
TIMEOUT: Final = 120_000
#: Most effort for one question with quantifiers, in Z3's own units, which do not depend on the load
#: of the machine: about ten seconds.
EFFORT: Final = 12_000_000

#: What is asked. ``quantified``: lemmas for any number of members; their instances are found by
#: matching terms, without a model search. ``finite``: members are named, and every question is
#: free of quantifiers. ``bits``: bit vectors alone.
Kind = Literal["quantified", "finite", "bits"]


def new_solver(kind: Kind, *, seed: int = 0, timeout: int = TIMEOUT, effort: int = EFFORT) -> Any:
    """
    Return a solver.

    Args:
        kind: What will be asked.
        seed: Seed of the solver's own choices; for quantified questions.
        timeout: Milliseconds for one question; for quantified ones. The others always end.
        effort: Most effort for one question, in Z3's own units; for quantified ones.
    """
    if kind == "finite":
        return z3.SimpleSolver()
    if kind == "bits":
        return z3.SolverFor("QF_BV")
    solver = z3.Solver()
    solver.set("auto_config", False)
    solver.set("mbqi", False)
    solver.set("timeout", timeout)
    solver.set("rlimit", effort)
    solver.set("random_seed", seed)
    return solver


def answer(solver: Any, assumptions: Sequence[Term] = ()) -> str:
    """Return ``sat``, ``unsat`` or ``unknown`` for what a solver holds under some assumptions."""
    return str(solver.check(*assumptions))
