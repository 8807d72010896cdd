"""
The physical history: what really happened beside the contract, told without asking the contract.

Each function below says what one accepted transition means for the world: which work ran, what a
buffer or a cache now holds, who has waited for whom. It follows the action and its arguments and
the configuration, never the contract's own state and never a guard, so that a property of the
history is a claim about the world and not the guard said twice. (A reference's generation and
incarnation are read from the memory, because that is what the caller is handed.) Time is told
conservatively: from its check to its commit an action may touch the device at any moment.

Some ghosts follow one thing only, chosen once and for all and arbitrary: a reference, a ticket, a
slot, a link and a stage. A property proved of an arbitrary one holds of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from qeffect.spec.constants import DGRAD_BIT, NEVER, READ_BITS, RESERVED, WGRAD_BIT
from qeffect.spec.predicates import choose
from qeffect.spec.promises.words import domain_of_slot
from qeffect.spec.world import DGRAD, DONE, FORWARD, NONE, REFRESH, RUNNING, WGRAD

__all__ = ["ADVANCE", "GHOSTS", "Ghost", "advance"]

State = Any
History = Any


class Ghost(NamedTuple):
    """A column of the history: sorts of its indices and values, and what it starts with."""

    indices: tuple[str, ...]
    values: str = "int"
    initial: int | None = 0


def _each(index: str, *names: str, **options: Any) -> dict[str, Ghost]:
    return {name: Ghost(tuple(index.split()), **options) for name in names}


#: The history's columns. An initial value of None is arbitrary.
GHOSTS: Final[Mapping[str, Ghost]] = {
    # The work that was last put into a slot, its key, the consumers that still have to visit it,
    # transfers under way through it and the messages that the work has received, actions in flight
    # on it, what its dI left queued, whether its F fills the cache, and the fill
    # that its F read.
    **_each("slot", "tenant", values="cell", initial=None),
    **_each("slot", "tenant_epoch", initial=NEVER),
    **_each("slot", "owing", "moving", "arrived", values="mask"),
    **_each("slot", "acting"),
    **_each("slot", "queued", values="opaque", initial=None),
    **_each("slot", "filling", values="flag"),
    **_each("slot", "fill_read"),
    # The scaling updates that its F had seen, and the forwards that had rolled scales with it.
    **_each("slot", "scaled_by", "rolls_seen"),
    # How often each action of a cell succeeded since the weights last changed, where it was
    # bound, and what its dW covered.
    **_each("cell", "ran_forward", "ran_dgrad", "ran_wgrad", "binds"),
    **_each("cell", "bound_to", "covered", values="opaque", initial=None),
    # The same of each stage; and its cells in some order: those whose dW ran, then those whose dI
    # did, then those whose F did, then the others.
    **_each("stage", "num_forwards", "num_dgrads", "num_wgrads"),
    **_each("cell", "place", initial=None),
    **_each("stage place", "placed", values="cell", initial=None),
    # The optimizer updates of the weights, the version of the weights in each cache, how often
    # the cache was filled, the fill that the epoch's first F read, whether the fill in progress
    # was lost, and the scaling updates that the fill had seen.
    **_each("one", "weights"),
    **_each("stage", "cached", "fill_of_epoch", initial=NEVER),
    **_each("stage", "fills", "filled_after"),
    **_each("stage", "lost", values="flag"),
    # The last epoch in which the cache was lost while an F or dI read it, or had yet to.
    **_each("stage", "lost_in_use", initial=NEVER),
    # The last epoch whose gradients a failure spoiled, or left half written.
    **_each("stage", "spoiled", "half_written", initial=NEVER),
    # How often a stage was finalized since the weights last changed, and on which caller's link;
    # a bucket's reduction of the epoch, on whose link it was awaited, and how many were started.
    **_each("stage", "finals"),
    **_each("stage", "finalized_by", values="link", initial=None),
    **_each("bucket", "reduction"),
    **_each("bucket", "awaited_by", values="link", initial=None),
    **_each("one", "begun"),
    # Scaling updates since the last restore, and of this epoch; F, dI and refreshes in flight;
    # whether scaling state is broken, whether it was touched since the last commit and by whose F
    # or refresh; whether device work may be unfinished and on which slot or stage it began last.
    **_each("domain", "updates", "updates_of_epoch", "running"),
    # Forwards that ever rolled the domain's scales.
    **_each("domain", "rolls"),
    # What was enqueued on a domain's graph stream since the last restore.
    **_each("domain", "enqueued"),
    **_each("domain", "broken", "touched", "device", values="flag"),
    **_each("domain", "toucher", "refresher", values="stage", initial=None),
    **_each("domain", "updater", "beginner", values="slot", initial=None),
    # The epoch whose gradients a buffer holds, and who is writing it.
    **_each("buffer", "content", initial=NEVER),
    **_each("buffer", "writers"),
    **_each("buffer", "writer", values="slot", initial=None),
    # How many slots keep memory in a pool, and the pool's slots in some order, those first; the
    # capture rank of a slot's latest replay, and the slot that a pool last replayed.
    **_each("pool", "tapes"),
    **_each("pool", "slots", initial=None),
    **_each("slot", "in_pool", values="flag"),
    **_each("slot", "seat", initial=None),
    **_each("pool place", "seated", values="slot", initial=None),
    **_each("slot", "last_rank"),
    **_each("pool", "last_replayed", values="slot", initial=None),
    # The caller's stream that the latest optimizer update was enqueued on, and whether it may run
    # beside what a domain's graph stream is given.
    **_each("one", "updated_on", values="caller", initial=None),
    **_each("domain", "updating", values="flag"),
    # Whether the graph stream has yet to wait for work of a caller.
    **_each("link", "behind", values="flag"),
    # The ends of transfers told on a link, and those that the graph stream has waited for; and the
    # latest end of a slot: on which link, and which of those.
    **_each("link", "told", "heard"),
    **_each("slot", "last_end_on", values="link", initial=None),
    **_each("slot", "last_end"),
    # Arbitrary ones.
    **_each("one", "slot", values="slot", initial=None),
    **_each("one", "link", values="link", initial=None),
    **_each("one", "stage", values="stage", initial=None),
    # The slot's retained memory was overwritten by an earlier graph; the link waited for the
    # replay that wrote the slot's output; and for the one that wrote the stage's gradients.
    **_each("one", "clobbered", "seen", values="flag"),
    # The link waited for every replay on the slot; for every one of the slot's former work; and a
    # transfer of the slot ended on the link and the graph stream has not waited for it.
    **_each("one", "saw", "clear", values="flag", initial=1),
    **_each("one", "trailing", values="flag"),
    **_each("one", "seen_gradients", values="flag", initial=1),
    # An arbitrary reference: was it issued, for what, and is the work it named gone.
    **_each("one", "ref_slot", values="slot", initial=None),
    **_each("one", "ref_generation", values="generation", initial=None),
    **_each("one", "ref_incarnation", initial=None),
    **_each("one", "issued", "dead", values="flag"),
    **_each("one", "ref_cell", values="cell", initial=None),
    **_each("one", "ref_epoch", initial=NEVER),
    # An arbitrary ticket: what it is good for now, and where.
    **_each("one", "ticket", values="ticket", initial=None),
    **_each("one", "outstanding"),
    **_each("one", "ticket_slot", values="slot", initial=None),
    **_each("one", "ticket_stage", values="stage", initial=None),
}


# What happens to the arbitrary reference and ticket


def issue(st: State, h: History, key: Any, slot: Any) -> None:
    """A reference to the slot is handed to the key's owner."""
    same = (
        (slot == h.ref_slot[0])
        & (st.generation[slot] == h.ref_generation[0])
        & (st.incarnation[0] == h.ref_incarnation[0])
    )
    h.ref_cell[0] = choose(same, key.cell, h.ref_cell[0])
    h.ref_epoch[0] = choose(same, key.epoch, h.ref_epoch[0])
    h.issued[0] = choose(same, 1, h.issued[0])


def bury(h: History, slot: Any) -> None:
    """The work in the slot is gone; references handed out for it are dead."""
    h.dead[0] = choose((slot == h.ref_slot[0]) & (h.issued[0] == 1), 1, h.dead[0])


def reserve_ticket(h: History, ticket: Any, kind: int, slot: Any, stage: Any) -> None:
    same = ticket == h.ticket[0]
    h.outstanding[0] = choose(same, kind, h.outstanding[0])
    h.ticket_slot[0] = choose(same, slot, h.ticket_slot[0])
    h.ticket_stage[0] = choose(same, stage, h.ticket_stage[0])


def redeem(h: History, ticket: Any) -> None:
    h.outstanding[0] = choose(ticket == h.ticket[0], NONE, h.outstanding[0])


# What happens to capture memory


def replay(st: State, h: History, slot: Any, rank: Any) -> None:
    """A graph of the slot is replayed: it scratches on what later graphs of its pool keep."""
    pool = st.pool_of[slot]
    kept = (h.in_pool[h.slot[0]] == 1) & (st.pool_of[h.slot[0]] == pool)
    h.clobbered[0] = choose(kept & (rank <= h.last_rank[h.slot[0]]), 1, h.clobbered[0])
    h.last_rank[slot] = rank
    h.last_replayed[pool] = slot


def trade(numbers: Any, members: Any, group: Any, member: Any, number: Any) -> None:
    """A member of a numbered group takes a number; whoever had it gets the member's."""
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
    """Where ``leaves``, the slot keeps no memory in its pool any more."""
    pool = st.pool_of[slot]
    last = h.tapes[pool] - 1
    trade(h.seat, h.seated, pool, slot, choose(leaves, last, h.seat[slot]))
    h.in_pool[slot] = choose(leaves, 0, h.in_pool[slot])
    h.tapes[pool] = choose(leaves, last, h.tapes[pool])


def vacate(st: State, h: History, slot: Any) -> None:
    """The work in a slot is lost; what is still read of it stays, and what arrives is nobody's."""
    unread = (h.moving[slot] & READ_BITS) == 0
    leave_pool(st, h, slot, (h.in_pool[slot] == 1) & unread)
    h.owing[slot] = 0
    h.arrived[slot] = 0
    h.clear[0] = choose(slot == h.slot[0], h.saw[0], h.clear[0])
    bury(h, slot)


def visit(st: State, h: History, slot: Any, bit: Any) -> None:
    """A consumer is done with the work in a slot; the last one frees it."""
    left = h.owing[slot] & ~bit
    gone = (left == 0) & (h.owing[slot] != 0)
    unread = (h.moving[slot] & READ_BITS) == 0
    leave_pool(st, h, slot, (left == 0) & unread & (h.in_pool[slot] == 1))
    h.dead[0] = choose((slot == h.ref_slot[0]) & (h.issued[0] == 1) & gone, 1, h.dead[0])
    h.arrived[slot] = choose(left == 0, 0, h.arrived[slot])
    h.clear[0] = choose((slot == h.slot[0]) & gone, h.saw[0], h.clear[0])
    h.owing[slot] = left


def replayed_on(h: History, slot: Any) -> None:
    """A replay may touch a slot; who fills the slot next has to wait for it."""
    h.saw[0] = choose(slot == h.slot[0], 0, h.saw[0])


def transferred(h: History, slot: Any, link: Any) -> None:
    """A transfer through a slot ended on a caller's stream."""
    mine = (slot == h.slot[0]) & (link == h.link[0])
    h.trailing[0] = choose(mine, 1, h.trailing[0])
    h.behind[link] = 1
    h.told[link] = h.told[link] + 1
    h.last_end_on[slot] = link
    h.last_end[slot] = h.told[link]


# What happens between a check and its commit


def begin(st: State, h: History, slot: Any) -> None:
    d = domain_of_slot(st, slot)
    h.acting[slot] = h.acting[slot] + 1
    h.device[d] = 1
    h.beginner[d] = slot


def end(st: State, h: History, slot: Any) -> None:
    """Also what was enqueued after a drain is device work."""
    h.acting[slot] = h.acting[slot] - 1
    h.device[domain_of_slot(st, slot)] = 1


def enqueue(h: History, d: Any) -> None:
    """A replay was enqueued; one that failed may have been in part."""
    h.enqueued[d] = h.enqueued[d] + 1


# What happens to scaling state


def begin_update(h: History, d: Any) -> None:
    h.running[d] = h.running[d] + 1
    h.touched[d] = 1


def end_update(h: History, d: Any, updates: Any) -> None:
    """Scaling state was updated as often as the backend says; once, where it cannot say."""
    h.running[d] = h.running[d] - 1
    h.updates[d] = h.updates[d] + updates
    h.updates_of_epoch[d] = h.updates_of_epoch[d] + updates


def break_update(h: History, d: Any) -> None:
    h.running[d] = h.running[d] - 1
    h.broken[d] = 1


# What happens to a weight cache


def content(st: State, h: History, stage: Any, filled: Any, fill_epoch: Any) -> Any:
    """The weights that a fill left in the cache: those reported, if that was every matrix; where
    the backend cannot say, the current ones."""
    reported = choose(filled == st.matrices[stage], fill_epoch, NEVER)
    return choose(st.reports_fills[stage] != 0, reported, h.weights[0])


# What each accepted transition means


def reserve(st: State, h: History, key: Any, slot: Any, link: Any) -> None:
    h.tenant[slot] = key.cell
    h.tenant_epoch[slot] = key.epoch
    h.owing[slot] = RESERVED
    issue(st, h, key, slot)


def bind(st: State, h: History, key: Any, destination: Any) -> None:
    h.binds[key.cell] = h.binds[key.cell] + 1
    h.bound_to[key.cell] = destination


def check_refresh(st: State, h: History, stage: Any, link: Any, ticket: Any) -> None:
    d = st.domain_of[stage]
    begin_update(h, d)
    h.device[d] = 1
    h.toucher[d] = stage
    h.refresher[d] = stage
    h.cached[stage] = NEVER
    h.lost[stage] = 0
    reserve_ticket(h, ticket, REFRESH, h.ticket_slot[0], stage)


def commit_refresh(
    st: State, h: History, stage: Any, ticket: Any, filled: Any, fill_epoch: Any
) -> None:
    d = st.domain_of[stage]
    h.running[d] = h.running[d] - 1
    h.device[d] = 1
    enqueue(h, d)
    h.cached[stage] = choose(h.lost[stage] == 0, content(st, h, stage, filled, fill_epoch), NEVER)
    h.fills[stage] = h.fills[stage] + 1
    h.filled_after[stage] = h.updates[d]
    redeem(h, ticket)


def abort_refresh(st: State, h: History, stage: Any, ticket: Any) -> None:
    d = st.domain_of[stage]
    break_update(h, d)
    h.device[d] = 1
    redeem(h, ticket)


def check_forward(
    st: State,
    h: History,
    key: Any,
    slot: Any,
    token: Any,
    link: Any,
    refresh: Any,
    ticket: Any,
) -> None:
    s = key.stage
    d = st.domain_of[s]
    fills = refresh != 0
    begin(st, h, slot)
    begin_update(h, d)
    h.toucher[d] = s
    h.updater[d] = slot
    h.tenant[slot] = key.cell
    h.tenant_epoch[slot] = key.epoch
    h.owing[slot] = RESERVED
    h.filling[slot] = refresh
    h.cached[s] = choose(fills, NEVER, h.cached[s])
    h.lost[s] = choose(fills, 0, h.lost[s])
    h.fills[s] = choose(fills, h.fills[s] + 1, h.fills[s])
    h.fill_read[slot] = h.fills[s]
    h.fill_of_epoch[s] = choose(h.fill_of_epoch[s] == NEVER, h.fills[s], h.fill_of_epoch[s])
    replay(st, h, slot, st.forward_rank[slot])
    enter_pool(st, h, slot)
    reserve_ticket(h, ticket, FORWARD, slot, h.ticket_stage[0])


def commit_forward(
    st: State, h: History, slot: Any, ticket: Any, filled: Any, fill_epoch: Any, updates: Any
) -> None:
    s = st.slot_stage[slot]
    cell = h.tenant[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    h.scaled_by[slot] = h.updates[st.domain_of[s]]
    h.rolls[st.domain_of[s]] = h.rolls[st.domain_of[s]] + 1
    h.rolls_seen[slot] = h.rolls[st.domain_of[s]]
    end_update(h, st.domain_of[s], choose(st.reports_updates[s] != 0, updates, 1))
    trade(h.place, h.placed, s, cell, h.num_forwards[s])
    h.ran_forward[cell] = h.ran_forward[cell] + 1
    h.num_forwards[s] = h.num_forwards[s] + 1
    asked = h.filling[slot] != 0
    now = choose(h.lost[s] == 0, content(st, h, s, filled, fill_epoch), NEVER)
    h.cached[s] = choose(asked, now, h.cached[s])
    unasked = (st.reports_fills[s] != 0) & (h.filling[slot] == 0) & (fill_epoch != NEVER)
    h.fills[s] = choose(unasked, h.fills[s] + 1, h.fills[s])
    h.owing[slot] = st.owes[s]
    h.seen[0] = choose(slot == h.slot[0], 0, h.seen[0])
    issue(st, h, _key(h, slot), slot)
    redeem(h, ticket)


def abort_forward(st: State, h: History, slot: Any, ticket: Any) -> None:
    s = st.slot_stage[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    break_update(h, st.domain_of[s])
    h.spoiled[s] = h.tenant_epoch[slot]
    vacate(st, h, slot)
    redeem(h, ticket)


def check_dgrad(
    st: State, h: History, key: Any, ref: Any, token: Any, link: Any, ticket: Any
) -> None:
    d = st.domain_of[key.stage]
    begin(st, h, ref.slot)
    begin_update(h, d)
    h.updater[d] = ref.slot
    replay(st, h, ref.slot, st.dgrad_rank[ref.slot])
    reserve_ticket(h, ticket, DGRAD, ref.slot, h.ticket_stage[0])


def commit_dgrad(
    st: State, h: History, slot: Any, ticket: Any, queued: Any, updates: Any, scales: Any
) -> None:
    s = st.slot_stage[slot]
    cell = h.tenant[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    end_update(h, st.domain_of[s], choose(st.reports_updates[s] != 0, updates, 1))
    trade(h.place, h.placed, s, cell, h.num_dgrads[s])
    h.ran_dgrad[cell] = h.ran_dgrad[cell] + 1
    h.num_dgrads[s] = h.num_dgrads[s] + 1
    h.queued[slot] = queued
    h.owing[slot] = h.owing[slot] & ~DGRAD_BIT
    h.seen[0] = choose(slot == h.slot[0], 0, h.seen[0])
    redeem(h, ticket)


def abort_dgrad(st: State, h: History, slot: Any, ticket: Any) -> None:
    abort_forward(st, h, slot, ticket)


def write(st: State, h: History, cell: Any, more: int) -> None:
    """A dW begins or ends to write a cell's own buffer, and the shared one if that is another."""
    own, shared = st.buffer_of[cell], st.shared_of[st.buffer_of[cell]]
    h.writers[own] = h.writers[own] + more
    h.writers[shared] = h.writers[shared] + choose(own == shared, 0, more)


def check_wgrad(
    st: State,
    h: History,
    key: Any,
    ref: Any,
    link: Any,
    destination: Any,
    first: Any,
    ticket: Any,
) -> None:
    begin(st, h, ref.slot)
    write(st, h, key.cell, 1)
    h.writer[st.buffer_of[key.cell]] = ref.slot
    h.writer[st.shared_of[st.buffer_of[key.cell]]] = ref.slot
    replay(st, h, ref.slot, st.wgrad_rank[ref.slot])
    reserve_ticket(h, ticket, WGRAD, ref.slot, h.ticket_stage[0])


def commit_wgrad(st: State, h: History, slot: Any, ticket: Any, covered: Any) -> None:
    s = st.slot_stage[slot]
    cell = h.tenant[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    write(st, h, cell, -1)
    h.content[st.buffer_of[cell]] = h.tenant_epoch[slot]
    h.content[st.shared_of[st.buffer_of[cell]]] = h.tenant_epoch[slot]
    h.covered[cell] = covered
    trade(h.place, h.placed, s, cell, h.num_wgrads[s])
    h.num_wgrads[s] = h.num_wgrads[s] + 1
    h.ran_wgrad[cell] = h.ran_wgrad[cell] + 1
    h.seen_gradients[0] = choose(s == h.stage[0], 0, h.seen_gradients[0])
    visit(st, h, slot, WGRAD_BIT)
    redeem(h, ticket)


def abort_wgrad(st: State, h: History, slot: Any, ticket: Any) -> None:
    s = st.slot_stage[slot]
    end(st, h, slot)
    enqueue(h, st.domain_of[s])
    replayed_on(h, slot)
    write(st, h, h.tenant[slot], -1)
    h.half_written[s] = h.tenant_epoch[slot]
    h.spoiled[s] = h.tenant_epoch[slot]
    vacate(st, h, slot)
    redeem(h, ticket)


def post_receive(st: State, h: History, key: Any, ref: Any, message: Any, link: Any) -> None:
    h.moving[ref.slot] = h.moving[ref.slot] | message
    h.device[st.domain_of[key.stage]] = 1


def finish_receive(st: State, h: History, key: Any, ref: Any, message: Any, link: Any) -> None:
    """What arrives for work that is lost is nobody's."""
    h.moving[ref.slot] = h.moving[ref.slot] & ~message
    lost = h.owing[ref.slot] == 0
    h.arrived[ref.slot] = choose(lost, h.arrived[ref.slot], h.arrived[ref.slot] | message)
    transferred(h, ref.slot, link)


def read(st: State, h: History, key: Any, ref: Any, bit: Any, link: Any) -> None:
    h.moving[ref.slot] = h.moving[ref.slot] | bit
    h.device[st.domain_of[key.stage]] = 1


def finish_read(st: State, h: History, key: Any, ref: Any, bit: Any, link: Any) -> None:
    h.moving[ref.slot] = h.moving[ref.slot] & ~bit
    visit(st, h, ref.slot, bit)
    transferred(h, ref.slot, link)


def drop(st: State, h: History, key: Any, ref: Any) -> None:
    h.spoiled[key.stage] = key.epoch
    vacate(st, h, ref.slot)


def invalidate(st: State, h: History, stage: Any) -> None:
    h.cached[stage] = NEVER
    h.lost[stage] = 1
    needed = (h.fill_of_epoch[stage] != NEVER) & (h.num_dgrads[stage] != st.cells[stage])
    h.lost_in_use[stage] = choose(needed, h.weights[0], h.lost_in_use[stage])


def submit(st: State, h: History, link: Any) -> None:
    h.behind[link] = 1


def join(st: State, h: History, link: Any) -> None:
    d = st.domain_at[link]
    ours = st.caller_at[link] == h.updated_on[0]
    h.updating[d] = choose(ours, 0, h.updating[d])
    h.behind[link] = 0
    h.heard[link] = h.told[link]
    h.trailing[0] = choose(link == h.link[0], 0, h.trailing[0])


def wait(st: State, h: History, link: Any) -> None:
    """The caller waits for all that its domain's graph stream was given."""
    d = st.domain_at[link]
    mine = link == h.link[0]
    h.seen[0] = choose(mine & (domain_of_slot(st, h.slot[0]) == d), 1, h.seen[0])
    h.saw[0] = choose(mine & (domain_of_slot(st, h.slot[0]) == d), 1, h.saw[0])
    h.clear[0] = choose(mine & (domain_of_slot(st, h.slot[0]) == d), 1, h.clear[0])
    stage_there = st.domain_of[h.stage[0]] == d
    h.seen_gradients[0] = choose(mine & stage_there, 1, h.seen_gradients[0])


def drain(st: State, h: History, domain: Any) -> None:
    h.device[domain] = 0
    h.updating[domain] = 0


def finalize(st: State, h: History, stage: Any, link: Any) -> None:
    h.finals[stage] = h.finals[stage] + 1
    h.finalized_by[stage] = link


def start_reduction(st: State, h: History, bucket: Any, link: Any) -> None:
    """The caller's stream enqueues device work."""
    h.reduction[bucket] = RUNNING
    h.begun[0] = h.begun[0] + 1
    h.device[st.domain_of[st.stage_at[bucket]]] = 1


def finish_reduction(st: State, h: History, bucket: Any, link: Any) -> None:
    """The caller's stream waits for it."""
    h.reduction[bucket] = DONE
    h.awaited_by[bucket] = link


def fail_reduction(st: State, h: History, bucket: Any) -> None:
    h.reduction[bucket] = NONE
    h.spoiled[st.stage_at[bucket]] = h.weights[0]
    h.spoiled[st.tied_at[bucket]] = h.weights[0]


def forget_epoch(st: State, h: History) -> None:
    """The weights are others now; what ran, ran for the old ones."""
    for count in (h.ran_forward, h.ran_dgrad, h.ran_wgrad, h.binds):
        st.fill(count, 0)
    for count in (h.num_forwards, h.num_dgrads, h.num_wgrads, h.finals, h.reduction):
        st.fill(count, 0)
    h.begun[0] = 0
    st.fill(h.fill_of_epoch, NEVER)
    st.fill(h.updates_of_epoch, 0)
    st.fill(h.touched, 0)


def commit_epoch(st: State, h: History, epoch: Any, caller: Any) -> None:
    """The optimizer updates the weights of every stage of the process, once, on one stream."""
    h.weights[0] = h.weights[0] + 1
    h.updated_on[0] = caller
    st.fill(h.updating, 1)
    st.fill(h.device, 1)
    forget_epoch(st, h)


def restore(st: State, h: History, epoch: Any, incarnation: Any) -> None:
    """Numerical state comes from a checkpoint; streams, events, slots and pools are new."""
    h.weights[0] = epoch
    forget_epoch(st, h)
    st.fill(h.cached, NEVER)
    st.fill(h.spoiled, NEVER)
    st.fill(h.lost_in_use, NEVER)
    st.fill(h.half_written, NEVER)
    st.fill(h.content, NEVER)
    st.fill(h.updates, 0)
    st.fill(h.enqueued, 0)
    st.fill(h.broken, 0)
    st.fill(h.owing, 0)
    st.fill(h.moving, 0)
    st.fill(h.arrived, 0)
    st.fill(h.in_pool, 0)
    st.fill(h.tapes, 0)
    st.fill(h.behind, 0)
    h.seen_gradients[0] = 1
    st.fill(h.told, 0)
    st.fill(h.heard, 0)
    st.fill(h.last_end, 0)
    h.saw[0] = 1
    h.clear[0] = 1
    h.trailing[0] = 0
    h.dead[0] = choose(h.issued[0] == 1, 1, h.dead[0])


class _Key(NamedTuple):
    cell: Any
    epoch: Any


def _key(h: History, slot: Any) -> _Key:
    return _Key(h.tenant[slot], h.tenant_epoch[slot])


#: What each transition means for the world; one that is absent means nothing.
ADVANCE: Final[Mapping[str, Callable[..., None]]] = {
    function.__name__: function
    for function in (
        reserve,
        bind,
        check_refresh,
        commit_refresh,
        abort_refresh,
        check_forward,
        commit_forward,
        abort_forward,
        check_dgrad,
        commit_dgrad,
        abort_dgrad,
        check_wgrad,
        commit_wgrad,
        abort_wgrad,
        finish_read,
        post_receive,
        finish_receive,
        read,
        drop,
        invalidate,
        submit,
        join,
        wait,
        drain,
        finalize,
        start_reduction,
        finish_reduction,
        fail_reduction,
        commit_epoch,
        restore,
    )
}


def advance(
    transition: str, st: State, h: History, arguments: tuple[Any, ...], ticket: Any = None
) -> None:
    """
    Tell the history that a transition was accepted.

    Args:
        transition: Its name.
        st: The memory as it was before the transition.
        h: The history, changed in place.
        arguments: The transition's arguments.
        ticket: The ticket that a check returned.
    """
    function = ADVANCE.get(transition)
    if function is not None:
        extra = () if ticket is None else (ticket,)
        function(st, h, *arguments, *extra)
