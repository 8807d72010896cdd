"""The order of the guards is the order of the specification, in every composition."""

from __future__ import annotations

import ast
import inspect
from itertools import combinations

import pytest

from qeffect.engine.stage import OPTIONAL, RELATIONS, Transitions, transitions
from qeffect.spec.clauses import CLAUSES, PARTS
from qeffect.spec.document import contract
from qeffect.spec.guards import GUARDS
from qeffect.spec.transitions import TRANSITIONS


def raised(composed: Transitions, transition: str) -> list[str]:
    """The clauses that a composed function raises, in the order of its statements."""
    (function,) = ast.parse(inspect.getsource(composed.functions[transition])).body
    assert isinstance(function, ast.FunctionDef)
    found = []
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Raise):
                assert isinstance(node.exc, ast.Call)
                assert isinstance(node.exc.args[0], ast.Constant)
                found.append(str(node.exc.args[0].value))
    return found


@pytest.mark.parametrize("transition", GUARDS)
def test_guards_run_in_the_stated_order(transition: str) -> None:
    """A composed function checks exactly the stated clauses, in the stated order."""
    assert list(GUARDS[transition]) == raised(transitions(), transition)


@pytest.mark.parametrize("relation", sorted(OPTIONAL))
def test_the_others_keep_their_order_where_a_part_is_left_out(relation: str) -> None:
    """A stage without a relation checks some of the same clauses, in the same order."""
    composed = transitions(omit=[relation])
    for transition, clauses in GUARDS.items():
        rest, found = iter(clauses), raised(composed, transition)
        owned = next(t.relation for t in TRANSITIONS if t.name == transition)

        assert (found == [f"{relation}.left-out"]) == (owned == relation)
        assert owned == relation or all(clause in rest for clause in found), transition


def test_every_transition_has_its_guards_stated() -> None:
    """The order is stated of each transition, and of nothing else."""
    assert [transition.name for transition in TRANSITIONS] == list(GUARDS)


def test_a_clause_lists_the_transitions_that_check_it() -> None:
    """What stands under a clause agrees with the order of the guards."""
    for clause in CLAUSES.values():
        checked = {name for name, clauses in GUARDS.items() if clause.id in clauses}

        assert not checked or checked == set(clause.transitions), clause.id


def test_a_clause_that_stands_twice_is_of_two_columns() -> None:
    """Where a transition checks a clause twice, the two tests differ."""
    twice = [(n, c) for n, clauses in GUARDS.items() for c in clauses if clauses.count(c) > 1]
    assert twice
    for transition, clause in twice:
        source = inspect.getsource(transitions().functions[transition])
        (function,) = ast.parse(source).body
        tests = [
            ast.unparse(node.test)
            for node in ast.walk(function)
            if isinstance(node, ast.If) and f"'{clause}'" in ast.unparse(node.body[0])
        ]

        assert len(tests) == len(set(tests)) == GUARDS[transition].count(clause)


def test_actions_ask_the_parts_in_the_normative_order() -> None:
    """F, dI, dW and a refresh ask one part after another, in the order of the text."""
    order = [part.name for part in PARTS]
    for transition in ("check_forward", "check_dgrad", "check_wgrad", "check_refresh"):
        asked = [order.index(clause.partition(".")[0]) for clause in GUARDS[transition]]

        assert asked == sorted(asked), transition


def test_every_half_is_of_a_transition_that_is_written() -> None:
    """No relation exports a half that no composition would use."""
    names = {transition.name for transition in TRANSITIONS}
    for relation, module in RELATIONS.items():
        for name in vars(module):
            if name.endswith(("_guards", "_writes")):
                transition, _, before = name.rpartition("_")[0].partition("_before_")

                assert transition in names, (relation, name)
                assert not before or before in RELATIONS, (relation, name)


def test_the_text_states_the_order() -> None:
    """The chapter on transitions shows each transition's clauses in their order."""
    _, _, chapter = contract().partition(". Transitions\n")
    rows = [line for line in chapter.splitlines() if " → " in line]
    shown = {row.split("`")[1]: row for row in rows}
    for transition, clauses in GUARDS.items():
        if len(clauses) > 1:
            arrows = " → ".join(f"{c} ({CLAUSES[c].number})" for c in clauses)
            assert arrows in shown[transition]


def test_the_instrument_sees_the_order() -> None:
    """Two swapped clauses are noticed."""
    found = raised(transitions(), "check_dgrad")
    for first, second in combinations(range(len(found)), 2):
        if found[first] != found[second]:
            swapped = [*found]
            swapped[first], swapped[second] = found[second], found[first]
            assert swapped != list(GUARDS["check_dgrad"])
