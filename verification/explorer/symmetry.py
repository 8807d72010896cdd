"""
Symmetry: the slots of a stage are interchangeable, and its cells where their order is free.

Slots are interchangeable if each has its own capture-memory pool; cells are if no order is
declared. The representative of an orbit has the tapes first, sorted by the values of their slot,
cell and buffers, then the free slots, then the idle cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import frozen

from qeffect.engine.stage import STATE

from .flat import FlatMemory
from .scopes import Scope, configuration

__all__ = ["Family", "canonical_form", "families"]


@frozen
class Family:
    """
    The slots and cells of one stage.

    Args:
        slots: Its slots.
        cells: Its cells.
        slot_columns: Columns that move with a slot, but for the cell that it holds.
        cell_columns: Columns that move with a cell, but for the slot that holds it.
        swaps_slots: Slots are interchangeable.
        swaps_cells: Cells are interchangeable.
    """

    slots: tuple[int, ...]
    cells: tuple[int, ...]
    slot_columns: tuple[str, ...]
    cell_columns: tuple[str, ...]
    swaps_slots: bool
    swaps_cells: bool


def families(scope: Scope, kept: Iterable[str]) -> tuple[Family, ...]:
    """Return the families of interchangeable slots and cells."""
    names = [name for name in STATE if name in set(kept)]
    own_pools = "capture" in scope.omit or not scope.shared_pool
    per_slot = ("slot", "pool") if own_pools else ("slot",)
    per_cell = ("cell",) if scope.accumulate else ("cell", "buffer")
    slot_columns = [n for n in names if STATE[n].index in per_slot and n != "cell_at"]
    cell_columns = [n for n in names if STATE[n].index in per_cell and n != "slot_of"]
    config = configuration(scope)
    return tuple(
        Family(
            tuple(i for i, s in enumerate(config["slot_stage"]) if s == stage),
            tuple(i for i, s in enumerate(config["stage_of"]) if s == stage),
            tuple(slot_columns),
            tuple(cell_columns),
            own_pools,
            not scope.declared and not scope.feeds,
        )
        for stage in range(len(scope.slots))
    )


def canonical_form(scope: Scope, memory: FlatMemory) -> Callable[[], None]:
    """
    Return what brings a memory's state, in normal form, to its orbit's representative, in place.

    A state in which slots and cells do not name each other stays unchanged: it breaks an invariant,
    and only sound states of one orbit are known to behave alike.
    """
    found = [_sorter(family, memory) for family in families(scope, memory.layout)]

    def canonical() -> None:
        for sort in found:
            sort()

    return canonical


def _sorter(family: Family, st: Any) -> Callable[[], None]:
    by_slot = [getattr(st, name) for name in family.slot_columns]
    by_cell = [getattr(st, name) for name in family.cell_columns]
    cell_at, slot_of = st.cell_at, st.slot_of
    slots, cells = family.slots, family.cells

    def sort() -> None:
        held = [cell_at[slot] for slot in slots]
        live = [cell for cell in held if cell != -1]
        if len(set(live)) != len(live) or any(
            cell not in cells or slot_of[cell] != slot
            for slot, cell in zip(slots, held, strict=True)
            if cell != -1
        ):
            return
        slot_rows = {slot: tuple([column[slot] for column in by_slot]) for slot in slots}
        cell_rows = {cell: tuple([column[cell] for column in by_cell]) for cell in cells}
        order = list(zip(slots, held, strict=True))
        if family.swaps_slots:
            order.sort(key=lambda pair: _rank(pair, slot_rows, cell_rows, family.swaps_cells))
        places = list(cells)
        if family.swaps_cells:
            live = [cell for _, cell in order if cell != -1]
            idle = sorted((c for c in cells if c not in live), key=cell_rows.__getitem__)
            places = live + idle
        new_cell = {old: new for new, old in zip(cells, places, strict=True)}
        for cell in cells:
            slot_of[cell] = -1
        for new, (old, cell) in zip(slots, order, strict=True):
            for column, value in zip(by_slot, slot_rows[old], strict=True):
                column[new] = value
            cell_at[new] = -1 if cell == -1 else new_cell[cell]
            if cell != -1:
                slot_of[new_cell[cell]] = new
        for new, old in zip(cells, places, strict=True):
            for column, value in zip(by_cell, cell_rows[old], strict=True):
                column[new] = value

    return sort


def _rank(
    pair: tuple[int, int],
    slot_rows: dict[int, tuple[int, ...]],
    cell_rows: dict[int, tuple[int, ...]],
    swaps_cells: bool,
) -> tuple[Any, ...]:
    """What slots are sorted by: tapes first, then rows; the cell itself where it has a name."""
    slot, cell = pair
    if cell == -1:
        return (1, slot_rows[slot])
    return (0, slot_rows[slot], cell_rows[cell] if swaps_cells else cell)
