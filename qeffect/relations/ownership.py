"""
Ownership: each retained tape has one key, one slot and one generation (paper, III-A; Invariant 2).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import DI, DW, GRAD, NEVER, NO_SLOT, OUT, RESERVED, State

#: ``cell_at`` and ``epoch_at`` are the tape's key; ``held`` is the ticket in flight on a slot;
#: ``forwarded`` marks the epoch of a cell's last forward.
STATE = {
    "pending": Column("slot", "mask"),
    "generation": Column("slot", "generation"),
    "cell_at": Column("slot", "cell", None),
    "epoch_at": Column("slot", initial=NEVER),
    "held": Column("slot", "ticket"),
    "slot_of": Column("cell", "slot", NO_SLOT),
    "forwarded": Column("cell", initial=NEVER),
}


def release(st: State, slot):
    """Free a slot for its next tenant; every outstanding reference to it dies here."""
    st.slot_of[st.cell_at[slot]] = NO_SLOT
    st.pending[slot] = 0
    st.generation[slot] = st.generation[slot] + 1


def require_reference(st: State, key, ref):
    """The reference names a live tape of this incarnation, and the key names the same tape."""
    slot = ref.slot
    e = key.epoch
    c = key.cell
    mask = st.pending[slot]
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    if mask == 0 or st.generation[slot] != ref.generation:
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.pending")


def reserve_guards(st: State, key, slot):
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.pending[slot]
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


def reserve_writes(st: State, key, slot):
    e = key.epoch
    c = key.cell
    st.slot_of[c] = slot
    st.cell_at[slot] = c
    st.epoch_at[slot] = e
    st.pending[slot] = RESERVED


def check_forward_guards(st: State, key, slot, token, link, refresh):
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.pending[slot]
    if slot == NO_SLOT:
        raise Refused("ownership.pool-exhausted")
    if st.slot_stage[slot] != s:
        raise Refused("ownership.foreign-slot")
    if st.held[slot] != 0:
        raise Refused("ownership.pending")
    if mask != 0 and (mask != RESERVED or st.cell_at[slot] != c or st.epoch_at[slot] != e):
        raise Refused("ownership.slot-busy")
    if mask == 0 and st.slot_of[c] != NO_SLOT:
        raise Refused("ownership.key-live")
    if st.forwarded[c] == e:
        raise Refused("ownership.repeated-forward")
    if st.generation[slot] == st.generation_max[0]:
        raise Refused("ownership.generation-exhausted")


def check_forward_writes(st: State, key, slot, token, link, refresh):
    e = key.epoch
    c = key.cell
    ticket = st.serial[0] + 1
    st.slot_of[c] = slot
    st.cell_at[slot] = c
    st.epoch_at[slot] = e
    st.pending[slot] = RESERVED
    st.held[slot] = ticket
    st.forwarded[c] = e


def commit_forward_guards(st: State, slot, ticket):
    mask = st.pending[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask != RESERVED:
        raise Refused("ownership.unknown-ticket")


def commit_forward_writes(st: State, slot, ticket):
    s = st.slot_stage[slot]
    st.pending[slot] = st.owes[s]
    st.held[slot] = 0


def abort_forward_guards(st: State, slot, ticket):
    mask = st.pending[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask != RESERVED:
        raise Refused("ownership.unknown-ticket")


def abort_forward_writes(st: State, slot, ticket):
    st.held[slot] = 0
    release(st, slot)


def check_dgrad_guards(st: State, key, ref, token, link):
    slot = ref.slot
    mask = st.pending[slot]
    require_reference(st, key, ref)
    if mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if mask & DI == 0:
        raise Refused("ownership.duplicate-dgrad")


def check_dgrad_writes(st: State, key, ref, token, link):
    slot = ref.slot
    ticket = st.serial[0] + 1
    st.held[slot] = ticket


def commit_dgrad_guards(st: State, slot, ticket, queued):
    s = st.slot_stage[slot]
    mask = st.pending[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DI == 0:
        raise Refused("ownership.unknown-ticket")
    if queued != st.matrices[s]:
        raise Refused("ownership.work-not-queued")


def commit_dgrad_writes(st: State, slot, ticket, queued):
    mask = st.pending[slot]
    st.pending[slot] = mask & ~DI
    st.held[slot] = 0


def abort_dgrad_guards(st: State, slot, ticket):
    mask = st.pending[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DI == 0:
        raise Refused("ownership.unknown-ticket")


def abort_dgrad_writes(st: State, slot, ticket):
    st.held[slot] = 0
    release(st, slot)


def check_wgrad_guards(st: State, key, ref, link, destination, first):
    slot = ref.slot
    mask = st.pending[slot]
    require_reference(st, key, ref)
    if mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if mask & DI != 0:
        raise Refused("ownership.wgrad-before-dgrad")
    if mask & DW == 0:
        raise Refused("ownership.duplicate-wgrad")


def check_wgrad_writes(st: State, key, ref, link, destination, first):
    slot = ref.slot
    ticket = st.serial[0] + 1
    st.held[slot] = ticket


def commit_wgrad_guards(st: State, slot, ticket, covered):
    s = st.slot_stage[slot]
    mask = st.pending[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DI != 0 or mask & DW == 0:
        raise Refused("ownership.unknown-ticket")
    if covered != st.matrices[s]:
        raise Refused("ownership.matrix-coverage")


def commit_wgrad_writes(st: State, slot, ticket, covered):
    mask = st.pending[slot]
    left = mask & ~DW
    st.held[slot] = 0
    if left == 0:
        release(st, slot)
    else:
        st.pending[slot] = left


def abort_wgrad_guards(st: State, slot, ticket):
    mask = st.pending[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DI != 0 or mask & DW == 0:
        raise Refused("ownership.unknown-ticket")


def abort_wgrad_writes(st: State, slot, ticket):
    st.held[slot] = 0
    release(st, slot)


def read_guards(st: State, key, ref, bit, link):
    slot = ref.slot
    mask = st.pending[slot]
    require_reference(st, key, ref)
    if (bit != OUT and bit != GRAD) or mask & bit == 0:
        raise Refused("ownership.no-such-reader")
    if bit == GRAD and mask & DI != 0:
        raise Refused("ownership.read-before-dgrad")


def finish_read_guards(st: State, key, ref, bit):
    slot = ref.slot
    mask = st.pending[slot]
    require_reference(st, key, ref)
    if (bit != OUT and bit != GRAD) or mask & bit == 0:
        raise Refused("ownership.no-such-reader")
    if bit == GRAD and mask & DI != 0:
        raise Refused("ownership.read-before-dgrad")


def finish_read_writes(st: State, key, ref, bit):
    slot = ref.slot
    mask = st.pending[slot]
    left = mask & ~bit
    if left == 0:
        release(st, slot)
    else:
        st.pending[slot] = left


def drop_guards(st: State, key, ref):
    require_reference(st, key, ref)


def drop_writes(st: State, key, ref):
    slot = ref.slot
    release(st, slot)


def commit_epoch_guards(st: State, epoch):
    if not st.every(st.pending, 0):
        raise Refused("ownership.live-tape")


def restore_guards(st: State, epoch, incarnation):
    if not st.every(st.held, 0):
        raise Refused("ownership.pending")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.pending, 0)
    st.fill(st.generation, 0)
    st.fill(st.slot_of, NO_SLOT)
    st.fill(st.forwarded, NEVER)
