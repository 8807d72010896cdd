"""
Reduction: a stage's gradients are reduced once, after they are whole and before the commit
(paper, IV-E).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import State

#: ``unreduced`` is 1 while a finalized stage still owes its reduction, ``reducing`` 1 while one
#: is in flight.
STATE = {"unreduced": Column("stage", "flag"), "reducing": Column("stage", "flag")}


def drop_guards(st: State, key, ref):
    s = key.stage
    if st.reducing[s] != 0:
        raise Refused("reduction.in-flight")


def finalize_writes(st: State, stage, link):
    st.unreduced[stage] = st.reduces[stage]


def start_reduction_guards(st: State, stage):
    if st.final[stage] != st.weight_epoch[stage]:
        raise Refused("reduction.before-final")
    if st.reducing[stage] != 0:
        raise Refused("reduction.in-flight")
    if st.unreduced[stage] == 0:
        raise Refused("reduction.duplicate")


def start_reduction_writes(st: State, stage):
    st.reducing[stage] = 1


def finish_reduction_guards(st: State, stage):
    if st.reducing[stage] == 0:
        raise Refused("reduction.not-started")


def finish_reduction_writes(st: State, stage):
    st.reducing[stage] = 0
    st.unreduced[stage] = 0


def fail_reduction_guards(st: State, stage):
    if st.reducing[stage] == 0:
        raise Refused("reduction.not-started")


def fail_reduction_writes(st: State, stage):
    st.reducing[stage] = 0


def commit_epoch_guards(st: State, epoch):
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")
    if not st.every(st.unreduced, 0):
        raise Refused("reduction.missing")


def restore_guards(st: State, epoch, incarnation):
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.unreduced, 0)
