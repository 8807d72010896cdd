"""
Invariants of slots, of the work in them, and of outstanding tickets.

A live slot holds the work of one key, and the slot's mask tells exactly which actions of that work
have run. Per weight epoch, F runs at most once, dI only after F, and dW only after dI and for every
matrix. At most one action is in flight on a slot. A reference matches only the work that it was
issued for. What a check reserved for its ticket is still reserved when the ticket is committed.
"""

from __future__ import annotations

from qeffect.spec.constants import (
    DGRAD_BIT,
    GRAD_BIT,
    NO_SLOT,
    NO_STAGE,
    OUT_BIT,
    RESERVED,
    WGRAD_BIT,
)
from qeffect.spec.predicates import Register, implies
from qeffect.spec.world import DGRAD, EVALUATION, FORWARD, NONE, REFRESH, UPDATE, WGRAD

from .words import History, Index, State, Truth, awaits, live, now, retained

__all__ = ["HISTORY"]

#: Proved: lemmas about slots, cells, references and tickets.
HISTORY = Register()


# Ownership: the tenant of a slot, and the progress of its work


@HISTORY("ownership.acting", s="slot")
def acting(st: State, h: History, s: Index) -> Truth:
    """At most one action is in flight on a slot, and the slot has the ticket of that action."""
    idle = (st.held[s] == 0) & (h.acting[s] == 0)
    return idle | ((st.held[s] != 0) & (h.acting[s] == 1))


@HISTORY("ownership.ran-is-marked", c="cell")
def ran_is_marked(st: State, h: History, c: Index) -> Truth:
    """A cell whose F ran is marked as forwarded."""
    return implies(h.ran_forward[c] != 0, st.forwarded[c] == now(st, st.stage_of[c]))


@HISTORY("ownership.skipped-is-marked", c="cell")
def skipped_is_marked(st: State, h: History, c: Index) -> Truth:
    """A walk leaves a cell out at most once; the cell is marked exactly if the walk left it out."""
    marked = st.skipped[c] == now(st, st.stage_of[c])
    return ((h.skipped[c] == 0) | (h.skipped[c] == 1)) & (marked == (h.skipped[c] == 1))


@HISTORY("ownership.progress", s="slot")
def progress(st: State, h: History, s: Index) -> Truth:
    """A slot's mask tells exactly which actions of the slot's cell have run."""
    c = st.cell_at[s]
    claimed = implies(st.consumers[s] == RESERVED, h.ran_forward[c] == 0)
    forwarded = implies(retained(st, s), h.ran_forward[c] == 1)
    dgrad = implies(retained(st, s), awaits(st, s, DGRAD_BIT) == (h.ran_dgrad[c] == 0))
    wgrad = implies(retained(st, s), awaits(st, s, WGRAD_BIT) == (h.ran_wgrad[c] == 0))
    return claimed & forwarded & dgrad & wgrad


@HISTORY("ownership.reads-began", s="slot")
def reads_began(st: State, h: History, s: Index) -> Truth:
    """If a read of a tape is running, or is no longer awaited, the read has begun."""
    owes, mask, c = st.owes[st.slot_stage[s]], st.consumers[s], st.cell_at[s]
    under_way = st.moving[s]
    output = ((under_way & OUT_BIT) != 0) | (((owes & OUT_BIT) != 0) & ((mask & OUT_BIT) == 0))
    gradient = ((under_way & GRAD_BIT) != 0) | (((owes & GRAD_BIT) != 0) & ((mask & GRAD_BIT) == 0))
    return implies(retained(st, s) & output, h.output_read[c] == 1) & implies(
        retained(st, s) & gradient, h.gradient_read[c] == 1
    )


@HISTORY("ownership.kept-or-done", c="cell")
def kept_or_done(st: State, h: History, c: Index) -> Truth:
    """
    After the F of a cell, one of three things holds: its tape is live; or its dI ran, and the input
    gradient was read if it has a reader; or a failure spoiled the epoch of its stage.
    """
    g = st.stage_of[c]
    read = implies((st.owes[g] & GRAD_BIT) != 0, h.gradient_read[c] == 1)
    done = (h.ran_dgrad[c] == 1) & read
    lost = h.spoiled[g] == now(st, g)
    return implies(h.ran_forward[c] == 1, (st.slot_of[c] != NO_SLOT) | done | lost)


@HISTORY("ownership.deferred-whole", s="slot")
def deferred_whole(st: State, h: History, s: Index) -> Truth:
    """Between dI and dW a tape keeps deferred work of every matrix."""
    after_dgrad = retained(st, s) & (st.consumers[s] & DGRAD_BIT == 0)
    return implies(after_dgrad, h.queued[s] == st.matrices[st.slot_stage[s]])


@HISTORY("ownership.reference", s="slot")
def reference(st: State, h: History, s: Index) -> Truth:
    """A reference matches if and only if it was issued for the work in its slot."""
    mine = (s == h.ref_slot[0]) & (st.incarnation[0] == h.ref_incarnation[0])
    issued = mine & (h.issued[0] == 1)
    matches = st.generation[s] == h.ref_generation[0]
    ours = (
        live(st, s)
        & (st.cell_at[s] == h.ref_cell[0])
        & (st.epoch_at[s] == h.ref_epoch[0])
        & (h.dead[0] == 0)
    )
    # Transfers of an aborted tape end with a reference of the previous generation.
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
    """A reference can end only after it was issued."""
    flags = ((h.issued[0] == 0) | (h.issued[0] == 1)) & ((h.dead[0] == 0) | (h.dead[0] == 1))
    return flags & (h.dead[0] <= h.issued[0])


# Tickets: the commit of an outstanding ticket finds that ticket


@HISTORY("tickets.outstanding")
def outstanding(st: State, h: History) -> Truth:
    """While a ticket is outstanding, everything that its check reserved stays reserved."""
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
    """While a refresh is outstanding, everything that its check reserved stays reserved."""
    t, g = h.ticket[0], h.ticket_stage[0]
    kept = (g != NO_STAGE) & (st.refreshing[g] == t) & (t != 0)
    return implies(h.outstanding[0] == REFRESH, kept)


@HISTORY("tickets.nothing-else", s="slot")
def nothing_else(st: State, h: History, s: Index) -> Truth:
    """A ticket in flight on a slot is outstanding, and its kind follows from the mask."""
    mine = (st.held[s] == h.ticket[0]) & (h.ticket[0] != 0)
    forward = (st.consumers[s] == RESERVED) & (h.outstanding[0] == FORWARD)
    dgrad = retained(st, s) & awaits(st, s, DGRAD_BIT) & (h.outstanding[0] == DGRAD)
    wgrad = retained(st, s) & (st.consumers[s] & DGRAD_BIT == 0) & (h.outstanding[0] == WGRAD)
    return implies(mine, (h.ticket_slot[0] == s) & (forward | dgrad | wgrad))


@HISTORY("tickets.nothing-else-refreshes", g="stage")
def nothing_else_refreshes(st: State, h: History, g: Index) -> Truth:
    """The ticket of a refresh in flight is outstanding, as a refresh of that stage."""
    mine = (st.refreshing[g] == h.ticket[0]) & (h.ticket[0] != 0)
    return implies(mine, (h.outstanding[0] == REFRESH) & (h.ticket_stage[0] == g))


@HISTORY("tickets.outstanding-evaluation")
def outstanding_evaluation(st: State, h: History) -> Truth:
    """While an evaluation is outstanding, everything that its check reserved stays reserved."""
    t, g = h.ticket[0], h.ticket_stage[0]
    kept = (g != NO_STAGE) & (st.evaluating[g] == t) & (t != 0)
    return implies(h.outstanding[0] == EVALUATION, kept)


@HISTORY("tickets.nothing-else-evaluates", g="stage")
def nothing_else_evaluates(st: State, h: History, g: Index) -> Truth:
    """The ticket of an evaluation in flight is outstanding, as an evaluation of that stage."""
    mine = (st.evaluating[g] == h.ticket[0]) & (h.ticket[0] != 0)
    return implies(mine, (h.outstanding[0] == EVALUATION) & (h.ticket_stage[0] == g))


@HISTORY("tickets.outstanding-update")
def outstanding_update(st: State, h: History) -> Truth:
    """An update is outstanding if and only if it is in flight."""
    mine = (st.optimizing[0] == h.ticket[0]) & (h.ticket[0] != 0)
    return (h.outstanding[0] == UPDATE) == mine


@HISTORY("tickets.none-before-issue")
def none_before_issue(st: State, h: History) -> Truth:
    """A ticket is not outstanding before it was issued."""
    return implies(h.outstanding[0] != NONE, h.ticket[0] <= st.serial[0])
