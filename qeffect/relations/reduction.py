"""
Reduction: each bucket of gradients is reduced once, after its last dW and before the commit, in the
declared order of all replicas (paper, IV-E).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import NEVER, State

#: A bucket holds gradients of one stage, or of the two stages that share a tied destination.
#: ``reducing`` is 1 while the bucket's reduction is in flight, ``reduced`` the last epoch in which
#: it finished; ``started`` counts the reductions that started in this epoch.
STATE = {
    "reducing": Column("bucket", "flag"),
    "reduced": Column("bucket", initial=NEVER),
    "started": Column("one"),
}


def start_reduction_before_completion_guards(st: State, bucket, link):
    s = st.stage_at[bucket]
    t = st.tied_at[bucket]
    if st.spoiled[s] == st.weight_epoch[s] or st.spoiled[t] == st.weight_epoch[t]:
        raise Refused("reduction.spoiled")
    if st.wgrads[s] != st.cells[s] or st.wgrads[t] != st.cells[t]:
        raise Refused("reduction.incomplete")
    if st.reducing[bucket] != 0:
        raise Refused("reduction.in-flight")
    if st.reduced[bucket] == st.weight_epoch[s]:
        raise Refused("reduction.duplicate")
    if st.ordered[0] != 0 and st.reduce_at[bucket] != st.started[0]:
        raise Refused("reduction.out-of-order")


def start_reduction_writes(st: State, bucket, link):
    st.reducing[bucket] = 1
    st.started[0] = st.started[0] + 1


def finish_reduction_before_completion_guards(st: State, bucket, link):
    if st.reducing[bucket] == 0:
        raise Refused("reduction.not-started")


def finish_reduction_writes(st: State, bucket, link):
    s = st.stage_at[bucket]
    st.reducing[bucket] = 0
    st.reduced[bucket] = st.weight_epoch[s]


def fail_reduction_guards(st: State, bucket):
    if st.reducing[bucket] == 0:
        raise Refused("reduction.not-started")


def fail_reduction_writes(st: State, bucket):
    st.reducing[bucket] = 0


def start_gradients_read_before_persistence_guards(st: State, stage, link):
    e = st.weight_epoch[stage]
    if not st.every(st.reduced, e):
        raise Refused("reduction.missing")


def next_walk_before_persistence_guards(st: State, epoch):
    if st.started[0] != 0:
        raise Refused("reduction.begun")


def check_update_before_persistence_guards(st: State, epoch, caller):
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")
    if not st.every(st.reduced, epoch):
        raise Refused("reduction.missing")


def commit_update_writes(st: State, epoch, ticket):
    st.started[0] = 0


def restore_guards(st: State, epoch, incarnation):
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.reduced, NEVER)
    st.started[0] = 0
