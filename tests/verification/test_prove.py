"""
The proofs: everything is proved, and nothing is vacuous.
"""

from __future__ import annotations

import pytest

from verification import prove
from verification.obligations import COMPOSITIONS, composition_name


@pytest.fixture(scope="module")
def report() -> prove.ProofReport:
    """Every proof, once."""
    return prove.run()


def test_everything_is_proved(report: prove.ProofReport) -> None:
    """No obligation is open or unknown, in any composition."""
    assert [] == report.open
    assert 0 == report.unknown
    assert len(report.obligations) == report.unsat > 10_000


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
    assert len(taken) > 150
    assert len(taken) > 0.9 * len(report.witnesses)


def test_bounded_proofs_name_their_scope(report: prove.ProofReport) -> None:
    """Bounded proofs begin in the initial state; depth and scope stand in their names."""
    assert report.bounded
    assert all(proof.verdict == "unsat" and proof.path for proof in report.bounded)
