"""
The composed transitions check_forward, commit_forward and abort_forward.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import IN_BIT, NEVER, NO_SLOT, NO_STAGE, RESERVED

__all__ = ["abort_forward", "check_forward", "commit_forward"]


def check_forward(st, key, slot, token, link, refresh):
    """
    Before F: reserves slot and domain.

    Guards: ownership, version, order, capture, completion.
    Writes: ownership, version, order, capture, tickets.
    """
    # ownership.check_forward_guards
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    if slot == NO_SLOT:
        raise Refused("ownership.pool-exhausted")
    if st.slot_stage[slot] != s:
        raise Refused("ownership.foreign-slot")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    if mask != 0 and (mask != RESERVED or st.cell_at[slot] != c or st.epoch_at[slot] != e):
        raise Refused("ownership.slot-busy")
    if mask == 0 and st.slot_of[c] != NO_SLOT:
        raise Refused("ownership.key-live")
    if st.forwarded[c] == e:
        raise Refused("ownership.repeated-forward")
    if st.generation[slot] == st.generation_max[0]:
        raise Refused("ownership.generation-exhausted")
    if st.moving[slot] != 0:
        raise Refused("ownership.transfer-in-flight")
    if st.receives[s] & IN_BIT != 0 and st.arrived[slot] & IN_BIT == 0:
        raise Refused("ownership.receive-missing")
    # version.check_forward_guards
    d = st.domain_of[s]
    cached = st.cache_epoch[s]
    waiting = st.refreshed[d]
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")
    if refresh != 0 and (st.refreshing[s] != 0 or st.filling[s] != 0):
        raise Refused("version.in-flight")
    if refresh == 0 and cached != e:
        raise Refused("version.stale-cache")
    if refresh != 0 and cached == e:
        raise Refused("version.already-fresh")
    if refresh != 0 and st.forwards[s] != 0:
        raise Refused("version.late-refresh")
    if waiting != NO_STAGE and waiting != s:
        raise Refused("version.refresh-interrupted")
    # order.check_forward_guards
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    if st.token[d] != token:
        raise Refused("order.token")
    if st.declared[d] != 0 and st.forward_at[c] != st.position[d]:
        raise Refused("order.reordered")
    # capture.check_forward_guards
    p = st.pool_of[slot]
    if st.tenants[p] != 0 and st.cursor[p] >= st.forward_rank[slot]:
        raise Refused("capture.out-of-order")
    # completion.check_forward_guards
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.joined[link] != st.submitted[link]:
        raise Refused("completion.caller-to-graph")
    if st.unawaited[d] != 0:
        raise Refused("completion.update-to-graph")
    if st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.transfer-to-graph")
    ticket = st.serial[0] + 1
    # ownership.check_forward_writes
    st.slot_of[c] = slot
    st.cell_at[slot] = c
    st.epoch_at[slot] = e
    st.consumers[slot] = RESERVED
    st.held[slot] = ticket
    st.forwarded[c] = e
    # version.check_forward_writes
    if refresh != 0:
        st.filling[s] = ticket
    # order.check_forward_writes
    st.busy[d] = ticket
    # capture.check_forward_writes
    st.cursor[p] = st.forward_rank[slot]
    st.tenants[p] = st.tenants[p] + 1
    # tickets.check_forward_writes
    st.serial[0] = ticket
    return ticket


def commit_forward(st, slot, ticket, filled, fill_epoch, updates):
    """
    After F: the tape is live and the token advances; an F that refreshes makes the cache current.
    `updates` counts how often F updated the scales.

    Guards: ownership, version, order.
    Writes: ownership, version, order, completion.
    """
    # ownership.commit_forward_guards
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask != RESERVED:
        raise Refused("ownership.unknown-ticket")
    # version.commit_forward_guards
    s = st.slot_stage[slot]
    reports = st.reports_fills[s]
    if reports != 0 and st.filling[s] == ticket and (filled != st.matrices[s]):
        raise Refused("version.fill-missing")
    if reports != 0 and st.filling[s] == ticket and (fill_epoch != st.weight_epoch[s]):
        raise Refused("version.wrong-fill")
    if reports != 0 and st.filling[s] != ticket and (fill_epoch != NEVER):
        raise Refused("version.fill-unasked")
    # order.commit_forward_guards
    if st.reports_updates[s] != 0 and updates != 1:
        raise Refused("order.scaling-updates")
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    # ownership.commit_forward_writes
    st.consumers[slot] = st.owes[s]
    st.held[slot] = 0
    # version.commit_forward_writes
    if st.filling[s] == ticket:
        st.cache_epoch[s] = st.epoch_at[slot]
        st.filling[s] = 0
    st.refreshed[d] = NO_STAGE
    # order.commit_forward_writes
    st.busy[d] = 0
    st.scaled_at[slot] = st.token[d]
    st.rolled_at[d] = st.token[d]
    st.token[d] = st.token[d] + 1
    st.position[d] = st.position[d] + 1
    st.forwards[s] = st.forwards[s] + 1
    # completion.commit_forward_writes
    st.produced[slot] = replay
    st.replays[d] = replay
    st.undrained[d] = 1


def abort_forward(st, slot, ticket):
    """
    After F failed: releases the tape, poisons the domain and spoils the epoch.

    Guards: ownership.
    Writes: ownership, version, order, capture, completion, epoch.
    """
    # ownership.abort_forward_guards
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask != RESERVED:
        raise Refused("ownership.unknown-ticket")
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    p = st.pool_of[slot]
    replay = st.replays[d] + 1
    # ownership.abort_forward_writes
    st.held[slot] = 0
    st.slot_of[st.cell_at[slot]] = NO_SLOT
    st.consumers[slot] = 0
    st.arrived[slot] = 0
    st.generation[slot] = st.generation[slot] + 1
    # version.abort_forward_writes
    if st.filling[s] == ticket:
        st.filling[s] = 0
    # order.abort_forward_writes
    st.busy[d] = 0
    st.poisoned[d] = 1
    # capture.abort_forward_writes
    st.tenants[p] = st.tenants[p] - 1
    # completion.abort_forward_writes
    st.vacated[slot] = replay
    st.replays[d] = replay
    st.undrained[d] = 1
    # epoch.abort_forward_writes
    st.spoiled[s] = st.epoch_at[slot]
