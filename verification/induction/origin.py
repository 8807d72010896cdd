"""
Assumptions about the initial state: a stage's cells and a pool's slots can be numbered.
"""

from __future__ import annotations

from qeffect.spec.constants import NO_SLOT
from qeffect.spec.predicates import Register, implies

from .words import History, Index, State, Truth

__all__ = ["ORIGIN"]

#: Assumptions about ghosts with an arbitrary initial value.
ORIGIN = Register()


@ORIGIN("ownership.cells-counted", c="cell")
def cells_counted(st: State, h: History, c: Index) -> Truth:
    """
    The cells of a stage are numbered from 0 up to, not including, its configured number of cells.
    """
    g, place = st.stage_of[c], h.place[c]
    return (0 <= place) & (place < st.cells[g]) & (h.placed[g, place] == c)


@ORIGIN("ownership.cell-numbers-used", g="stage", i="place")
def cell_numbers_used(st: State, h: History, g: Index, i: Index) -> Truth:
    """Each number below a stage's number of cells names one cell of the stage."""
    cell = h.placed[g, i]
    return implies((0 <= i) & (i < st.cells[g]), (st.stage_of[cell] == g) & (h.place[cell] == i))


@ORIGIN("capture.slots-counted", s="slot")
def slots_counted(st: State, h: History, s: Index) -> Truth:
    """The slots of a pool are numbered from 0 up to, not including, its number of slots."""
    p, seat = st.pool_of[s], h.seat[s]
    return (0 <= seat) & (seat < h.slots[p]) & (h.seated[p, seat] == s)


@ORIGIN("capture.slot-numbers-used", p="pool", i="place")
def slot_numbers_used(st: State, h: History, p: Index, i: Index) -> Truth:
    """Each number below a pool's number of slots names one slot of the pool."""
    s = h.seated[p, i]
    named = (s != NO_SLOT) & (st.pool_of[s] == p) & (h.seat[s] == i)
    return implies((0 <= i) & (i < h.slots[p]), named)


@ORIGIN("capture.slot-numbers", p="pool")
def slot_numbers(st: State, h: History, p: Index) -> Truth:
    """A pool's number of slots is not negative."""
    return 0 <= h.slots[p]
