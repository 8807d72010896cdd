"""
What is not proved but taken as given: of the caller's arguments, and of how the history begins.

The caller counts epochs from zero and draws a fresh incarnation for a restore. Where the relation
that would check it is left out, the caller is also trusted with naming the current weights. Of the
beginning it is assumed only that a stage's cells, and a pool's slots, can be numbered.
"""

from __future__ import annotations

from ..predicates import NO_SLOT, Register, implies
from .words import Args, History, Index, State, Truth

__all__ = ["ASSUMED", "ORIGIN"]

#: Assumed of the caller's arguments; some only where the relation that checks it is left out.
ASSUMED = Register()
#: Assumed of the beginning: that ghosts with an arbitrary start start so.
ORIGIN = Register()


# The caller's arguments


@ASSUMED("ownership.epochs-from-zero", "reserve", "bind", "check_forward")
def epochs_from_zero(st: State, h: History, a: Args) -> Truth:
    """Keys count epochs from zero."""
    return 0 <= a.key.epoch


@ASSUMED("ownership.keys-of-now", "reserve", "bind", "check_forward", without="version")
def keys_of_now(st: State, h: History, a: Args) -> Truth:
    """Where version is left out, the caller's keys are of the current weights."""
    return a.key.epoch == h.weights[0]


@ASSUMED("epoch.commits-of-now", "commit_epoch", without="version")
def commits_of_now(st: State, h: History, a: Args) -> Truth:
    """Where version is left out, the caller commits the current epoch."""
    return a.epoch == h.weights[0]


@ASSUMED("persistence.epochs-from-zero", "restore")
def checkpoints_from_zero(st: State, h: History, a: Args) -> Truth:
    """So do checkpoints."""
    return 0 <= a.epoch


@ASSUMED("persistence.fresh-incarnation", "restore")
def fresh_incarnation(st: State, h: History, a: Args) -> Truth:
    """A restore draws an incarnation that no earlier one had; 64 random bits make it so."""
    earlier = (h.issued[0] == 1) & (h.ref_incarnation[0] != st.incarnation[0])
    return implies(earlier, a.incarnation != h.ref_incarnation[0])


# The beginning


@ORIGIN("ownership.cells-counted", c="cell")
def cells_counted(st: State, h: History, c: Index) -> Truth:
    """A stage's cells, of which it is configured to have so many, can be numbered:"""
    g, place = st.stage_of[c], h.place[c]
    return (0 <= place) & (place < st.cells[g]) & (h.placed[g, place] == c)


@ORIGIN("ownership.cell-numbers-used", g="stage", i="place")
def cell_numbers_used(st: State, h: History, g: Index, i: Index) -> Truth:
    """every number names one of them."""
    cell = h.placed[g, i]
    return implies((0 <= i) & (i < st.cells[g]), (st.stage_of[cell] == g) & (h.place[cell] == i))


@ORIGIN("capture.slots-counted", s="slot")
def slots_counted(st: State, h: History, s: Index) -> Truth:
    """A pool's slots can be numbered:"""
    p, seat = st.pool_of[s], h.seat[s]
    return (0 <= seat) & (seat < h.slots[p]) & (h.seated[p, seat] == s)


@ORIGIN("capture.slot-numbers-used", p="pool", i="place")
def slot_numbers_used(st: State, h: History, p: Index, i: Index) -> Truth:
    """every number names one of them."""
    s = h.seated[p, i]
    named = (s != NO_SLOT) & (st.pool_of[s] == p) & (h.seat[s] == i)
    return implies((0 <= i) & (i < h.slots[p]), named)


@ORIGIN("capture.slot-numbers", p="pool")
def slot_numbers(st: State, h: History, p: Index) -> Truth:
    """There are as many numbers as slots, perhaps none."""
    return 0 <= h.slots[p]
