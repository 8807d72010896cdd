"""
What is always true of the contract's memory and the world together: the memory agrees with what
really happened.

Each predicate holds in every reachable state, for all values of its variables.
"""

from __future__ import annotations

from ..constants import NEVER
from ..predicates import Register, implies
from .words import History, Index, State, Truth, live

__all__ = ["WORLD"]

#: Proved: predicates of the memory and the world that every transition preserves.
WORLD = Register()


@WORLD("ownership.tenant", s="slot")
def tenant(st: State, h: History, s: Index) -> Truth:
    """While a slot is live (in use) or has a transfer under way, the contract records the key of
    the work in the slot."""
    return implies(
        live(st, s) | (st.moving[s] != 0),
        (h.tenant[s] == st.cell_at[s]) & (h.tenant_epoch[s] == st.epoch_at[s]),
    )


@WORLD("ownership.owing", s="slot")
def owing(st: State, h: History, s: Index) -> Truth:
    """For each slot, the contract's consumer mask names exactly those consumers (dI, dW, readers)
    that have not finished with the slot's tape."""
    return st.consumers[s] == h.owing[s]


@WORLD("ownership.moving", s="slot")
def moving(st: State, h: History, s: Index) -> Truth:
    """For each slot, the contract records exactly the transfers that are under way. The contract
    also records exactly which messages the slot's tape has received, and whether a copy of its
    input was enqueued."""
    return (st.moving[s] == h.moving[s]) & (st.arrived[s] == h.arrived[s])


@WORLD("ownership.once", c="cell")
def once(st: State, h: History, c: Index) -> Truth:
    """In one walk over the microbatches, a cell (a key without its epoch) runs F, dI and dW in this
    order, each at most once."""
    forwards, dgrads, wgrads = h.ran_forward[c], h.ran_dgrad[c], h.ran_wgrad[c]
    return (0 <= wgrads) & (wgrads <= dgrads) & (dgrads <= forwards) & (forwards <= 1)


@WORLD("ownership.left-out-never-runs", c="cell")
def left_out_never_runs(st: State, h: History, c: Index) -> Truth:
    """If a walk over the microbatches leaves out a cell (a key without its epoch), the cell runs no
    F in that walk."""
    return implies(h.skipped[c] != 0, h.ran_forward[c] == 0)


@WORLD("ownership.left-out-counted")
def left_out_counted(st: State, h: History) -> Truth:
    """The contract's count of left-out cells (keys without their epoch) is the number of cells that
    the current walk over the microbatches leaves out."""
    return st.skips[0] == h.left_out[0]


@WORLD("ownership.covered-whole", c="cell")
def covered_whole(st: State, h: History, c: Index) -> Truth:
    """If a cell (a key without its epoch) has run dW in this walk over the microbatches, that dW
    covered every matrix of the cell's stage."""
    return implies(h.ran_wgrad[c] != 0, h.covered[c] == st.matrices[st.stage_of[c]])


@WORLD("epoch.weights", g="stage")
def weights(st: State, h: History, g: Index) -> Truth:
    """The weight epoch of every stage equals the number of optimizer updates that the weights have
    had."""
    return st.weight_epoch[g] == h.weights[0]


@WORLD("version.cache-content", g="stage")
def cache_content(st: State, h: History, g: Index) -> Truth:
    """The contract records a weight cache as current if, and only if, the cache holds the current
    weights. No cache holds weights of a later epoch."""
    called_fresh = st.cache_epoch[g] == st.weight_epoch[g]
    return (called_fresh == (h.cached[g] == h.weights[0])) & (h.cached[g] <= h.weights[0])


@WORLD("version.one-fill", needs="order", g="stage")
def one_fill(st: State, h: History, g: Index) -> Truth:
    """Once a stage's first F of an epoch has begun, the stage's weight cache is not filled again in
    that epoch. So every F of the epoch reads the same fill of the cache."""
    same = implies(h.fill_of_epoch[g] != NEVER, h.fills[g] == h.fill_of_epoch[g])
    return same & (0 <= h.fills[g])


@WORLD("order.token", d="domain")
def token(st: State, h: History, d: Index) -> Truth:
    """A domain's effect token equals the number of scaling updates that the domain's F and dI have
    made since the last restore. If the domain's scales change only once an epoch, the token instead
    equals the number of F and dI since that restore."""
    return st.token[d] == h.updates[d]


@WORLD("order.moved-for-each-update", g="stage")
def moved_for_each_update(st: State, h: History, g: Index) -> Truth:
    """If a domain's scales change once an epoch, they have changed exactly once per update
    committed since the last restore. The promise does not cover the time while an update is in
    flight or weights are half updated."""
    d = st.domain_of[g]
    between = (h.optimizing[0] == 0) & (h.half_updated[0] == 0) & (st.epoch_scales[d] != 0)
    return implies(between, h.moves[d] == h.commits[0])


@WORLD("order.drawn-once", d="domain")
def drawn_once(st: State, h: History, d: Index) -> Truth:
    """An F may report the position of the random generator at which it began to draw. Since the
    last restore, no two F of a domain have reported the same position."""
    return h.repeats[d] <= 1


@WORLD("capture.unclobbered")
def unclobbered(st: State, h: History) -> Truth:
    """While a tape keeps memory in its capture pool, no replay has overwritten that memory. A
    replay of any other graph of the pool (a refresh's graph included) counts as overwriting the
    memory, with one exception: the graph was captured after the tape's latest graph and before the
    tape's next graph."""
    return implies(h.in_pool[h.slot[0]] == 1, h.clobbered[0] == 0)
