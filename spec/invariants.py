"""
What is always true of the contract's memory, and what its configuration must satisfy.

Read it beside ``qeffect.relations.columns`` and the columns that each relation declares. Every
predicate holds in every reachable state, for all values of its variables.
"""

from __future__ import annotations

from typing import Any

from .predicates import DI, DW, GRAD, NEVER, NO_SLOT, NO_STAGE, RESERVED, Register, implies

__all__ = ["CONFIGURATION", "INVARIANTS"]

#: Assumed: what a configuration is checked for when a contract is built from it.
CONFIGURATION = Register()
#: Proved: what every transition keeps.
INVARIANTS = Register()

State = Any
Index = Any
Truth = Any


def free(st: State, slot: Index) -> Truth:
    return st.pending[slot] == 0


def live(st: State, slot: Index) -> Truth:
    """Claimed by a key: its forward is still to come, or some consumer is."""
    return st.pending[slot] != 0


def retained(st: State, slot: Index) -> Truth:
    """The forward has run and its work is kept for the consumers in the mask."""
    return (st.pending[slot] != 0) & (st.pending[slot] != RESERVED)


def awaits(st: State, slot: Index, bit: int) -> Truth:
    return (st.pending[slot] & bit) != 0


def domain_of_slot(st: State, slot: Index) -> Any:
    return st.domain_of[st.slot_stage[slot]]


# Configuration


@CONFIGURATION("ownership.slots-have-stages", s="slot")
def slots_have_stages(st: State, s: Index) -> Truth:
    """Every slot belongs to a stage."""
    return st.slot_stage[s] != NO_STAGE


@CONFIGURATION("ownership.cells-have-stages", c="cell")
def cells_have_stages(st: State, c: Index) -> Truth:
    """Every cell belongs to a stage."""
    return st.stage_of[c] != NO_STAGE


@CONFIGURATION("ownership.tapes-owe-both", g="stage")
def tapes_owe_both(st: State, g: Index) -> Truth:
    """A fresh tape waits for its dI and its dW, and perhaps for readers."""
    return ((st.owes[g] & (DI | DW)) == (DI | DW)) & ((st.owes[g] & RESERVED) == 0)


@CONFIGURATION("ownership.cells-counted", g="stage")
def cells_counted(st: State, g: Index) -> Truth:
    """Every stage has a cell."""
    return 1 <= st.cells[g]


@CONFIGURATION("ownership.generations-counted")
def generations_counted(st: State) -> Truth:
    """Generations begin at zero."""
    return 0 <= st.generation_max[0]


@CONFIGURATION("arena.buffers-apart", a="cell", b="cell")
def buffers_apart(st: State, a: Index, b: Index) -> Truth:
    """Stages do not share gradient buffers."""
    return implies(st.buffer_of[a] == st.buffer_of[b], st.stage_of[a] == st.stage_of[b])


@CONFIGURATION("capture.pools-apart", a="slot", b="slot")
def pools_apart(st: State, a: Index, b: Index) -> Truth:
    """State domains do not share capture memory."""
    return implies(st.pool_of[a] == st.pool_of[b], domain_of_slot(st, a) == domain_of_slot(st, b))


# Ownership: one key, one slot, one generation


@INVARIANTS("ownership.injective", a="cell", b="cell")
def injective(st: State, a: Index, b: Index) -> Truth:
    """Two live cells are in two slots."""
    return implies((st.slot_of[a] == st.slot_of[b]) & (st.slot_of[a] != NO_SLOT), a == b)


@INVARIANTS("ownership.cell-names-its-slot", c="cell")
def cell_names_its_slot(st: State, c: Index) -> Truth:
    """The slot of a live cell is live and holds that cell."""
    slot = st.slot_of[c]
    return implies(slot != NO_SLOT, live(st, slot) & (st.cell_at[slot] == c))


@INVARIANTS("ownership.slot-names-its-cell", s="slot")
def slot_names_its_cell(st: State, s: Index) -> Truth:
    """The cell in a live slot is live there."""
    return implies(live(st, s), st.slot_of[st.cell_at[s]] == s)


@INVARIANTS("ownership.own-stage", s="slot")
def own_stage(st: State, s: Index) -> Truth:
    """A live slot holds a cell of its own stage."""
    return implies(live(st, s), st.stage_of[st.cell_at[s]] == st.slot_stage[s])


@INVARIANTS("ownership.consumers", s="slot")
def consumers(st: State, s: Index) -> Truth:
    """A retained tape waits only for configured consumers, dI before dW and gradient readers."""
    mask, owes = st.pending[s], st.owes[st.slot_stage[s]]
    configured = (mask | owes) == owes
    before_dgrad = implies((mask & DI) != 0, (mask & (DW | GRAD)) == (owes & (DW | GRAD)))
    return implies(retained(st, s), configured & before_dgrad)


@INVARIANTS("ownership.generation-bounded", s="slot")
def generation_bounded(st: State, s: Index) -> Truth:
    """No generation passes the maximum, and a live slot can still be released."""
    bounded = (0 <= st.generation[s]) & (st.generation[s] <= st.generation_max[0])
    return bounded & implies(live(st, s), st.generation[s] != st.generation_max[0])


@INVARIANTS("ownership.held-is-live", s="slot")
def held_is_live(st: State, s: Index) -> Truth:
    """An action in flight has a live slot."""
    return implies(st.held[s] != 0, live(st, s))


@INVARIANTS("ownership.live-epoch", s="slot")
def live_epoch(st: State, s: Index) -> Truth:
    """A live slot holds a key of the current weight epoch."""
    return implies(live(st, s), st.epoch_at[s] == st.weight_epoch[st.slot_stage[s]])


@INVARIANTS("ownership.forwarded-marks", s="slot")
def forwarded_marks(st: State, s: Index) -> Truth:
    """A cell is marked as forwarded once its forward has been checked, not before."""
    here = st.forwarded[st.cell_at[s]] == st.weight_epoch[st.slot_stage[s]]
    begun = retained(st, s) | (st.held[s] != 0)
    return implies(live(st, s), here == begun)


# Marks of an epoch are never ahead of it, so that the next epoch begins with none


@INVARIANTS("epoch.counts-from-zero", g="stage")
def counts_from_zero(st: State, g: Index) -> Truth:
    """Epochs count from zero, and a stage's marks are at most the current one."""
    now = st.weight_epoch[g]
    return (0 <= now) & (st.spoiled[g] <= now) & (st.final[g] <= now)


@INVARIANTS("ownership.forwarded-by-now", c="cell")
def forwarded_by_now(st: State, c: Index) -> Truth:
    """No cell was forwarded in an epoch to come."""
    return st.forwarded[c] <= st.weight_epoch[st.stage_of[c]]


@INVARIANTS("arena.bound-by-now", c="cell")
def bound_by_now(st: State, c: Index) -> Truth:
    """No cell was bound in an epoch to come."""
    return st.bound[c] <= st.weight_epoch[st.stage_of[c]]


@INVARIANTS("arena.opened-by-now", c="cell")
def opened_by_now(st: State, c: Index) -> Truth:
    """No buffer was opened in an epoch to come."""
    return st.opened[st.buffer_of[c]] <= st.weight_epoch[st.stage_of[c]]


# Version


@INVARIANTS("version.cache-by-now", g="stage")
def cache_by_now(st: State, g: Index) -> Truth:
    """No cache holds weights to come."""
    return (st.cache_epoch[g] == NEVER) | (
        (0 <= st.cache_epoch[g]) & (st.cache_epoch[g] <= st.weight_epoch[g])
    )


@INVARIANTS("version.refreshed-at-home", d="domain")
def refreshed_at_home(st: State, d: Index) -> Truth:
    """The stage whose first forward must come next is one of the domain."""
    return implies(st.refreshed[d] != NO_STAGE, st.domain_of[st.refreshed[d]] == d)


# Tickets: what a check reserved is what its commit finds


@INVARIANTS("tickets.issued", s="slot")
def issued(st: State, s: Index) -> Truth:
    """Every ticket in flight on a slot was issued."""
    return (0 <= st.held[s]) & (st.held[s] <= st.serial[0])


@INVARIANTS("tickets.issued-to-refresh", g="stage")
def issued_to_refresh(st: State, g: Index) -> Truth:
    """So was every ticket in flight on a stage's cache."""
    refreshing = (0 <= st.refreshing[g]) & (st.refreshing[g] <= st.serial[0])
    return refreshing & (0 <= st.filling[g]) & (st.filling[g] <= st.serial[0])


@INVARIANTS("tickets.one-stage", a="stage", b="stage")
def one_stage(st: State, a: Index, b: Index) -> Truth:
    """No ticket is of two refreshes."""
    return implies((st.refreshing[a] == st.refreshing[b]) & (st.refreshing[a] != 0), a == b)


@INVARIANTS("tickets.tape-or-refresh", s="slot", g="stage")
def tape_or_refresh(st: State, s: Index, g: Index) -> Truth:
    """No ticket is in flight on a slot and of a refresh."""
    return implies(st.held[s] == st.refreshing[g], st.held[s] == 0)


@INVARIANTS("tickets.one-slot", a="slot", b="slot")
def one_slot(st: State, a: Index, b: Index) -> Truth:
    """No ticket is in flight on two slots."""
    return implies((st.held[a] == st.held[b]) & (st.held[a] != 0), a == b)


@INVARIANTS("order.busy-with-forward-or-dgrad", s="slot")
def busy_with_forward_or_dgrad(st: State, s: Index) -> Truth:
    """A domain is busy with the F or dI in flight on one of its slots."""
    updates = (st.pending[s] == RESERVED) | awaits(st, s, DI)
    return implies((st.held[s] != 0) & updates, st.busy[domain_of_slot(st, s)] == st.held[s])


@INVARIANTS("order.busy-with-refresh", needs="version", g="stage")
def busy_with_refresh(st: State, g: Index) -> Truth:
    """A domain is busy with the refresh in flight on one of its stages."""
    return implies(st.refreshing[g] != 0, st.busy[st.domain_of[g]] == st.refreshing[g])


@INVARIANTS("arena.writing-with-wgrad", s="slot")
def writing_with_wgrad(st: State, s: Index) -> Truth:
    """A buffer is reserved for the dW in flight on a slot."""
    wgrad = retained(st, s) & (st.pending[s] & DI == 0)
    buffer = st.buffer_of[st.cell_at[s]]
    return implies((st.held[s] != 0) & wgrad, st.writing[buffer] == st.held[s])


# Completion


@INVARIANTS("completion.waits-behind-work", l="link")
def waits_behind_work(st: State, l: Index) -> Truth:  # noqa: E741 - a link
    """Nothing waits for work that was not enqueued."""
    return (st.joined[l] <= st.submitted[l]) & (st.waited[l] <= st.replays[st.domain_at[l]])


@INVARIANTS("completion.output-behind-work", s="slot")
def output_behind_work(st: State, s: Index) -> Truth:
    """A slot's output comes from a replay that was enqueued."""
    return st.produced[s] <= st.replays[domain_of_slot(st, s)]


@INVARIANTS("completion.gradients-behind-work", g="stage")
def gradients_behind_work(st: State, g: Index) -> Truth:
    """A stage's gradients come from a replay that was enqueued."""
    return st.landed[g] <= st.replays[st.domain_of[g]]


# Reduction


@INVARIANTS("reduction.of-final-gradients", g="stage")
def of_final_gradients(st: State, g: Index) -> Truth:
    """Only a finalized stage reduces, and only one that owes a reduction."""
    final = st.final[g] == st.weight_epoch[g]
    return implies(st.reducing[g] != 0, final & (st.unreduced[g] != 0))


@INVARIANTS("reduction.owed-by-final", g="stage")
def owed_by_final(st: State, g: Index) -> Truth:
    """Only a stage that was finalized in this epoch owes a reduction."""
    now = st.weight_epoch[g]
    return implies(st.unreduced[g] != 0, (st.final[g] == now) | (st.spoiled[g] == now))
