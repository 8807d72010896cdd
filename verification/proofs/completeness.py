"""
Proof that no guard is too strong: a check is accepted whenever its action is legal.

The specification defines what is legal (``qeffect.spec.promises.legal``) by the physical history.
The proof is for the contract with all relations, which has every guard.
"""

from __future__ import annotations

from collections.abc import Iterator

from qeffect.spec.promises import LEGAL

from .goals import Goal
from .obligations import Composition

__all__ = ["CHECKS", "completeness"]

#: The transitions with a definition of legal.
CHECKS = tuple(dict.fromkeys(name for predicate in LEGAL for name in predicate.transitions))


def completeness(composition: Composition) -> Iterator[Goal]:
    """Yield goals that together prove: no path that refuses is taken by a legal check."""
    words = composition.vocabulary
    for transition in CHECKS:
        legal = [term for claim in words.legal(transition) for term in words.close(claim)]
        facts = (*words.assumed(transition), *legal)
        for path in composition.paths[transition]:
            if path.clause is not None:
                yield Goal(
                    "a legal check is accepted",
                    "complete",
                    transition,
                    path.label,
                    words.relations,
                    facts,
                    path.condition,
                )
