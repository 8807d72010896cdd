"""The table of state columns agrees with what the relations declare and what their halves write."""

from __future__ import annotations

import ast
import inspect
from types import FunctionType, ModuleType

import pytest

from qeffect.engine.compose import half_source, halves
from qeffect.engine.stage import RELATIONS, TRANSITIONS
from qeffect.relations.columns import CONFIG, Column
from qeffect.spec.columns import COLUMNS, CONFIGURED, SORTS, StateColumn


def written(module: ModuleType, function: FunctionType) -> set[str]:
    """Columns that a half, or a helper that it calls, assigns to or fills."""
    found = set()
    for node in ast.walk(half_source(function)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            assert isinstance(node.value, ast.Attribute)
            found.add(node.value.attr)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "fill":
                assert isinstance(node.args[0], ast.Attribute)
                found.add(node.args[0].attr)
            elif isinstance(node.func, ast.Name):
                helper = getattr(module, node.func.id)
                if inspect.isfunction(helper):
                    found |= written(module, helper)
    return found


def writers() -> dict[str, set[tuple[str, str]]]:
    """Relation and transition of every half that writes a column, by the column."""
    found: dict[str, set[tuple[str, str]]] = {}
    for relation, module in RELATIONS.items():
        for transition in TRANSITIONS:
            for _, half in halves(module, transition):
                for column in written(module, half):
                    found.setdefault(column, set()).add((relation, transition))
    return found


def shape(column: Column | StateColumn) -> tuple[str, str, int | None]:
    """What both the table and a relation say of a column."""
    return column.index, column.values, column.initial


def test_the_table_has_the_columns_that_the_relations_declare() -> None:
    """Each column stands in the table once, under its relation, with its sorts and its start."""
    declared = {
        (relation, name): shape(column)
        for relation, module in RELATIONS.items()
        for name, column in module.STATE.items()
    }

    assert declared == {(c.relation, c.name): shape(c) for c in COLUMNS}
    assert len(COLUMNS) == len({column.name for column in COLUMNS}) == len(declared)


def test_the_table_has_the_configured_columns() -> None:
    """So does each configured column, with its sorts; nothing writes it."""
    assert {n: shape(c) for n, c in CONFIG.items()} == {c.name: shape(c) for c in CONFIGURED}
    assert len(CONFIGURED) == len(CONFIG)
    assert not {column.name for column in CONFIGURED} & set(writers())


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_column_is_written_where_the_table_says(column: StateColumn) -> None:
    """Exactly those transitions write it, in the half of the relation that owns it."""
    expected = {(column.relation, transition) for transition in column.writers}

    assert expected == writers()[column.name]
    assert [t for t in TRANSITIONS if t in column.writers] == list(column.writers)


def test_the_sorts_are_explained() -> None:
    """Every sort of an index or a value is in the list of sorts, and each is used."""
    used = {sort for c in (*COLUMNS, *CONFIGURED) for sort in (c.index, c.values)}

    assert set(SORTS) == used


def test_the_instrument_sees_every_kind_of_write() -> None:
    """Assignments, fills and the writes of helpers are all found."""
    ownership = RELATIONS["ownership"]

    assert {"held"} == written(ownership, ownership.check_dgrad_writes)
    assert {"held", "consumers", "arrived", "slot_of", "generation"} == written(
        ownership, ownership.abort_dgrad_writes
    )
    assert {"bound", "opened"} == written(RELATIONS["arena"], RELATIONS["arena"].restore_writes)
