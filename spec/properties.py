"""
What is always true of the physical history, and what must be true when an action is accepted.

``HISTORY`` relates the world that ``spec.history`` tells of to the contract's memory; it holds in
every reachable state. ``STEPS`` are the promises to the caller: when a transition is accepted, the
world is in order for it. ``ASSUMED`` is what the caller is trusted with.
"""

from __future__ import annotations

from typing import Any

from .history import DGRAD, DONE, FORWARD, NONE, REFRESH, RUNNING, WGRAD
from .invariants import awaits, domain_of_slot, free, live, retained
from .predicates import DI, DW, GRAD, NEVER, NO_SLOT, NO_STAGE, RESERVED, Register, implies

__all__ = ["ASSUMED", "HISTORY", "ORIGIN", "STEPS"]

#: Proved: what every transition keeps, of the memory and the history together.
HISTORY = Register()
#: Proved: what holds of the world whenever one of the named transitions is accepted.
STEPS = Register()
#: Assumed of the caller's arguments; some only where the relation that checks it is left out.
ASSUMED = Register()
#: Assumed of the beginning: that ghosts with an arbitrary start start so.
ORIGIN = Register()

State = Any
History = Any
Index = Any
Args = Any
Truth = Any


def in_flight(st: State, slot: Index) -> Truth:
    return st.held[slot] != 0


def wgrad_in_flight(st: State, slot: Index) -> Truth:
    return in_flight(st, slot) & retained(st, slot) & (st.pending[slot] & DI == 0)


def update_in_flight(st: State, slot: Index) -> Truth:
    forward_or_dgrad = (st.pending[slot] == RESERVED) | awaits(st, slot, DI)
    return in_flight(st, slot) & live(st, slot) & forward_or_dgrad


def now(st: State, stage: Index) -> Any:
    return st.weight_epoch[stage]


# Ownership: who is in a slot, and how far its work has come


@HISTORY("ownership.tenant", s="slot")
def tenant(st: State, h: History, s: Index) -> Truth:
    """A live slot holds the work of the key that was put there."""
    return implies(
        live(st, s), (h.tenant[s] == st.cell_at[s]) & (h.tenant_epoch[s] == st.epoch_at[s])
    )


@HISTORY("ownership.owing", s="slot")
def owing(st: State, h: History, s: Index) -> Truth:
    """A slot waits for exactly the consumers that have yet to visit its work."""
    return st.pending[s] == h.owing[s]


@HISTORY("ownership.acting", s="slot")
def acting(st: State, h: History, s: Index) -> Truth:
    """At most one action is in flight on a slot, and the ticket there is its own."""
    idle = (st.held[s] == 0) & (h.acting[s] == 0)
    return idle | ((st.held[s] != 0) & (h.acting[s] == 1))


@HISTORY("ownership.once", c="cell")
def once(st: State, h: History, c: Index) -> Truth:
    """Per weights, a cell's F runs at most once, its dI only after it, its dW only after that."""
    forwards, dgrads, wgrads = h.ran_forward[c], h.ran_dgrad[c], h.ran_wgrad[c]
    return (0 <= wgrads) & (wgrads <= dgrads) & (dgrads <= forwards) & (forwards <= 1)


@HISTORY("ownership.ran-is-marked", c="cell")
def ran_is_marked(st: State, h: History, c: Index) -> Truth:
    """A cell whose F ran is marked as forwarded."""
    return implies(h.ran_forward[c] != 0, st.forwarded[c] == now(st, st.stage_of[c]))


@HISTORY("ownership.progress", s="slot")
def progress(st: State, h: History, s: Index) -> Truth:
    """What a slot's mask says of its cell is what ran."""
    c = st.cell_at[s]
    claimed = implies(st.pending[s] == RESERVED, h.ran_forward[c] == 0)
    forwarded = implies(retained(st, s), h.ran_forward[c] == 1)
    dgrad = implies(retained(st, s), awaits(st, s, DI) == (h.ran_dgrad[c] == 0))
    wgrad = implies(retained(st, s), awaits(st, s, DW) == (h.ran_wgrad[c] == 0))
    return claimed & forwarded & dgrad & wgrad


@HISTORY("ownership.deferred-whole", s="slot")
def deferred_whole(st: State, h: History, s: Index) -> Truth:
    """Between dI and dW a tape keeps deferred work of every matrix."""
    after_dgrad = retained(st, s) & (st.pending[s] & DI == 0)
    return implies(after_dgrad, h.queued[s] == st.matrices[st.slot_stage[s]])


@HISTORY("ownership.covered-whole", c="cell")
def covered_whole(st: State, h: History, c: Index) -> Truth:
    """A dW that ran covered every matrix."""
    return implies(h.ran_wgrad[c] != 0, h.covered[c] == st.matrices[st.stage_of[c]])


@HISTORY("ownership.reference", s="slot")
def reference(st: State, h: History, s: Index) -> Truth:
    """A reference that still matches was handed out for the work that is there, and only such."""
    mine = (s == h.ref_slot[0]) & (st.incarnation[0] == h.ref_incarnation[0])
    issued = mine & (h.issued[0] == 1)
    matches = st.generation[s] == h.ref_generation[0]
    ours = (
        live(st, s)
        & (st.cell_at[s] == h.ref_cell[0])
        & (st.epoch_at[s] == h.ref_epoch[0])
        & (h.dead[0] == 0)
    )
    usable = mine & matches & live(st, s) & (retained(st, s) | (st.held[s] == 0))
    return (
        implies(issued, h.ref_generation[0] <= st.generation[s])
        & implies(issued & matches, ours)
        & implies(usable, h.issued[0] == 1)
    )


@HISTORY("ownership.dead-was-issued")
def dead_was_issued(st: State, h: History) -> Truth:
    """Only a reference that was handed out dies."""
    flags = ((h.issued[0] == 0) | (h.issued[0] == 1)) & ((h.dead[0] == 0) | (h.dead[0] == 1))
    return flags & (h.dead[0] <= h.issued[0])


# Tickets: a ticket that is out is the one that its commit will find


@HISTORY("tickets.outstanding")
def outstanding(st: State, h: History) -> Truth:
    """What the check reserved for a ticket that is out is still reserved for it."""
    t, s, kind = h.ticket[0], h.ticket_slot[0], h.outstanding[0]
    held = (s != NO_SLOT) & (st.held[s] == t) & (t != 0)
    return (
        implies(kind == FORWARD, held & (st.pending[s] == RESERVED))
        & implies(kind == DGRAD, held & retained(st, s) & awaits(st, s, DI))
        & implies(kind == WGRAD, held & retained(st, s) & (st.pending[s] & (DI | DW) == DW))
    )


@HISTORY("tickets.outstanding-refresh")
def outstanding_refresh(st: State, h: History) -> Truth:
    """What the check reserved for a refresh that is out is still reserved for it."""
    t, g = h.ticket[0], h.ticket_stage[0]
    kept = (g != NO_STAGE) & (st.refreshing[g] == t) & (t != 0)
    return implies(h.outstanding[0] == REFRESH, kept)


@HISTORY("tickets.nothing-else", s="slot")
def nothing_else(st: State, h: History, s: Index) -> Truth:
    """A ticket in flight on a slot is out, and of the kind that the mask says."""
    mine = (st.held[s] == h.ticket[0]) & (h.ticket[0] != 0)
    forward = (st.pending[s] == RESERVED) & (h.outstanding[0] == FORWARD)
    dgrad = retained(st, s) & awaits(st, s, DI) & (h.outstanding[0] == DGRAD)
    wgrad = retained(st, s) & (st.pending[s] & DI == 0) & (h.outstanding[0] == WGRAD)
    return implies(mine, (h.ticket_slot[0] == s) & (forward | dgrad | wgrad))


@HISTORY("tickets.nothing-else-refreshes", g="stage")
def nothing_else_refreshes(st: State, h: History, g: Index) -> Truth:
    """A ticket of a refresh in flight is out, as a refresh of that stage."""
    mine = (st.refreshing[g] == h.ticket[0]) & (h.ticket[0] != 0)
    return implies(mine, (h.outstanding[0] == REFRESH) & (h.ticket_stage[0] == g))


@HISTORY("tickets.none-before-issue")
def none_before_issue(st: State, h: History) -> Truth:
    """A ticket is not out before it was issued."""
    return implies(h.outstanding[0] != NONE, h.ticket[0] <= st.serial[0])


# Version: weights, and what the caches hold


@HISTORY("epoch.weights", g="stage")
def weights(st: State, h: History, g: Index) -> Truth:
    """The weight epoch counts the optimizer's updates."""
    return now(st, g) == h.weights[0]


@HISTORY("version.cache-content", g="stage")
def cache_content(st: State, h: History, g: Index) -> Truth:
    """A cache is called fresh exactly when it holds the current weights, and is never ahead."""
    return ((st.cache_epoch[g] == now(st, g)) == (h.cached[g] == h.weights[0])) & (
        h.cached[g] <= h.weights[0]
    )


@HISTORY("version.fill-in-progress", g="stage")
def fill_in_progress(st: State, h: History, g: Index) -> Truth:
    """A refresh in flight was not lost."""
    return implies(st.refreshing[g] != 0, h.lost[g] == 0)


@HISTORY("version.filled-by-forward", s="slot", g="stage")
def filled_by_forward(st: State, h: History, s: Index, g: Index) -> Truth:
    """The F that fills a cache is in flight on a slot of its stage, and its fill was not lost."""
    here = (st.filling[g] == st.held[s]) & (st.held[s] != 0)
    forward = live(st, s) & (st.pending[s] == RESERVED) & (st.slot_stage[s] == g)
    fills = forward & (h.filling[s] != 0) & (h.lost[g] == 0)
    return implies(here, fills) & implies(
        in_flight(st, s) & (st.pending[s] == RESERVED) & (h.filling[s] != 0),
        st.filling[st.slot_stage[s]] == st.held[s],
    )


@HISTORY("version.one-fill", needs="order", g="stage")
def one_fill(st: State, h: History, g: Index) -> Truth:
    """All forwards of an epoch read one and the same fill of the cache."""
    same = implies(h.fill_of_epoch[g] != NEVER, h.fills[g] == h.fill_of_epoch[g])
    return same & (0 <= h.fills[g])


@HISTORY("version.tape-of-that-fill", needs="order", s="slot")
def tape_of_that_fill(st: State, h: History, s: Index) -> Truth:
    """A retained tape is of that fill."""
    g = st.slot_stage[s]
    begun = retained(st, s) | (live(st, s) & in_flight(st, s))
    return implies(begun, (h.fill_read[s] == h.fill_of_epoch[g]) & (h.fill_of_epoch[g] != NEVER))


@HISTORY("version.filled-just-before", needs="order", g="stage")
def filled_just_before(st: State, h: History, g: Index) -> Truth:
    """Between a refresh and its stage's first forward no scaling update happens in the domain."""
    d = st.domain_of[g]
    waiting = (st.cache_epoch[g] == now(st, g)) & (h.fill_of_epoch[g] == NEVER)
    return implies(waiting, (st.refreshed[d] == g) & (h.filled_after[g] == h.updates[d]))


@HISTORY("version.undisturbed", needs="order", s="slot")
def undisturbed_fill(st: State, h: History, s: Index) -> Truth:
    """No F of another stage, and no dI, is in flight between a refresh and its first forward."""
    waiting = st.refreshed[domain_of_slot(st, s)]
    own = (st.pending[s] == RESERVED) & (waiting == st.slot_stage[s])
    return implies(update_in_flight(st, s), (waiting == NO_STAGE) | own)


@HISTORY("version.first-forward-shows", needs="order", g="stage")
def first_forward_shows(st: State, h: History, g: Index) -> Truth:
    """An epoch's first forward of a stage shows in its counts, in flight, or as a failure."""
    d = st.domain_of[g]
    s = h.updater[d]
    flying = (s != NO_SLOT) & (st.held[s] != 0) & (st.pending[s] == RESERVED)
    shows = (h.num_forwards[g] != 0) | (st.poisoned[d] != 0) | (flying & (st.slot_stage[s] == g))
    return implies(h.fill_of_epoch[g] != NEVER, shows)


@HISTORY("version.refresh-before-forwards", needs="order", g="stage")
def refresh_before_forwards(st: State, h: History, g: Index) -> Truth:
    """While a refresh is in flight its stage has had no forward, and no other stage waits."""
    waiting = st.refreshed[st.domain_of[g]]
    alone = (waiting == NO_STAGE) | (waiting == g)
    return implies(st.refreshing[g] != 0, (h.fill_of_epoch[g] == NEVER) & alone)


# Order: scaling state


@HISTORY("order.token", d="domain")
def token(st: State, h: History, d: Index) -> Truth:
    """The effect token counts the scaling updates."""
    return st.token[d] == h.updates[d]


@HISTORY("order.position", d="domain")
def position(st: State, h: History, d: Index) -> Truth:
    """The position counts those of the epoch."""
    return st.position[d] == h.updates_of_epoch[d]


@HISTORY("order.one-at-a-time", d="domain")
def one_at_a_time(st: State, h: History, d: Index) -> Truth:
    """At most one F, dI or refresh is in flight in a domain, and its ticket is the domain's."""
    s, g = h.updater[d], h.refresher[d]
    tape = (s != NO_SLOT) & update_in_flight(st, s) & (domain_of_slot(st, s) == d)
    refresh = (g != NO_STAGE) & (st.domain_of[g] == d) & (st.busy[d] == st.refreshing[g])
    idle = (st.busy[d] == 0) & (h.running[d] == 0)
    return idle | (
        (st.busy[d] != 0) & (h.running[d] == 1) & ((tape & (st.busy[d] == st.held[s])) | refresh)
    )


@HISTORY("order.broken", d="domain")
def broken(st: State, h: History, d: Index) -> Truth:
    """Broken scaling state is marked."""
    return implies(h.broken[d] != 0, st.poisoned[d] != 0)


@HISTORY("order.counts", g="stage")
def counts(st: State, h: History, g: Index) -> Truth:
    """The counts of F and dI are those that ran."""
    return (st.forwards[g] == h.num_forwards[g]) & (st.dgrads[g] == h.num_dgrads[g])


@HISTORY("order.touched", d="domain")
def touched(st: State, h: History, d: Index) -> Truth:
    """Scaling state that was touched since the last commit shows it."""
    g, s, r = h.toucher[d], h.updater[d], h.refresher[d]
    forward = (s != NO_SLOT) & (st.held[s] == st.busy[d]) & (st.pending[s] == RESERVED)
    refresh = (r != NO_STAGE) & (st.refreshing[r] == st.busy[d])
    shows = (
        ((st.busy[d] != 0) & (forward | refresh))
        | (st.poisoned[d] != 0)
        | (st.refreshed[d] != NO_STAGE)
        | (st.forwards[g] != 0)
    )
    return implies(h.touched[d] != 0, (g != NO_STAGE) & shows)


@HISTORY("order.toucher", s="slot")
def toucher(st: State, h: History, s: Index) -> Truth:
    """An F in flight is the last that touched its domain."""
    forward = in_flight(st, s) & (st.pending[s] == RESERVED)
    return implies(forward, h.toucher[domain_of_slot(st, s)] == st.slot_stage[s])


@HISTORY("order.tape-touches", s="slot")
def tape_touches(st: State, h: History, s: Index) -> Truth:
    """A tape's forward, from its check on, touched its domain."""
    begun = retained(st, s) | in_flight(st, s)
    return implies(begun, h.touched[domain_of_slot(st, s)] != 0)


# Epoch: whole, and never when ruined


@HISTORY("epoch.counts", g="stage")
def wgrads(st: State, h: History, g: Index) -> Truth:
    """The count of dW is of those that ran: of no more than dI, no more than F, than cells."""
    forwards, dgrads = h.num_forwards[g], h.num_dgrads[g]
    first = (st.wgrads[g] == h.num_wgrads[g]) & (0 <= st.wgrads[g]) & (st.wgrads[g] <= dgrads)
    return first & (dgrads <= forwards) & (forwards <= st.cells[g])


@HISTORY("epoch.every-cell-placed", c="cell")
def every_cell_placed(st: State, h: History, c: Index) -> Truth:
    """Every cell has a place of its own, below each count exactly when that action ran."""
    g, place = st.stage_of[c], h.place[c]
    ran = (
        ((place < h.num_forwards[g]) == (h.ran_forward[c] == 1))
        & ((place < h.num_dgrads[g]) == (h.ran_dgrad[c] == 1))
        & ((place < h.num_wgrads[g]) == (h.ran_wgrad[c] == 1))
    )
    return (0 <= place) & (place < st.cells[g]) & (h.placed[g, place] == c) & ran


@HISTORY("epoch.every-place-taken", g="stage", i="place")
def every_place_taken(st: State, h: History, g: Index, i: Index) -> Truth:
    """Every place has a cell of the stage."""
    cell = h.placed[g, i]
    return implies((0 <= i) & (i < st.cells[g]), (st.stage_of[cell] == g) & (h.place[cell] == i))


@HISTORY("epoch.ruined", g="stage")
def ruined(st: State, h: History, g: Index) -> Truth:
    """An epoch that a failure ruined is spoiled."""
    marked = implies(h.ruined[g] == now(st, g), st.spoiled[g] == now(st, g))
    return marked & (h.ruined[g] <= now(st, g)) & (h.half_written[g] <= h.ruined[g])


@HISTORY("epoch.half-written", g="stage")
def half_written(st: State, h: History, g: Index) -> Truth:
    """An epoch with half-written gradients is spoiled."""
    return implies(h.half_written[g] == now(st, g), st.spoiled[g] == now(st, g))


@HISTORY("epoch.final-is-whole", g="stage")
def final_is_whole(st: State, h: History, g: Index) -> Truth:
    """A final stage has every gradient, and nothing spoiled them."""
    whole = (st.wgrads[g] == st.cells[g]) & (st.spoiled[g] != now(st, g))
    return implies(st.final[g] == now(st, g), whole)


# Arena


@HISTORY("arena.content", b="buffer")
def content(st: State, h: History, b: Index) -> Truth:
    """A buffer holds the gradients of the epoch that it was opened in."""
    return st.opened[b] == h.content[b]


@HISTORY("arena.one-writer", b="buffer")
def one_writer(st: State, h: History, b: Index) -> Truth:
    """At most one dW writes a buffer, and its ticket is the buffer's."""
    s = h.writer[b]
    idle = (st.writing[b] == 0) & (h.writers[b] == 0)
    dw = (s != NO_SLOT) & wgrad_in_flight(st, s) & (st.writing[b] == st.held[s])
    busy = (st.writing[b] != 0) & (h.writers[b] == 1)
    return idle | (busy & dw & (st.buffer_of[st.cell_at[s]] == b))


@HISTORY("arena.bound-once", c="cell")
def bound_once(st: State, h: History, c: Index) -> Truth:
    """A cell is bound at most once per weights, to its configured destination."""
    bound = st.bound[c] == now(st, st.stage_of[c])
    there = (h.binds[c] == 1) & (h.bound_to[c] == st.destination_of[c])
    return (bound & there) | ((st.bound[c] != now(st, st.stage_of[c])) & (h.binds[c] == 0))


@HISTORY("arena.bound-before-dgrad", c="cell")
def bound_before_dgrad(st: State, h: History, c: Index) -> Truth:
    """A cell whose dI ran was bound."""
    return implies(h.ran_dgrad[c] != 0, h.binds[c] == 1)


@HISTORY("arena.bound-during-dgrad", s="slot")
def bound_during_dgrad(st: State, h: History, s: Index) -> Truth:
    """So is one whose dI is running."""
    running = in_flight(st, s) & retained(st, s)
    return implies(running, h.binds[st.cell_at[s]] == 1)


# Capture memory


@HISTORY("capture.in-pool", s="slot")
def in_pool(st: State, h: History, s: Index) -> Truth:
    """A slot keeps memory in its pool from the check of its forward on."""
    kept = retained(st, s) | (live(st, s) & in_flight(st, s))
    return (kept & (h.in_pool[s] == 1)) | (
        (h.in_pool[s] == 0) & (free(st, s) | ((st.pending[s] == RESERVED) & (st.held[s] == 0)))
    )


@HISTORY("capture.tenants", p="pool")
def tenants(st: State, h: History, p: Index) -> Truth:
    """The pool counts the slots that keep memory in it."""
    return (st.tenants[p] == h.tapes[p]) & (0 <= h.tapes[p]) & (h.tapes[p] <= h.slots[p])


@HISTORY("capture.every-slot-seated", s="slot")
def every_slot_seated(st: State, h: History, s: Index) -> Truth:
    """Every slot has a seat of its own, below the count exactly when it keeps memory."""
    p, seat = st.pool_of[s], h.seat[s]
    kept = (seat < h.tapes[p]) == (h.in_pool[s] == 1)
    return (0 <= seat) & (seat < h.slots[p]) & (h.seated[p, seat] == s) & kept


@HISTORY("capture.every-seat-taken", p="pool", i="place")
def every_seat_taken(st: State, h: History, p: Index, i: Index) -> Truth:
    """Every seat has a slot of the pool."""
    s = h.seated[p, i]
    taken = (s != NO_SLOT) & (st.pool_of[s] == p) & (h.seat[s] == i)
    return implies((0 <= i) & (i < h.slots[p]), taken)


@HISTORY("capture.cursor", s="slot")
def cursor(st: State, h: History, s: Index) -> Truth:
    """The cursor is the rank of the pool's latest replay, and none kept was later."""
    p = st.pool_of[s]
    last = h.last_replayed[p]
    latest = (last != NO_SLOT) & (st.pool_of[last] == p) & (st.cursor[p] == h.last_rank[last])
    return implies(h.in_pool[s] == 1, latest & (h.last_rank[s] <= st.cursor[p]))


@HISTORY("capture.last-rank", s="slot")
def last_rank(st: State, h: History, s: Index) -> Truth:
    """A tape's latest replay is the one that its mask, and the action in flight, say."""
    idle, mask = st.held[s] == 0, st.pending[s]
    begun = (mask == RESERVED) & in_flight(st, s)
    forwarded = retained(st, s) & awaits(st, s, DI)
    forward = implies(begun | (forwarded & idle), h.last_rank[s] == st.forward_rank[s])
    deferred = retained(st, s) & idle & (mask & (DI | DW) == DW)
    dgrad = (forwarded & in_flight(st, s)) | deferred
    return forward & implies(dgrad, h.last_rank[s] == st.dgrad_rank[s])


@HISTORY("capture.unclobbered")
def unclobbered(st: State, h: History) -> Truth:
    """No earlier graph has overwritten what a live tape keeps."""
    return implies(h.in_pool[h.slot[0]] == 1, h.clobbered[0] == 0)


# Completion


@HISTORY("completion.behind", l="link")
def behind(st: State, h: History, l: Index) -> Truth:  # noqa: E741 - a link
    """A link called joined has no work that the graph stream has yet to wait for."""
    return implies(st.joined[l] == st.submitted[l], h.behind[l] == 0)


@HISTORY("completion.replays", d="domain")
def replays(st: State, h: History, d: Index) -> Truth:
    """The replays counted are those that were enqueued."""
    return st.replays[d] == h.enqueued[d]


@HISTORY("completion.seen")
def seen(st: State, h: History) -> Truth:
    """A caller that waited past a tape's latest replay sees its output."""
    l, s = h.link[0], h.slot[0]  # noqa: E741 - a link
    there = st.domain_at[l] == domain_of_slot(st, s)
    return implies(retained(st, s) & there & (st.produced[s] <= st.waited[l]), h.seen[0] == 1)


@HISTORY("completion.seen-gradients")
def seen_gradients(st: State, h: History) -> Truth:
    """A caller that waited past a stage's latest dW sees its gradients."""
    l, g = h.link[0], h.stage[0]  # noqa: E741 - a link
    there = st.domain_at[l] == st.domain_of[g]
    return implies(there & (st.landed[g] <= st.waited[l]), h.seen_gradients[0] == 1)


@HISTORY("completion.device", d="domain")
def device(st: State, h: History, d: Index) -> Truth:
    """Device work that may be unfinished is undrained, or its action is still in flight."""
    s, g = h.beginner[d], h.refresher[d]
    slot = (s != NO_SLOT) & in_flight(st, s) & (domain_of_slot(st, s) == d)
    stage = (g != NO_STAGE) & (st.refreshing[g] != 0) & (st.domain_of[g] == d)
    return implies((h.device[d] != 0) & (st.undrained[d] == 0), slot | stage)


# Reduction


@HISTORY("reduction.stations", g="stage")
def stations(st: State, h: History, g: Index) -> Truth:
    """Each stage's reduction is where the contract says, and of gradients that were final."""
    none, running, done = (h.reduction[g] == k for k in (NONE, RUNNING, DONE))
    final, spoiled = st.final[g] == now(st, g), st.spoiled[g] == now(st, g)
    return (
        (none | running | done)
        & (running == (st.reducing[g] != 0))
        & implies(none & final, st.unreduced[g] == st.reduces[g])
        & implies(running, st.reduces[g] != 0)
        & implies(done, st.unreduced[g] == 0)
        & implies(done, st.reduces[g] != 0)
        & (none | final | spoiled)
    )


# Steps: what an accepted action may rely on


@STEPS("ownership.right-reference", "check_dgrad", "check_wgrad", "read", "finish_read", "drop")
def right_reference(st: State, h: History, a: Args) -> Truth:
    """A reference is accepted only if it was handed out for that key and its work is not gone."""
    mine = (
        (a.ref.slot == h.ref_slot[0])
        & (a.ref.generation == h.ref_generation[0])
        & (a.ref.incarnation == h.ref_incarnation[0])
    )
    named = (a.key.cell == h.ref_cell[0]) & (a.key.epoch == h.ref_epoch[0])
    return implies(mine, (h.issued[0] == 1) & (h.dead[0] == 0) & named)


@STEPS("ownership.right-work", "check_dgrad", "check_wgrad", "read", "finish_read", "drop")
def right_work(st: State, h: History, a: Args) -> Truth:
    """An action finds its own key's work in the slot, and nobody else acting there."""
    s = a.ref.slot
    mine = (h.tenant[s] == a.key.cell) & (h.tenant_epoch[s] == a.key.epoch)
    return mine & (h.owing[s] != 0) & (h.acting[s] == 0)


@STEPS("ownership.right-consumer", "read", "finish_read")
def right_consumer(st: State, h: History, a: Args) -> Truth:
    """One reader reads, only where one is awaited, and a gradient only after dI."""
    s = a.ref.slot
    one = (a.bit == 4) | (a.bit == 8)
    there = implies(a.bit == GRAD, h.ran_dgrad[a.key.cell] == 1)
    return one & ((h.owing[s] & a.bit) != 0) & (h.ran_forward[a.key.cell] == 1) & there


@STEPS("ownership.dgrad-after-forward", "check_dgrad")
def dgrad_after_forward(st: State, h: History, a: Args) -> Truth:
    """dI runs once, after F."""
    return (h.ran_forward[a.key.cell] == 1) & (h.ran_dgrad[a.key.cell] == 0)


@STEPS("ownership.wgrad-after-dgrad", "check_wgrad")
def wgrad_after_dgrad(st: State, h: History, a: Args) -> Truth:
    """dW runs once, after dI, and dI left it work of every matrix."""
    once = (h.ran_dgrad[a.key.cell] == 1) & (h.ran_wgrad[a.key.cell] == 0)
    return once & (h.queued[a.ref.slot] == st.matrices[a.key.stage])


@STEPS("ownership.never-preempted", "reserve", "check_forward")
def never_preempted(st: State, h: History, a: Args) -> Truth:
    """A forward gets a slot of its stage that nobody waits for, or the one its key claimed."""
    claimed = (h.owing[a.slot] == RESERVED) & (h.tenant[a.slot] == a.key.cell)
    own = claimed & (h.tenant_epoch[a.slot] == a.key.epoch)
    vacant = (h.owing[a.slot] == 0) | own
    return (a.slot != NO_SLOT) & vacant & (st.slot_stage[a.slot] == a.key.stage)


@STEPS("ownership.claimed-once", "reserve")
def claimed_once(st: State, h: History, a: Args) -> Truth:
    """A claim is of a free slot."""
    return h.owing[a.slot] == 0


@STEPS("ownership.forward-once", "reserve", "check_forward")
def forward_once(st: State, h: History, a: Args) -> Truth:
    """No key's forward runs twice for the same weights."""
    return h.ran_forward[a.key.cell] == 0


@STEPS(
    "version.weights-of-the-key", "reserve", "bind", "check_forward", "check_dgrad", "check_wgrad"
)
def weights_of_the_key(st: State, h: History, a: Args) -> Truth:
    """An action runs on the weights that its key names."""
    return a.key.epoch == h.weights[0]


@STEPS("version.cache-of-the-key", "check_forward")
def cache_of_the_key(st: State, h: History, a: Args) -> Truth:
    """A forward that does not fill the cache finds the key's weights in it."""
    return implies(a.refresh == 0, h.cached[a.key.stage] == a.key.epoch)


@STEPS("version.cache-for-dgrad", "check_dgrad", needs="order")
def cache_for_dgrad(st: State, h: History, a: Args) -> Truth:
    """dI finds the very cache that its forward read."""
    same = h.fill_read[a.ref.slot] == h.fills[a.key.stage]
    return same & (h.cached[a.key.stage] == a.key.epoch)


@STEPS("version.only-stale-filled", "check_refresh", needs="order")
def only_stale_filled(st: State, h: History, a: Args) -> Truth:
    """Only a cache without the current weights is filled, before any forward of the epoch."""
    return (h.cached[a.stage] != h.weights[0]) & (h.fill_of_epoch[a.stage] == NEVER)


@STEPS("version.only-stale-filled-by-forward", "check_forward", needs="order")
def only_stale_filled_by_forward(st: State, h: History, a: Args) -> Truth:
    """The same of a forward that fills it."""
    s = a.key.stage
    stale = (h.cached[s] != h.weights[0]) & (h.fill_of_epoch[s] == NEVER)
    return implies(a.refresh != 0, stale)


@STEPS("version.filled-just-before", "check_forward", needs="order")
def first_after_fill(st: State, h: History, a: Args) -> Truth:
    """A first forward that finds its cache filled is the domain's next update after the fill."""
    s = a.key.stage
    first = (a.refresh == 0) & (h.fill_of_epoch[s] == NEVER)
    return implies(first, h.filled_after[s] == h.updates[st.domain_of[s]])


@STEPS("order.threaded", "check_forward", "check_dgrad")
def threaded(st: State, h: History, a: Args) -> Truth:
    """The caller's token has seen every scaling update, in the declared order if there is one."""
    d = st.domain_of[a.key.stage]
    return a.token == h.updates[d]


@STEPS("order.declared-forward", "check_forward")
def declared_forward(st: State, h: History, a: Args) -> Truth:
    """Where an order is declared, F comes at its place."""
    d = st.domain_of[a.key.stage]
    return implies(st.declared[d] != 0, st.forward_at[a.key.cell] == h.updates_of_epoch[d])


@STEPS("order.declared-dgrad", "check_dgrad")
def declared_dgrad(st: State, h: History, a: Args) -> Truth:
    """Where an order is declared, dI comes at its place."""
    d = st.domain_of[a.key.stage]
    return implies(st.declared[d] != 0, st.dgrad_at[a.key.cell] == h.updates_of_epoch[d])


@STEPS("order.sound-state", "check_forward", "check_dgrad")
def sound_state(st: State, h: History, a: Args) -> Truth:
    """Scaling state is whole, and nobody else is updating it."""
    d = st.domain_of[a.key.stage]
    return (h.broken[d] == 0) & (h.running[d] == 0)


@STEPS("order.sound-state-of-stage", "check_refresh")
def sound_state_of_stage(st: State, h: History, a: Args) -> Truth:
    """The same for a refresh."""
    d = st.domain_of[a.stage]
    return (h.broken[d] == 0) & (h.running[d] == 0)


@STEPS("order.sound-at-finalize", "finalize")
def sound_at_finalize(st: State, h: History, a: Args) -> Truth:
    """A stage is final only with every F and dI run, on whole scaling state."""
    n = st.cells[a.stage]
    ran = (h.num_forwards[a.stage] == n) & (h.num_dgrads[a.stage] == n)
    return ran & (h.broken[st.domain_of[a.stage]] == 0)


@STEPS("arena.bound-destination", "check_dgrad")
def bound_destination(st: State, h: History, a: Args) -> Truth:
    """dI finds its key bound to the configured destination."""
    c = a.key.cell
    return (h.binds[c] == 1) & (h.bound_to[c] == st.destination_of[c])


@STEPS("arena.right-destination", "check_wgrad")
def right_destination(st: State, h: History, a: Args) -> Truth:
    """dW writes where dI was told, alone, over nothing of its epoch or onto only that."""
    c = a.key.cell
    buffer = st.buffer_of[c]
    bound = (a.destination == h.bound_to[c]) & (h.writers[buffer] == 0)
    fresh = implies(a.first != 0, h.content[buffer] != a.key.epoch)
    return bound & fresh & implies(a.first == 0, h.content[buffer] == a.key.epoch)


@STEPS("arena.usable", "bind", "check_wgrad")
def usable(st: State, h: History, a: Args) -> Truth:
    """Nothing is written for an epoch that a failure ruined."""
    return (h.ruined[a.key.stage] != a.key.epoch) & (h.half_written[a.key.stage] != a.key.epoch)


@STEPS("arena.bound-once", "bind")
def bind_once(st: State, h: History, a: Args) -> Truth:
    """A destination is bound once, and is the configured one."""
    c = a.key.cell
    return (h.binds[c] == 0) & (a.destination == st.destination_of[c])


@STEPS("epoch.whole", "finalize", c="cell")
def whole(st: State, h: History, a: Args, c: Index) -> Truth:
    """When a stage is final, every cell's F, dI and dW ran exactly once, over every matrix."""
    once = (h.ran_forward[c] == 1) & (h.ran_dgrad[c] == 1) & (h.ran_wgrad[c] == 1)
    ours = st.stage_of[c] == a.stage
    return implies(ours, once & (h.covered[c] == st.matrices[a.stage]))


@STEPS("epoch.not-ruined", "finalize")
def not_ruined(st: State, h: History, a: Args) -> Truth:
    """A stage that a failure ruined is not final."""
    return (h.ruined[a.stage] != h.weights[0]) & (h.half_written[a.stage] != h.weights[0])


@STEPS("reduction.final-once", "finalize")
def final_once(st: State, h: History, a: Args) -> Truth:
    """A stage is not final again once its reduction began."""
    return h.reduction[a.stage] == NONE


@STEPS("completion.replay-after-caller", "check_forward", "check_dgrad", "check_wgrad")
def replay_after_caller(st: State, h: History, a: Args) -> Truth:
    """A replay comes after all work of its caller, which waited for this very graph stream."""
    here = st.domain_at[a.link] == st.domain_of[a.key.stage]
    return here & (h.behind[a.link] == 0)


@STEPS("completion.refresh-after-caller", "check_refresh")
def refresh_after_caller(st: State, h: History, a: Args) -> Truth:
    """So does a refresh."""
    here = st.domain_at[a.link] == st.domain_of[a.stage]
    return here & (h.behind[a.link] == 0)


@STEPS("completion.consumer-after-replay", "check_dgrad", "read")
def consumer_after_replay(st: State, h: History, a: Args) -> Truth:
    """A consumer's stream waited for the replay that wrote what it consumes."""
    mine = (a.link == h.link[0]) & (a.ref.slot == h.slot[0])
    return implies(mine, h.seen[0] == 1)


@STEPS("completion.gradients-after-replay", "finalize")
def gradients_after_replay(st: State, h: History, a: Args) -> Truth:
    """Whoever finalizes a stage waited for its latest dW."""
    mine = (a.link == h.link[0]) & (a.stage == h.stage[0])
    return implies(mine, h.seen_gradients[0] == 1)


@STEPS("reduction.of-whole-gradients", "start_reduction")
def of_whole_gradients(st: State, h: History, a: Args) -> Truth:
    """A reduction starts on whole gradients that owe one and were not reduced."""
    g = a.stage
    complete = (h.num_wgrads[g] == st.cells[g]) & (h.ruined[g] != h.weights[0])
    return complete & (h.reduction[g] == NONE) & (st.reduces[g] != 0)


@STEPS("reduction.running", "finish_reduction", "fail_reduction")
def reduction_running(st: State, h: History, a: Args) -> Truth:
    """Only a running reduction ends."""
    return h.reduction[a.stage] == RUNNING


@STEPS("reduction.undisturbed", "check_wgrad", "drop")
def undisturbed(st: State, h: History, a: Args) -> Truth:
    """No gradient is written, and none given up, under a running reduction."""
    return h.reduction[a.key.stage] != RUNNING


@STEPS("epoch.commit", "commit_epoch", c="cell", g="stage", s="slot")
def commit(st: State, h: History, a: Args, c: Index, g: Index, s: Index) -> Truth:
    """The weights change only when every dW ran, no tape is live, and nothing was ruined."""
    ran = h.ran_wgrad[c] == 1
    idle = (h.owing[s] == 0) & (h.acting[s] == 0)
    return ran & idle & (h.ruined[g] != h.weights[0]) & (a.epoch == h.weights[0])


@STEPS("order.commit", "commit_epoch", d="domain")
def commit_in_order(st: State, h: History, a: Args, d: Index) -> Truth:
    """No scaling update is in flight when the weights change."""
    return h.running[d] == 0


@STEPS("reduction.commit", "commit_epoch", g="stage")
def commit_reduced(st: State, h: History, a: Args, g: Index) -> Truth:
    """Every reduction that is owed is done when the weights change."""
    done = implies(st.reduces[g] != 0, h.reduction[g] == DONE)
    return done & (h.reduction[g] != RUNNING)


@STEPS("persistence.quiescent", "checkpoint", g="stage", s="slot")
def quiescent(st: State, h: History, a: Args, g: Index, s: Index) -> Truth:
    """A checkpoint finds no tape, no action and no gradient of a step that is under way."""
    return (h.owing[s] == 0) & (h.acting[s] == 0) & (h.num_wgrads[g] == 0)


@STEPS("order.quiescent", "checkpoint", d="domain")
def quiescent_order(st: State, h: History, a: Args, d: Index) -> Truth:
    """A checkpoint finds scaling state as the last commit left it, and whole."""
    return (h.running[d] == 0) & (h.broken[d] == 0) & (h.touched[d] == 0)


@STEPS("completion.quiescent", "checkpoint", "restore", d="domain")
def quiescent_device(st: State, h: History, a: Args, d: Index) -> Truth:
    """No device work is left when state is saved or replaced."""
    return h.device[d] == 0


@STEPS("reduction.quiescent", "checkpoint", "restore", g="stage")
def quiescent_reduction(st: State, h: History, a: Args, g: Index) -> Truth:
    """Nor a reduction."""
    return h.reduction[g] != RUNNING


@STEPS("persistence.restore-between-actions", "restore", s="slot")
def restore_between_actions(st: State, h: History, a: Args, s: Index) -> Truth:
    """State is replaced only between actions."""
    return h.acting[s] == 0


@STEPS("order.restore-between-actions", "restore", d="domain")
def restore_between_updates(st: State, h: History, a: Args, d: Index) -> Truth:
    """And only between scaling updates."""
    return h.running[d] == 0


@STEPS("tickets.forward-redeems-its-own", "commit_forward", "abort_forward")
def forward_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The end of an F is accepted once, from the check that began it."""
    mine = implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == FORWARD) & (h.ticket_slot[0] == a.slot)
    )
    return mine & (h.acting[a.slot] == 1)


@STEPS("tickets.dgrad-redeems-its-own", "commit_dgrad", "abort_dgrad")
def dgrad_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The end of a dI is accepted once, from the check that began it."""
    mine = implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == DGRAD) & (h.ticket_slot[0] == a.slot)
    )
    return mine & (h.acting[a.slot] == 1)


@STEPS("tickets.wgrad-redeems-its-own", "commit_wgrad", "abort_wgrad")
def wgrad_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The end of a dW is accepted once, from the check that began it."""
    mine = implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == WGRAD) & (h.ticket_slot[0] == a.slot)
    )
    return mine & (h.acting[a.slot] == 1)


@STEPS("tickets.refresh-redeems-its-own", "commit_refresh", "abort_refresh")
def refresh_redeems_its_own(st: State, h: History, a: Args) -> Truth:
    """The end of a refresh is accepted once, from the check that began it."""
    return implies(
        a.ticket == h.ticket[0], (h.outstanding[0] == REFRESH) & (h.ticket_stage[0] == a.stage)
    )


# Assumed


@ASSUMED("ownership.epochs-from-zero", "reserve", "bind", "check_forward")
def epochs_from_zero(st: State, h: History, a: Args) -> Truth:
    """Keys count epochs from zero."""
    return 0 <= a.key.epoch


@ASSUMED("ownership.keys-of-now", "reserve", "bind", "check_forward", without="version")
def keys_of_now(st: State, h: History, a: Args) -> Truth:
    """Where version is left out, the caller's keys are of the current weights."""
    return a.key.epoch == h.weights[0]


@ASSUMED("epoch.commits-of-now", "commit_epoch", without="version")
def commits_of_now(st: State, h: History, a: Args) -> Truth:
    """Where version is left out, the caller commits the current epoch."""
    return a.epoch == h.weights[0]


@ASSUMED("persistence.epochs-from-zero", "restore")
def checkpoints_from_zero(st: State, h: History, a: Args) -> Truth:
    """So do checkpoints."""
    return 0 <= a.epoch


@ASSUMED("persistence.fresh-incarnation", "restore")
def fresh_incarnation(st: State, h: History, a: Args) -> Truth:
    """A restore draws an incarnation that no earlier one had; 64 random bits make it so."""
    earlier = (h.issued[0] == 1) & (h.ref_incarnation[0] != st.incarnation[0])
    return implies(earlier, a.incarnation != h.ref_incarnation[0])


@ORIGIN("ownership.cells-counted", c="cell")
def cells_counted(st: State, h: History, c: Index) -> Truth:
    """A stage's cells, of which it is configured to have so many, can be numbered:"""
    g, place = st.stage_of[c], h.place[c]
    return (0 <= place) & (place < st.cells[g]) & (h.placed[g, place] == c)


@ORIGIN("ownership.cell-numbers-used", g="stage", i="place")
def cell_numbers_used(st: State, h: History, g: Index, i: Index) -> Truth:
    """every number names one of them."""
    cell = h.placed[g, i]
    return implies((0 <= i) & (i < st.cells[g]), (st.stage_of[cell] == g) & (h.place[cell] == i))


@ORIGIN("capture.slots-counted", s="slot")
def slots_counted(st: State, h: History, s: Index) -> Truth:
    """A pool's slots can be numbered:"""
    p, seat = st.pool_of[s], h.seat[s]
    return (0 <= seat) & (seat < h.slots[p]) & (h.seated[p, seat] == s)


@ORIGIN("capture.slot-numbers-used", p="pool", i="place")
def slot_numbers_used(st: State, h: History, p: Index, i: Index) -> Truth:
    """every number names one of them."""
    s = h.seated[p, i]
    named = (s != NO_SLOT) & (st.pool_of[s] == p) & (h.seat[s] == i)
    return implies((0 <= i) & (i < h.slots[p]), named)


@ORIGIN("capture.slot-numbers", p="pool")
def slot_numbers(st: State, h: History, p: Index) -> Truth:
    """There are as many numbers as slots, perhaps none."""
    return 0 <= h.slots[p]
