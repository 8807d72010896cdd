"""
The composed transitions checkpoint and restore.

Written by ``python -m qeffect.engine``; edit ``qeffect.relations`` and write it again.
"""

from __future__ import annotations

from ...refusals import Refused
from ...relations.constants import NEVER, NO_SLOT, NO_STAGE

__all__ = ["checkpoint", "restore"]


def checkpoint(st):
    """
    Before anything is saved.

    Guards: persistence, order.
    Writes: none.
    """
    # persistence.checkpoint_before_order_guards
    if not st.every(st.consumers, 0):
        raise Refused("persistence.live-tape")
    if not st.every(st.refreshing, 0):
        raise Refused("persistence.action-in-flight")
    if not st.every(st.refreshed, NO_STAGE):
        raise Refused("persistence.mid-epoch")
    # order.checkpoint_guards
    if not st.every(st.poisoned, 0):
        raise Refused("order.poisoned")
    # persistence.checkpoint_guards
    if not st.every(st.undrained, 0):
        raise Refused("persistence.device-work")
    if not st.every(st.reducing, 0):
        raise Refused("persistence.reduction-in-flight")
    if not st.every(st.forwards, 0) or not st.every(st.wgrads, 0):
        raise Refused("persistence.mid-epoch")


def restore(st, epoch, incarnation):
    """
    After the numerical state was loaded: starts a new incarnation with stale caches.

    Guards: ownership, version, persistence, reduction.
    Writes: ownership, version, order, arena, capture, completion, reduction, epoch, persistence.
    """
    # ownership.restore_guards
    if not st.every(st.held, 0):
        raise Refused("ownership.in-flight")
    # version.restore_guards
    if not st.every(st.refreshing, 0):
        raise Refused("version.in-flight")
    # persistence.restore_before_reduction_guards
    if not st.every(st.undrained, 0):
        raise Refused("persistence.device-work")
    # reduction.restore_guards
    if not st.every(st.reducing, 0):
        raise Refused("reduction.in-flight")
    # persistence.restore_guards
    if incarnation == st.incarnation[0]:
        raise Refused("persistence.same-incarnation")
    # ownership.restore_writes
    st.fill(st.consumers, 0)
    st.fill(st.moving, 0)
    st.fill(st.arrived, 0)
    st.fill(st.generation, 0)
    st.fill(st.slot_of, NO_SLOT)
    st.fill(st.forwarded, NEVER)
    # version.restore_writes
    st.fill(st.cache_epoch, NEVER)
    st.fill(st.refreshed, NO_STAGE)
    # order.restore_writes
    st.fill(st.token, 0)
    st.fill(st.position, 0)
    st.fill(st.poisoned, 0)
    st.fill(st.forwards, 0)
    st.fill(st.dgrads, 0)
    # arena.restore_writes
    st.fill(st.bound, NEVER)
    st.fill(st.opened, NEVER)
    # capture.restore_writes
    st.fill(st.tenants, 0)
    # completion.restore_writes
    st.fill(st.submitted, 0)
    st.fill(st.joined, 0)
    st.fill(st.waited, 0)
    st.fill(st.replays, 0)
    st.fill(st.produced, 0)
    st.fill(st.landed, 0)
    st.fill(st.vacated, 0)
    st.fill(st.ended_at, 0)
    st.named[0] = NEVER
    # reduction.restore_writes
    st.fill(st.reduced, NEVER)
    st.started[0] = 0
    # epoch.restore_writes
    st.fill(st.weight_epoch, epoch)
    st.fill(st.wgrads, 0)
    st.fill(st.spoiled, NEVER)
    st.fill(st.final, NEVER)
    # persistence.restore_writes
    st.incarnation[0] = incarnation
