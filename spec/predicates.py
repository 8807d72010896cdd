"""
Predicates of the specification, and the two operators that Python lacks.

A predicate is a function of the contract's memory ``st``, in some cases of the history ``h``, and
of variables. The predicate holds for all values of its variables. It uses only comparisons, ``+``,
``&``, ``|``, ``implies`` and ``choose``, so it runs over plain memory and over symbolic terms. It
never branches on a comparison. Reading an entry outside a column gives an unspecified value, as in
``implies(slot != NO_SLOT, st.consumers[slot] != 0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

__all__ = ["Predicate", "Register", "choose", "implies"]


def implies(premise: Any, conclusion: Any) -> Any:
    """Whether the premise fails or the conclusion holds; ``<=`` on truth values means just that."""
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
        name: ``relation.what-holds``.
        function: Function of the memory, in some cases the history, in some cases the arguments,
            then the variables.
        variables: Sort (type) of each variable: an index sort of ``qeffect.relations.columns``, or
            ``place``, a non-negative integer up to the number of members of some sort.
        needs: Relations (groups of guards) that the predicate mentions; the predicate is claimed
            only if all of them take part.
        transitions: For a predicate that holds whenever a transition is accepted: these
            transitions.
        without: For an assumption, the relation that would check it; the predicate is assumed only
            if that relation is left out.
    """

    name: str
    function: Callable[..., Any] = field(repr=False)
    variables: Mapping[str, str] = field(factory=dict)
    needs: frozenset[str] = frozenset()
    transitions: tuple[str, ...] = ()
    without: str = ""

    @property
    def text(self) -> str:
        """The predicate in a sentence: the docstring of its function."""
        return " ".join((self.function.__doc__ or "").split())


class Register:
    """
    A list of predicates in the order of their definition; each decorated function adds one
    predicate.

    Args:
        parts: Registers whose predicates come first, in this order.

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
            name: Name of the predicate; the relation before the dot is always needed.
            transitions: For a predicate that holds whenever a transition is accepted: these
                transitions.
            needs: Other relations that the predicate needs, separated by spaces.
            without: For an assumption, the relation that would check it.
            variables: Sort (type) of each variable.

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
