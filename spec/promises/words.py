"""
Names that the promises share.

``st`` is the contract's memory, with the columns of ``qeffect.spec.columns``. ``h`` is the world,
with the words of ``qeffect.spec.world``. ``a`` holds the arguments of a transition by name.
``st.stage_of[cell]`` is the stage that a cell names. These values can be plain numbers or symbolic
terms, so their type is ``Any``.
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
    """Whether the slot is free: no consumer needs it, and no key has claimed it."""
    return st.consumers[slot] == 0


def live(st: State, slot: Index) -> Truth:
    """Whether a key has claimed the slot, and the key's F or a consumer is still to come."""
    return st.consumers[slot] != 0


def domain_of_slot(st: State, slot: Index) -> Any:
    """Return the state domain of the slot's stage."""
    return st.domain_of[st.slot_stage[slot]]
