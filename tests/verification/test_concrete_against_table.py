"""
The concrete reading compared with the path table: the functions of a run are the proved functions.

States are reachable states with a few entries changed at random, so that guards are tested that no
reachable state fails. Arguments are those of a move, with a few changed.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import z3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import OPTIONAL, STATE, TRANSITIONS
from qeffect.refusals import Refused
from qeffect.relations.columns import CONFIG, Column
from qeffect.relations.constants import GRAD_BIT, OUT_BIT
from qeffect.verification.explorer import Scope
from qeffect.verification.explorer.drafts import Chunk
from qeffect.verification.explorer.exploration import Exploration, explore
from qeffect.verification.explorer.program import Bundle, Evaluation, Program
from qeffect.verification.explorer.scopes import configuration, sizes
from qeffect.verification.explorer.space import Space
from qeffect.verification.explorer.steps import Key, Ref, step_of
from qeffect.verification.explorer.tally import State, Tally
from qeffect.verification.symbolic import ARGUMENTS, Encoding, Path, flat_arguments, path_table
from qeffect.verification.symbolic.encoding import STAGE_OF
from tests.profiles import few

from .explorations import real_memory

COLUMNS = {**CONFIG, **STATE}
SCOPES = {
    "whole": Scope("whole", slots=(2,), cells=(2,), generation_max=1, tickets=True, reduces=True),
    "readers": Scope(
        "readers",
        slots=(1,),
        cells=(1,),
        generation_max=1,
        epochs=2,
        tickets=True,
        readers=OUT_BIT | GRAD_BIT,
        reduces=True,
    ),
    "bare": Scope(
        "bare",
        slots=(1, 1),
        cells=(1, 1),
        generation_max=1,
        tickets=True,
        reduces=True,
        omit=tuple(sorted(OPTIONAL - {"completion", "reduction"})),
    ),
}

#: Named lists of numbers: every column, and the stage of every cell.
Numbers = dict[str, list[int]]


@cache
def _explored(name: str) -> tuple[Exploration, list[State], dict[str, list[tuple[State, int]]]]:
    """A scope's exploration, its states, and for each transition some states and accepted moves."""
    found = explore(Space(SCOPES[name]))
    accepted: dict[str, list[tuple[State, int]]] = {}
    for level in found.levels:
        for arrival in found.engine.expand(level, Tally(), check=False):
            row = 0 if arrival.rows is None else int(arrival.rows[0])
            move = found.engine.moves[arrival.move]
            pairs = accepted.setdefault(move.label, [])
            if arrival.move not in (index for _, index in pairs):
                pairs.append((tuple(level[:, row].tolist()), arrival.move))
    states = [tuple(state) for state in found.seen.words.T.tolist()]
    return found, states, accepted


@cache
def _table(name: str, finite: bool) -> dict[str, tuple[Path, ...]]:
    found, *_ = _explored(name)
    encoding = _finite(name) if finite else Encoding.integers()
    return path_table(found.engine.space.transitions, encoding)


@cache
def _finite(name: str) -> Encoding:
    n = sizes(SCOPES[name])
    return Encoding.finite({sort: n[sort] for sort in n if sort != "one"} | {"opaque": 4})


def _values(sort: str, n: dict[str, int], *, sentinel: bool) -> st.SearchStrategy[int]:
    """Values of a sort: a member, perhaps its sentinel, or a small number."""
    if sort == "mask":
        return st.integers(0, 31)
    if sort == "flag":
        return st.integers(0, 1)
    if sort in ("slot", "stage"):
        return st.integers(-1 if sentinel else 0, n[sort] - 1)
    if sort in n:
        return st.integers(0, n[sort] - 1)
    return st.integers(0, 3) if sort == "opaque" else st.integers(-1, 3)


def _offered(name: str, state: State, index: int) -> tuple[str, Numbers, dict[str, int]]:
    """Return a move in a state as a transition, a memory and flat arguments."""
    found, *_ = _explored(name)
    space, chunk = found.engine.space, Chunk(found.engine.packing, np.array([state], np.int64).T)
    columns: Numbers = {k: list(v) for k, v in configuration(space.scope).items()}
    for column, values in space.initial().items():
        columns[column] = [
            int(np.asarray(chunk.entry(column, i)).flat[0]) for i in range(len(values))
        ]
    move = space.moves[index]
    step = step_of(move, columns[STAGE_OF], lambda column, i: columns[column][i])
    return move.label, columns, _flat(move.label, step.arguments)


def _example(data: st.DataObject, name: str) -> tuple[str, Numbers, dict[str, int]]:
    """Draw a transition, a memory and flat arguments."""
    found, states, accepted = _explored(name)
    n = sizes(SCOPES[name])
    transition = data.draw(st.sampled_from(sorted(accepted)))
    if data.draw(st.sampled_from([True, True, False])):
        state, index = data.draw(st.sampled_from(accepted[transition]))
    else:
        moves = [i for i, move in enumerate(found.engine.moves) if move.label == transition]
        state, index = data.draw(st.sampled_from(states)), data.draw(st.sampled_from(moves))
    _, columns, arguments = _offered(name, state, index)
    for _ in range(data.draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        column = data.draw(st.sampled_from(sorted(COLUMNS)))
        index = data.draw(st.integers(0, len(columns[column]) - 1))
        values = _values(COLUMNS[column].values, n, sentinel=column in STATE)
        columns[column][index] = data.draw(values)
    if arguments and data.draw(st.sampled_from([False, False, False, True])):
        flat = data.draw(st.sampled_from(sorted(arguments)))
        no_slot = flat == "slot" and transition in ("reserve", "check_forward")
        arguments[flat] = data.draw(_values(ARGUMENTS[flat], n, sentinel=no_slot))
    return transition, columns, arguments


def _flat(transition: str, arguments: tuple[Any, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in zip(TRANSITIONS[transition], arguments, strict=True):
        if isinstance(value, Key):
            found |= {"key.cell": value.cell, "key.epoch": value.epoch}
        elif isinstance(value, Ref):
            found |= {
                "ref.slot": value.slot,
                "ref.generation": value.generation,
                "ref.incarnation": value.incarnation,
            }
        else:
            found[name] = value
    return found


def _run(
    name: str, transition: str, columns: Numbers, arguments: dict[str, int]
) -> tuple[str | None, int | None, Memory]:
    """Run a transition concretely; return its clause, its result, and the memory afterwards."""
    space = _explored(name)[0].engine.space
    memory = real_memory(space)
    for column in COLUMNS:
        getattr(memory, column)[:] = columns[column]
    given: list[Any] = []
    for parameter in TRANSITIONS[transition]:
        if parameter == "key":
            cell = arguments["key.cell"]
            given.append(Key(arguments["key.epoch"], columns[STAGE_OF][cell], cell))
        elif parameter == "ref":
            parts = (arguments[f"ref.{part}"] for part in ("slot", "generation", "incarnation"))
            given.append(Ref(*parts))
        else:
            given.append(arguments[parameter])
    try:
        return None, space.transitions.functions[transition](memory, *given), memory
    except Refused as refused:
        return refused.clause, None, memory


class _Numbers:
    """A memory's columns as the compiled table reads them."""

    def __init__(self, columns: Numbers) -> None:
        self.columns = columns

    def entry(self, column: str, index: int) -> int:
        return self.columns[column][index]

    def width(self, column: str) -> int:
        return len(self.columns[column])


@pytest.mark.parametrize("name", few(SCOPES, [2], [0, 1]))
def test_one_path_predicts_each_run(name: str) -> None:
    """Exactly one path's condition holds; it predicts the clause, the ticket and every column."""
    table = _table(name, False)
    program = Program(frozenset((*COLUMNS, STAGE_OF)))
    seen: Counter[tuple[str, str | None]] = Counter()

    def predict(transition: str, columns: Numbers, arguments: dict[str, int]) -> None:
        clause, returned, memory = _run(name, transition, columns, arguments)
        given = {f"arg.{flat}": value for flat, value in arguments.items()}
        evaluation = Evaluation(_Numbers(columns), given, given, {})
        taken = [
            path
            for path in table[transition]
            if all(evaluation.value(program.node(test)) for test in path.tests)
        ]
        seen[transition, clause] += 1

        assert 1 == len(taken)
        path = taken[0]
        assert clause == path.clause
        if path.returned is not None:
            assert returned == evaluation.value(program.node(path.returned))
        for column in COLUMNS:
            after = evaluation.value(program.node(path.columns[column]))
            expected = list(getattr(memory, column))
            if isinstance(after, Bundle):
                states = _Numbers(columns)
                assert expected == [after.entry(states, i) for i in range(len(expected))], column
            else:
                assert expected == [after], column

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def predict_any(data: st.DataObject) -> None:
        predict(*_example(data, name))

    for pairs in _explored(name)[2].values():
        for state, index in pairs[:3]:
            predict(*_offered(name, state, index))
    predict_any()
    assert set(_explored(name)[2]) == {t for t, clause in seen if clause is None}
    assert CLAUSES_MET[name] <= len({clause for _, clause in seen})


#: Clauses that the examples meet at least.
CLAUSES_MET = {"whole": 15, "readers": 15, "bare": 8}


def _term(encoding: Encoding, sort: str, value: int) -> Any:
    """A number as a term of a finite sort."""
    if sort in encoding.members:
        return encoding.null(sort) if value == -1 else encoding.members[sort][value]
    return z3.BitVecVal(value, 6) if sort == "mask" else z3.IntVal(value)


def _array(encoding: Encoding, column: Column, values: list[int]) -> Any:
    """A column as a term; indices outside the list give its last entry, as in Python."""
    terms = [_term(encoding, column.values, value) for value in values]
    if column.index == "one":
        return terms[0]
    array = z3.K(encoding.sorts[column.index], terms[-1])
    for member, term in zip(encoding.members[column.index], terms, strict=True):
        array = z3.Store(array, member, term)
    return array


@pytest.mark.parametrize("name", few(SCOPES, [2], [0, 1]))
def test_the_finite_encoding_predicts_each_run(name: str) -> None:
    """In the bounded proofs' encoding, Z3 determines which path is taken and what it does."""
    encoding, table = _finite(name), _table(name, True)

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        transition, columns, arguments = _example(data, name)
        # An unset entry names no member of a sort without a sentinel.
        whole = {sort for sort in encoding.members if encoding.null(sort) is None}
        for unset, column in COLUMNS.items():
            if column.values in whole:
                columns[unset] = [max(entry, 0) for entry in columns[unset]]
        for flat, sort in flat_arguments(transition).items():
            if sort in whole:
                arguments[flat] = max(arguments[flat], 0)
        clause, returned, memory = _run(name, transition, columns, arguments)
        known = [
            (encoding.column(c, column), _array(encoding, column, columns[c]))
            for c, column in (*COLUMNS.items(), (STAGE_OF, Column("cell", "stage")))
        ]
        known += [
            (encoding.const(f"arg.{flat}", sort), _term(encoding, sort, arguments[flat]))
            for flat, sort in flat_arguments(transition).items()
        ]

        def value(term: Any) -> Any:
            return z3.simplify(z3.substitute(term, *known))

        left = list(table[transition])
        depth = 0
        while len(left) > 1 or len(left[0].tests) > depth:
            test = left[0].tests[depth]
            holds = z3.is_true(value(test))
            assert holds or z3.is_false(value(test))
            left = [p for p in left if p.tests[depth].eq(test) is holds]
            depth += 1
        path = left[0]

        assert clause == path.clause
        if path.returned is not None:
            assert returned == value(path.returned).as_long()
        for c, column in COLUMNS.items():
            if c in path.written:
                for index, after in enumerate(getattr(memory, c)):
                    member = (
                        value(path.columns[c])
                        if column.index == "one"
                        else value(
                            z3.Select(path.columns[c], encoding.members[column.index][index])
                        )
                    )
                    assert member.eq(_term(encoding, column.values, after)), c
            else:
                assert columns[c] == list(getattr(memory, c)), c

    agree()
