"""
Predicates of the specification, and the two operators that Python lacks.

A predicate is a function of the contract's memory ``st``, in some cases of the history ``h`` (what
really happened), and of variables. The predicate holds for all values of its variables. It uses
only comparisons, ``+``, ``&``, ``|``, ``implies`` and ``choose``, and never branches on a
comparison. So it runs over plain memory and over symbolic terms. An index outside a column gives an
unspecified value. In ``implies(slot != NO_SLOT, st.consumers[slot] != 0)``, for example, this value
does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

__all__ = ["Predicate", "Register", "choose", "implies"]


def implies(premise: Any, conclusion: Any) -> Any:
    """Whether the premise is false or the conclusion is true (``<=`` on truth values)."""
    return premise <= conclusion


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Return ``yes`` if the condition holds, else ``no``."""
    chooser = getattr(condition, "choose", None)
    if chooser is None:
        return yes if condition else no
    return chooser(yes, no)


@frozen
class Predicate:
    """
    One predicate of the specification.

    Args:
        name: Name of the predicate, as ``relation.what-holds``.
        function: Function that states the predicate. Its parameters are the memory, the history if
            needed, the transition's arguments if needed, then the variables.
        variables: Sort (type) of each variable, by the variable's name: an index sort of
            ``qeffect.relations.columns``, or ``place``, a non-negative integer.
        needs: Relations (groups of guards) that the predicate mentions. The predicate is promised
            only if all these relations are in force.
        transitions: Names of the transitions at whose acceptance the predicate holds; empty if it
            holds always.
        without: For an assumption, the relation whose guards would check it. The predicate is
            assumed only if this relation is left out.
    """

    name: str
    function: Callable[..., Any] = field(repr=False)
    variables: Mapping[str, str] = field(factory=dict)
    needs: frozenset[str] = frozenset()
    transitions: tuple[str, ...] = ()
    without: str = ""

    @property
    def text(self) -> str:
        """The predicate in words: the docstring of its function, on one line."""
        return " ".join((self.function.__doc__ or "").split())


class Register:
    """
    A list of predicates in the order of their definition. A register is also a decorator, which
    adds the decorated function as a predicate.

    Args:
        parts: Registers whose predicates the new register begins with, in this order.

    >>> invariants = Register()
    >>> @invariants("ownership.no-phantom", slot="slot")
    ... def no_phantom(st, slot):
    ...     '''A slot without consumers holds nothing.'''
    >>> [predicate.name for predicate in invariants]
    ['ownership.no-phantom']

    Several registers join into one:

    >>> promises = Register()
    >>> @promises("epoch.current", "check_update")
    ... def current(st, h, a):
    ...     '''The update names the epoch of the weights.'''
    >>> [predicate.name for predicate in Register(promises, invariants)]
    ['epoch.current', 'ownership.no-phantom']

    Raises:
        ValueError: Two parts contain predicates of the same name.
    """

    def __init__(self, *parts: Register) -> None:
        self._found: dict[str, Predicate] = {}
        for part in parts:
            for predicate in part:
                self._add(predicate)

    def __call__(
        self,
        name: str,
        *transitions: str,
        needs: str = "",
        without: str = "",
        **variables: str,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """
        Add the decorated function under a name.

        Args:
            name: Name of the predicate; the predicate always needs the relation before the dot.
            transitions: Names of the transitions at whose acceptance the predicate holds.
            needs: Names of other relations that the predicate needs, separated by spaces.
            without: For an assumption, the relation whose guards would check it.
            variables: Sort (type) of each variable, by the variable's name.

        Raises:
            ValueError: Another predicate has this name.
        """

        def enter(function: Callable[..., Any]) -> Callable[..., Any]:
            needed = frozenset({name.partition(".")[0], *needs.split()})
            self._add(Predicate(name, function, variables, needed, transitions, without))
            return function

        return enter

    def _add(self, predicate: Predicate) -> None:
        if predicate.name in self._found:
            raise ValueError(f"two predicates are named {predicate.name}")
        self._found[predicate.name] = predicate

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, name: str) -> Predicate:
        return self._found[name]
