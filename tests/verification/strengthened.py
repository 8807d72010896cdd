"""
Compositions with one guard more than the contract has, as a coding mistake would add it.
"""

from __future__ import annotations

import ast
from functools import cache

from qeffect.engine.compose import source
from qeffect.engine.stage import RELATIONS, transitions
from qeffect.verification.proofs.obligations import Composition
from qeffect.verification.symbolic import Encoding

__all__ = ["with_guard"]


@cache
def _encoding() -> Encoding:
    """One encoding for all compositions: it caches paths, and most transitions are the same."""
    return Encoding.sorted()


def with_guard(half: str, test: str) -> Composition:
    """
    Return the full composition with one more guard at the end of a half of guards.

    Args:
        half: The half, as ``relation.function``.
        test: What the guard refuses, in the half's names.
    """
    relation, _, name = half.partition(".")
    (function,) = ast.parse(source(getattr(RELATIONS[relation], name))).body
    assert isinstance(function, ast.FunctionDef)
    function.body += ast.parse(f"if {test}:\n    raise Refused('order.in-flight')").body
    stronger = transitions((), {half: ast.fix_missing_locations(function)})
    return Composition((), _encoding(), stronger)
