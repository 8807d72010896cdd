"""
Physical effects that several transitions share, each as a change of the history.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qeffect.spec.constants import COPY_BIT, NEVER, READ_BITS
from qeffect.spec.predicates import choose
from qeffect.spec.promises.words import domain_of_slot
from qeffect.spec.world import NONE, RUNNING

from .ghosts import History, State

__all__ = [
    "Key",
    "begin",
    "begin_update",
    "break_update",
    "bury",
    "content",
    "copied",
    "end",
    "end_group",
    "end_scaling",
    "end_update",
    "enqueue",
    "enter_pool",
    "forget_epoch",
    "forget_walk",
    "issue",
    "key_in",
    "leave_pool",
    "move",
    "overwrite",
    "redeem",
    "replay",
    "replayed_on",
    "reserve_ticket",
    "trade",
    "transferred",
    "vacate",
    "visit",
    "write",
]


# The arbitrary reference and ticket


def issue(st: State, h: History, key: Any, slot: Any) -> None:
    """A reference to the slot is issued to the caller of this key."""
    same = (
        (slot == h.ref_slot[0])
        & (st.generation[slot] == h.ref_generation[0])
        & (st.incarnation[0] == h.ref_incarnation[0])
    )
    h.ref_cell[0] = choose(same, key.cell, h.ref_cell[0])
    h.ref_epoch[0] = choose(same, key.epoch, h.ref_epoch[0])
    h.issued[0] = choose(same, 1, h.issued[0])


def bury(h: History, slot: Any) -> None:
    """The work in the slot ends, and so do its references."""
    h.dead[0] = choose((slot == h.ref_slot[0]) & (h.issued[0] == 1), 1, h.dead[0])


def reserve_ticket(h: History, ticket: Any, kind: int, slot: Any, stage: Any) -> None:
    same = ticket == h.ticket[0]
    h.outstanding[0] = choose(same, kind, h.outstanding[0])
    h.ticket_slot[0] = choose(same, slot, h.ticket_slot[0])
    h.ticket_stage[0] = choose(same, stage, h.ticket_stage[0])


def redeem(h: History, ticket: Any) -> None:
    h.outstanding[0] = choose(ticket == h.ticket[0], NONE, h.outstanding[0])


# Capture memory


def replay(st: State, h: History, slot: Any, rank: Any) -> None:
    """
    A graph of the slot is replayed. Suppose that the slot's pool has already replayed this graph,
    or a graph that was captured later. The scratch memory of that earlier replay has then
    overwritten data of the slot's tape that the graph reads.
    """
    pool = st.pool_of[slot]
    late = (slot == h.slot[0]) & (h.in_pool[slot] == 1) & (rank <= h.last_rank[pool])
    h.clobbered[0] = choose(late, 1, h.clobbered[0])
    overwrite(st, h, pool, rank, True)
    h.own_rank[slot] = rank
    h.last_replayed[pool] = slot


def overwrite(st: State, h: History, pool: Any, rank: Any, there: Any) -> None:
    """If ``there``, a graph of a pool is replayed, and overwrites what later graphs keep."""
    kept = (h.in_pool[h.slot[0]] == 1) & (st.pool_of[h.slot[0]] == pool)
    found = kept & (rank <= h.own_rank[h.slot[0]]) & there
    h.clobbered[0] = choose(found, 1, h.clobbered[0])
    h.last_rank[pool] = choose(there, rank, h.last_rank[pool])


def trade(numbers: Any, members: Any, group: Any, member: Any, number: Any) -> None:
    """
    A member of a numbered group takes a new number; the member that had this number gets the old
    number in exchange.
    """
    other, before = members[group, number], numbers[member]
    numbers[other] = before
    numbers[member] = number
    members[group, before] = other
    members[group, number] = member


def enter_pool(st: State, h: History, slot: Any) -> None:
    pool = st.pool_of[slot]
    h.clobbered[0] = choose(slot == h.slot[0], 0, h.clobbered[0])
    h.in_pool[slot] = 1
    trade(h.seat, h.seated, pool, slot, h.tapes[pool])
    h.tapes[pool] = h.tapes[pool] + 1


def leave_pool(st: State, h: History, slot: Any, leaves: Any) -> None:
    """If ``leaves``, the slot no longer keeps memory in its pool."""
    pool = st.pool_of[slot]
    last = h.tapes[pool] - 1
    trade(h.seat, h.seated, pool, slot, choose(leaves, last, h.seat[slot]))
    h.in_pool[slot] = choose(leaves, 0, h.in_pool[slot])
    h.tapes[pool] = choose(leaves, last, h.tapes[pool])


def vacate(st: State, h: History, slot: Any) -> None:
    """The work in a slot is lost; running reads keep its memory, and arriving data is dropped."""
    unread = (h.moving[slot] & READ_BITS) == 0
    leave_pool(st, h, slot, (h.in_pool[slot] == 1) & unread)
    h.owing[slot] = 0
    h.arrived[slot] = 0
    h.clear[0] = choose(slot == h.slot[0], h.saw[0], h.clear[0])
    bury(h, slot)


def visit(st: State, h: History, slot: Any, bit: Any) -> None:
    """A consumer is done with the work in a slot; the last consumer frees the slot."""
    left = h.owing[slot] & ~bit
    gone = (left == 0) & (h.owing[slot] != 0)
    unread = (h.moving[slot] & READ_BITS) == 0
    leave_pool(st, h, slot, (left == 0) & unread & (h.in_pool[slot] == 1))
    h.dead[0] = choose((slot == h.ref_slot[0]) & (h.issued[0] == 1) & gone, 1, h.dead[0])
    h.arrived[slot] = choose(left == 0, 0, h.arrived[slot])
    h.clear[0] = choose((slot == h.slot[0]) & gone, h.saw[0], h.clear[0])
    h.owing[slot] = left


def replayed_on(h: History, slot: Any) -> None:
    """A replay may touch a slot; the next stream that fills the slot must wait for the replay."""
    h.saw[0] = choose(slot == h.slot[0], 0, h.saw[0])


def end_group(h: History, slot: Any, progress: int) -> None:
    """A dW has ended. If it also used the followed slot's tape, its replay may touch that slot."""
    took = (h.grouped[0] == RUNNING) & (h.leader[0] == slot)
    h.grouped[0] = choose(took, progress, h.grouped[0])
    h.saw[0] = choose(took, 0, h.saw[0])


def transferred(h: History, slot: Any, link: Any) -> None:
    """A transfer through a slot ended on a caller's stream."""
    mine = (slot == h.slot[0]) & (link == h.link[0])
    h.trailing[0] = choose(mine, 1, h.trailing[0])
    h.behind[link] = 1
    h.told[link] = h.told[link] + 1
    h.last_end_on[slot] = link
    h.last_end[slot] = h.told[link]


def copied(h: History, slot: Any, link: Any, d: Any, copies: Any) -> None:
    """If ``copies``, a caller's stream copies the input of a key into its slot."""
    mine = copies & (slot == h.slot[0]) & (link == h.link[0])
    h.trailing[0] = choose(mine, 1, h.trailing[0])
    h.behind[link] = choose(copies, 1, h.behind[link])
    h.told[link] = choose(copies, h.told[link] + 1, h.told[link])
    h.last_end_on[slot] = choose(copies, link, h.last_end_on[slot])
    h.last_end[slot] = choose(copies, h.told[link], h.last_end[slot])
    h.arrived[slot] = choose(copies, COPY_BIT, h.arrived[slot])
    h.device[d] = choose(copies, 1, h.device[d])


# Between a check and its commit


def begin(st: State, h: History, slot: Any) -> None:
    d = domain_of_slot(st, slot)
    h.acting[slot] = h.acting[slot] + 1
    h.device[d] = 1
    h.beginner[d] = slot


def end(st: State, h: History, slot: Any) -> None:
    """An action ends; work that it enqueued after a drain is also device work."""
    h.acting[slot] = h.acting[slot] - 1
    h.device[domain_of_slot(st, slot)] = 1


def enqueue(h: History, d: Any) -> None:
    """A replay was enqueued, perhaps only in part if the action failed."""
    h.enqueued[d] = h.enqueued[d] + 1


# Scaling state


def begin_update(h: History, d: Any) -> None:
    h.running[d] = h.running[d] + 1
    h.touched[d] = 1


def end_update(h: History, d: Any, updates: Any) -> None:
    """Scaling state was updated as often as the backend reports, or once without a report."""
    h.running[d] = h.running[d] - 1
    h.updates[d] = h.updates[d] + updates
    h.updates_of_walk[d] = h.updates_of_walk[d] + updates


def end_scaling(st: State, h: History, stage: Any, updates: Any) -> None:
    """
    An F or dI of a stage succeeded.

    It moved scales as often as the backend reports. Without a report it moved scales once. If
    scales move once per epoch, the F or dI only gathers amaxes and moves none.
    """
    d = st.domain_of[stage]
    gathers = st.epoch_scales[d] != 0
    moved = choose(st.reports_updates[stage] != 0, updates, choose(gathers, 0, 1))
    end_update(h, d, choose(gathers, 1, moved))
    h.gathers[d] = h.gathers[d] + choose(gathers, 1, 0)
    move(h, d, moved)


def move(h: History, d: Any, times: Any) -> None:
    """The scales of a domain move a number of times, by all amaxes that were gathered so far."""
    h.moves[d] = h.moves[d] + times
    h.gathers[d] = choose(times == 0, h.gathers[d], 0)


def break_update(h: History, d: Any) -> None:
    h.running[d] = h.running[d] - 1
    h.broken[d] = 1


# Weight caches


def content(st: State, h: History, stage: Any, filled: Any, fill_epoch: Any) -> Any:
    """
    Return which epoch's weights are in the cache after a fill: the reported epoch if the backend
    reported every matrix, or the current epoch if the backend makes no reports.
    """
    reported = choose(filled == st.matrices[stage], fill_epoch, NEVER)
    return choose(st.reports_fills[stage] != 0, reported, h.weights[0])


# Gradient buffers


def write(st: State, h: History, cell: Any, more: int) -> None:
    """
    A dW begins or ends a write to a cell's own buffer, and to the shared buffer if that differs.
    """
    own, shared = st.buffer_of[cell], st.shared_of[st.buffer_of[cell]]
    h.writers[own] = h.writers[own] + more
    h.writers[shared] = h.writers[shared] + choose(own == shared, 0, more)


# Epochs


def forget_epoch(st: State, h: History) -> None:
    """The weights change, so all counts of the epoch start again at zero."""
    forget_walk(st, h)
    h.walks[0] = 0
    st.fill(h.weighed, 0)
    st.fill(h.counted_in, 0)
    st.fill(h.forwards_of_epoch, 0)
    st.fill(h.reduction, 0)
    st.fill(h.weights_reader, 0)
    st.fill(h.gradients_reader, 0)
    h.begun[0] = 0
    st.fill(h.fill_of_epoch, NEVER)
    st.fill(h.touched, 0)


def forget_walk(st: State, h: History) -> None:
    """Every microbatch runs again, so all counts of the walk start again at zero."""
    for count in (h.ran_forward, h.ran_dgrad, h.ran_wgrad, h.binds, h.skipped):
        st.fill(count, 0)
    st.fill(h.output_read, 0)
    st.fill(h.gradient_read, 0)
    for count in (h.num_forwards, h.num_dgrads, h.num_wgrads, h.num_skipped):
        st.fill(count, 0)
    for count in (h.finals, h.updates_of_walk, h.left_out):
        st.fill(count, 0)


class Key(NamedTuple):
    cell: Any
    epoch: Any


def key_in(h: History, slot: Any) -> Key:
    return Key(h.tenant[slot], h.tenant_epoch[slot])
