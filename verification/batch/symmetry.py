"""
Representatives of orbits, as in ``qeffect.verification.explorer.symmetry``, over many states at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..explorer.symmetry import Family, families
from .packing import Packing, Words

__all__ = ["canonical_words"]

Columns = dict[tuple[str, int], Any]
Table = NDArray[Any]


def canonical_words(packing: Packing) -> Callable[[Words], Words]:
    """Return what maps states in normal form to their orbits' representatives."""
    found = families(packing.scope, packing.layout)

    def canonical(words: Words) -> Words:
        columns = packing.unpack(words)
        for family in found:
            _sort(packing, family, columns, words.shape[1])
        return packing.repack(columns, words.shape[1])

    return canonical


def _sort(packing: Packing, family: Family, columns: Columns, count: int) -> None:
    slots, cells = family.slots, family.cells

    def table(name: str, members: Iterable[int]) -> Table:
        rows = [np.broadcast_to(np.asarray(columns[name, i], np.int8), count) for i in members]
        return np.stack(rows)

    def rank(names: Iterable[str], members: tuple[int, ...]) -> Table:
        """One number for each member's row, in the order of the rows."""
        total = np.zeros((len(members), count), np.int64)
        for name in names:
            where = packing.fields[name, members[0]]
            span = where.size + where.gap
            total = total * span + (table(name, members).astype(np.int64) - where.low)
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
        if last * span * 2 >= 1 << 62:
            raise ValueError(f"scope {packing.scope.name}: rows are too wide to sort")
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
            columns[name, i] = np.where(sound, row, old).astype(np.int8)

    new_held = np.take_along_axis(renamed, np.take_along_axis(cell_index, order, 0), 0) + cells[0]
    new_home = np.take_along_axis(position, np.take_along_axis(slot_index, places, 0), 0) + slots[0]
    for name in family.slot_columns:
        put(name, slots, np.take_along_axis(table(name, slots), order, 0))
    for name in family.cell_columns:
        put(name, cells, np.take_along_axis(table(name, cells), places, 0))
    put("cell_at", slots, np.where(np.take_along_axis(live, order, 0), new_held, -1))
    put("slot_of", cells, np.where(np.take_along_axis(tenant, places, 0), new_home, -1))


def _sound(live: Table, cell_index: Table, slot_index: Table, tenant: Table) -> Table:
    """Return the states in which slots and cells name each other; others stay unchanged."""
    home = np.take_along_axis(slot_index, np.minimum(cell_index, len(slot_index) - 1), 0)
    named = np.take_along_axis(tenant, np.minimum(cell_index, len(tenant) - 1), 0)
    mutual = (home == np.arange(len(live))[:, np.newaxis]) & named & (cell_index < len(tenant))
    result: Table = (~live | (mutual & (cell_index >= 0))).all(axis=0)
    return result
