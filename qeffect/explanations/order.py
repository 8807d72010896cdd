"""
Texts of found and expected values, for refusals by the clauses of order (FP8 scaling state).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..text import counted
from .words import (
    Arguments,
    Explanation,
    asked,
    domain_of,
    nonzero_entries,
    other_indices,
    slot_of,
    with_skipped,
)

__all__ = ["EXPLANATIONS"]


def _reported(count: Any, what: str, said: str) -> str:
    """Return an action's report as text: a count, a missing report, or an unreadable report."""
    if isinstance(count, str):
        return f"no readable count in the report of {what}: {count}"
    return said.format(count) if count >= 0 else f"no report of {what}"


def _moves(st: Any, a: Arguments) -> str:
    """Return text: how often an action must move the scales of its domain."""
    if a["transition"] == "commit_evaluation":
        wanted = 0
    elif a["transition"] == "move_scales":
        wanted = 1
    else:
        wanted = 1 - st.epoch_scales[domain_of(st, a)]
    return f"{counted(wanted, 'scaling update')} of domain {domain_of(st, a)}"


def _position(st: Any, a: Arguments, column: str, action: str) -> tuple[str, str]:
    d = domain_of(st, a)
    return (
        f"{action} of {a['key']} at position {st.position[d]} of the declared order",
        f"this action at position {getattr(st, column)[a['key'].cell]}",
    )


#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    "order.in-flight": lambda st, a: (
        asked(a),
        "no F, dI, refresh or evaluation in flight; in flight "
        f"{nonzero_entries(st.busy)} (domain: ticket)",
    ),
    "order.poisoned": lambda st, a: (
        f"{asked(a)} with scaling state that a failed F, dI, refresh or evaluation left half "
        "updated",
        "a domain restored from the last commit's snapshot",
    ),
    "order.token": lambda st, a: (
        f"effect token {a['token']}",
        f"token {st.token[domain_of(st, a)]}",
    ),
    "order.reordered": lambda st, a: _position(
        st, a, "dgrad_at" if "ref" in a else "forward_at", "dI" if "ref" in a else "F"
    ),
    "order.scaling-updates": lambda st, a: (
        _reported(a["updates"], "scaling updates", "{} scaling updates"),
        _moves(st, a),
    ),
    "order.moves-outside-update": lambda st, a: (
        f"move_scales of domain {domain_of(st, a)} with no optimizer update in flight",
        "move_scales between the check of an optimizer update and its commit",
    ),
    "order.nothing-gathered": lambda st, a: (
        f"move_scales of domain {domain_of(st, a)}, whose scales "
        + (
            "have already moved in this optimizer update"
            if st.epoch_scales[domain_of(st, a)]
            else "move with each F and dI"
        ),
        "one move_scales per optimizer update, only for a domain whose scales move once an epoch",
    ),
    "order.scales-not-moved": lambda st, a: (
        f"the commit of an update before move_scales of domain {other_indices(st.gathered)}",
        "one move_scales for each domain whose scales move once an epoch",
    ),
    "order.scales-moved": lambda st, a: (
        f"{a['key']} while the live scales are those of the F at token "
        f"{st.rolled_at[domain_of(st, a)]}",
        f"the scales of this key's F, at token {st.scaled_at[slot_of(a)]}",
    ),
    "order.wrong-scales": lambda st, a: (
        _reported(a["scales"], "the scales that dI used", "the scales of the F at token {}"),
        f"the scales of the same key's F, at token {st.scaled_at[a['slot']]}",
    ),
    "order.unequal-scales": lambda st, a: (
        f"{a['key']}, whose F used the scales at token {st.scaled_at[slot_of(a)]}",
        f"the scales of the group's first tape, at token {st.scaled_at[a['leader']]}",
    ),
    "order.draws-again": lambda st, a: (
        _reported(a["draws"], "where F began to draw", "random numbers drawn from position {}"),
        f"a position after {st.drawn[domain_of(st, a)]}, where the latest F of domain "
        f"{domain_of(st, a)} began"
        if st.drawn[domain_of(st, a)] >= 0
        else "a position of at least 0",
    ),
    "order.wrong-draws": lambda st, a: (
        _reported(
            a["draws"],
            "where the recomputation began to draw",
            "random numbers drawn again from position {}",
        ),
        f"the random numbers of the same key's F, from position {st.drawn_at[a['slot']]}",
    ),
    "order.declared": lambda st, a: (
        asked(a),
        f"a domain without a declared order; domain {domain_of(st, a)} declares its order",
    ),
    "order.incomplete": lambda st, a: (
        f"{counted(st.forwards[a['stage']], 'forward')} and "
        f"{counted(st.dgrads[a['stage']], 'input gradient')}{with_skipped(st, [a['stage']])}",
        f"{st.cells[a['stage']]} of each",
    ),
}
