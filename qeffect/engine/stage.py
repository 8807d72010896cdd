"""
Every transition (state-changing call) of a stage's contract, composed from the relations (groups of
guards) that the backend uses.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, Final

from attrs import field, frozen

from qeffect.spec.transitions import TRANSITIONS as WRITTEN

from ..relations import (
    arena,
    capture,
    completion,
    epoch,
    order,
    ownership,
    persistence,
    reduction,
    tickets,
    version,
)
from ..relations.columns import CONFIG, Column
from .compose import compose, halves, refuse

__all__ = ["OPTIONAL", "RELATIONS", "STATE", "TRANSITIONS", "Transitions", "transitions"]

#: Relations in the normative order of their guards: a refusal names the first guard that fails.
RELATIONS: Final[Mapping[str, ModuleType]] = {
    "ownership": ownership,
    "version": version,
    "order": order,
    "arena": arena,
    "capture": capture,
    "completion": completion,
    "reduction": reduction,
    "epoch": epoch,
    "persistence": persistence,
    "tickets": tickets,
}

#: Relations that a backend without the protected state may leave out.
OPTIONAL: Final = frozenset({"version", "order", "arena", "capture", "completion", "reduction"})

#: Every transition and its parameters after the state, from the specification's table.
TRANSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    transition.name: transition.arguments for transition in WRITTEN
}

#: The relation that a transition needs; without the relation every call is refused.
_NEEDS: Final[Mapping[str, str]] = {
    transition.name: transition.relation for transition in WRITTEN if transition.relation
}

#: Every column that a transition writes.
STATE: Final[Mapping[str, Column]] = {
    name: column for module in RELATIONS.values() for name, column in module.STATE.items()
}


@frozen
class Transitions:
    """
    The composed transition functions for one choice of relations (groups of guards).

    Args:
        relations: Names of the relations that take part, in the order in which their guards run.
        functions: For each transition's name, the composed function.
    """

    relations: tuple[str, ...]
    functions: Mapping[str, Callable[..., Any]] = field(repr=False)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def columns(self) -> dict[str, Column]:
        """The columns (arrays) of a memory for these transitions, configured columns first."""
        return {**CONFIG, **STATE}


def transitions(
    omit: Iterable[str] = (), replaced: Mapping[str, ast.FunctionDef] | None = None
) -> Transitions:
    """
    Compose the transitions of a stage that leaves out some relations (groups of guards).

    Args:
        omit: Names of the relations to leave out, from ``OPTIONAL``.
        replaced: By ``module.function`` name, a guard, write or helper function to use instead of
            the relation's function. The result is then a mutant.

    Raises:
        ValueError: A name is unknown, or names a relation that cannot be left out.

    >>> transitions(omit=["capture", "completion"]).relations[:4]
    ('ownership', 'version', 'order', 'arena')
    """
    left_out = frozenset(omit)
    unknown = sorted(left_out - OPTIONAL)
    if unknown:
        raise ValueError(
            f"cannot leave out {', '.join(unknown)}: a stage may omit {', '.join(sorted(OPTIONAL))}"
        )
    if replaced is None:
        return _composed(left_out)
    return _compose(left_out, replaced)


@cache
def _composed(left_out: frozenset[str]) -> Transitions:
    # Imported late: the generator imports this module and must run if the generated code is broken.
    from . import composed

    whole = {name: getattr(composed, name) for name in TRANSITIONS}
    absent = [RELATIONS[name] for name in left_out]
    untouched = {
        name: function
        for name, function in whole.items()
        if not any(halves(module, name) for module in absent)
    }
    return _compose(left_out, {}, untouched)


def _compose(
    left_out: frozenset[str],
    replaced: Mapping[str, ast.FunctionDef],
    made: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Transitions:
    modules = {name: m for name, m in RELATIONS.items() if name not in left_out}
    return Transitions(
        tuple(modules),
        {
            name: made[name]
            if name in made
            else refuse(name, parameters, RELATIONS[_NEEDS[name]])
            if _NEEDS.get(name) in left_out
            else compose(name, parameters, modules.values(), replaced=replaced)
            for name, parameters in TRANSITIONS.items()
        },
    )
