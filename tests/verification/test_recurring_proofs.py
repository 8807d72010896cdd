"""A recorded step has the same effect later: proved for every path; every entry is needed."""

from __future__ import annotations

from collections import Counter

import pytest
import z3

from qeffect.engine.stage import STATE, TRANSITIONS
from qeffect.steps.counters import BASES, COUNTERS
from qeffect.steps.recorded_step import RECUR
from qeffect.verification.proofs.finite import SCOPE, solver_of
from qeffect.verification.proofs.goals import Goal
from qeffect.verification.proofs.obligations import Composition
from qeffect.verification.proofs.recurring import MOVED, NAME, recurring
from qeffect.verification.proofs.solvers import Z3
from qeffect.verification.symbolic import Encoding
from tests.profiles import few


@pytest.fixture(scope="module")
def full() -> Composition:
    """The composition of all relations, unbounded."""
    return Composition.of((), Encoding.sorted())


@pytest.fixture(scope="module")
def small() -> Composition:
    """The composition of all relations in a finite scope, where the solver decides every query."""
    return Composition.of((), Encoding.finite(SCOPE))


def test_every_path_of_a_steps_transitions_is_asked_for_every_family(full: Composition) -> None:
    """Each path has a goal, or does not mention the family."""
    asked = Counter((found.transition, found.name) for found in recurring(full))

    assert {
        (transition, f"{NAME}: {family}"): len(full.paths[transition])
        for transition in TRANSITIONS
        if transition in RECUR
        for family in BASES
    } == asked


def test_what_moves_is_what_a_recorded_step_moves_and_the_tickets_in_flight() -> None:
    """The proofs move the kernel's counters and the tickets, which no step leaves in flight."""
    tickets = {name for name, column in STATE.items() if column.values == "ticket"}
    tickets.remove("evaluating")  # no evaluation is part of a step
    assert not {name for name in RECUR if "evaluation" in name}

    assert {*MOVED} == {*COUNTERS} | tickets
    assert tickets
    assert not {*COUNTERS} & tickets


@pytest.mark.parametrize(
    "transition", few(["check_dgrad", "commit_forward", "check_update"], dev=[2], ci=[0, 1])
)
def test_a_move_commutes(full: Composition, transition: str) -> None:
    """For any number of slots, stages, links, epochs; `qeffect prove` covers every transition."""
    goals = [
        found
        for found in recurring(full)
        if isinstance(found, Goal) and found.transition == transition
    ]
    answers = list(Z3(full).prove(goals))

    assert len(answers) == len(goals) > 5
    assert {"unsat"} == {answer.verdict for answer in answers}


@pytest.mark.parametrize(
    "column", few(sorted(MOVED), range(24, len(MOVED), 24), range(0, len(MOVED), 8))
)
def test_no_column_may_stand_still_while_its_family_moves(small: Composition, column: str) -> None:
    """Without its entry, some transition decides or writes differently from a moved state."""
    rest = {name: counter for name, counter in MOVED.items() if name != column}
    solver = solver_of(small)
    for found in recurring(small, rest, [MOVED[column].family]):
        if isinstance(found, Goal):
            solver.push()
            solver.add(*found.facts, found.denied)
            verdict = solver.check()
            solver.pop()
            assert verdict != z3.unknown
            if verdict == z3.sat:
                return
    raise AssertionError(
        f"the proof does not need {column} in the table of counters; remove it there"
    )
