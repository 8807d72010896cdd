"""
Entries of many columns of a memory, compared and written in few calls.

If every entry of a column is selected, the column is compared whole, list with list or dictionary
with dictionary; otherwise the selected entries are picked first. Both compare the same entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..engine.concrete_memory import Memory

__all__ = ["Entries"]

#: By column, the indices of the selected entries.
Indices = Mapping[str, Sequence[Any]]


class Entries:
    """
    Selected entries of a memory's columns: their values now, and after counters have moved.

    Args:
        memory: The contract's memory; no reference to it is kept.
        indices: By column, the indices of the selected entries.
        counter: Maps column, index and entry to the position of the entry's counter in a list of
            amounts.
        still: Position, in the list of amounts, of the amount for entries that do not move; this
            amount is always 0.
    """

    __slots__ = ("_made", "_make", "_moved_by", "_parts", "_wholes")

    _moved_by: tuple[int, ...] | None

    def __init__(
        self,
        memory: Memory,
        indices: Indices,
        counter: Callable[[str, Any, Any], int],
        still: int,
    ) -> None:
        every = {name: {*_every(getattr(memory, name))} for name in indices}
        whole = [name for name, own in indices.items() if {*own} == every[name]]
        part = [name for name in indices if name not in whole]
        self._wholes = _columns(whole)
        self._parts = [(_columns([name]), tuple(indices[name])) for name in part]
        held: list[Any] = []
        texts = []
        for name in (*whole, *part):
            column = getattr(memory, name)
            own = indices[name] if name in part else [*_every(column)]
            held.append(column.copy() if name in whole else [column[index] for index in own])
            entries = [(column[index], counter(name, index, column[index])) for index in own]
            texts.append(_text(f"held[{len(held) - 1}]", held[-1], entries, still))
        self._make = _function(texts, still, held)
        self._moved_by = None
        self._made: tuple[Any, ...] = ()

    def at(self, amounts: tuple[int, ...]) -> tuple[Any, ...]:
        """
        Return the values of the columns after counters have moved; whole columns come first.

        Args:
            amounts: How far each counter has moved.
        """
        if amounts != self._moved_by:
            self._made = self._make(*amounts)
            self._moved_by = amounts
        return self._made

    def stand_in(self, memory: Memory, amounts: tuple[int, ...]) -> bool:
        """
        Whether a memory's selected entries equal these values after each counter rose by its
        amount.
        """
        wanted, found = self.at(amounts), self._wholes(memory)
        if not self._parts:
            return bool(found == wanted)
        picked = [
            [column[index] for index in indices]
            for get, indices in self._parts
            for column in get(memory)
        ]
        return bool((*found, *picked) == wanted)

    def write(self, memory: Memory, amounts: tuple[int, ...]) -> None:
        """Write the selected entries into the memory, each counter raised by its amount."""
        made = iter(self.at(amounts))
        for column in self._wholes(memory):
            if column.__class__ is dict:
                column.update(next(made))
            else:
                column[:] = next(made)
        for (get, indices), values in zip(self._parts, made, strict=True):
            for column in get(memory):
                for index, value in zip(indices, values, strict=True):
                    column[index] = value


def _every(column: Any) -> Iterable[Any]:
    return column if isinstance(column, dict) else range(len(column))


def _columns(names: Sequence[str]) -> Callable[[Memory], tuple[Any, ...]]:
    """Return a function that gets several columns at once."""
    if not names:
        return lambda memory: ()
    if len(names) == 1:
        one = attrgetter(*names)
        return lambda memory: (one(memory),)
    return attrgetter(*names)


def _text(name: str, held: Any, entries: Sequence[tuple[int, int]], still: int) -> str:
    """Return source text for a column's moved entries; a single call if all entries are equal."""
    if all(group == still for _, group in entries):
        return name
    numbers = [f"{value} + a{group}" for value, group in entries]
    every, same = f"[{', '.join(numbers)}]", len({*numbers}) == 1
    if isinstance(held, dict):
        return f"fromkeys({name}, {numbers[0]})" if same else f"dict(zip({name}, {every}))"
    return f"[{numbers[0]}] * {len(numbers)}" if same else every


def _function(
    texts: Sequence[str], still: int, held: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """Return one function that moves all columns, because a call per column would cost too much."""
    every = ", ".join(f"a{n}" for n in range(still + 1))
    text = f"lambda {every}: ({''.join(f'{own}, ' for own in texts)})"
    made: Callable[..., tuple[Any, ...]] = eval(text, {"held": held, "fromkeys": dict.fromkeys})
    return made
