"""
Nothing proved is vacuous: every way through every transition is taken in some state.

The search is in a finite scope, where every quantifier is expanded and every query is decided.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from .finite import solver_of
from .obligations import Composition, Obligation

__all__ = ["COVERED", "witnesses"]

_RESERVED = "the slot was reserved for this key, and the reservation was asked the same"
_BUSY = (
    "a busy domain has an F or dI in flight, which is a live tape, or a refresh, which is "
    "version's; needed where version is left out"
)

#: Paths of the full composition that no state takes, and why their tests stay.
COVERED: Final[Mapping[tuple[str, str], str]] = {
    ("check_forward", "ownership.repeated-forward#89"): _RESERVED,
    ("check_forward", "ownership.generation-exhausted#90"): _RESERVED,
    ("check_forward", "version.wrong-epoch#91"): _RESERVED,
    ("check_dgrad", "version.wrong-epoch#8"): "a live tape's key is of the current epoch, and "
    "ownership.wrong-key compares the whole key; the clause keeps version's promise by itself",
    ("check_wgrad", "version.wrong-epoch#9"): "as in check_dgrad",
    ("commit_epoch", "order.pending#4"): _BUSY,
    ("checkpoint", "persistence.pending-action#4"): _BUSY,
    ("checkpoint", "persistence.mid-epoch#9"): "dW that ran had its F; needed where order, which "
    "counts those, is left out",
    ("restore", "order.pending#3"): _BUSY,
}


def witnesses(composition: Composition) -> Iterator[Obligation]:
    """
    Yield, for every path of every transition, whether some state takes it.

    The state satisfies every invariant, and the arguments what is assumed of them. What is
    expected of a covered path, in the full composition, is that no state takes it.

    Args:
        composition: One in a finite encoding.
    """
    words = composition.vocabulary
    solver = solver_of(composition)
    for transition, paths in composition.every_path.items():
        assumed = words.assumed(transition)
        for path in paths:
            began = time.perf_counter()
            solver.push()
            solver.add(path.condition, *assumed)
            verdict = str(solver.check())
            solver.pop()
            covered = not composition.omit and (transition, path.label) in COVERED
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
