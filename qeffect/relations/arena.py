"""
Arena: each matrix gradient of each microbatch is written to its configured destination exactly
once (paper, III-D).
"""

from __future__ import annotations

from ..refusals import Refused
from .columns import Column
from .constants import ADDS, JOINS, NEVER, OPENS, State

#: A dW writes its stage's own buffer and a shared buffer. If the stage shares no destination, both
#: are the same buffer.
#: ``bound`` is the epoch in which a cell's destination was bound for the current walk, ``opened``
#: the epoch of the gradients in a buffer; ``writing`` is the ticket of the dW in flight on a
#: buffer, or 0.
STATE = {
    "bound": Column("cell", initial=NEVER),
    "opened": Column("buffer", initial=NEVER),
    "writing": Column("buffer", "ticket"),
}


def left_out(st: State):
    """Refuse this relation's own transitions, because the contract leaves the relation out."""
    raise Refused("arena.left-out")


def bind_guards(st: State, key, destination):
    s = key.stage
    e = key.epoch
    c = key.cell
    if st.spoiled[s] == e:
        raise Refused("arena.spoiled")
    if st.bound[c] == e:
        raise Refused("arena.duplicate-bind")
    if st.destination_of[c] != destination:
        raise Refused("arena.mismatch")


def bind_writes(st: State, key, destination):
    e = key.epoch
    c = key.cell
    st.bound[c] = e


def check_dgrad_guards(st: State, key, ref, token, link):
    e = key.epoch
    c = key.cell
    if st.bound[c] != e:
        raise Refused("arena.unbound")


def check_wgrad_guards(st: State, key, ref, link, destination, first):
    s = key.stage
    e = key.epoch
    c = key.cell
    b = st.buffer_of[c]
    t = st.shared_of[b]
    if st.spoiled[s] == e:
        raise Refused("arena.spoiled")
    if st.destination_of[c] != destination:
        raise Refused("arena.mismatch")
    # Every dW writes both buffers: if its own buffer is in flight, or open, so is the shared one.
    if st.writing[t] != 0:
        raise Refused("arena.in-flight")
    own = st.opened[b]
    shared = st.opened[t]
    if (first == JOINS and own == e) or (first != ADDS and first != JOINS and shared == e):
        raise Refused("arena.overwrite")
    if (first == ADDS and own != e) or first == OPENS or (first == JOINS and shared != e):
        raise Refused("arena.stale-accumulation")


def check_wgrad_writes(st: State, key, ref, link, destination, first):
    c = key.cell
    b = st.buffer_of[c]
    t = st.shared_of[b]
    ticket = st.serial[0] + 1
    st.writing[b] = ticket
    st.writing[t] = ticket


def commit_wgrad_writes(st: State, slot, ticket, covered):
    c = st.cell_at[slot]
    b = st.buffer_of[c]
    t = st.shared_of[b]
    e = st.epoch_at[slot]
    st.writing[b] = 0
    st.writing[t] = 0
    st.opened[b] = e
    st.opened[t] = e


def group_wgrad_guards(st: State, key, ref, leader, ticket, link, destination):
    s = key.stage
    e = key.epoch
    c = key.cell
    b = st.buffer_of[c]
    if st.spoiled[s] == e:
        raise Refused("arena.spoiled")
    if st.destination_of[c] != destination:
        raise Refused("arena.mismatch")
    if st.writing[b] != ticket:
        raise Refused("arena.other-destination")


def ungroup_wgrad_guards(st: State, key, ref, covered):
    slot = ref.slot
    s = key.stage
    e = key.epoch
    c = key.cell
    b = st.buffer_of[c]
    mask = st.consumers[slot]
    if mask != 0 and st.spoiled[s] == e:
        raise Refused("arena.spoiled")
    if st.writing[b] != 0:
        raise Refused("arena.in-flight")


def abort_wgrad_writes(st: State, slot, ticket):
    c = st.cell_at[slot]
    b = st.buffer_of[c]
    t = st.shared_of[b]
    st.writing[b] = 0
    st.writing[t] = 0


def finalize_guards(st: State, stage, link):
    t = st.sharer_of[stage]
    if st.spoiled[stage] == st.weight_epoch[stage] or st.spoiled[t] == st.weight_epoch[t]:
        raise Refused("arena.spoiled")
    if st.wgrads[stage] != st.cells[stage] or st.wgrads[t] != st.cells[t]:
        raise Refused("arena.incomplete")


def next_walk_writes(st: State, epoch):
    st.fill(st.bound, NEVER)


def restore_writes(st: State, epoch, incarnation):
    st.fill(st.bound, NEVER)
    st.fill(st.opened, NEVER)
