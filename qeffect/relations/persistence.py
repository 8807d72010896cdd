"""
Persistence: a checkpoint is taken only when nothing is live, and a restore begins a new incarnation
in which every older reference is refused (paper, III-E; Invariant 4).

The guards read columns of every other relation and raise only their own clauses. If a guard must
run before the guards of another relation, the name of its function names that relation.
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NO_STAGE, State

#: ``incarnation`` is the random number in every reference that this memory issues.
STATE = {"incarnation": Column("one")}


def checkpoint_before_order_guards(st: State):
    if not st.every(st.consumers, 0):
        raise Refused("persistence.live-tape")
    if not st.every(st.refreshing, 0) or st.optimizing[0] != 0:
        raise Refused("persistence.action-in-flight")
    if not st.every(st.evaluating, 0):
        raise Refused("persistence.action-in-flight")
    if st.half_updated[0] != 0:
        raise Refused("persistence.half-updated")
    if not st.every(st.refreshed, NO_STAGE):
        raise Refused("persistence.mid-epoch")


def checkpoint_guards(st: State):
    if not st.every(st.undrained, 0):
        raise Refused("persistence.device-work")
    if not st.every(st.reducing, 0):
        raise Refused("persistence.reduction-in-flight")
    if not st.every(st.forwards, 0) or not st.every(st.wgrads, 0) or st.walk[0] != 0:
        raise Refused("persistence.mid-epoch")


def restore_before_reduction_guards(st: State, epoch, incarnation):
    if not st.every(st.undrained, 0):
        raise Refused("persistence.device-work")


def restore_guards(st: State, epoch, incarnation):
    if incarnation == st.incarnation[0]:
        raise Refused("persistence.same-incarnation")


def restore_writes(st: State, epoch, incarnation):
    st.incarnation[0] = incarnation
