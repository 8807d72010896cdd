"""
The sweep over seeds and solvers: others agree with the proofs, and would not agree with a kernel
that lacks a guard.
"""

from __future__ import annotations

from collections.abc import Callable

import cvc5
import pytest

from qeffect.verification.mutants import Mutant, sites
from qeffect.verification.proofs import prove
from qeffect.verification.proofs.obligations import Composition, Goal
from qeffect.verification.proofs.solvers import Z3, Cvc5
from qeffect.verification.symbolic import Encoding

#: cvc5 is asked every so many goals of a kind, which keeps the test short; the sweep asks them all.
STRIDE = 8
#: Milliseconds for one attempt at a goal, where all are true and where some are false: of those
#: no solver finds a model here, and each may use up what it is given.
PATIENT, IMPATIENT = 10_000, 300

SOLVERS: dict[str, Callable[[Composition, int], Z3 | Cvc5]] = {
    "z3": lambda composition, timeout: Z3(composition, seed=1, timeout=timeout),
    "cvc5": lambda composition, timeout: Cvc5(composition, timeout=timeout),
}


@pytest.fixture(scope="module")
def encoding() -> Encoding:
    """The unbounded encoding, in which the sweep asks."""
    return Encoding.sorted()


@pytest.fixture(scope="module")
def broken(encoding: Encoding) -> Composition:
    """A kernel whose dI does not ask whether its reference is stale."""
    guards = [
        site
        for site in sites()
        if (site.transition, site.kind, site.clause)
        == ("check_dgrad", "guard", "ownership.stale-reference")
    ]
    assert guards
    return Composition((), encoding, Mutant(tuple(guards)).functions)


def of_dgrad(composition: Composition) -> list[Goal]:
    """The goals of a composition that are about ``check_dgrad``."""
    return [goal for goal in prove._goals(composition) if goal.transition == "check_dgrad"]


@pytest.mark.slow
def test_other_seeds_agree() -> None:
    """Two more seeds prove every goal of the full composition."""
    answers = list(prove.again([1, 2]))

    assert [("z3", 1), ("z3", 2)] == [(answer.solver, answer.seed) for answer in answers]
    for answer in answers:
        assert [] == answer.open
        assert answer.goals == answer.unsat > 1000


@pytest.mark.slow
def test_a_second_solver_proves_every_kind_of_obligation(encoding: Encoding) -> None:
    """A second solver proves what it is asked of every kind, from scripts of its own."""
    composition = Composition.of((), encoding)
    goals = list(prove._goals(composition))
    kinds = {goal.kind for goal in goals}
    asked = [g for kind in sorted(kinds) for g in [g for g in goals if g.kind == kind][::STRIDE]]

    answer = prove._agreement(Cvc5(composition), asked, 0)

    assert cvc5.__version__
    assert ("cvc5", len(asked)) == (answer.solver, answer.goals)
    assert [] == answer.open
    assert answer.goals == answer.unsat > 100


@pytest.mark.slow
def test_again_asks_cvc5_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep itself hands cvc5 the goals, after the seeds, and nobody when nobody is named."""
    whole = prove._goals
    monkeypatch.setattr(prove, "_goals", lambda composition: list(whole(composition))[:5])

    answers = list(prove.again([3], ("z3", "cvc5")))

    assert [] == list(prove.again([]))
    assert ["z3", "cvc5"] == [answer.solver for answer in answers]
    assert all(answer.goals == answer.unsat > 5 for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_the_sweep_leaves_the_goals_of_a_broken_kernel_open(
    name: str, encoding: Encoding, broken: Composition
) -> None:
    """Without one guard a promise of ``check_dgrad`` is open; with it, none is."""
    whole = Composition.of((), encoding)

    sound = prove._agreement(SOLVERS[name](whole, PATIENT), of_dgrad(whole), 0)
    answer = prove._agreement(SOLVERS[name](broken, IMPATIENT), of_dgrad(broken), 0)

    assert [] == sound.open
    assert name == answer.solver
    assert "ownership.right-reference" in {obligation.name for obligation in answer.open}
    assert {"check_dgrad"} == {obligation.transition for obligation in answer.open}
    assert 0 < len(answer.open) == answer.goals - answer.unsat < answer.goals
    assert all(obligation.verdict in ("sat", "unknown") for obligation in answer.open)
