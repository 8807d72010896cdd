"""
Symmetry reduction: states that differ only in the names of a stage's slots or cells form an orbit.

The slots of a stage are interchangeable if each has its own capture-memory pool; its cells are
interchangeable if no order is declared. The representative of an orbit has the tapes first, sorted
by the values of their slot, cell and buffers, then the free slots, then the idle cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from qeffect.engine.stage import STATE

from .packing import Packing, Words
from .scopes import Scope, configuration

__all__ = ["Family", "canonical_words", "families"]

Columns = dict[tuple[str, int], Any]
Table = NDArray[Any]

_WIDEST: Final = 1 << 62  # ranks stay below this number


@frozen
class Family:
    """
    The slots and cells of one stage.

    Args:
        slots: The stage's slots (sets of buffers for one microbatch each).
        cells: The stage's cells, that is, its microbatches.
        slot_columns: Columns (arrays of the state) indexed by slot, except the column with the cell
            that a slot holds.
        cell_columns: Columns indexed by cell, except the column with the slot that holds a cell.
        swaps_slots: Whether the slots are interchangeable: exchanging two slots leads to an
            equivalent state.
        swaps_cells: Whether the cells are interchangeable: exchanging two cells leads to an
            equivalent state.
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


def canonical_words(packing: Packing) -> Callable[[Words], Words]:
    """Return a function that maps states in normal form to their orbits' representatives."""
    found = families(packing.scope, packing.layout)

    def canonical(words: Words) -> Words:
        columns = packing.unpack(words)
        for family in found:
            _sort(packing, family, columns, words.shape[1])
        return packing.repack(columns, words.shape[1])

    return canonical


def _sort(packing: Packing, family: Family, columns: Columns, count: int) -> None:
    slots, cells, kind = family.slots, family.cells, packing.entries

    def table(name: str, members: Iterable[int]) -> Table:
        rows = [np.broadcast_to(np.asarray(columns[name, i], kind), count) for i in members]
        return np.stack(rows)

    def rank(names: Iterable[str], members: tuple[int, ...]) -> Table:
        """Return a rank for each member of a family by the values of its columns (arrays of the
        state), in sorted order."""
        total, most = np.zeros((len(members), count), np.int64), 1
        for name in names:
            where = packing.fields[name, members[0]]
            span = where.size + where.gap
            if most * span >= _WIDEST:
                total, most = _dense(total)
            total = total * span + (table(name, members).astype(np.int64) - where.low)
            most *= span
        return total

    held, kept_in = table("cell_at", slots), table("slot_of", cells)
    live, tenant = held != -1, kept_in != -1
    cell_index = np.where(live, held - cells[0], 0).astype(np.intp)
    slot_index = np.where(tenant, kept_in - slots[0], 0).astype(np.intp)
    sound = _sound(live, cell_index, slot_index, tenant)
    slot_rank, cell_rank = rank(family.slot_columns, slots), rank(family.cell_columns, cells)

    order = np.broadcast_to(np.arange(len(slots))[:, np.newaxis], live.shape)
    if family.swaps_slots:
        held_rank = np.take_along_axis(cell_rank, cell_index, 0)
        tie = held_rank if family.swaps_cells else cell_index
        span = int(tie.max(initial=0)) + 1
        last = int(slot_rank.max(initial=0)) + 1
        if last * span * 2 >= _WIDEST:
            (slot_rank, last), (tie, span) = _dense(slot_rank), _dense(tie)
        key = np.where(live, slot_rank * span + tie, last * span + slot_rank)
        order = np.argsort(key, axis=0, kind="stable")
    position = np.argsort(order, axis=0)
    places = np.broadcast_to(np.arange(len(cells))[:, np.newaxis], tenant.shape)
    if family.swaps_cells:
        seat = np.take_along_axis(position, slot_index, 0)
        places = np.argsort(np.where(tenant, seat, len(slots) + cell_rank), axis=0, kind="stable")
    renamed = np.argsort(places, axis=0)

    def put(name: str, members: tuple[int, ...], values: Table) -> None:
        for i, row in zip(members, values, strict=True):
            old = columns[name, i]
            columns[name, i] = np.where(sound, row, old).astype(kind)

    new_held = np.take_along_axis(renamed, np.take_along_axis(cell_index, order, 0), 0) + cells[0]
    new_home = np.take_along_axis(position, np.take_along_axis(slot_index, places, 0), 0) + slots[0]
    for name in family.slot_columns:
        put(name, slots, np.take_along_axis(table(name, slots), order, 0))
    for name in family.cell_columns:
        put(name, cells, np.take_along_axis(table(name, cells), places, 0))
    put("cell_at", slots, np.where(np.take_along_axis(live, order, 0), new_held, -1))
    put("slot_of", cells, np.where(np.take_along_axis(tenant, places, 0), new_home, -1))


def _dense(ranks: Table) -> tuple[Table, int]:
    """Renumber ranks without gaps, in the same order; return them and their count."""
    found, dense = np.unique(ranks, return_inverse=True)
    return dense.reshape(ranks.shape), len(found)


def _sound(live: Table, cell_index: Table, slot_index: Table, tenant: Table) -> Table:
    """Return a mask of the states in which slots and cells (microbatches) name each other; only
    these states are sorted."""
    home = np.take_along_axis(slot_index, np.minimum(cell_index, len(slot_index) - 1), 0)
    named = np.take_along_axis(tenant, np.minimum(cell_index, len(tenant) - 1), 0)
    mutual = (home == np.arange(len(live))[:, np.newaxis]) & named & (cell_index < len(tenant))
    result: Table = (~live | (mutual & (cell_index >= 0))).all(axis=0)
    return result
