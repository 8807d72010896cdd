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
    """The contract never records one slot for two cells (keys without their epoch)."""
    return implies((st.slot_of[a] == st.slot_of[b]) & (st.slot_of[a] != NO_SLOT), a == b)


@MEMORY("ownership.cell-names-its-slot", c="cell")
def cell_names_its_slot(st: State, c: Index) -> Truth:
    """If the contract records a slot for a cell (a key without its epoch), that slot is live and
    holds the cell."""
    slot = st.slot_of[c]
    return implies(slot != NO_SLOT, live(st, slot) & (st.cell_at[slot] == c))


@MEMORY("ownership.slot-names-its-cell", s="slot")
def slot_names_its_cell(st: State, s: Index) -> Truth:
    """If a live slot holds a cell (a key without its epoch), the contract records that slot as the
    cell's slot."""
    return implies(live(st, s), st.slot_of[st.cell_at[s]] == s)


@MEMORY("ownership.own-stage", s="slot")
def own_stage(st: State, s: Index) -> Truth:
    """The cell (a key without its epoch) that a live slot holds belongs to the slot's stage."""
    return implies(live(st, s), st.stage_of[st.cell_at[s]] == st.slot_stage[s])


@MEMORY("ownership.live-epoch", s="slot")
def live_epoch(st: State, s: Index) -> Truth:
    """A live slot holds a key of its stage's current weight epoch."""
    return implies(live(st, s), st.epoch_at[s] == st.weight_epoch[st.slot_stage[s]])


@MEMORY("ownership.generation-bounded", s="slot")
def generation_bounded(st: State, s: Index) -> Truth:
    """A slot's generation is at most the maximum. A live slot's generation is below the maximum, so
    the slot can still be released."""
    bounded = (0 <= st.generation[s]) & (st.generation[s] <= st.generation_max[0])
    return bounded & implies(live(st, s), st.generation[s] != st.generation_max[0])
