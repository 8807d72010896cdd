"""
Every obligation is proved, and every path is either reachable or proved unreachable.
"""

from __future__ import annotations

from itertools import product

import pytest
from attrs import evolve

from qeffect.engine.stage import OPTIONAL, TRANSITIONS
from qeffect.spec import document
from qeffect.spec.promises import PAPER
from qeffect.verification import kept
from qeffect.verification.coverage import COVERED, UNTAKEN
from qeffect.verification.mutants import Mutant, sites
from qeffect.verification.proofs import prove
from qeffect.verification.proofs.finite import SCOPE, refuted, solver_of
from qeffect.verification.proofs.goals import Obligation
from qeffect.verification.proofs.obligations import (
    COMPOSITIONS,
    Composition,
    composition_name,
)
from qeffect.verification.proofs.report import ProofReport
from qeffect.verification.proofs.witnesses import CONDITIONS
from qeffect.verification.symbolic import Encoding
from tests.kernel.helpers import Rig, refused

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> ProofReport:
    """The report of all proofs, made once."""
    return prove.run()


def test_everything_is_proved(report: ProofReport) -> None:
    """No obligation is open or unknown, in any composition."""
    assert [] == report.open
    assert 0 == report.unknown
    assert len(report.obligations) == report.unsat > 10_000


def test_distinct_questions_are_counted(report: ProofReport) -> None:
    """Three kinds are counted: solver queries, obligations that follow, equal terms."""
    data = report.asdict()

    assert data["questions"] + data["implied"] + data["same_term"] == len(report.obligations)
    assert 0 < data["questions"] < data["implied"]
    assert data["same_term"] == sum(o.solver == "syntax" for o in report.obligations)


def test_every_composition_is_proved(report: ProofReport) -> None:
    """The full composition, each with one relation left out, and the smallest one."""
    proved = {obligation.composition for obligation in report.obligations}

    assert {composition_name(omit) for omit in COMPOSITIONS} <= proved


def test_every_kind_is_there(report: ProofReport) -> None:
    """Initial states, induction, steps, refusals, tickets and recovery all have obligations."""
    kinds = report.by_kind()

    for kind in (
        "initial",
        "inductive",
        "step",
        "change",
        "refusal",
        "commit",
        "capture",
        "restore",
        "recovery",
        "recurring",
        "complete",
    ):
        assert kinds[kind] > 0, kind


def test_the_papers_invariants_are_proved(report: ProofReport) -> None:
    """Each promise and theorem of a paper's invariant has obligations, and all are proved."""
    assert dict.fromkeys(PAPER, True) == report.paper()


def test_a_papers_invariant_with_an_open_obligation_is_not_proved() -> None:
    """One open or missing obligation makes exactly the invariants that use it unproved."""
    names = {n for invariant in PAPER.values() for n in (*invariant.promises, *invariant.theorems)}
    made = [Obligation(name, "step", "full", "", "", "z3", "unsat", 0.0) for name in sorted(names)]
    broken = [
        evolve(o, verdict="unknown") if o.name == "order.threaded" else o
        for o in made
        if o.name != "epoch.whole"
    ]
    lost = {"token-once": False, "written-exactly-once": False}

    assert dict.fromkeys(PAPER, True) == ProofReport(made).paper()
    assert {**dict.fromkeys(PAPER, True), **lost} == ProofReport(broken).paper()


def test_nothing_is_vacuous(report: ProofReport) -> None:
    """Every reachable path is taken from a state that keeps every invariant."""
    taken = [witness for witness in report.witnesses if witness.expected == "sat"]

    assert all(witness.proved for witness in report.witnesses)
    assert (3007, 2460) == (len(report.witnesses), len(taken))
    assert {entry.condition for entry in (*COVERED, *UNTAKEN)} == set(CONDITIONS)
    ways = {
        (witness.transition, witness.path.partition("#")[0])
        for witness in report.witnesses
        if witness.expected == "unsat"
    }
    covered = {(entry.transition, entry.clause) for entry in COVERED}
    assert covered <= ways
    assert {transition for transition, _ in ways - covered} == {e.transition for e in UNTAKEN}


def test_what_is_covered_is_needed_elsewhere() -> None:
    """Without order no F is counted, so only dW shows that an epoch has begun."""
    rig = Rig(omit={"order"})
    rig.microbatch(0)
    rig.contract.drain()

    assert [0] == [*rig.contract.memory.forwards]
    with refused(rig, "persistence.mid-epoch"):
        rig.contract.checkpoint()


#: Choices of three relations: each test makes one, and proves every choice of the others.
CHOSEN = [
    dict(zip(sorted(OPTIONAL)[:3], left_out, strict=True))
    for left_out in product((True, False), repeat=3)
]


def test_the_choices_are_all_choices() -> None:
    """The parts of the next test contain each composition once."""
    found = [omit for fixed in CHOSEN for omit in prove.choices(fixed)]

    assert 2 ** len(OPTIONAL) == len(found) == len(set(found))


@pytest.mark.slow(minutes=3)
@pytest.mark.parametrize(
    "fixed", CHOSEN, ids=lambda fixed: composition_name(tuple(n for n in fixed if fixed[n]))
)
def test_every_composition_is_proved_that_a_contract_may_have(fixed: dict[str, bool]) -> None:
    """Every choice of relations is proved, not only those that ``qeffect prove`` reports."""
    obligations = list(prove.everywhere(fixed))
    expected = {composition_name(omit) for omit in prove.choices(fixed)}

    assert expected <= {obligation.composition for obligation in obligations}
    assert [] == [obligation for obligation in obligations if not obligation.proved]
    assert len(obligations) > 1_000 * len(expected)


def test_bounded_proofs_name_their_scope(report: ProofReport) -> None:
    """Bounded proofs begin in the initial state; their names contain depth and scope."""
    assert report.bounded
    assert all(proof.verdict == "unsat" and proof.path for proof in report.bounded)


@pytest.fixture(scope="module")
def finite() -> Composition:
    """The full composition in a finite scope, where the solver decides every query."""
    return Composition.of((), Encoding.finite(SCOPE))


#: In how many tests the guards of all transitions are deleted in turn.
PARTS = 8


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_that_a_guard_keeps_fails_without_it(part: int, finite: Composition) -> None:
    """The solver confirms each guard's row of the file from which the contract is made."""
    chosen = [*TRANSITIONS][part::PARTS]
    guards = [site for site in kept.guard_sites() if site.transition in chosen]
    written = [row for row in document.kept()["guards"] if row["transition"] in chosen]

    for transition in chosen:
        assert [] == list(refuted(finite, transition, solver_of(finite))), transition
    assert written == kept.rows(guards, kept.predicates_without(guards))


def test_every_row_is_of_a_guard() -> None:
    """The file has as many rows as the kernel has guards."""
    assert len(kept.guard_sites()) == len(document.kept()["guards"])


#: A transition, an update, and a promise of what the transition changes that fails without it.
MOVED = [
    ("commit_forward", "st.token[d] = st.token[d] + 1", "order.token-advances"),
    ("commit_dgrad", "st.token[d] = st.token[d] + 1", "order.token-advances"),
    ("drop", "st.generation[slot] = st.generation[slot] + 1", "ownership.generation-rises"),
    ("commit_refresh", "st.cache_epoch[stage] = st.weight_epoch[stage]", "version.refresh-fills"),
    ("restore", "st.fill(st.cache_epoch, NEVER)", "version.stale-after-restore"),
    ("restore", "st.fill(st.generation, 0)", "persistence.slots-from-zero"),
]


@pytest.mark.parametrize(("transition", "update", "promise"), MOVED)
def test_without_an_update_what_it_changes_is_not_proved(
    transition: str, update: str, promise: str, finite: Composition
) -> None:
    """A promise about a transition's effect fails for a kernel that lacks the update."""
    updates = [
        site
        for site in sites()
        if (site.transition, site.kind, site.text) == (transition, "update", update)
    ]
    assert updates
    broken = Composition((), finite.encoding, Mutant(tuple(updates)).functions)
    failing = set(refuted(broken, transition, solver_of(finite)))

    assert any(name.startswith(promise) for name in failing)
