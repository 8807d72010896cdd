"""
The words that the properties are written in: the argument types and what is in flight.

``st`` is the contract's memory and ``h`` the history of ``qeffect.spec.history``; ``a`` are the
arguments of a transition, by their names. All are read as plain values and as symbolic terms alike,
so they have no one type.
"""

from __future__ import annotations

from typing import Any

from ..invariants import awaits, live, retained
from ..predicates import DI, RESERVED

__all__ = [
    "Args",
    "History",
    "Index",
    "State",
    "Truth",
    "in_flight",
    "now",
    "update_in_flight",
    "wgrad_in_flight",
]

State = Any
History = Any
Index = Any
Args = Any
Truth = Any


def in_flight(st: State, slot: Index) -> Truth:
    """An action on the slot was accepted and has neither committed nor aborted."""
    return st.held[slot] != 0


def wgrad_in_flight(st: State, slot: Index) -> Truth:
    """That action is a dW."""
    return in_flight(st, slot) & retained(st, slot) & (st.pending[slot] & DI == 0)


def update_in_flight(st: State, slot: Index) -> Truth:
    """That action updates scaling state: it is an F or a dI."""
    forward_or_dgrad = (st.pending[slot] == RESERVED) | awaits(st, slot, DI)
    return in_flight(st, slot) & live(st, slot) & forward_or_dgrad


def now(st: State, stage: Index) -> Any:
    """The epoch of the stage's current weights."""
    return st.weight_epoch[stage]
