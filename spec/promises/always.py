"""
What is always true of the memory and the world together: the memory describes the world.

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
    """A slot that is live, or has a transfer under way, records the key whose work it holds."""
    return implies(
        live(st, s) | (st.moving[s] != 0),
        (h.tenant[s] == st.cell_at[s]) & (h.tenant_epoch[s] == st.epoch_at[s]),
    )


@WORLD("ownership.owing", s="slot")
def owing(st: State, h: History, s: Index) -> Truth:
    """A slot waits for exactly the consumers that have yet to visit its tape."""
    return st.consumers[s] == h.owing[s]


@WORLD("ownership.moving", s="slot")
def moving(st: State, h: History, s: Index) -> Truth:
    """The contract knows every transfer under way, and what each tape has received."""
    return (st.moving[s] == h.moving[s]) & (st.arrived[s] == h.arrived[s])


@WORLD("ownership.once", c="cell")
def once(st: State, h: History, c: Index) -> Truth:
    """Per walk, a cell's F, dI and dW each run at most once, and in this order."""
    forwards, dgrads, wgrads = h.ran_forward[c], h.ran_dgrad[c], h.ran_wgrad[c]
    return (0 <= wgrads) & (wgrads <= dgrads) & (dgrads <= forwards) & (forwards <= 1)


@WORLD("ownership.left-out-never-runs", c="cell")
def left_out_never_runs(st: State, h: History, c: Index) -> Truth:
    """A cell that the walk leaves out runs no F in that walk."""
    return implies(h.skipped[c] != 0, h.ran_forward[c] == 0)


@WORLD("ownership.left-out-counted")
def left_out_counted(st: State, h: History) -> Truth:
    """The contract counts the cells that the walk leaves out."""
    return st.skips[0] == h.left_out[0]


@WORLD("ownership.covered-whole", c="cell")
def covered_whole(st: State, h: History, c: Index) -> Truth:
    """A dW that ran covered every matrix."""
    return implies(h.ran_wgrad[c] != 0, h.covered[c] == st.matrices[st.stage_of[c]])


@WORLD("epoch.weights", g="stage")
def weights(st: State, h: History, g: Index) -> Truth:
    """The weight epoch counts the optimizer's updates."""
    return st.weight_epoch[g] == h.weights[0]


@WORLD("version.cache-content", g="stage")
def cache_content(st: State, h: History, g: Index) -> Truth:
    """The contract calls a cache fresh exactly when it holds the current weights. No cache holds
    later ones."""
    called_fresh = st.cache_epoch[g] == st.weight_epoch[g]
    return (called_fresh == (h.cached[g] == h.weights[0])) & (h.cached[g] <= h.weights[0])


@WORLD("version.one-fill", needs="order", g="stage")
def one_fill(st: State, h: History, g: Index) -> Truth:
    """All forwards of an epoch read the same fill of the cache."""
    same = implies(h.fill_of_epoch[g] != NEVER, h.fills[g] == h.fill_of_epoch[g])
    return same & (0 <= h.fills[g])


@WORLD("order.token", d="domain")
def token(st: State, h: History, d: Index) -> Truth:
    """The effect token counts the F and dI that updated scales or gathered maxima for them."""
    return st.token[d] == h.updates[d]


@WORLD("order.moved-for-each-update", g="stage")
def moved_for_each_update(st: State, h: History, g: Index) -> Truth:
    """Between updates, scales that move once an epoch have moved exactly once for each update since
    the last restore."""
    d = st.domain_of[g]
    between = (h.optimizing[0] == 0) & (h.half_updated[0] == 0) & (st.epoch_scales[d] != 0)
    return implies(between, h.moves[d] == h.commits[0])


@WORLD("order.drawn-once", d="domain")
def drawn_once(st: State, h: History, d: Index) -> Truth:
    """Between two restores, no two F of a domain that report where they draw begin at the same
    position."""
    return h.repeats[d] <= 1


@WORLD("capture.unclobbered")
def unclobbered(st: State, h: History) -> Truth:
    """No earlier graph has overwritten memory that a live tape keeps."""
    return implies(h.in_pool[h.slot[0]] == 1, h.clobbered[0] == 0)
