"""
The composed transitions check_wgrad, commit_wgrad and abort_wgrad.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import (
    ADDS,
    DGRAD_BIT,
    JOINS,
    NO_SLOT,
    OPENS,
    READ_BITS,
    RESERVED,
    WGRAD_BIT,
)

__all__ = ["abort_wgrad", "check_wgrad", "commit_wgrad"]


def check_wgrad(st, key, ref, link, destination, first):
    """
    Before dW: reserves tape and destination. `first` says which buffers dW overwrites.

    Guards: ownership, arena, capture, completion.
    Writes: ownership, arena, capture, tickets.
    """
    # ownership.check_wgrad_guards
    slot = ref.slot
    mask = st.consumers[slot]
    e = key.epoch
    c = key.cell
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    if mask == 0 or st.generation[slot] != ref.generation:
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    if mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if mask & DGRAD_BIT != 0:
        raise Refused("ownership.wgrad-before-dgrad")
    if mask & WGRAD_BIT == 0:
        raise Refused("ownership.duplicate-wgrad")
    # arena.check_wgrad_guards
    s = key.stage
    b = st.buffer_of[c]
    t = st.shared_of[b]
    if st.spoiled[s] == e:
        raise Refused("arena.spoiled")
    if st.destination_of[c] != destination:
        raise Refused("arena.mismatch")
    if st.writing[t] != 0:
        raise Refused("arena.in-flight")
    own = st.opened[b]
    shared = st.opened[t]
    if first == JOINS and own == e or (first != ADDS and first != JOINS and (shared == e)):
        raise Refused("arena.overwrite")
    if first == ADDS and own != e or first == OPENS or (first == JOINS and shared != e):
        raise Refused("arena.stale-accumulation")
    # capture.check_wgrad_guards
    p = st.pool_of[slot]
    if st.cursor[p] >= st.wgrad_rank[slot]:
        raise Refused("capture.out-of-order")
    # completion.check_wgrad_guards
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.joined[link] != st.submitted[link]:
        raise Refused("completion.caller-to-graph")
    ticket = st.serial[0] + 1
    # ownership.check_wgrad_writes
    st.held[slot] = ticket
    # arena.check_wgrad_writes
    st.writing[b] = ticket
    st.writing[t] = ticket
    # capture.check_wgrad_writes
    st.cursor[p] = st.wgrad_rank[slot]
    # tickets.check_wgrad_writes
    st.serial[0] = ticket
    return ticket


def commit_wgrad(st, slot, ticket, covered):
    """
    After dW: counts the write. `covered` names the matrices written. The tape's last consumer
    releases the slot.

    Guards: ownership.
    Writes: ownership, arena, capture, completion, epoch.
    """
    # ownership.commit_wgrad_guards
    s = st.slot_stage[slot]
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT != 0 or (mask & WGRAD_BIT == 0):
        raise Refused("ownership.unknown-ticket")
    if covered != st.matrices[s]:
        raise Refused("ownership.matrix-coverage")
    left = mask & ~WGRAD_BIT
    c = st.cell_at[slot]
    b = st.buffer_of[c]
    t = st.shared_of[b]
    e = st.epoch_at[slot]
    p = st.pool_of[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    # ownership.commit_wgrad_writes
    st.held[slot] = 0
    if left == 0:
        st.slot_of[st.cell_at[slot]] = NO_SLOT
        st.consumers[slot] = 0
        st.arrived[slot] = 0
        st.generation[slot] = st.generation[slot] + 1
    else:
        st.consumers[slot] = left
    # arena.commit_wgrad_writes
    st.writing[b] = 0
    st.writing[t] = 0
    st.opened[b] = e
    st.opened[t] = e
    # capture.commit_wgrad_writes
    if left == 0:
        st.tenants[p] = st.tenants[p] - 1
    # completion.commit_wgrad_writes
    st.landed[s] = replay
    st.vacated[slot] = replay
    st.replays[d] = replay
    st.undrained[d] = 1
    # epoch.commit_wgrad_writes
    st.wgrads[s] = st.wgrads[s] + 1


def abort_wgrad(st, slot, ticket):
    """
    After dW failed: releases the tape and spoils the stage's epoch.

    Guards: ownership.
    Writes: ownership, arena, capture, completion, epoch.
    """
    # ownership.abort_wgrad_guards
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT != 0 or (mask & WGRAD_BIT == 0):
        raise Refused("ownership.unknown-ticket")
    c = st.cell_at[slot]
    b = st.buffer_of[c]
    t = st.shared_of[b]
    p = st.pool_of[slot]
    moving = st.moving[slot]
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    # ownership.abort_wgrad_writes
    st.held[slot] = 0
    st.slot_of[st.cell_at[slot]] = NO_SLOT
    st.consumers[slot] = 0
    st.arrived[slot] = 0
    st.generation[slot] = st.generation[slot] + 1
    # arena.abort_wgrad_writes
    st.writing[b] = 0
    st.writing[t] = 0
    # capture.abort_wgrad_writes
    if moving & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1
    # completion.abort_wgrad_writes
    st.vacated[slot] = replay
    st.replays[d] = replay
    st.undrained[d] = 1
    # epoch.abort_wgrad_writes
    st.spoiled[s] = st.epoch_at[slot]
