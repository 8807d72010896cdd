"""
Entries of many columns (arrays) of a contract's memory, compared in one call and written in one
call.

If every entry of a column is selected, whole columns are compared (list with list, or dictionary
with dictionary). Otherwise the selected entries are picked first. Both ways compare the same
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        indices: For each column (array of the state), the indices of the selected entries.
        counter: Maps column, index and entry to the position of the entry's counter in a list of
            amounts.
        still: Position, in the list of amounts, of the amount for entries that do not move; this
            amount is always 0.

    Attributes:
        stand_in: Function of a memory and of the counters' amounts. It returns whether the memory's
            selected entries equal the kept values, each raised by its counter's amount.
        write: Function of a memory and of the counters' amounts. It writes the kept values into the
            memory, each raised by its counter's amount.
    """

    __slots__ = ("stand_in", "write")

    stand_in: Callable[[Memory, tuple[int, ...]], bool]
    write: Callable[[Memory, tuple[int, ...]], None]

    def __init__(
        self,
        memory: Memory,
        indices: Indices,
        counter: Callable[[str, Any, Any], int],
        still: int,
    ) -> None:
        held: list[Any] = []
        picked: list[tuple[Any, ...]] = []
        same, writes = [], []
        for name, selected in indices.items():
            column = getattr(memory, name)
            every = [*_every(column)]
            whole = {*selected} == {*every}
            own = every if whole else selected
            held.append(column.copy() if whole else [column[index] for index in own])
            picked.append(tuple(own))
            entries = [(column[index], counter(name, index, column[index])) for index in own]
            text = _text(f"held[{len(held) - 1}]", held[-1], entries, still)
            place, places = f"memory.{name}", f"picked[{len(picked) - 1}]"
            if not whole:
                same.append(f"[*map({place}.__getitem__, {places})] == {text}")
                writes.append(f"for n, value in zip({places}, {text}): {place}[n] = value")
            elif isinstance(column, dict):
                same.append(f"{place} == {text}")
                writes.append(f"{place}.update({text})")
            else:
                same.append(f"{place} == {text}")
                writes.append(f"{place}[:] = {text}")
        names = {"held": held, "picked": picked}
        self.stand_in = _function(["return " + (" and ".join(same) or "True")], still, names)
        self.write = _function(writes, still, names)


def _every(column: Any) -> Iterable[Any]:
    return column if isinstance(column, dict) else range(len(column))


def _text(name: str, held: Any, entries: Sequence[tuple[int, int]], still: int) -> str:
    """Return source text for a column's moved entries; a single call if all entries are equal."""
    if all(group == still for _, group in entries):
        return name
    numbers = [f"{value} + a{group}" for value, group in entries]
    every, same = f"[{', '.join(numbers)}]", len({*numbers}) == 1
    if isinstance(held, dict):
        return f"fromkeys({name}, {numbers[0]})" if same else f"dict(zip({name}, {every}))"
    return f"[{numbers[0]}] * {len(numbers)}" if same else every


def _function(lines: Sequence[str], still: int, names: Mapping[str, Any]) -> Callable[..., Any]:
    """
    Return a function of a memory and amounts.

    One function over all columns costs less than a call per column.

    Args:
        lines: The function's statements, in which ``a0``, ``a1`` and so on are the amounts.
        still: Position of the last amount.
        names: The values that the statements name.
    """
    every = "".join(f"a{n}, " for n in range(still + 1))
    text = "\n    ".join(["def made(memory, amounts):", f"{every} = amounts", *lines])
    found = {"fromkeys": dict.fromkeys, **names}
    exec(text, found)
    made: Callable[..., Any] = found["made"]
    return made
