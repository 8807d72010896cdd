"""
Other seeds and solvers also prove the obligations, and fail to prove them for a kernel that lacks a
guard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cvc5
import pytest
import z3
from attrs import evolve

from qeffect.engine.stage import Transitions, transitions
from qeffect.verification.mutants import Mutant, sites
from qeffect.verification.proofs import prove, report, second_solver
from qeffect.verification.proofs.finite import SCOPE
from qeffect.verification.proofs.goals import Goal
from qeffect.verification.proofs.obligations import Composition, changes, obligations
from qeffect.verification.proofs.report import Agreement, agree
from qeffect.verification.proofs.second_solver import ATTEMPTS, Cvc5
from qeffect.verification.proofs.solvers import Z3
from qeffect.verification.symbolic import Encoding

#: cvc5 is asked every so many goals of a kind, which keeps the test short; the sweep asks them all.
STRIDE = 8
#: In how many tests cvc5 is asked.
PARTS = 4
#: Milliseconds for one attempt at a goal, where all are true and where some are false: of those
#: no solver finds a model here, and each may use its whole time limit.
PATIENT, IMPATIENT = 10_000, 300

SOLVERS: dict[str, Callable[[Composition, int], Z3 | Cvc5]] = {
    "z3": lambda composition, timeout: Z3(composition, seed=1, timeout=timeout),
    "cvc5": lambda composition, timeout: Cvc5(composition, timeout=timeout),
}


@pytest.fixture(scope="module")
def encoding() -> Encoding:
    """The unbounded encoding, which the sweep over solvers uses."""
    return Encoding.sorted()


@pytest.fixture(scope="module")
def full(encoding: Encoding) -> Composition:
    """The kernel's own transitions over every relation."""
    return Composition.of((), encoding)


@pytest.fixture(scope="module")
def goals(full: Composition) -> list[Goal]:
    """The goals that the sweep proves."""
    return [*prove._goals(full), *prove._asked(changes(full))]


@pytest.fixture(scope="module")
def broken(encoding: Encoding) -> Composition:
    """A kernel whose dI does not check whether its reference is stale."""
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


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_agree(seed: int) -> None:
    """Two more seeds prove every goal of the full composition."""
    [answer] = prove.again([seed])

    assert ("z3", seed) == (answer.solver, answer.seed)
    assert [] == answer.open
    assert answer.goals == answer.unsat > 1000


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_second_solver_proves_every_kind_of_obligation(part: int, encoding: Encoding) -> None:
    """A second solver proves obligations of every kind, from its own scripts."""
    composition = Composition.of((), encoding)
    goals = list(prove._goals(composition))
    kinds = {goal.kind for goal in goals}
    asked = [g for kind in sorted(kinds) for g in [g for g in goals if g.kind == kind][::STRIDE]]
    asked = asked[part::PARTS]

    answer = agree(Cvc5(composition), asked, 0)

    assert cvc5.__version__
    assert ("cvc5", len(asked)) == (answer.solver, answer.goals)
    assert [] == answer.open
    assert answer.goals == answer.unsat > 100 // PARTS


@pytest.mark.slow
def test_again_asks_cvc5_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep gives cvc5 the goals after the seeds, and runs no solver that is not named."""
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
    """Without one guard a promise of ``check_dgrad`` is not proved; with it, all are."""
    whole = Composition.of((), encoding)

    sound = agree(SOLVERS[name](whole, PATIENT), of_dgrad(whole), 0)
    answer = agree(SOLVERS[name](broken, IMPATIENT), of_dgrad(broken), 0)

    assert [] == sound.open
    assert name == answer.solver
    assert "ownership.right-reference" in {obligation.name for obligation in answer.open}
    assert {"check_dgrad"} == {obligation.transition for obligation in answer.open}
    assert 0 < len(answer.open) == answer.goals - answer.unsat < answer.goals
    assert all(obligation.verdict in ("sat", "unknown") for obligation in answer.open)


#: Goals that cvc5 left open when it was told the lemmas of their relations alone.
ONCE_OPEN = [
    ("epoch.first-forward-before-final", "finalize", "accepted#8"),
    ("a ticket is honoured", "commit_dgrad", "order.wrong-scales#3"),
]


def named(goals: Iterable[Goal], name: str, transition: str, path: str) -> Goal:
    """The only goal with a name at a path of a transition."""
    wanted = name, transition, path
    [goal] = [goal for goal in goals if (goal.name, goal.transition, goal.path) == wanted]
    return goal


@pytest.mark.ci
@pytest.mark.parametrize(("name", "transition", "path"), ONCE_OPEN)
def test_every_lemma_answers_what_few_leave_open(
    name: str,
    transition: str,
    path: str,
    full: Composition,
    goals: list[Goal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cvc5 proves both goals from every lemma, and the record names the attempt that succeeded."""
    goal = named(goals, name, transition, path)
    few, *others = ATTEMPTS
    monkeypatch.setattr(second_solver, "ATTEMPTS", (evolve(few, most=200), *others))

    [answer] = Cvc5(full).prove([goal])

    assert ("unsat", "every lemma") == (answer.verdict, answer.attempt)
    assert (name, transition, path) == (answer.name, answer.transition, answer.path)


def test_the_lemmas_of_its_relations_do_not_prove_a_goal_that_every_lemma_proves() -> None:
    """In a finite scope some state satisfies the few lemmas and violates the goal."""
    name, transition, _ = ONCE_OPEN[0]
    kernel = transitions(())
    alone = Transitions(kernel.relations, {transition: kernel.functions[transition]})
    composition = Composition((), Encoding.finite(SCOPE), alone)
    goal, *_ = (goal for goal in obligations(composition) if goal.name == name)
    few = composition.lemmas_of(goal.relations)
    needed = "version.busy-with-first-forward"

    def verdict(lemmas: frozenset[str]) -> Any:
        words = composition.vocabulary
        solver = z3.Solver()
        solver.add(*words.counted(), *goal.facts, goal.denied)
        for claim in (*words.configuration(), *(composition.lemmas[name] for name in lemmas)):
            solver.add(list(words.close(claim)))
        return solver.check()

    assert needed not in few
    assert z3.sat == verdict(few)
    assert z3.unsat == verdict(few | {needed})
    assert z3.unsat == verdict(frozenset(composition.lemmas))


@pytest.mark.ci
def test_both_solvers_are_asked_the_same_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep hands cvc5 the very goals that it hands another seed of Z3."""
    asked: dict[str, list[Goal]] = {}

    def remember(solver: Z3 | Cvc5, goals: list[Goal], seed: int) -> Agreement:
        asked[solver.name] = list(goals)
        return Agreement(solver.name, seed, len(goals), 0, 0.0)

    monkeypatch.setattr(report, "agree", remember)
    list(prove.again([1], ("z3", "cvc5")))

    assert {"z3", "cvc5"} == set(asked)
    assert len(asked["z3"]) == len(asked["cvc5"]) > 1000
    assert all(one is other for one, other in zip(asked["z3"], asked["cvc5"], strict=True))


def read_back(script: str) -> Iterator[Any]:
    """The assertions of a script; an array with one value everywhere is written as that value."""
    filled, rest = [], []
    for term in z3.parse_smt2_string(script):
        if z3.is_quantifier(term) and term.var_name(0) == "index!":
            [entry] = [side for side in term.body().children() if z3.is_select(side)]
            [value] = [side for side in term.body().children() if not z3.is_select(side)]
            filled.append((entry.arg(0), z3.K(entry.arg(0).sort().domain(), value)))
        else:
            rest.append(term)
    for term in rest:
        yield z3.substitute(term, *filled)


UNORDERED = (z3.Z3_OP_AND, z3.Z3_OP_OR, z3.Z3_OP_EQ, z3.Z3_OP_ADD)


def plain(term: Any) -> str:
    """A term as text that does not depend on the order of equal members."""
    if z3.is_quantifier(term):
        return f"(forall {term.num_vars()} {term.var_sort(0)} {plain(term.body())})"
    parts = [plain(part) for part in term.children()]
    if not parts:
        return str(term)
    kind = term.decl().kind()
    return f"({term.decl().sexpr()} {' '.join(sorted(parts) if kind in UNORDERED else parts)})"


def counted(terms: Iterable[Any], known: dict[int, tuple[Any, list[str]]]) -> Counter[str]:
    """Terms in a normal form, with the members of each conjunction counted."""
    found: Counter[str] = Counter()
    for term in terms:
        if term.get_id() not in known:
            form = z3.simplify(term)
            parts = form.children() if z3.is_and(form) else [form]
            known[term.get_id()] = term, [plain(part) for part in parts]
        found.update(known[term.get_id()][1])
    return found


@pytest.mark.ci
@pytest.mark.parametrize("whole", [False, True])
def test_a_script_says_lemmas_facts_and_the_denial_and_nothing_else(
    whole: bool, full: Composition, goals: list[Goal]
) -> None:
    """A script, read back, has only the goal's facts and denial, and the composition's lemmas."""
    words = full.vocabulary
    trusted = [term for claim in words.configuration() for term in words.close(claim)]
    solver = Cvc5(full)
    known: dict[int, tuple[Any, list[str]]] = {}
    with_arrays = 0
    for goal in [*(named(goals, *where) for where in ONCE_OPEN), *goals[::200]]:
        names = full.lemmas_of(goal.relations)
        if whole and goal.relations is not None:
            names = frozenset(full.lemmas)
        lemmas = [term for name in names for term in words.close(full.lemmas[name])]
        script = solver.script(goal, whole=whole)
        with_arrays += "filled!" in script

        said = counted(read_back(script), known)

        wanted = [*trusted, *lemmas, *goal.facts, goal.denied]
        assert counted(wanted, known) == said, goal.name
    assert with_arrays


def test_a_script_of_the_goals_own_members_has_no_lemma_for_all(
    full: Composition, goals: list[Goal]
) -> None:
    """Besides the configuration, it has the lemmas for the goal's members only."""
    goal = named(goals, *ONCE_OPEN[1])
    trusted = [term for claim in full.configuration for term in claim.close(full.encoding)]
    known: dict[int, tuple[Any, list[str]]] = {}

    said = counted(read_back(Cvc5(full).script(goal, told=True)), known)

    wanted = [*trusted, *full.instances(goal), *goal.facts, goal.denied]
    assert counted(wanted, known) == said


@pytest.mark.ci
@pytest.mark.parametrize(("name", "transition", "path"), ONCE_OPEN)
def test_no_attempt_refutes_what_is_not_denied(
    name: str, transition: str, path: str, full: Composition, goals: list[Goal]
) -> None:
    """cvc5 refutes neither the facts with every lemma, nor these with the claim itself."""
    goal = named(goals, name, transition, path)
    wrong = [evolve(goal, denied=z3.BoolVal(True)), evolve(goal, denied=z3.Not(goal.denied))]

    answers = list(Cvc5(full, timeout=200).prove(wrong))

    assert len(wrong) == len(answers)
    assert all(answer.verdict in ("sat", "unknown") for answer in answers)
    assert not any(answer.proved for answer in answers)


class Scripted(Cvc5):
    """cvc5 with a given answer for each attempt."""

    def __init__(self, composition: Composition, said: list[str]) -> None:
        super().__init__(composition)
        self.said = list(said)

    def _ask(self, script: str, seed: int, limit: int) -> str:
        return self.said.pop(0)


FEW, EVERY, *_ = (attempt.name for attempt in ATTEMPTS)


@pytest.mark.parametrize(
    ("said", "verdict", "attempt"),
    [
        (["unsat"], "unsat", FEW),
        (["unknown", "unsat"], "unsat", EVERY),
        (["sat", "unsat"], "unsat", EVERY),
        (["unknown", "sat"], "sat", EVERY),
        (["unknown", "unknown", "unsat"], "unsat", ATTEMPTS[2].name),
        (["unknown", "unknown", "sat"], "sat", ATTEMPTS[2].name),
        (["unknown"] * len(ATTEMPTS), "unknown", ""),
        (["unknown"] * 4 + ["unsat"], "unsat", ATTEMPTS[4].name),
        (["sat", "unknown", "unknown", "sat", "sat"], "unknown", ""),
    ],
)
def test_an_attempt_with_every_lemma_decides(
    said: list[str], verdict: str, attempt: str, full: Composition, goals: list[Goal]
) -> None:
    """A model of some lemmas decides nothing; a model of all lemmas is a disagreement."""
    solver = Scripted(full, said)

    [answer] = solver.prove([named(goals, *ONCE_OPEN[0])])

    assert (verdict, attempt) == (answer.verdict, answer.attempt)
    assert [] == solver.said


def test_a_model_of_a_goal_without_hypotheses_is_a_disagreement(
    full: Composition, goals: list[Goal]
) -> None:
    """A goal about the initial state has no lemmas, so the first attempt decides it."""
    initial = next(goal for goal in goals if goal.relations is None)
    solver = Scripted(full, ["sat", "unsat"])

    [answer] = solver.prove([initial])

    assert ("sat", FEW, ["unsat"]) == (answer.verdict, answer.attempt, solver.said)


def test_an_agreement_counts_what_each_attempt_proved(full: Composition, goals: list[Goal]) -> None:
    """The report says how many goals needed more than the lemmas of their relations."""
    goal = named(goals, *ONCE_OPEN[0])
    said = ["unsat", "unknown", "unsat", *["unknown"] * len(ATTEMPTS)]

    answer = agree(Scripted(full, said), [goal] * 3, 0)

    assert {FEW: 1, EVERY: 1} == answer.attempts == answer.asdict()["attempts"]
    assert (3, 2, 1) == (answer.goals, answer.unsat, len(answer.open))
