"""
Ownership: each retained tape has one key, one slot and one generation (paper, III-A; Invariant 2).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import (
    BACK_BIT,
    BEFORE_DGRAD,
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    GROUP_BIT,
    IN_BIT,
    INPUT_BITS,
    NEVER,
    NO_SLOT,
    OUT_BIT,
    RESERVED,
    SOURCE_BIT,
    TARGET_BIT,
    WGRAD_BIT,
    State,
)

#: ``cell_at`` and ``epoch_at`` are the tape's key; ``held`` is the ticket in flight on a slot;
#: ``forwarded`` is the epoch of a cell's last forward in the current walk, ``skipped`` the epoch of
#: the walk that left the cell out, and ``skips`` counts the cells left out. ``moving`` is the mask
#: of transfers under way out of a slot and into it, which continue after their tape is aborted;
#: ``arrived`` is the mask of messages that a live tape has received, with the copy of its input.
STATE = {
    "consumers": Column("slot", "mask"),
    "generation": Column("slot", "generation"),
    "cell_at": Column("slot", "cell", None),
    "epoch_at": Column("slot", initial=NEVER),
    "held": Column("slot", "ticket"),
    "moving": Column("slot", "mask"),
    "arrived": Column("slot", "mask"),
    "slot_of": Column("cell", "slot", NO_SLOT),
    "forwarded": Column("cell", initial=NEVER),
    "skipped": Column("cell", initial=NEVER),
    "skips": Column("one"),
}


def release(st: State, slot):
    """Free a slot for its next tape; every outstanding reference to the slot becomes stale."""
    st.slot_of[st.cell_at[slot]] = NO_SLOT
    st.consumers[slot] = 0
    st.arrived[slot] = 0
    st.generation[slot] = st.generation[slot] + 1


def require_reference(st: State, key, ref):
    """Require that reference and key name the same live tape of this incarnation."""
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


def require_transfer(st: State, key, ref, bit):
    """Require that the reference names the tape, live or aborted, of a transfer under way."""
    slot = ref.slot
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    moving = st.moving[slot]
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    now = st.generation[slot]
    then = ref.generation
    if (mask == 0 or now != then) and (mask != 0 or moving & bit == 0 or now != then + 1):
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if st.held[slot] != 0:
        raise Refused("ownership.in-flight")


def reserve_guards(st: State, key, slot, link):
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
    if st.skips[0] != 0 and st.skipped[c] == e:
        raise Refused("ownership.skipped")
    if st.generation[slot] == st.generation_max[0]:
        raise Refused("ownership.generation-exhausted")
    if st.moving[slot] != 0:
        raise Refused("ownership.transfer-in-flight")


def reserve_writes(st: State, key, slot, link):
    s = key.stage
    e = key.epoch
    c = key.cell
    st.slot_of[c] = slot
    st.cell_at[slot] = c
    st.epoch_at[slot] = e
    st.consumers[slot] = RESERVED
    if st.receives[s] & COPY_BIT != 0:
        st.arrived[slot] = COPY_BIT


def check_forward_guards(st: State, key, slot, token, link, refresh):
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    needs = st.receives[s]
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
    if st.skips[0] != 0 and st.skipped[c] == e:
        raise Refused("ownership.skipped")
    if st.generation[slot] == st.generation_max[0]:
        raise Refused("ownership.generation-exhausted")
    if st.moving[slot] != 0:
        raise Refused("ownership.transfer-in-flight")
    if needs & INPUT_BITS != 0 and st.arrived[slot] & INPUT_BITS == 0:
        raise Refused("ownership.receive-missing")
    # The source's tape waits for this F: its own dI comes after the dI of this tape.
    if needs & SOURCE_BIT != 0 and (
        st.slot_of[st.input_of[c]] == NO_SLOT
        or st.consumers[st.slot_of[st.input_of[c]]] == RESERVED
    ):
        raise Refused("ownership.input-not-made")


def check_forward_writes(st: State, key, slot, token, link, refresh):
    e = key.epoch
    c = key.cell
    ticket = st.serial[0] + 1
    st.slot_of[c] = slot
    st.cell_at[slot] = c
    st.epoch_at[slot] = e
    st.consumers[slot] = RESERVED
    st.held[slot] = ticket
    st.forwarded[c] = e


def commit_forward_guards(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask != RESERVED:
        raise Refused("ownership.unknown-ticket")


def commit_forward_writes(st: State, slot, ticket, filled, fill_epoch, updates, draws):
    s = st.slot_stage[slot]
    st.consumers[slot] = st.owes[s]
    st.held[slot] = 0


def abort_forward_guards(st: State, slot, ticket):
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask != RESERVED:
        raise Refused("ownership.unknown-ticket")


def abort_forward_writes(st: State, slot, ticket):
    st.held[slot] = 0
    release(st, slot)


def check_dgrad_guards(st: State, key, ref, token, link):
    slot = ref.slot
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    needs = st.receives[s]
    require_reference(st, key, ref)
    if mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if mask & DGRAD_BIT == 0:
        raise Refused("ownership.duplicate-dgrad")
    if st.moving[slot] & BACK_BIT != 0:
        raise Refused("ownership.transfer-in-flight")
    if needs & BACK_BIT != 0 and st.arrived[slot] & BACK_BIT == 0:
        raise Refused("ownership.receive-missing")
    # Without a tape the target's cell has run its dI, or has lost its tape to a failure.
    if needs & TARGET_BIT != 0 and (
        st.forwarded[st.gradient_of[c]] != e
        or st.spoiled[st.target_of[s]] == e
        or (
            st.slot_of[st.gradient_of[c]] != NO_SLOT
            and st.consumers[st.slot_of[st.gradient_of[c]]] & BEFORE_DGRAD != 0
        )
    ):
        raise Refused("ownership.gradient-not-made")


def check_dgrad_writes(st: State, key, ref, token, link):
    slot = ref.slot
    ticket = st.serial[0] + 1
    st.held[slot] = ticket


def commit_dgrad_guards(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
    s = st.slot_stage[slot]
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT == 0:
        raise Refused("ownership.unknown-ticket")
    if queued != st.matrices[s]:
        raise Refused("ownership.work-not-queued")


def commit_dgrad_writes(st: State, slot, ticket, queued, updates, scales, draws, weight, parts):
    mask = st.consumers[slot]
    st.consumers[slot] = mask & ~DGRAD_BIT
    st.held[slot] = 0


def abort_dgrad_guards(st: State, slot, ticket):
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT == 0:
        raise Refused("ownership.unknown-ticket")


def abort_dgrad_writes(st: State, slot, ticket):
    st.held[slot] = 0
    release(st, slot)


def check_wgrad_guards(st: State, key, ref, link, destination, first):
    slot = ref.slot
    mask = st.consumers[slot]
    require_reference(st, key, ref)
    if mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if mask & DGRAD_BIT != 0:
        raise Refused("ownership.wgrad-before-dgrad")
    if mask & WGRAD_BIT == 0 or st.moving[slot] & GROUP_BIT != 0:
        raise Refused("ownership.duplicate-wgrad")


def check_wgrad_writes(st: State, key, ref, link, destination, first):
    slot = ref.slot
    ticket = st.serial[0] + 1
    st.held[slot] = ticket


def commit_wgrad_guards(st: State, slot, ticket, covered):
    s = st.slot_stage[slot]
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT != 0 or mask & WGRAD_BIT == 0:
        raise Refused("ownership.unknown-ticket")
    if covered != st.matrices[s]:
        raise Refused("ownership.matrix-coverage")


def commit_wgrad_writes(st: State, slot, ticket, covered):
    mask = st.consumers[slot]
    left = mask & ~WGRAD_BIT
    st.held[slot] = 0
    if left == 0:
        release(st, slot)
    else:
        st.consumers[slot] = left


def group_wgrad_guards(st: State, key, ref, leader, ticket, link, destination):
    slot = ref.slot
    s = key.stage
    mask = st.consumers[slot]
    moving = st.moving[slot]
    require_reference(st, key, ref)
    if mask & DGRAD_BIT != 0:
        raise Refused("ownership.wgrad-before-dgrad")
    if mask & WGRAD_BIT == 0 or moving & GROUP_BIT != 0:
        raise Refused("ownership.duplicate-wgrad")
    if (
        ticket == 0
        or st.held[leader] != ticket
        or st.consumers[leader] & BEFORE_DGRAD != 0
        or st.slot_stage[leader] != s
    ):
        raise Refused("ownership.unknown-ticket")


def group_wgrad_writes(st: State, key, ref, leader, ticket, link, destination):
    slot = ref.slot
    moving = st.moving[slot]
    st.moving[slot] = moving | GROUP_BIT


def ungroup_wgrad_guards(st: State, key, ref, covered):
    slot = ref.slot
    bit = GROUP_BIT
    s = key.stage
    mask = st.consumers[slot]
    moving = st.moving[slot]
    e = key.epoch
    c = key.cell
    now = st.generation[slot]
    then = ref.generation
    # As the end of any other transfer; but no action is in flight on a grouped tape.
    if ref.incarnation != st.incarnation[0]:
        raise Refused("ownership.foreign-incarnation")
    if (mask == 0 or now != then) and (mask != 0 or moving & bit == 0 or now != then + 1):
        raise Refused("ownership.stale-reference")
    if st.cell_at[slot] != c or st.epoch_at[slot] != e:
        raise Refused("ownership.wrong-key")
    if moving & bit == 0:
        raise Refused("ownership.not-grouped")
    if mask != 0 and covered != st.matrices[s]:
        raise Refused("ownership.matrix-coverage")


def ungroup_wgrad_writes(st: State, key, ref, covered):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    left = mask & ~WGRAD_BIT
    st.moving[slot] = moving & ~GROUP_BIT
    if mask != 0 and left == 0:
        release(st, slot)
    else:
        st.consumers[slot] = left


def abort_wgrad_guards(st: State, slot, ticket):
    mask = st.consumers[slot]
    held = st.held[slot]
    if held == 0 or held != ticket or mask & DGRAD_BIT != 0 or mask & WGRAD_BIT == 0:
        raise Refused("ownership.unknown-ticket")


def abort_wgrad_writes(st: State, slot, ticket):
    st.held[slot] = 0
    release(st, slot)


def read_guards(st: State, key, ref, bit, link):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    require_reference(st, key, ref)
    if (bit != OUT_BIT and bit != GRAD_BIT) or mask & bit == 0:
        raise Refused("ownership.no-such-reader")
    if bit == GRAD_BIT and mask & DGRAD_BIT != 0:
        raise Refused("ownership.read-before-dgrad")
    if moving & bit != 0:
        raise Refused("ownership.read-duplicate")


def read_writes(st: State, key, ref, bit, link):
    slot = ref.slot
    moving = st.moving[slot]
    st.moving[slot] = moving | bit


def finish_read_guards(st: State, key, ref, bit, link):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    require_transfer(st, key, ref, bit)
    if (bit != OUT_BIT and bit != GRAD_BIT) or (mask | moving) & bit == 0:
        raise Refused("ownership.no-such-reader")
    if moving & bit == 0:
        raise Refused("ownership.read-not-begun")


def finish_read_writes(st: State, key, ref, bit, link):
    slot = ref.slot
    mask = st.consumers[slot]
    moving = st.moving[slot]
    left = mask & ~bit
    st.moving[slot] = moving & ~bit
    if mask != 0 and left == 0:
        release(st, slot)
    else:
        st.consumers[slot] = left


def post_receive_guards(st: State, key, ref, message, link):
    slot = ref.slot
    s = key.stage
    mask = st.consumers[slot]
    moving = st.moving[slot]
    require_reference(st, key, ref)
    if (message != IN_BIT and message != BACK_BIT) or st.receives[s] & message == 0:
        raise Refused("ownership.no-such-receive")
    if message == BACK_BIT and mask == RESERVED:
        raise Refused("ownership.not-forwarded")
    if (moving | st.arrived[slot]) & message != 0:
        raise Refused("ownership.receive-duplicate")


def post_receive_writes(st: State, key, ref, message, link):
    slot = ref.slot
    moving = st.moving[slot]
    st.moving[slot] = moving | message


def finish_receive_guards(st: State, key, ref, message, link):
    slot = ref.slot
    bit = message
    s = key.stage
    e = key.epoch
    c = key.cell
    mask = st.consumers[slot]
    needs = st.receives[s]
    moving = st.moving[slot]
    require_transfer(st, key, ref, bit)
    if (bit != IN_BIT and bit != BACK_BIT) or moving & bit == 0:
        raise Refused("ownership.receive-not-posted")
    # A message that a lost tape waited for ends without having arrived.
    if (
        needs & SOURCE_BIT != 0
        and mask != 0
        and bit == IN_BIT
        and (
            st.slot_of[st.input_of[c]] == NO_SLOT
            or st.consumers[st.slot_of[st.input_of[c]]] == RESERVED
            or (
                st.consumers[st.slot_of[st.input_of[c]]] & OUT_BIT != 0
                and st.moving[st.slot_of[st.input_of[c]]] & OUT_BIT == 0
            )
        )
    ):
        raise Refused("ownership.receive-before-read")
    if (
        needs & TARGET_BIT != 0
        and mask != 0
        and bit == BACK_BIT
        and (
            st.forwarded[st.gradient_of[c]] != e
            or st.spoiled[st.target_of[s]] == e
            or (
                st.slot_of[st.gradient_of[c]] != NO_SLOT
                and (
                    st.consumers[st.slot_of[st.gradient_of[c]]] == RESERVED
                    or (
                        st.consumers[st.slot_of[st.gradient_of[c]]] & GRAD_BIT != 0
                        and st.moving[st.slot_of[st.gradient_of[c]]] & GRAD_BIT == 0
                    )
                )
            )
        )
    ):
        raise Refused("ownership.receive-before-read")


def finish_receive_writes(st: State, key, ref, message, link):
    slot = ref.slot
    bit = message
    mask = st.consumers[slot]
    moving = st.moving[slot]
    st.moving[slot] = moving & ~bit
    if mask != 0:
        st.arrived[slot] = st.arrived[slot] | bit


def drop_guards(st: State, key, ref):
    require_reference(st, key, ref)


def drop_writes(st: State, key, ref):
    slot = ref.slot
    release(st, slot)


def skip_guards(st: State, key):
    e = key.epoch
    c = key.cell
    if not st.every(st.forwarded, NEVER):
        raise Refused("ownership.walk-begun")
    if st.slot_of[c] != NO_SLOT:
        raise Refused("ownership.key-live")
    if st.skipped[c] == e:
        raise Refused("ownership.skipped")


def skip_writes(st: State, key):
    e = key.epoch
    c = key.cell
    st.skipped[c] = e
    st.skips[0] = st.skips[0] + 1


def next_walk_guards(st: State, epoch):
    if not st.every(st.consumers, 0):
        raise Refused("ownership.live-tape")


def next_walk_writes(st: State, epoch):
    st.fill(st.forwarded, NEVER)
    st.fill(st.skipped, NEVER)
    st.skips[0] = 0


def check_update_guards(st: State, epoch, caller):
    if not st.every(st.consumers, 0):
        raise Refused("ownership.live-tape")


def commit_update_writes(st: State, epoch, ticket):
    st.fill(st.forwarded, NEVER)
    st.skips[0] = 0


def restore_guards(st: State, epoch, incarnation):
    if not st.every(st.held, 0):
        raise Refused("ownership.in-flight")


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.consumers, 0)
    st.fill(st.moving, 0)
    st.fill(st.arrived, 0)
    st.fill(st.generation, 0)
    st.fill(st.slot_of, NO_SLOT)
    st.fill(st.forwarded, NEVER)
    st.fill(st.skipped, NEVER)
    st.skips[0] = 0
