"""
Where the contract refuses: every clause that a guard raises, by transition, read off the source.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType

from qeffect import arguments, checkpoint
from qeffect.engine.compose import source
from qeffect.engine.stage import TRANSITIONS, transitions

__all__ = ["clauses", "raised", "sites"]

#: Clauses that the embedding API raises itself, and the transitions where.
_EMBEDDING: Mapping[str, tuple[str, ...]] = {
    "ownership.unknown-key": ("reserve", "bind", "check_forward", "check_wgrad"),
    "ownership.unknown-slot": ("reserve", "check_forward", "check_dgrad", "check_wgrad", "read"),
    "persistence.configuration": ("restore",),
}


def raised(tree: ast.AST) -> Iterator[str]:
    """Yield the clause of every refusal in a syntax tree, in source order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            clause = node.args[0].value
            if name in ("Refused", "refused", "_refused") and isinstance(clause, str):
                yield clause


@cache
def sites(omit: frozenset[str] = frozenset()) -> Mapping[str, tuple[str, ...]]:
    """
    Return the transitions in which each clause is raised, in the order of the guards.

    >>> sites()["order.token"]
    ('check_forward', 'check_dgrad')
    """
    found: dict[str, list[str]] = {}
    functions = transitions(omit).functions
    for transition in TRANSITIONS:
        for clause in raised(ast.parse(source(functions[transition]))):
            if transition not in found.setdefault(clause, []):
                found[clause].append(transition)
    for module in (arguments, checkpoint):
        for clause in _raised_by(module):
            found.setdefault(clause, list(_EMBEDDING[clause]))
    return {clause: tuple(where) for clause, where in found.items()}


def clauses() -> tuple[str, ...]:
    """Every clause that some composition, or the embedding API, can refuse by."""
    return tuple(sites())


def _raised_by(module: ModuleType) -> Iterator[str]:
    for clause in raised(ast.parse(inspect.getsource(module))):
        if not clause.endswith("unknown-ticket"):
            yield clause
