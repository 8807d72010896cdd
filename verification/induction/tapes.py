"""
What is always true of slots, of the work in them, and of the tickets that are out.

A live slot holds one key's work, and its mask says exactly what of that work has run. Per weights,
F runs at most once, dI only after it, dW only after that and over every matrix. At most one action
is on a slot at a time. A reference matches only the work that it was handed out for, and a ticket
that is out finds, when it is redeemed, what was reserved for it.
"""

from __future__ import annotations

from qeffect.spec.constants import DGRAD_BIT, NO_SLOT, NO_STAGE, RESERVED, WGRAD_BIT
from qeffect.spec.predicates import Register, implies
from qeffect.spec.world import DGRAD, FORWARD, NONE, REFRESH, WGRAD

from .words import History, Index, State, Truth, awaits, live, now, retained

__all__ = ["HISTORY"]

#: Proved: of slots, cells, references and tickets.
HISTORY = Register()


# Ownership: who is in a slot, and how far its work has come


@HISTORY("ownership.acting", s="slot")
def acting(st: State, h: History, s: Index) -> Truth:
    """At most one action is in flight on a slot, and the ticket there is its own."""
    idle = (st.held[s] == 0) & (h.acting[s] == 0)
    return idle | ((st.held[s] != 0) & (h.acting[s] == 1))


@HISTORY("ownership.ran-is-marked", c="cell")
def ran_is_marked(st: State, h: History, c: Index) -> Truth:
    """A cell whose F ran is marked as forwarded."""
    return implies(h.ran_forward[c] != 0, st.forwarded[c] == now(st, st.stage_of[c]))


@HISTORY("ownership.progress", s="slot")
def progress(st: State, h: History, s: Index) -> Truth:
    """What a slot's mask says of its cell is what ran."""
    c = st.cell_at[s]
    claimed = implies(st.consumers[s] == RESERVED, h.ran_forward[c] == 0)
    forwarded = implies(retained(st, s), h.ran_forward[c] == 1)
    dgrad = implies(retained(st, s), awaits(st, s, DGRAD_BIT) == (h.ran_dgrad[c] == 0))
    wgrad = implies(retained(st, s), awaits(st, s, WGRAD_BIT) == (h.ran_wgrad[c] == 0))
    return claimed & forwarded & dgrad & wgrad


@HISTORY("ownership.deferred-whole", s="slot")
def deferred_whole(st: State, h: History, s: Index) -> Truth:
    """Between dI and dW a tape keeps deferred work of every matrix."""
    after_dgrad = retained(st, s) & (st.consumers[s] & DGRAD_BIT == 0)
    return implies(after_dgrad, h.queued[s] == st.matrices[st.slot_stage[s]])


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
    # An aborted tape's transfers are told with a reference of the generation before.
    last = mine & (st.generation[s] == h.ref_generation[0] + 1)
    moves = last & (st.consumers[s] == 0) & (st.moving[s] != 0)
    named = (st.cell_at[s] == h.ref_cell[0]) & (st.epoch_at[s] == h.ref_epoch[0])
    usable = mine & matches & live(st, s) & (retained(st, s) | (st.held[s] == 0))
    return (
        implies(issued, h.ref_generation[0] <= st.generation[s])
        & implies(issued & matches, ours)
        & implies(usable, h.issued[0] == 1)
        & implies(moves, (h.issued[0] == 1) & named)
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
        implies(kind == FORWARD, held & (st.consumers[s] == RESERVED))
        & implies(kind == DGRAD, held & retained(st, s) & awaits(st, s, DGRAD_BIT))
        & implies(
            kind == WGRAD,
            held & retained(st, s) & (st.consumers[s] & (DGRAD_BIT | WGRAD_BIT) == WGRAD_BIT),
        )
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
    forward = (st.consumers[s] == RESERVED) & (h.outstanding[0] == FORWARD)
    dgrad = retained(st, s) & awaits(st, s, DGRAD_BIT) & (h.outstanding[0] == DGRAD)
    wgrad = retained(st, s) & (st.consumers[s] & DGRAD_BIT == 0) & (h.outstanding[0] == WGRAD)
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
