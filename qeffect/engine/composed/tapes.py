"""
The composed transitions reserve, bind, drop and invalidate.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import NEVER, NO_SLOT, READ_BITS, RESERVED

__all__ = ["bind", "drop", "invalidate", "reserve"]


def reserve(st, key, slot, link):
    """
    Before a receive: claims a slot for a key's F.

    Guards: ownership, version, completion.
    Writes: ownership.
    """
    # ownership.reserve_guards
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    if slot == NO_SLOT:
        raise Refused("ownership.pool-exhausted")
    if st.slot_stage[slot] != s:
        raise Refused("ownership.foreign-slot")
    if mask != 0:
        raise Refused("ownership.slot-busy")
    if st.slot_of[c] != NO_SLOT:
        raise Refused("ownership.key-live")
    if st.forwarded[c] == e:
        raise Refused("ownership.repeated-forward")
    if st.generation[slot] == st.generation_max[0]:
        raise Refused("ownership.generation-exhausted")
    if st.moving[slot] != 0:
        raise Refused("ownership.transfer-in-flight")
    # version.reserve_guards
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")
    # completion.reserve_guards
    d = st.domain_of[s]
    if st.domain_at[link] != d:
        raise Refused("completion.wrong-stream")
    if st.waited[link] < st.vacated[slot]:
        raise Refused("completion.slot-not-awaited")
    # ownership.reserve_writes
    st.slot_of[c] = slot
    st.cell_at[slot] = c
    st.epoch_at[slot] = e
    st.consumers[slot] = RESERVED


def bind(st, key, destination):
    """
    Before dI: binds the destination of its gradients.

    Guards: version, arena.
    Writes: arena.
    """
    # version.bind_guards
    s = key.stage
    e = key.epoch
    if e != st.weight_epoch[s]:
        raise Refused("version.wrong-epoch")
    # arena.bind_guards
    c = key.cell
    if st.spoiled[s] == e:
        raise Refused("arena.spoiled")
    if st.bound[c] == e:
        raise Refused("arena.duplicate-bind")
    if st.destination_of[c] != destination:
        raise Refused("arena.mismatch")
    # arena.bind_writes
    st.bound[c] = e


def drop(st, key, ref):
    """
    Aborts one tape. A purge drops every tape of an epoch.

    Guards: ownership.
    Writes: ownership, capture, completion, epoch.
    """
    # ownership.drop_guards
    slot = ref.slot
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    if mask == 0 or st.generation[slot] != ref.generation:
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")
    moving = st.moving[slot]
    p = st.pool_of[slot]
    s = key.stage
    d = st.domain_of[s]
    # ownership.drop_writes
    st.slot_of[st.cell_at[slot]] = NO_SLOT
    st.consumers[slot] = 0
    st.arrived[slot] = 0
    st.generation[slot] = st.generation[slot] + 1
    # capture.drop_writes
    if mask != RESERVED and moving & READ_BITS == 0:
        st.tenants[p] = st.tenants[p] - 1
    # completion.drop_writes
    st.vacated[slot] = st.replays[d]
    # epoch.drop_writes
    st.spoiled[s] = e
    st.final[s] = NEVER


def invalidate(st, stage):
    """
    After the weight cache was lost: marks the cache stale. If the stage's F have begun and a dI is
    still to come, spoils the epoch.

    Guards: version.
    Writes: version, epoch.
    """
    # version.invalidate_guards
    if st.refreshing[stage] != 0 or st.filling[stage] != 0:
        raise Refused("version.in-flight")
    d = st.domain_of[stage]
    # version.invalidate_writes
    st.cache_epoch[stage] = NEVER
    # epoch.invalidate_writes
    if st.forwards[stage] != 0 and st.dgrads[stage] != st.cells[stage]:
        st.spoiled[stage] = st.weight_epoch[stage]
    if st.refreshed[d] == stage and st.busy[d] != 0:
        st.spoiled[stage] = st.weight_epoch[stage]
