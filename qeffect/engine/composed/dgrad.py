"""
The composed transitions check_dgrad, commit_dgrad and abort_dgrad.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import BACK_BIT, DGRAD_BIT, NO_SLOT, NO_STAGE, READ_BITS, RESERVED

__all__ = ["abort_dgrad", "check_dgrad", "commit_dgrad"]


def check_dgrad(st, key, ref, token, link):
    """
    Before dI: reserves tape and domain.

    Guards: ownership, version, order, arena, capture, completion.
    Writes: ownership, order, capture, tickets.
    """
    # ownership.check_dgrad_guards
    slot = ref.slot
    s = key.stage
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
    if mask & DGRAD_BIT == 0:
        raise Refused("ownership.duplicate-dgrad")
    if st.moving[slot] & BACK_BIT != 0:
        raise Refused("ownership.transfer-in-flight")
    if st.receives[s] & BACK_BIT != 0 and st.arrived[slot] & BACK_BIT == 0:
        raise Refused("ownership.receive-missing")
    # version.check_dgrad_guards
    d = st.domain_of[s]
    if st.cache_epoch[s] != e:
        raise Refused("version.stale-cache")
    if st.refreshed[d] != NO_STAGE:
        raise Refused("version.refresh-interrupted")
    # order.check_dgrad_guards
    if st.busy[d] != 0:
        raise Refused("order.in-flight")
    if st.poisoned[d] != 0:
        raise Refused("order.poisoned")
    if st.token[d] != token:
        raise Refused("order.token")
    if st.declared[d] != 0 and st.dgrad_at[c] != st.position[d]:
        raise Refused("order.reordered")
    if st.live_scales[s] != 0 and st.scaled_at[ref.slot] != st.rolled_at[d]:
        raise Refused("order.scales-moved")
    # arena.check_dgrad_guards
    if st.bound[c] != e:
        raise Refused("arena.unbound")
    # capture.check_dgrad_guards
    p = st.pool_of[slot]
    if st.cursor[p] >= st.dgrad_rank[slot]:
        raise Refused("capture.out-of-order")
    # completion.check_dgrad_guards
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.joined[link] != st.submitted[link]:
        raise Refused("completion.caller-to-graph")
    if st.waited[link] < st.produced[slot]:
        raise Refused("completion.graph-to-caller")
    if st.receives[s] & BACK_BIT != 0 and st.joined[st.ended_on[slot]] < st.ended_at[slot]:
        raise Refused("completion.transfer-to-graph")
    ticket = st.serial[0] + 1
    # ownership.check_dgrad_writes
    st.held[slot] = ticket
    # order.check_dgrad_writes
    st.busy[d] = ticket
    # capture.check_dgrad_writes
    st.cursor[p] = st.dgrad_rank[slot]
    # tickets.check_dgrad_writes
    st.serial[0] = ticket
    return ticket


def commit_dgrad(st, slot, ticket, queued, updates, scales):
    """
    After dI: the token advances, and the tape waits for dW. `queued` is the deferred work, `scales`
    the token of the F whose scales dI used.

    Guards: ownership, order.
    Writes: ownership, order, completion.
    """
    # ownership.commit_dgrad_guards
    s = st.slot_stage[slot]
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT == 0:
        raise Refused("ownership.unknown-ticket")
    if queued != st.matrices[s]:
        raise Refused("ownership.work-not-queued")
    # order.commit_dgrad_guards
    if st.reports_updates[s] != 0 and updates != 1:
        raise Refused("order.scaling-updates")
    if st.carried_scales[s] != 0 and scales != st.scaled_at[slot]:
        raise Refused("order.wrong-scales")
    d = st.domain_of[s]
    replay = st.replays[d] + 1
    # ownership.commit_dgrad_writes
    st.consumers[slot] = mask & ~DGRAD_BIT
    st.held[slot] = 0
    # order.commit_dgrad_writes
    st.busy[d] = 0
    st.token[d] = st.token[d] + 1
    st.position[d] = st.position[d] + 1
    st.dgrads[s] = st.dgrads[s] + 1
    # completion.commit_dgrad_writes
    st.produced[slot] = replay
    st.replays[d] = replay
    st.undrained[d] = 1


def abort_dgrad(st, slot, ticket):
    """
    After dI failed: releases the tape, poisons the domain and spoils the epoch.

    Guards: ownership.
    Writes: ownership, order, capture, completion, epoch.
    """
    # ownership.abort_dgrad_guards
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT == 0:
        raise Refused("ownership.unknown-ticket")
    s = st.slot_stage[slot]
    d = st.domain_of[s]
    p = st.pool_of[slot]
    moving = st.moving[slot]
    replay = st.replays[d] + 1
    # ownership.abort_dgrad_writes
    st.held[slot] = 0
    st.slot_of[st.cell_at[slot]] = NO_SLOT
    st.consumers[slot] = 0
    st.arrived[slot] = 0
    st.generation[slot] = st.generation[slot] + 1
    # order.abort_dgrad_writes
    st.busy[d] = 0
    st.poisoned[d] = 1
    # capture.abort_dgrad_writes
    if moving & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1
    # completion.abort_dgrad_writes
    st.vacated[slot] = replay
    st.replays[d] = replay
    st.undrained[d] = 1
    # epoch.abort_dgrad_writes
    st.spoiled[s] = st.epoch_at[slot]
