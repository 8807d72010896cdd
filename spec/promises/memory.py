"""
What is always true of the contract's memory about keys, slots, generations and epochs.

Each predicate holds in every reachable state, for all values of its variables.
"""

from __future__ import annotations

from ..constants import NO_SLOT
from ..predicates import Register, implies
from .words import Index, State, Truth, live

__all__ = ["MEMORY"]

#: Proved: predicates of the memory that every transition preserves.
MEMORY = Register()


@MEMORY("ownership.injective", a="cell", b="cell")
def injective(st: State, a: Index, b: Index) -> Truth:
    """The contract never records the same slot for two different cells (keys without their
    epoch)."""
    return implies((st.slot_of[a] == st.slot_of[b]) & (st.slot_of[a] != NO_SLOT), a == b)


@MEMORY("ownership.cell-names-its-slot", c="cell")
def cell_names_its_slot(st: State, c: Index) -> Truth:
    """If the contract records a slot for a cell (a key without its epoch), that slot is live (in
    use) and holds the cell."""
    slot = st.slot_of[c]
    return implies(slot != NO_SLOT, live(st, slot) & (st.cell_at[slot] == c))


@MEMORY("ownership.slot-names-its-cell", s="slot")
def slot_names_its_cell(st: State, s: Index) -> Truth:
    """If a live slot (one in use) holds a cell (a key without its epoch), the contract records this
    slot for the cell."""
    return implies(live(st, s), st.slot_of[st.cell_at[s]] == s)


@MEMORY("ownership.own-stage", s="slot")
def own_stage(st: State, s: Index) -> Truth:
    """A live slot (one in use) and the cell that it holds (a key without its epoch) belong to the
    same stage."""
    return implies(live(st, s), st.stage_of[st.cell_at[s]] == st.slot_stage[s])


@MEMORY("ownership.live-epoch", s="slot")
def live_epoch(st: State, s: Index) -> Truth:
    """The key in a live slot (one in use) names the current weight epoch of the slot's stage."""
    return implies(live(st, s), st.epoch_at[s] == st.weight_epoch[st.slot_stage[s]])


@MEMORY("ownership.generation-bounded", s="slot")
def generation_bounded(st: State, s: Index) -> Truth:
    """A slot's generation (its count of releases) is at most the configured maximum. While a slot
    is live (in use), its generation is below the maximum, so the slot can still be released."""
    bounded = (0 <= st.generation[s]) & (st.generation[s] <= st.generation_max[0])
    return bounded & implies(live(st, s), st.generation[s] != st.generation_max[0])
