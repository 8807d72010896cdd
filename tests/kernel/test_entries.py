"""Bulk comparisons and bulk writes of entries affect exactly the named entries."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qeffect.steps.entries import Entries

COUNTERS = 3
"""Amounts that entries are counted from; the one behind them is that of what does not move."""

numbers = st.integers(-2, 4)
columns = st.one_of(
    st.lists(numbers, min_size=1, max_size=4),
    st.dictionaries(st.tuples(st.integers(0, 3), st.just(0)), numbers, min_size=1, max_size=4),
)


def every(column: Any) -> list[Any]:
    """The indices of a column."""
    return list(column if isinstance(column, dict) else range(len(column)))


@st.composite
def memories(draw: st.DrawFn) -> tuple[Any, dict[str, list[Any]], dict[Any, int]]:
    """Columns, the chosen entries of each, and the counter that each is relative to."""
    memory = SimpleNamespace(**{f"c{n}": draw(columns) for n in range(draw(st.integers(1, 4)))})
    indices, counted = {}, {}
    for name, column in vars(memory).items():
        own = draw(st.permutations(every(column)))
        if draw(st.booleans()):
            own = own[: draw(st.integers(1, len(own)))]
        if draw(st.integers(0, 3)):
            indices[name] = own
        alike = draw(st.booleans()) and draw(st.integers(0, COUNTERS))
        for index in every(column):
            group = alike if alike is not False else draw(st.integers(0, COUNTERS))
            counted[name, index] = group
    return memory, indices, counted


def made(memory: Any, indices: Any, counted: Any) -> Entries:
    """The entries at this moment."""
    return Entries(memory, indices, lambda name, index, _: counted[name, index], COUNTERS)


amounts_of = st.tuples(*[st.integers(0, 3)] * COUNTERS, st.just(0))


@given(memories(), amounts_of, amounts_of, st.data())
def test_each_entry_is_compared_and_no_other(
    case: Any, amounts: tuple[int, ...], others: tuple[int, ...], data: st.DataObject
) -> None:
    """Entries are compared relative to their counter; entries that are not named may differ."""
    memory, indices, counted = case
    entries = made(memory, indices, counted)
    now = copy.deepcopy(memory)
    for (name, index), group in counted.items():
        getattr(now, name)[index] += amounts[group]
    assert entries.stand_in(now, amounts)
    assert entries.stand_in(memory, others) == all(
        others[counted[name, index]] == 0 for name, own in indices.items() for index in own
    )
    assert entries.stand_in(now, amounts)

    name, index = data.draw(st.sampled_from(sorted(counted, key=str)))
    getattr(now, name)[index] += 1
    assert entries.stand_in(now, amounts) == (index not in indices.get(name, ()))


@given(memories(), amounts_of)
def test_each_entry_is_written_and_no_other(case: Any, amounts: tuple[int, ...]) -> None:
    """In the existing columns; the prepared lists are not shared with the memory."""
    memory, indices, counted = case
    entries = made(memory, indices, counted)
    into = copy.deepcopy(memory)
    for column in vars(into).values():
        for index in every(column):
            column[index] = 99
    held = dict(vars(into))
    for _ in range(2):
        entries.write(into, amounts)
        for name, column in vars(into).items():
            assert column is held[name]
            for index in every(column):
                meant = index in indices.get(name, ())
                wanted = getattr(memory, name)[index] + amounts[counted[name, index]]
                assert column[index] == (wanted if meant else 99)
                if meant:
                    column[index] = 98  # the next write is not moved by it
    assert entries.stand_in(memory, (0,) * (COUNTERS + 1))


@pytest.mark.parametrize("column", ["short", "long"])
def test_a_column_of_another_length_is_another(column: str) -> None:
    """If all its entries are named, a column of another length differs."""
    entries = Entries(SimpleNamespace(c=[1, 1]), {"c": (0, 1)}, lambda *_: 0, 1)  # type: ignore[arg-type]
    other: Any = SimpleNamespace(c=[1] if column == "short" else [1, 1, 1])
    assert not entries.stand_in(other, (0, 0))
