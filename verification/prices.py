"""
Measure the price of one clause: time guarded actions with the clause's guard and without it.

The guard is removed from the composed transition in memory. The reads of columns into local names
stay, so a clause's price is only the price of its test. The price of a whole relation, with its
reads and updates, is measured by leaving the relation out (``qeffect.cli.prices``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from attrs import evolve

from qeffect.cli import prices
from qeffect.cli.bench import priced_contract, run_epochs
from qeffect.engine.compose import compose
from qeffect.engine.stage import RELATIONS, TRANSITIONS, Transitions, transitions

from .mutants import Mutant, Site, sites

__all__ = ["clauses", "guards_of", "without"]


def guards_of(action: str) -> list[Site]:
    """
    Return the guards in the check and the commit of an action, in the order in which they run.
    """
    found = [site for site in sites() if site.kind == "guard"]
    return [s for name in prices.ACTIONS[action] for s in found if s.transition == name]


def without(guards: Sequence[Site]) -> Transitions:
    """Return all transitions; F, dI and dW are composed again without the given guards."""
    own = transitions()
    modules = [RELATIONS[name] for name in own.relations]
    replaced = Mutant(tuple(guards)).replaced
    made = {
        name: compose(name, TRANSITIONS[name], modules, replaced=replaced)
        for pair in prices.ACTIONS.values()
        for name in pair
    }
    return evolve(own, functions={**own.functions, **made})


def clauses(run: prices.Run = run_epochs, **turns: int) -> dict[str, Any]:
    """
    Measure the price of every guard of F, dI and dW, and of all guards of an action together.

    One guard of each action is removed at a time, and each action is timed separately.

    Args:
        run: Function that runs epochs of a contract and returns the times.
        turns: Keyword arguments of ``qeffect.cli.prices.in_turns``, such as ``rounds``.

    Returns:
        ``guards``: a list with the ``action``, ``transition``, ``clause``, ``relation``, ``test``
        and price fields of each guard. ``every_guard``: for each action the price of all its guards
        together. ``nothing``: the price of the same functions composed again, which shows the
        measurement noise.
    """
    guards = {action: guards_of(action) for action in prices.ACTIONS}
    together = list(zip_longest(*guards.values()))
    pairs = [
        _pair(str(number), [site for site in row if site is not None])
        for number, row in enumerate(together)
    ]
    pairs.append(_pair("every_guard", [site for own in guards.values() for site in own]))
    pairs.append(_pair(prices.NOTHING, []))
    found = prices.in_turns(pairs, run, **turns)
    rows = [
        {
            "action": action,
            "transition": site.transition,
            "clause": site.clause,
            "relation": site.relation,
            "test": site.text,
            **found[str(number)][action],
        }
        for action, own in guards.items()
        for number, site in enumerate(own)
    ]
    return {"guards": rows, **{name: found[name] for name in ("every_guard", prices.NOTHING)}}


def _pair(name: str, guards: Sequence[Site]) -> prices.Pair:
    """Pair a contract with one that lacks some guards; both run functions made in memory."""
    whole, broken = without([]), without(guards)
    return prices.Pair(
        name,
        lambda: prices.with_functions(priced_contract(), whole),
        lambda: prices.with_functions(priced_contract(), broken),
    )
