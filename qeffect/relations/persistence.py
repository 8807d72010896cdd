"""
Persistence: a checkpoint is taken only when nothing is live, and a restore begins a new incarnation
in which every older reference is refused (paper, III-E; Invariant 4).

Its guards look at columns of every other relation, and raise no clause but their own. Where one of
them must run before a guard of another relation, its half says so in its name.
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NO_STAGE, State

#: ``incarnation`` is the random number that this memory puts into the references it issues.
STATE = {"incarnation": Column("one")}


def checkpoint_before_order_guards(st: State):
    if not st.every(st.consumers, 0):
        raise Refused("persistence.live-tape")
    if not st.every(st.refreshing, 0):
        raise Refused("persistence.action-in-flight")
    if not st.every(st.refreshed, NO_STAGE):
        raise Refused("persistence.mid-epoch")


def checkpoint_guards(st: State):
    if not st.every(st.undrained, 0):
        raise Refused("persistence.device-work")
    if not st.every(st.reducing, 0):
        raise Refused("persistence.reduction-in-flight")
    if not st.every(st.forwards, 0) or not st.every(st.wgrads, 0):
        raise Refused("persistence.mid-epoch")


def restore_before_reduction_guards(st: State, epoch, incarnation):
    if not st.every(st.undrained, 0):
        raise Refused("persistence.device-work")


def restore_guards(st: State, epoch, incarnation):
    if incarnation == st.incarnation[0]:
        raise Refused("persistence.same-incarnation")


def restore_writes(st: State, epoch, incarnation):
    st.incarnation[0] = incarnation
