"""
The proofs: everything is proved, and nothing is vacuous.
"""

from __future__ import annotations

import pytest

from qeffect.engine.stage import OPTIONAL
from qeffect.verification.mutants import Mutant, sites
from qeffect.verification.proofs import prove
from qeffect.verification.proofs.finite import SCOPE, refuted, solver_of
from qeffect.verification.proofs.obligations import COMPOSITIONS, Composition, composition_name
from qeffect.verification.proofs.witnesses import CONDITIONS, witnesses
from qeffect.verification.symbolic import Encoding
from qeffect.verification.targets import COVERED


@pytest.fixture(scope="module")
def report() -> prove.ProofReport:
    """Every proof, once."""
    return prove.run()


def test_everything_is_proved(report: prove.ProofReport) -> None:
    """No obligation is open or unknown, in any composition."""
    assert [] == report.open
    assert 0 == report.unknown
    assert len(report.obligations) == report.unsat > 10_000


def test_distinct_questions_are_counted(report: prove.ProofReport) -> None:
    """Obligations are told apart: questions put to a solver, what follows, the same term twice."""
    data = report.asdict()

    assert data["questions"] + data["implied"] + data["same_term"] == len(report.obligations)
    assert 0 < data["questions"] < data["implied"]
    assert data["same_term"] == sum(o.solver == "syntax" for o in report.obligations)


def test_every_composition_is_proved(report: prove.ProofReport) -> None:
    """The full composition, each with one relation left out, and the bare one."""
    proved = {obligation.composition for obligation in report.obligations}

    assert {composition_name(omit) for omit in COMPOSITIONS} <= proved


def test_every_kind_is_there(report: prove.ProofReport) -> None:
    """Beginnings, induction, steps, refusals, tickets and capture each have obligations."""
    kinds = report.by_kind()

    for kind in ("initial", "inductive", "step", "refusal", "commit", "capture"):
        assert kinds[kind] > 0, kind


def test_nothing_is_vacuous(report: prove.ProofReport) -> None:
    """Every way that a state can take is taken from one that keeps every invariant."""
    taken = [witness for witness in report.witnesses if witness.expected == "sat"]

    assert all(witness.proved for witness in report.witnesses)
    assert len(COVERED) == len(report.witnesses) - len(taken)
    assert (374, 9) == (len(report.witnesses), len(COVERED))
    assert {entry.condition for entry in COVERED} == set(CONDITIONS)
    assert {(entry.transition, entry.clause) for entry in COVERED} == {
        (witness.transition, witness.path.partition("#")[0])
        for witness in report.witnesses
        if witness.expected == "unsat"
    }


def test_what_is_covered_is_needed_elsewhere() -> None:
    """Where version is left out, a busy domain is order's alone to refuse."""
    scope = Composition.of(("version",), Encoding.finite(SCOPE))
    taken = {(w.transition, w.path.partition("#")[0]): w.verdict for w in witnesses(scope)}

    for transition in ("commit_epoch", "restore"):
        assert "sat" == taken[transition, "order.pending"]


def test_every_composition_is_proved_that_a_contract_may_have() -> None:
    """Any choice of relations is as good as the eight that ``qeffect prove`` reports."""
    obligations = list(prove.everywhere())

    assert 2 ** len(OPTIONAL) == len({obligation.composition for obligation in obligations})
    assert [] == [obligation for obligation in obligations if not obligation.proved]
    assert len(obligations) > 60_000


def test_bounded_proofs_name_their_scope(report: prove.ProofReport) -> None:
    """Bounded proofs begin in the initial state; depth and scope stand in their names."""
    assert report.bounded
    assert all(proof.verdict == "unsat" and proof.path for proof in report.bounded)


@pytest.fixture(scope="module")
def finite() -> Composition:
    """The full composition in a finite scope, where every question is decided."""
    return Composition.of((), Encoding.finite(SCOPE))


#: A transition, a clause, and a promise that fails without its guard.
NEEDED = [
    ("check_dgrad", "ownership.stale-reference", "ownership.right-reference"),
    ("check_forward", "version.stale-cache", "version.cache-of-the-key"),
    ("check_forward", "order.token", "order.threaded"),
    ("check_wgrad", "arena.pending", "arena.right-destination"),
    ("check_wgrad", "completion.caller-to-graph", "completion.replay-after-caller"),
    ("commit_epoch", "epoch.not-final", "epoch.commit"),
    ("finish_reduction", "reduction.not-started", "reduction.running"),
    ("commit_dgrad", "ownership.unknown-ticket", "tickets.dgrad-redeems-its-own"),
]


@pytest.mark.parametrize(("transition", "clause", "promise"), NEEDED)
def test_without_a_guard_nothing_is_proved(
    transition: str, clause: str, promise: str, finite: Composition
) -> None:
    """The same question has another answer for a kernel that lacks one guard."""
    guards = [
        site
        for site in sites()
        if (site.transition, site.kind, site.clause) == (transition, "guard", clause)
    ]
    assert guards
    broken = Composition((), finite.encoding, Mutant(tuple(guards)).functions)

    assert [] == list(refuted(finite, transition, solver_of(finite)))
    assert promise in set(refuted(broken, transition, solver_of(finite)))
