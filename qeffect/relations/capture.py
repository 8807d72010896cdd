"""
Capture memory: graphs that share a memory pool must be replayed in the order of their capture.

The scratch memory of a graph may be memory that an earlier graph of the pool has freed.
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import GROUP_BIT, NO_RANK, READ_BITS, RESERVED, WGRAD_BIT, State

#: ``cursor`` is the capture rank (position in the order of capture) of the pool's latest replay.
#: ``tenants`` counts the tapes that keep memory in the pool: live tapes from the check of their F
#: on, and aborted tapes while a stream reads them or another tape's dW takes them. ``pool_of``, the
#: pool of a slot, and the capture ranks of the slot's three graphs in that pool are configured. So
#: are ``refresh_pool`` and ``refresh_rank``, the pool and the capture rank of a stage's refresh
#: graph; the rank is NO_RANK if that graph has a pool of its own. A pool serves the slots of one
#: state domain.
STATE = {"cursor": Column("pool"), "tenants": Column("pool")}


def check_refresh_guards(st: State, stage, link):
    p = st.refresh_pool[stage]
    rank = st.refresh_rank[stage]
    if rank != NO_RANK and st.tenants[p] != 0 and st.cursor[p] >= rank:
        raise Refused("capture.out-of-order")


def check_refresh_writes(st: State, stage, link):
    p = st.refresh_pool[stage]
    rank = st.refresh_rank[stage]
    if rank != NO_RANK:
        st.cursor[p] = rank


def check_forward_guards(st: State, key, slot, token, link, refresh):
    p = st.pool_of[slot]
    if st.tenants[p] != 0 and st.cursor[p] >= st.forward_rank[slot]:
        raise Refused("capture.out-of-order")


def check_forward_writes(st: State, key, slot, token, link, refresh):
    p = st.pool_of[slot]
    st.cursor[p] = st.forward_rank[slot]
    st.tenants[p] = st.tenants[p] + 1


def abort_forward_writes(st: State, slot, ticket):
    p = st.pool_of[slot]
    st.tenants[p] = st.tenants[p] - 1


def check_dgrad_guards(st: State, key, ref, token, link):
    slot = ref.slot
    p = st.pool_of[slot]
    if st.cursor[p] >= st.dgrad_rank[slot]:
        raise Refused("capture.out-of-order")


def check_dgrad_writes(st: State, key, ref, token, link):
    slot = ref.slot
    p = st.pool_of[slot]
    st.cursor[p] = st.dgrad_rank[slot]


def abort_dgrad_writes(st: State, slot, ticket):
    p = st.pool_of[slot]
    moving = st.moving[slot]
    if moving & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1


def check_wgrad_guards(st: State, key, ref, link, destination, first):
    slot = ref.slot
    p = st.pool_of[slot]
    if st.cursor[p] >= st.wgrad_rank[slot]:
        raise Refused("capture.out-of-order")


def check_wgrad_writes(st: State, key, ref, link, destination, first):
    slot = ref.slot
    p = st.pool_of[slot]
    st.cursor[p] = st.wgrad_rank[slot]


def commit_wgrad_writes(st: State, slot, ticket, covered):
    mask = st.consumers[slot]
    p = st.pool_of[slot]
    left = mask & ~WGRAD_BIT
    if left == 0:
        st.tenants[p] = st.tenants[p] - 1


def group_wgrad_guards(st: State, key, ref, leader, ticket, link, destination):
    slot = ref.slot
    p = st.pool_of[slot]
    if st.cursor[p] >= st.wgrad_rank[slot]:
        raise Refused("capture.out-of-order")


def ungroup_wgrad_writes(st: State, key, ref, covered):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    p = st.pool_of[slot]
    left = mask & ~WGRAD_BIT
    if left == 0 and moving & ~GROUP_BIT & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1


def abort_wgrad_writes(st: State, slot, ticket):
    p = st.pool_of[slot]
    moving = st.moving[slot]
    if moving & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1


def finish_read_writes(st: State, key, ref, bit, link):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    p = st.pool_of[slot]
    left = mask & ~bit
    if left == 0 and moving & ~bit & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1


def drop_writes(st: State, key, ref):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    p = st.pool_of[slot]
    if mask != RESERVED and moving & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.tenants, 0)
