"""
Predicates that the lemmas share: what is in flight on a slot, a stage or a domain.
"""

from __future__ import annotations

from typing import Any

from qeffect.spec.constants import DGRAD_BIT, RESERVED
from qeffect.spec.promises.words import (
    Args,
    History,
    Index,
    State,
    Truth,
    domain_of_slot,
    free,
    live,
)

__all__ = [
    "Args",
    "History",
    "Index",
    "State",
    "Truth",
    "awaits",
    "domain_of_slot",
    "free",
    "in_flight",
    "live",
    "now",
    "retained",
    "update_in_flight",
    "updating",
    "wgrad_in_flight",
]


def retained(st: State, slot: Index) -> Truth:
    """The forward has run, and the slot retains its work for the consumers in the mask."""
    return (st.consumers[slot] != 0) & (st.consumers[slot] != RESERVED)


def awaits(st: State, slot: Index, bit: int) -> Truth:
    """The slot waits for a consumer."""
    return (st.consumers[slot] & bit) != 0


def in_flight(st: State, slot: Index) -> Truth:
    """An action on the slot was accepted and has neither committed nor aborted."""
    return st.held[slot] != 0


def wgrad_in_flight(st: State, slot: Index) -> Truth:
    """The action in flight is a dW."""
    return in_flight(st, slot) & retained(st, slot) & (st.consumers[slot] & DGRAD_BIT == 0)


def update_in_flight(st: State, slot: Index) -> Truth:
    """The action in flight updates scaling state: it is an F or a dI."""
    forward_or_dgrad = (st.consumers[slot] == RESERVED) | awaits(st, slot, DGRAD_BIT)
    return in_flight(st, slot) & live(st, slot) & forward_or_dgrad


def updating(st: State) -> Truth:
    """An update of the weights is in flight."""
    return st.optimizing[0] != 0


def now(st: State, stage: Index) -> Any:
    """The epoch of the stage's current weights."""
    return st.weight_epoch[stage]
