"""
Persistence: a checkpoint is taken only when nothing is live, and a restore begins a new incarnation
in which every older reference is refused (paper, III-E; Invariant 4).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import State

#: ``incarnation`` is the random number that this memory puts into the references it issues.
STATE = {"incarnation": Column("one")}


def restore_guards(st: State, epoch, incarnation):
    if incarnation == st.incarnation[0]:
        raise Refused("persistence.same-incarnation")


def restore_writes(st: State, epoch, incarnation):
    st.incarnation[0] = incarnation
