"""
The words that the promises are written in.

``st`` is the contract's memory, with the columns of ``qeffect.spec.columns``; ``h`` is the world
beside it, told in the words of ``qeffect.spec.world``; ``a`` are the arguments of a transition, by
their names. ``st.stage_of[cell]`` is the stage that a cell names. All of them are read as plain
values and as symbolic terms alike, so they have no one type.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "Args",
    "History",
    "Index",
    "State",
    "Truth",
    "domain_of_slot",
    "free",
    "live",
]

State = Any
History = Any
Index = Any
Args = Any
Truth = Any


def free(st: State, slot: Index) -> Truth:
    """Nobody waits for the slot."""
    return st.consumers[slot] == 0


def live(st: State, slot: Index) -> Truth:
    """Claimed by a key: its forward is still to come, or some consumer is."""
    return st.consumers[slot] != 0


def domain_of_slot(st: State, slot: Index) -> Any:
    """The state domain of the slot's stage."""
    return st.domain_of[st.slot_stage[slot]]
