"""
Invariants of the marks in the contract's state that make a guard refuse: each mark has a reason in
the physical history.

The other lemmas state that the contract marks every forbidden situation, so that a guard sees it.
The lemmas here state the converse: every mark stands for a forbidden situation. The proof that
every legal check is accepted needs them.
"""

from __future__ import annotations

from qeffect.spec.constants import NEVER, NO_SLOT, NO_STAGE, RESERVED
from qeffect.spec.predicates import Register, implies

from .words import History, Index, State, Truth, domain_of_slot, in_flight, live, now, retained

__all__ = ["HISTORY"]

#: Proved: lemmas about the marks that stop an action.
HISTORY = Register()


@HISTORY("ownership.good-reference-finds-its-work")
def finds_its_work(st: State, h: History) -> Truth:
    """
    As long as the work that a reference was issued for exists, the reference names this work in the
    current incarnation.
    """
    s = h.ref_slot[0]
    there = live(st, s) & (st.generation[s] == h.ref_generation[0])
    current = (s != NO_SLOT) & (st.incarnation[0] == h.ref_incarnation[0])
    return implies((h.issued[0] == 1) & (h.dead[0] == 0), there & current)


@HISTORY("ownership.forwarded-has-a-reason", c="cell")
def forwarded_has_a_reason(st: State, h: History, c: Index) -> Truth:
    """A cell is marked as forwarded because its F ran or is running, or something failed."""
    g, s = st.stage_of[c], st.slot_of[c]
    running = (s != NO_SLOT) & in_flight(st, s) & (st.consumers[s] == RESERVED)
    reason = (h.ran_forward[c] == 1) | running | (h.spoiled[g] == now(st, g))
    return implies(st.forwarded[c] == now(st, g), reason)


@HISTORY("order.poison-has-a-reason", d="domain")
def poison_has_a_reason(st: State, h: History, d: Index) -> Truth:
    """A domain is poisoned because an action on its scaling state raised."""
    return implies(st.poisoned[d] != 0, h.broken[d] == 1)


@HISTORY("order.filling-is-busy", needs="version", g="stage")
def filling_is_busy(st: State, h: History, g: Index) -> Truth:
    """While an F fills the cache of its stage, the stage's domain is busy with that F."""
    d = st.domain_of[g]
    s = h.updater[d]
    ours = (s != NO_SLOT) & (st.slot_stage[s] == g)
    flying = ours & (st.held[s] == st.filling[g]) & (st.consumers[s] == RESERVED)
    return implies(st.filling[g] != 0, (st.busy[d] == st.filling[g]) & flying)


@HISTORY("version.forward-read-a-fill", needs="order", g="stage")
def forward_read_a_fill(st: State, h: History, g: Index) -> Truth:
    """If a forward ran in the epoch, it read weights that were filled into the cache."""
    return implies(h.forwards_of_epoch[g] != 0, h.fill_of_epoch[g] != NEVER)


@HISTORY("version.waiting-has-a-reason", needs="order", d="domain")
def waiting_has_a_reason(st: State, h: History, d: Index) -> Truth:
    """A domain waits for a stage's first F because the stage's cache was filled, or was lost."""
    g = st.refreshed[d]
    filled = (h.cached[g] == h.weights[0]) | (h.lost[g] != 0)
    to_come = (h.fill_of_epoch[g] == NEVER) & filled
    return implies(g != NO_STAGE, to_come | (st.busy[d] != 0) | (st.poisoned[d] != 0))


@HISTORY("version.busy-with-first-forward", needs="order", d="domain")
def busy_with_first_forward(st: State, h: History, d: Index) -> Truth:
    """If a stage's first F must come next, only that F or a refresh of the stage is in flight."""
    g = st.refreshed[d]
    flying = (g != NO_STAGE) & (st.busy[d] != 0) & (st.refreshing[g] == 0)
    return implies(
        flying, (h.fill_of_epoch[g] != NEVER) & (h.num_dgrads[g] + h.num_skipped[g] < st.cells[g])
    )


@HISTORY("epoch.first-forward-before-final", d="domain")
def first_forward_before_final(st: State, h: History, d: Index) -> Truth:
    """If the first F that must come next is in flight, its stage is not final."""
    g = st.refreshed[d]
    here = (g != NO_STAGE) & (st.domain_of[g] == d)
    flying = here & (st.busy[d] != 0) & (st.refreshing[g] == 0)
    return implies(flying, st.final[g] != now(st, g))


@HISTORY("version.spoiled-has-a-reason", needs="order", g="stage")
def spoiled_has_a_reason(st: State, h: History, g: Index) -> Truth:
    """A stage is spoiled because an action failed, a tape was dropped, or its cache was lost."""
    lost = h.lost_in_use[g] == now(st, g)
    return implies(st.spoiled[g] == now(st, g), (h.spoiled[g] == now(st, g)) | lost)


@HISTORY("completion.behind-has-a-reason", l="link")
def behind_has_a_reason(st: State, h: History, l: Index) -> Truth:  # noqa: E741 - a link
    """A link is marked as not joined because its caller enqueued work after the last join."""
    return implies(h.behind[l] == 0, st.joined[l] == st.submitted[l])


@HISTORY("completion.unawaited-has-a-reason", d="domain")
def unawaited_has_a_reason(st: State, h: History, d: Index) -> Truth:
    """An update is marked unawaited only while it may run beside the graph stream."""
    return implies(h.updating[d] == 0, st.unawaited[d] == 0)


@HISTORY("completion.seen-is-counted")
def seen_is_counted(st: State, h: History) -> Truth:
    """A caller's wait for the replay that wrote a tape's output is counted."""
    l, s = h.link[0], h.slot[0]  # noqa: E741 - a link
    there = retained(st, s) & (st.domain_at[l] == domain_of_slot(st, s))
    return implies(there & (h.seen[0] == 1), st.produced[s] <= st.waited[l])


@HISTORY("completion.heard-was-told", l="link")
def heard_was_told(st: State, h: History, l: Index) -> Truth:  # noqa: E741 - a link
    """A graph stream has waited only for ends of transfers that were reported."""
    return (0 <= h.heard[l]) & (h.heard[l] <= h.told[l]) & (0 <= st.joined[l])


@HISTORY("completion.latest-end", s="slot")
def latest_end(st: State, h: History, s: Index) -> Truth:
    """A slot records its latest end of a transfer, which counts as joined once it was awaited."""
    l = h.last_end_on[s]  # noqa: E741 - a link
    none = (st.ended_at[s] == 0) & (h.last_end[s] == 0)
    waited = implies(h.last_end[s] <= h.heard[l], st.ended_at[s] <= st.joined[l])
    known = (st.ended_at[s] <= st.submitted[l]) & (h.last_end[s] <= h.told[l])
    return none | ((st.ended_on[s] == l) & waited & known)
