"""
Lemmas about the contract's memory alone, which the induction needs besides the promises.

The lemmas hold in every reachable state. They are not promises: another kernel that keeps the
promises may need different lemmas.
"""

from __future__ import annotations

from qeffect.spec.constants import (
    BACK_BIT,
    COPY_BIT,
    DGRAD_BIT,
    GRAD_BIT,
    GROUP_BIT,
    IN_BIT,
    INPUT_BITS,
    NEVER,
    NO_SLOT,
    NO_STAGE,
    OUT_BIT,
    READ_BITS,
    RESERVED,
    WGRAD_BIT,
)
from qeffect.spec.predicates import Register, implies

from .words import Index, State, Truth, awaits, domain_of_slot, live, retained

__all__ = ["MEMORY"]

#: Proved: these lemmas, besides the promises about the memory only.
MEMORY = Register()


# Ownership: the consumers of a tape, and what is in flight on it


@MEMORY("ownership.consumers", s="slot")
def consumers(st: State, s: Index) -> Truth:
    """A retained tape waits only for configured consumers, dI before dW and gradient readers."""
    mask, owes = st.consumers[s], st.owes[st.slot_stage[s]]
    configured = (mask | owes) == owes
    before_dgrad = implies(
        (mask & DGRAD_BIT) != 0, (mask & (WGRAD_BIT | GRAD_BIT)) == (owes & (WGRAD_BIT | GRAD_BIT))
    )
    return implies(retained(st, s), configured & before_dgrad)


@MEMORY("ownership.held-is-live", s="slot")
def held_is_live(st: State, s: Index) -> Truth:
    """An action in flight has a live slot."""
    return implies(st.held[s] != 0, live(st, s))


@MEMORY("ownership.held-by-consumer", s="slot")
def held_by_consumer(st: State, s: Index) -> Truth:
    """If an action is in flight on a retained tape, the tape still waits for dI or dW."""
    waits = awaits(st, s, DGRAD_BIT) | awaits(st, s, WGRAD_BIT)
    return implies((st.held[s] != 0) & retained(st, s), waits)


@MEMORY("ownership.forwarded-marks", s="slot")
def forwarded_marks(st: State, s: Index) -> Truth:
    """A cell is marked as forwarded only after its forward was checked."""
    here = st.forwarded[st.cell_at[s]] == st.weight_epoch[st.slot_stage[s]]
    begun = retained(st, s) | (st.held[s] != 0)
    return implies(live(st, s), here == begun)


@MEMORY("ownership.reads-of-readers", s="slot")
def reads_of_readers(st: State, s: Index) -> Truth:
    """
    A live tape is read only by readers that it waits for, and its input gradient is read only after
    dI. A dW of another tape takes it only while it waits for dW and no action on it is in flight.
    """
    moving, mask = st.moving[s], st.consumers[s]
    reading = moving & READ_BITS
    known = (moving & ~(IN_BIT | BACK_BIT | READ_BITS)) == 0
    after_dgrad = implies((moving & GRAD_BIT) != 0, (mask & DGRAD_BIT) == 0)
    readers = (moving & (OUT_BIT | GRAD_BIT) & ~mask) == 0
    idle = (mask & (DGRAD_BIT | WGRAD_BIT) == WGRAD_BIT) & (st.held[s] == 0)
    taken = implies((moving & GROUP_BIT) != 0, idle)
    retained_or_not = implies(retained(st, s), readers & after_dgrad & taken)
    return known & retained_or_not & implies(mask == RESERVED, reading == 0)


@MEMORY("ownership.receives-under-way", s="slot")
def receives_under_way(st: State, s: Index) -> Truth:
    """A live tape receives the configured messages: its input before F, a gradient before dI."""
    moving, mask = st.moving[s], st.consumers[s]
    receives = st.receives[st.slot_stage[s]]
    wanted = ((moving & (IN_BIT | BACK_BIT)) & ~receives) == 0
    claimed = (mask == RESERVED) & (st.held[s] == 0)
    forwarded = retained(st, s) & awaits(st, s, DGRAD_BIT) & (st.held[s] == 0)
    given = implies((moving & IN_BIT) != 0, claimed) & implies((moving & BACK_BIT) != 0, forwarded)
    return implies(live(st, s), wanted & given & ((moving & st.arrived[s]) == 0))


@MEMORY("ownership.received-before-use", s="slot")
def received_before_use(st: State, s: Index) -> Truth:
    """
    A tape's messages arrived before their use, and the copy of its input was enqueued before its
    use.
    """
    arrived, receives = st.arrived[s], st.receives[st.slot_stage[s]]
    claimed = (st.consumers[s] == RESERVED) & (st.held[s] == 0)
    run = live(st, s) & ((st.consumers[s] != RESERVED) | (st.held[s] != 0))
    after_dgrad = retained(st, s) & ((st.held[s] != 0) | ~awaits(st, s, DGRAD_BIT))
    return (
        ((arrived & ~receives) == 0)
        & ((arrived & ~(IN_BIT | BACK_BIT | COPY_BIT)) == 0)
        & implies(st.consumers[s] == 0, arrived == 0)
        & implies(claimed, (arrived & BACK_BIT) == 0)
        & implies(run, ((receives & INPUT_BITS) == 0) | ((arrived & INPUT_BITS) != 0))
        & implies(after_dgrad, (receives & ~arrived & BACK_BIT) == 0)
    )


# Marks never have a future epoch, so that the next epoch begins without marks


@MEMORY("epoch.counts-from-zero", g="stage")
def counts_from_zero(st: State, g: Index) -> Truth:
    """Epochs count from zero, and a stage's marks name no epoch after the current one."""
    now = st.weight_epoch[g]
    return (0 <= now) & (st.spoiled[g] <= now) & (st.final[g] <= now)


@MEMORY("epoch.one", a="stage", b="stage")
def one_epoch(st: State, a: Index, b: Index) -> Truth:
    """All stages of a process are in one weight epoch."""
    return st.weight_epoch[a] == st.weight_epoch[b]


@MEMORY("ownership.forwarded-by-now", c="cell")
def forwarded_by_now(st: State, c: Index) -> Truth:
    """Every mark of a forward is of the current epoch."""
    return (st.forwarded[c] == NEVER) | (st.forwarded[c] == st.weight_epoch[st.stage_of[c]])


@MEMORY("ownership.skipped-by-now", c="cell")
def skipped_by_now(st: State, c: Index) -> Truth:
    """No cell is marked as left out in a future epoch."""
    return st.skipped[c] <= st.weight_epoch[st.stage_of[c]]


@MEMORY("ownership.skipped-is-counted", c="cell")
def skipped_is_counted(st: State, c: Index) -> Truth:
    """If no cell is counted as left out, no cell is left out."""
    none = st.skipped[c] != st.weight_epoch[st.stage_of[c]]
    return (0 <= st.skips[0]) & implies(st.skips[0] == 0, none)


@MEMORY("ownership.skipped-is-idle", c="cell")
def skipped_is_idle(st: State, c: Index) -> Truth:
    """A cell that the walk leaves out has no tape and no forward."""
    now = st.weight_epoch[st.stage_of[c]]
    idle = (st.slot_of[c] == NO_SLOT) & (st.forwarded[c] != now)
    return implies(st.skipped[c] == now, idle)


@MEMORY("arena.bound-by-now", c="cell")
def bound_by_now(st: State, c: Index) -> Truth:
    """No cell is marked as bound in a future epoch."""
    return st.bound[c] <= st.weight_epoch[st.stage_of[c]]


@MEMORY("arena.opened-by-now", c="cell")
def opened_by_now(st: State, c: Index) -> Truth:
    """No buffer is marked as opened in a future epoch."""
    now = st.weight_epoch[st.stage_of[c]]
    return (st.opened[st.buffer_of[c]] <= now) & (st.opened[st.shared_of[st.buffer_of[c]]] <= now)


# Version


@MEMORY("version.cache-by-now", g="stage")
def cache_by_now(st: State, g: Index) -> Truth:
    """No cache holds weights of a future epoch."""
    return (st.cache_epoch[g] == NEVER) | (
        (0 <= st.cache_epoch[g]) & (st.cache_epoch[g] <= st.weight_epoch[g])
    )


@MEMORY("version.refreshed-at-home", d="domain")
def refreshed_at_home(st: State, d: Index) -> Truth:
    """The stage whose first forward must come next belongs to the domain."""
    return implies(st.refreshed[d] != NO_STAGE, st.domain_of[st.refreshed[d]] == d)


# Tickets: a commit finds what its check reserved


@MEMORY("tickets.issued", s="slot")
def issued(st: State, s: Index) -> Truth:
    """Every ticket in flight on a slot was issued by an earlier check."""
    return (0 <= st.held[s]) & (st.held[s] <= st.serial[0])


@MEMORY("tickets.issued-to-refresh", g="stage")
def issued_to_refresh(st: State, g: Index) -> Truth:
    """Every ticket in flight on a stage's cache was issued by an earlier check."""
    refreshing = (0 <= st.refreshing[g]) & (st.refreshing[g] <= st.serial[0])
    return refreshing & (0 <= st.filling[g]) & (st.filling[g] <= st.serial[0])


@MEMORY("tickets.issued-to-update")
def issued_to_update(st: State) -> Truth:
    """The ticket of an update in flight was issued by an earlier check."""
    return (0 <= st.optimizing[0]) & (st.optimizing[0] <= st.serial[0])


@MEMORY("tickets.issued-to-evaluation", g="stage")
def issued_to_evaluation(st: State, g: Index) -> Truth:
    """The ticket of an evaluation in flight was issued by an earlier check."""
    return (0 <= st.evaluating[g]) & (st.evaluating[g] <= st.serial[0])


@MEMORY("tickets.one-evaluation", a="stage", b="stage")
def one_evaluation(st: State, a: Index, b: Index) -> Truth:
    """No ticket belongs to two evaluations, or to a refresh and an evaluation."""
    one = implies((st.evaluating[a] == st.evaluating[b]) & (st.evaluating[a] != 0), a == b)
    return one & implies(st.refreshing[a] == st.evaluating[b], st.refreshing[a] == 0)


@MEMORY("tickets.tape-or-evaluation", s="slot", g="stage")
def tape_or_evaluation(st: State, s: Index, g: Index) -> Truth:
    """No ticket is in flight on a slot and belongs to an evaluation."""
    return implies(st.held[s] == st.evaluating[g], st.held[s] == 0)


@MEMORY("tickets.one-stage", a="stage", b="stage")
def one_stage(st: State, a: Index, b: Index) -> Truth:
    """No ticket belongs to two refreshes."""
    return implies((st.refreshing[a] == st.refreshing[b]) & (st.refreshing[a] != 0), a == b)


@MEMORY("tickets.tape-or-refresh", s="slot", g="stage")
def tape_or_refresh(st: State, s: Index, g: Index) -> Truth:
    """No ticket is in flight on a slot and belongs to a refresh."""
    return implies(st.held[s] == st.refreshing[g], st.held[s] == 0)


@MEMORY("tickets.one-slot", a="slot", b="slot")
def one_slot(st: State, a: Index, b: Index) -> Truth:
    """No ticket is in flight on two slots."""
    return implies((st.held[a] == st.held[b]) & (st.held[a] != 0), a == b)


@MEMORY("order.busy-with-forward-or-dgrad", s="slot")
def busy_with_forward_or_dgrad(st: State, s: Index) -> Truth:
    """A domain is busy with the F or dI in flight on one of its slots."""
    updates = (st.consumers[s] == RESERVED) | awaits(st, s, DGRAD_BIT)
    return implies((st.held[s] != 0) & updates, st.busy[domain_of_slot(st, s)] == st.held[s])


@MEMORY("order.busy-with-refresh", needs="version", g="stage")
def busy_with_refresh(st: State, g: Index) -> Truth:
    """A domain is busy with the refresh in flight on one of its stages."""
    return implies(st.refreshing[g] != 0, st.busy[st.domain_of[g]] == st.refreshing[g])


@MEMORY("order.busy-with-evaluation", g="stage")
def busy_with_evaluation(st: State, g: Index) -> Truth:
    """A domain is busy with the evaluation in flight on one of its stages."""
    return implies(st.evaluating[g] != 0, st.busy[st.domain_of[g]] == st.evaluating[g])


@MEMORY("order.issued-to-domain", d="domain")
def issued_to_domain(st: State, d: Index) -> Truth:
    """Every ticket in flight on a domain was issued by an earlier check."""
    return (0 <= st.busy[d]) & (st.busy[d] <= st.serial[0])


@MEMORY("order.tokens-from-zero", d="domain")
def tokens_from_zero(st: State, d: Index) -> Truth:
    """The effect token of a domain is at least zero."""
    return 0 <= st.token[d]


@MEMORY("order.rolls-from-zero", d="domain")
def rolls_from_zero(st: State, d: Index) -> Truth:
    """The token at which a domain's scales last moved is at least zero."""
    return 0 <= st.rolled_at[d]


@MEMORY("order.scales-from-zero", s="slot")
def scales_from_zero(st: State, s: Index) -> Truth:
    """The token at which a tape's F ran is at least zero."""
    return 0 <= st.scaled_at[s]


@MEMORY("arena.writing-with-wgrad", s="slot")
def writing_with_wgrad(st: State, s: Index) -> Truth:
    """The dW in flight on a slot has reserved the buffer that it writes."""
    wgrad = retained(st, s) & (st.consumers[s] & DGRAD_BIT == 0)
    own, shared = st.buffer_of[st.cell_at[s]], st.shared_of[st.buffer_of[st.cell_at[s]]]
    reserved = (st.writing[own] == st.held[s]) & (st.writing[shared] == st.held[s])
    return implies((st.held[s] != 0) & wgrad, reserved)


# Completion


@MEMORY("completion.joins-behind-work", l="link")
def joins_behind_work(st: State, l: Index) -> Truth:  # noqa: E741 - a link
    """No graph stream has waited for more work than its caller submitted."""
    return st.joined[l] <= st.submitted[l]


@MEMORY("completion.waits-behind-work", l="link")
def waits_behind_work(st: State, l: Index) -> Truth:  # noqa: E741 - a link
    """A caller has waited only for work that was enqueued."""
    return (st.joined[l] <= st.submitted[l]) & (st.waited[l] <= st.replays[st.domain_at[l]])


@MEMORY("completion.output-behind-work", s="slot")
def output_behind_work(st: State, s: Index) -> Truth:
    """A slot's output comes from a replay that was enqueued."""
    return st.produced[s] <= st.replays[domain_of_slot(st, s)]


@MEMORY("completion.gradients-behind-work", g="stage")
def gradients_behind_work(st: State, g: Index) -> Truth:
    """A stage's gradients come from a replay that was enqueued."""
    return st.landed[g] <= st.replays[st.domain_of[g]]


@MEMORY("completion.replays-from-zero", d="domain")
def replays_from_zero(st: State, d: Index) -> Truth:
    """The number of replays in a domain is at least zero."""
    return 0 <= st.replays[d]


@MEMORY("completion.waits-from-zero", l="link")
def waits_from_zero(st: State, l: Index) -> Truth:  # noqa: E741 - a link
    """The number of replays for which a caller has waited is at least zero."""
    return 0 <= st.waited[l]


# Reduction


@MEMORY("reduction.reduced-by-now", b="bucket")
def reduced_by_now(st: State, b: Index) -> Truth:
    """
    No bucket is marked as reduced in a future epoch, and no bucket whose reduction is running is
    marked as reduced in the current epoch.
    """
    now = st.weight_epoch[st.stage_at[b]]
    return (st.reduced[b] <= now) & implies(st.reducing[b] != 0, st.reduced[b] != now)
