"""
Recovery is always possible: from every reachable state, calls that are never refused lead to a
restore that is accepted.

The calls are, in this order: abort every outstanding ticket, fail every running reduction, drain
every domain, restore. An abort is accepted while its ticket is outstanding, and ``fail_reduction``
while the reduction runs. Each of these calls ends one action and begins none, so their number is
finite. A drain is always accepted. A restore is accepted after all these calls. The proof does not
depend on how the state was reached, nor on the number of actions in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import z3

from qeffect.engine.stage import STATE

from ..claims import MANDATORY
from ..symbolic import Path
from ..symbolic.terms import Term
from .goals import Goal
from .obligations import Composition

__all__ = ["ENDED", "recovery"]

#: For each recovery step, the column that shows the ended action, and its index among the
#: arguments.
ENDED: Final[Mapping[str, tuple[str, str]]] = {
    "abort_forward": ("held", "slot"),
    "abort_dgrad": ("held", "slot"),
    "abort_wgrad": ("held", "slot"),
    "abort_refresh": ("refreshing", "stage"),
    "abort_evaluation": ("evaluating", "stage"),
    "abort_update": ("optimizing", "one"),
    "fail_reduction": ("reducing", "bucket"),
    "drain": ("undrained", "domain"),
}

#: Columns in which a step never begins anything. A drain comes last, so it also drains the work of
#: aborts.
_UNDER_WAY: Final = ("held", "refreshing", "evaluating", "optimizing", "reducing")
_SETTLED: Final = (*_UNDER_WAY, "undrained")


def recovery(composition: Composition) -> Iterator[Goal]:
    """Yield goals for: every recovery step is accepted, ends one action and begins no action."""
    yield from _accepted(composition)
    yield from _one_fewer(composition)
    yield from _restored(composition)


def _accepted(composition: Composition) -> Iterator[Goal]:
    """Yield goals for: while an action is in flight, the step that ends it is accepted."""
    words, enc = composition.vocabulary, composition.encoding
    st, h = words.state(words.before), words.history(words.before)
    slot = enc.const("arg.slot", "slot")
    ticket = enc.const("arg.ticket", "ticket")
    # The history follows an arbitrary ticket; choose the ticket of the step.
    mine = [st.held[enc.sym(slot)].term == ticket, h.ticket[0].term == ticket]
    tape = ("abort_forward", "abort_dgrad", "abort_wgrad")
    facts = [*words.assumed("abort_forward"), *mine, ticket != 0]
    ways = [_conditions(composition, name) for name in tape]
    yield _goal("a recovery step is accepted", "abort", facts, z3.Not(z3.Or(ways)))
    for name in ("abort_refresh", "abort_evaluation", "abort_update", "fail_reduction", "drain"):
        column, index = ENDED[name]
        where = 0 if index == "one" else enc.sym(enc.const(f"arg.{index}", index))
        value = getattr(st, column)[where].term
        facts = list(words.assumed(name))
        if name in ("abort_refresh", "abort_evaluation", "abort_update"):
            facts += [value == ticket, ticket != 0]
            if name == "abort_update":
                facts.append(enc.const("arg.epoch", "int") == h.weights[0].term)
        elif name == "fail_reduction":
            facts += [value != 0]
        refused = z3.Not(_conditions(composition, name))
        yield _goal("a recovery step is accepted", name, facts, refused)


def _one_fewer(composition: Composition) -> Iterator[Goal]:
    """Yield goals for: an accepted recovery step ends its action and begins no other action."""
    words, enc = composition.vocabulary, composition.encoding
    for name, (column, index) in ENDED.items():
        kept = _SETTLED if name == "drain" else _UNDER_WAY
        for path in composition.paths[name]:
            if path.clause is not None:
                continue
            facts = [*path.tests, *words.assumed(name)]
            term = path.columns[column]
            at = enc.const(f"arg.{index}", index) if z3.is_array(term) else None
            ended = _entry(term, at) == 0
            yield _goal("a recovery step ends its action", name, facts, z3.Not(ended), path)
            for other in kept:
                after, before = path.columns[other], path.before[other]
                if after.eq(before):
                    continue
                member = enc.const("var.i", STATE[other].index) if z3.is_array(after) else None
                left = _entry(after, member)
                same = z3.Implies(left != 0, left == _entry(before, member))
                yield _goal("a recovery step begins no action", name, facts, z3.Not(same), path)


def _restored(composition: Composition) -> Iterator[Goal]:
    """
    Yield goals for: if nothing is in flight and every domain is drained, a restore into a new
    incarnation is accepted.
    """
    words, enc = composition.vocabulary, composition.encoding
    st = words.state(words.before)
    facts = list(words.assumed("restore"))
    for name in _SETTLED:
        column = STATE[name]
        term = enc.column(name, column)
        if column.index == "one":
            facts.append(term == 0)
            continue
        index = enc.const("var.i", column.index)
        facts += enc.close({"var.i": column.index}, z3.Select(term, index) == 0)
    facts.append(enc.const("arg.incarnation", "int") != st.incarnation[0].term)
    for path in composition.paths["restore"]:
        if path.clause is not None:
            yield _goal("a restore is accepted at last", "restore", facts, path.condition, path)


def _entry(term: Term, index: Term | None) -> Term:
    """Return an entry of a column (an array of the state); a column with a single entry has no
    index."""
    return term if index is None else z3.Select(term, index)


def _conditions(composition: Composition, transition: str) -> Term:
    """Return the conditions under which a transition is accepted."""
    accepted = [p.condition for p in composition.paths[transition] if p.clause is None]
    return z3.Or(accepted)


def _goal(
    name: str, transition: str, facts: list[Term], denied: Term, path: Path | None = None
) -> Goal:
    label = "" if path is None else path.label
    relations = MANDATORY | {"version", "order", "reduction", "completion"}
    return Goal(name, "recovery", transition, label, relations, tuple(facts), denied)
