"""
No guard is too strong: a legal check is accepted, and every predicate of `legal` is needed.
"""

from __future__ import annotations

import pytest

from qeffect.spec.predicates import Predicate
from qeffect.spec.promises import LEGAL
from qeffect.verification.proofs.completeness import CHECKS, completeness
from qeffect.verification.proofs.finite import SCOPE, solver_of
from qeffect.verification.proofs.goals import Obligation
from qeffect.verification.proofs.obligations import Composition
from qeffect.verification.proofs.solvers import Z3
from qeffect.verification.symbolic import Encoding
from tests.profiles import few

from .strengthened import with_guard


def _open(composition: Composition, timeout: int) -> list[Obligation]:
    answers = Z3(composition, timeout=timeout).prove(completeness(composition))
    return [obligation for obligation in answers if not obligation.proved]


@pytest.fixture(scope="module")
def full() -> Composition:
    """The full composition, unbounded."""
    return Composition.of((), Encoding.sorted())


def test_a_legal_check_is_accepted(full: Composition) -> None:
    """Every refusing path of every check has a goal, and all goals are proved."""
    goals = list(completeness(full))
    refusing = [p for name in CHECKS for p in full.paths[name] if p.clause is not None]

    actions = ("refresh", "forward", "evaluation", "dgrad", "wgrad")
    assert set(CHECKS) == {
        "move_scales",
        "group_wgrad",
        *(f"check_{action}" for action in actions),
    }
    assert [(g.transition, g.path) for g in goals] == [(p.transition, p.label) for p in refusing]
    assert [] == _open(full, 5_000)


#: A half, and a guard more than it need have; the check that it belongs to is the half's.
STRONGER = [
    ("ownership.check_forward_guards", "st.generation[slot] != 0"),
    ("ownership.check_wgrad_guards", "st.consumers[slot] != 2"),
    ("version.check_refresh_guards", "st.cache_epoch[stage] == st.weight_epoch[stage] + 0 - 1"),
    ("order.check_dgrad_guards", "st.declared[d] == 0 and st.dgrad_at[c] != st.position[d]"),
    ("arena.check_wgrad_guards", "st.wgrads[s] == 0 and first == 0"),
    ("capture.check_forward_guards", "st.cursor[p] >= st.forward_rank[slot]"),
    ("completion.check_wgrad_guards", "st.waited[link] < st.produced[ref.slot]"),
]


@pytest.mark.ci
@pytest.mark.parametrize(("half", "test"), few(STRONGER, (3,), ()))
def test_a_guard_that_is_too_strong_is_found(half: str, test: str) -> None:
    """With an over-strong guard only the obligation of its own check is not proved."""
    opened = {obligation.transition for obligation in _open(with_guard(half, test), 500)}

    assert opened == {half.partition(".")[2].removesuffix("_guards")}


@pytest.mark.slow
@pytest.mark.parametrize("predicate", list(LEGAL), ids=lambda predicate: predicate.name)
def test_legal_says_no_more_than_it_must(
    predicate: Predicate, full: Composition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of the predicates some guard refuses a check that counts as legal."""
    left = [p for p in LEGAL if p.name != predicate.name]
    monkeypatch.setattr("qeffect.verification.proofs.vocabulary.LEGAL", left)

    assert {o.transition for o in _open(full, 300)} == set(predicate.transitions)


@pytest.mark.parametrize("transition", CHECKS)
def test_something_is_legal(transition: str) -> None:
    """In a small scope each check is legal in some state that keeps every invariant."""
    composition = Composition.of((), Encoding.finite(SCOPE))
    words = composition.vocabulary
    solver = solver_of(composition)
    solver.add(*words.assumed(transition))
    solver.add([term for claim in words.legal(transition) for term in words.close(claim)])

    assert str(solver.check()) == "sat"
