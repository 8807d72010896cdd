"""
Entries of many columns of a memory, compared and written in few calls.

A column of which every entry is meant is compared as it is, list with list and dictionary with
dictionary; one of which some are is picked from. What is compared is the same, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from .engine.memory import Memory

__all__ = ["Entries"]

#: Which entries of each column.
Indices = Mapping[str, Sequence[Any]]


class Entries:
    """
    Some entries of a memory's columns as they are now, and as they are when counters have moved.

    Args:
        memory: The memory; nothing of it is kept.
        indices: By column, which of its entries.
        counter: The place of what an entry is counted from in a list of amounts, by column, index
            and entry.
        still: The place of the amount of entries that do not move, which is always 0.
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
        What the columns are, those that are meant as wholes first, when counters have moved.

        Args:
            amounts: By how much each has.
        """
        if amounts != self._moved_by:
            self._made = self._make(*amounts)
            self._moved_by = amounts
        return self._made

    def stand_in(self, memory: Memory, amounts: tuple[int, ...]) -> bool:
        """Whether a memory has these entries, moved."""
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
        """Leave these entries in a memory, moved."""
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
    """What gets several columns at once."""
    if not names:
        return lambda memory: ()
    if len(names) == 1:
        one = attrgetter(*names)
        return lambda memory: (one(memory),)
    return attrgetter(*names)


def _text(name: str, held: Any, entries: Sequence[tuple[int, int]], still: int) -> str:
    """The expression of a column's entries, moved: one call where they all are the same number."""
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
    """One function of all amounts: a call for each column would take as long as all its entries."""
    every = ", ".join(f"a{n}" for n in range(still + 1))
    text = f"lambda {every}: ({''.join(f'{own}, ' for own in texts)})"
    made: Callable[..., tuple[Any, ...]] = eval(text, {"held": held, "fromkeys": dict.fromkeys})
    return made
