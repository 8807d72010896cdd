"""
Invariants of the weights, of the caches of quantized weights, and of scaling state.

A cache that is marked fresh holds the current weights. All forwards of an epoch read the same fill
of the cache, made just before the first forward. One action at a time updates a domain's scaling
state, the effect token counts the updates, and broken state is marked.
"""

from __future__ import annotations

from qeffect.spec.constants import NEVER, NO_SLOT, NO_STAGE, RESERVED
from qeffect.spec.predicates import Register, implies

from .words import (
    History,
    Index,
    State,
    Truth,
    domain_of_slot,
    in_flight,
    live,
    now,
    retained,
    update_in_flight,
    updating,
)

__all__ = ["HISTORY"]

#: Proved: lemmas about weights, caches and scaling state.
HISTORY = Register()


# Version: weights, and what the caches hold


@HISTORY("version.fill-in-progress", g="stage")
def fill_in_progress(st: State, h: History, g: Index) -> Truth:
    """The fill of a refresh in flight was not lost."""
    return implies(st.refreshing[g] != 0, h.lost[g] == 0)


@HISTORY("version.filled-by-forward", s="slot", g="stage")
def filled_by_forward(st: State, h: History, s: Index, g: Index) -> Truth:
    """The F that fills a cache is in flight on a slot of its stage, and its fill was not lost."""
    here = (st.filling[g] == st.held[s]) & (st.held[s] != 0)
    forward = live(st, s) & (st.consumers[s] == RESERVED) & (st.slot_stage[s] == g)
    fills = forward & (h.filling[s] != 0) & (h.lost[g] == 0)
    return implies(here, fills) & implies(
        in_flight(st, s) & (st.consumers[s] == RESERVED) & (h.filling[s] != 0),
        st.filling[st.slot_stage[s]] == st.held[s],
    )


@HISTORY("version.tape-of-that-fill", needs="order", s="slot")
def tape_of_that_fill(st: State, h: History, s: Index) -> Truth:
    """A retained tape read the same fill as the first F of the epoch."""
    g = st.slot_stage[s]
    begun = retained(st, s) | (live(st, s) & in_flight(st, s))
    return implies(begun, (h.fill_read[s] == h.fill_of_epoch[g]) & (h.fill_of_epoch[g] != NEVER))


@HISTORY("version.filled-just-before", needs="order", g="stage")
def filled_just_before(st: State, h: History, g: Index) -> Truth:
    """Between a stage's refresh and its first forward, its domain makes no scaling update."""
    d = st.domain_of[g]
    waiting = (st.cache_epoch[g] == now(st, g)) & (h.fill_of_epoch[g] == NEVER)
    return implies(waiting, (st.refreshed[d] == g) & (h.filled_after[g] == h.updates[d]))


@HISTORY("version.undisturbed", needs="order", s="slot")
def undisturbed_fill(st: State, h: History, s: Index) -> Truth:
    """Between a stage's refresh and first F, no F of another stage and no dI is in flight."""
    waiting = st.refreshed[domain_of_slot(st, s)]
    own = (st.consumers[s] == RESERVED) & (waiting == st.slot_stage[s])
    return implies(update_in_flight(st, s), (waiting == NO_STAGE) | own)


@HISTORY("version.first-forward-shows", needs="order", g="stage")
def first_forward_shows(st: State, h: History, g: Index) -> Truth:
    """A stage's first forward in an epoch is counted, in flight, or recorded as failed."""
    d = st.domain_of[g]
    s = h.updater[d]
    flying = (s != NO_SLOT) & (st.held[s] != 0) & (st.consumers[s] == RESERVED)
    shows = (
        (h.forwards_of_epoch[g] != 0) | (st.poisoned[d] != 0) | (flying & (st.slot_stage[s] == g))
    )
    return implies(h.fill_of_epoch[g] != NEVER, shows)


@HISTORY("version.first-forward-reads", needs="order", s="slot")
def first_forward_reads(st: State, h: History, s: Index) -> Truth:
    """While a stage's first F is in flight, it fills the cache itself or follows a refresh."""
    g = st.slot_stage[s]
    first = in_flight(st, s) & (st.consumers[s] == RESERVED) & (st.forwards[g] == 0)
    followed = st.refreshed[domain_of_slot(st, s)] == g
    return implies(first, (st.filling[g] == st.held[s]) | followed)


@HISTORY("version.lost-in-use", needs="order", g="stage")
def lost_in_use(st: State, h: History, g: Index) -> Truth:
    """If an epoch lost a cache in use, the epoch is spoiled or the domain is poisoned."""
    lost, d = h.lost_in_use[g], st.domain_of[g]
    marked = (st.spoiled[g] == now(st, g)) | (st.poisoned[d] != 0)
    return implies(lost == now(st, g), marked) & (lost <= now(st, g))


@HISTORY("version.refresh-before-forwards", needs="order", g="stage")
def refresh_before_forwards(st: State, h: History, g: Index) -> Truth:
    """While a stage is refreshed, it has run no F, and no other stage awaits its first F."""
    waiting = st.refreshed[st.domain_of[g]]
    alone = (waiting == NO_STAGE) | (waiting == g)
    return implies(st.refreshing[g] != 0, (h.fill_of_epoch[g] == NEVER) & alone)


@HISTORY("version.evaluated-between-fills", needs="order", g="stage")
def evaluated_between_fills(st: State, h: History, g: Index) -> Truth:
    """While an evaluation is in flight no stage of its domain waits for its first forward."""
    return implies(st.evaluating[g] != 0, st.refreshed[st.domain_of[g]] == NO_STAGE)


# Order: scaling state


@HISTORY("order.position", d="domain")
def position(st: State, h: History, d: Index) -> Truth:
    """A domain's position counts the scaling updates of the current walk."""
    return st.position[d] == h.updates_of_walk[d]


@HISTORY("order.one-at-a-time", d="domain")
def one_at_a_time(st: State, h: History, d: Index) -> Truth:
    """At most one F, dI, refresh or evaluation is in flight in a domain, with its ticket."""
    s, g, e = h.updater[d], h.refresher[d], h.evaluator[d]
    tape = (s != NO_SLOT) & update_in_flight(st, s) & (domain_of_slot(st, s) == d)
    refresh = (g != NO_STAGE) & (st.domain_of[g] == d) & (st.busy[d] == st.refreshing[g])
    evaluation = (e != NO_STAGE) & (st.domain_of[e] == d) & (st.busy[d] == st.evaluating[e])
    idle = (st.busy[d] == 0) & (h.running[d] == 0)
    one = (tape & (st.busy[d] == st.held[s])) | refresh | evaluation
    return idle | ((st.busy[d] != 0) & (h.running[d] == 1) & one)


@HISTORY("order.broken", d="domain")
def broken(st: State, h: History, d: Index) -> Truth:
    """Broken scaling state is marked."""
    return implies(h.broken[d] != 0, st.poisoned[d] != 0)


@HISTORY("order.counts", g="stage")
def counts(st: State, h: History, g: Index) -> Truth:
    """The contract counts F over the whole epoch, and dI over the current walk."""
    counted = (st.forwards[g] == h.forwards_of_epoch[g]) & (
        st.dgrads[g] == h.num_dgrads[g] + h.num_skipped[g]
    )
    return counted & (h.num_forwards[g] <= h.forwards_of_epoch[g])


@HISTORY("order.touched", d="domain")
def touched(st: State, h: History, d: Index) -> Truth:
    """If scaling state was touched after the last commit, this is marked."""
    g, s, r = h.toucher[d], h.updater[d], h.refresher[d]
    forward = (s != NO_SLOT) & (st.held[s] == st.busy[d]) & (st.consumers[s] == RESERVED)
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
    """An F in flight is the last action that touched its domain."""
    forward = in_flight(st, s) & (st.consumers[s] == RESERVED)
    return implies(forward, h.toucher[domain_of_slot(st, s)] == st.slot_stage[s])


@HISTORY("order.tape-touches", s="slot")
def tape_touches(st: State, h: History, s: Index) -> Truth:
    """The forward of each tape has touched its domain's scaling state."""
    begun = retained(st, s) | in_flight(st, s)
    return implies(begun, h.touched[domain_of_slot(st, s)] != 0)


@HISTORY("order.scaled-by", s="slot")
def scaled_by(st: State, h: History, s: Index) -> Truth:
    """A tape records the right effect token for its scales; its domain's token has risen since."""
    d = domain_of_slot(st, s)
    before = (st.scaled_at[s] < st.token[d]) & (st.scaled_at[s] == h.scaled_by[s])
    return implies(retained(st, s), before)


@HISTORY("order.rolled-after", d="domain")
def rolled_after(st: State, h: History, d: Index) -> Truth:
    """A domain records the number of updates before its scales were last rolled."""
    return (st.rolled_at[d] == h.rolled_after[d]) & (st.rolled_at[d] <= st.token[d])


@HISTORY("order.rolled", s="slot")
def rolled(st: State, h: History, s: Index) -> Truth:
    """
    A tape's scales equal the domain's live scales while its forward is the latest of its domain. If
    scales move once per epoch, they are always equal.
    """
    d = domain_of_slot(st, s)
    live_now = h.rolls_seen[s] == h.rolls[d]
    latest = (st.scaled_at[s] == st.rolled_at[d]) == live_now
    still = implies(st.epoch_scales[d] != 0, live_now)
    return implies(retained(st, s), latest & still & (h.rolls_seen[s] <= h.rolls[d]))


# Order: scales that move once an epoch


@HISTORY("order.gathered", d="domain")
def gathered(st: State, h: History, d: Index) -> Truth:
    """A domain is marked if and only if an action gathered amaxes after its scales last moved."""
    once = st.epoch_scales[d] != 0
    marked = (st.gathered[d] != 0) == (h.gathers[d] != 0)
    return (0 <= h.gathers[d]) & marked & implies(st.gathered[d] != 0, once)


@HISTORY("order.final-has-gathered", g="stage")
def final_has_gathered(st: State, h: History, g: Index) -> Truth:
    """
    If a final stage's scales move once per epoch, its domain has gathered amaxes, until the update
    moves the scales.
    """
    d = st.domain_of[g]
    waits = (st.epoch_scales[d] != 0) & (st.optimizing[0] == 0) & (st.half_updated[0] == 0)
    return implies(waits & (st.final[g] == now(st, g)), st.gathered[d] != 0)


@HISTORY("order.forward-has-gathered", g="stage")
def forward_has_gathered(st: State, h: History, g: Index) -> Truth:
    """If a stage ran an F in the epoch, its domain has gathered amaxes until the scales move."""
    d = st.domain_of[g]
    waits = (st.epoch_scales[d] != 0) & (st.optimizing[0] == 0) & (st.half_updated[0] == 0)
    return implies(waits & (h.forwards_of_epoch[g] != 0), st.gathered[d] != 0)


@HISTORY("order.tape-has-gathered", s="slot")
def tape_has_gathered(st: State, h: History, s: Index) -> Truth:
    """If a tape is live after its F, its domain has gathered amaxes."""
    d = domain_of_slot(st, s)
    return implies(retained(st, s) & (st.epoch_scales[d] != 0), st.gathered[d] != 0)


@HISTORY("order.moved-in-update", g="stage")
def moved_in_update(st: State, h: History, g: Index) -> Truth:
    """
    While an update is in flight, a domain that has gathered amaxes has not moved its scales yet;
    every other domain has moved its scales once more than the number of ended updates.
    """
    d = st.domain_of[g]
    moved = h.moves[d] == h.commits[0] + 1
    waits = h.moves[d] == h.commits[0]
    once = (st.epoch_scales[d] != 0) & updating(st)
    return implies(once, ((st.gathered[d] != 0) & waits) | ((st.gathered[d] == 0) & moved))


@HISTORY("order.gathered-is-touched", d="domain")
def gathered_is_touched(st: State, h: History, d: Index) -> Truth:
    """
    If an action gathered amaxes after the scales last moved, scaling state was touched after the
    last commit.
    """
    return implies(h.gathers[d] != 0, h.touched[d] != 0)


# Order: random numbers


@HISTORY("order.drawn-at", s="slot")
def drawn_at(st: State, h: History, s: Index) -> Truth:
    """The memory records where the slot's latest reporting F began to draw random numbers."""
    return st.drawn_at[s] == h.drew_at[s]


@HISTORY("order.drawn", d="domain")
def drawn(st: State, h: History, d: Index) -> Truth:
    """The memory records where a domain's latest reporting F began to draw; no F began later."""
    latest = (st.drawn[d] == h.drew_last[d]) & (NEVER <= st.drawn[d])
    return latest & implies(h.repeats[d] != 0, h.number[0] <= st.drawn[d])
