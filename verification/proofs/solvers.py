"""
Ask Z3 to prove goals, with the lemmas of each goal's relations as hypotheses.

Z3 finds instances of the lemmas by matching terms, and does not search for models. If this is not
enough for a claim, Z3 soon answers ``unknown``, which counts as a failure. Models are searched only
in finite scopes, where a query has no quantifiers and always gets an answer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import z3
from attrs import define, field, frozen

from ..symbolic.solver import EFFORT, TIMEOUT, answer, new_solver
from ..symbolic.terms import Term
from .goals import Goal, Obligation, Theory

__all__ = ["Z3", "Proved"]

#: Lemmas about numbering. Each instance makes terms for the next instance, so these lemmas get a
#: higher weight.
_NUMBERING = frozenset(
    {
        "capture.every-slot-seated",
        "capture.every-seat-taken",
        "epoch.every-cell-placed",
        "epoch.every-place-taken",
    }
)

#: Effort of one attempt in Z3's own units, which do not depend on the load of the machine: about a
#: third of a second for a first attempt (HASTE), less for an attempt that helps at once or not at
#: all (GLANCE), one or two seconds for a goal alone (PATIENCE). Goals that are still open then get
#: the whole timeout.
HASTE: Final = 400_000
GLANCE: Final = 50_000
PATIENCE: Final = 2_000_000

#: Number of fresh solvers, with seeds that no run uses itself, that try a goal before the last
#: attempts. Whether a search finds a proof depends on the earlier questions of its process.
FRESH: Final = 3


@define
class Proved:
    """
    The proofs so far, so that a claim that follows from an earlier proof is not proved again.

    If some lemmas and facts refute a negated claim, then these and further lemmas and facts refute
    it too. Compositions (choices of relations) share most of their paths. Compositions that leave
    out more relations have fewer tests, and are proved first.
    """

    _found: dict[int, list[tuple[frozenset[str], frozenset[int], Any]]] = field(
        factory=lambda: defaultdict(list)
    )

    def add(self, goal: Goal, lemmas: frozenset[str], facts: frozenset[int]) -> None:
        """
        Record that some facts of a goal refute its negated claim.

        Args:
            goal: The goal whose negated claim was refuted.
            lemmas: Names of the lemmas that were hypotheses.
            facts: Ids of the goal's facts that the refutation used.
        """
        self._found[goal.denied.get_id()].append((lemmas, facts, goal))  # the goal keeps its ids

    def covers(self, goal: Goal, lemmas: frozenset[str]) -> bool:
        """Return whether an earlier proof needed only some of these lemmas and facts."""
        earlier = self._found.get(goal.denied.get_id())
        if not earlier:
            return False
        facts = frozenset(goal.fact_ids)
        return any(fewer <= lemmas and known <= facts for fewer, known, _ in earlier)


@frozen
class _NamedFact:
    """
    A fact and a Boolean constant that represents it, so that a refutation can list the facts that
    it used.

    Args:
        id: The solver's id of the fact.
        fact: The fact; holding it here keeps its id valid.
        name: The Boolean constant.
        named: The formula that the constant implies the fact.
    """

    id: int
    fact: Term
    name: Term
    named: Term


class Z3:
    """
    Runs Z3 over the goals of one theory.

    Args:
        theory: The theory whose lemmas are the hypotheses.
        seed: Seed of the solver's random choices.
        proved: The proofs so far; None to prove every goal anew.
        timeout: Timeout in milliseconds for one attempt at a single goal.
        thorough: Whether goals that cheap attempts leave open get further attempts. Mutants do not
            need them, since most of their open goals are false.
    """

    name = "z3"

    def __init__(
        self,
        theory: Theory,
        *,
        seed: int = 0,
        proved: Proved | None = None,
        timeout: int = TIMEOUT,
        thorough: bool = True,
    ) -> None:
        self.theory = theory
        self.seed = seed
        self.proved = proved
        self.timeout = timeout
        self.thorough = thorough
        self._trusted = [t for c in theory.configuration for t in c.close(theory.encoding)]
        self._solvers: dict[tuple[frozenset[str], int], Any] = {}
        self._facts: dict[int, _NamedFact] = {}

    def _solver(self, lemmas: frozenset[str], effort: int) -> Any:
        key = lemmas, effort
        if key not in self._solvers:
            self._solvers[key] = self._new_solver(lemmas, effort)
        return self._solvers[key]

    def _new_solver(self, lemmas: frozenset[str], effort: int, seed: int | None = None) -> Any:
        seed = self.seed if seed is None else seed
        solver = new_solver("quantified", seed=seed, timeout=self.timeout, effort=effort)
        solver.add(self._trusted)
        for name in sorted(lemmas):
            weight = 2 if name in _NUMBERING else 1
            solver.add(list(self.theory.lemmas[name].close(self.theory.encoding, weight)))
        return solver

    def _alone(
        self,
        goal: Goal,
        lemmas: frozenset[str],
        more: Sequence[Term] = (),
        effort: int = EFFORT,
    ) -> tuple[str, float]:
        """Ask a new solver, so that earlier goals cannot influence its answer."""
        began = time.perf_counter()
        solver = self._new_solver(lemmas, effort)
        solver.add(*goal.facts, goal.denied, *more)
        verdict = answer(solver)
        if verdict == "unsat" and self.proved is not None:
            self.proved.add(goal, lemmas, frozenset(goal.fact_ids))
        return verdict, time.perf_counter() - began

    def _again(self, goal: Goal) -> tuple[str, float]:
        return self._alone(goal, self.theory.lemmas_of(goal.relations))

    def _afresh(self, goal: Goal, seed: int) -> tuple[str, float]:
        """
        Repeat the first attempt with a new solver and another seed, since its search may succeed.
        """
        began = time.perf_counter()
        lemmas = self.theory.lemmas_of(goal.relations)
        solver = self._new_solver(lemmas, HASTE, seed)
        return self._refute(solver, goal, self._named(goal), lemmas), time.perf_counter() - began

    def _with_all(self, goal: Goal, effort: int = HASTE) -> tuple[str, float]:
        """Ask again with all lemmas, and with the facts about columns that are never written."""
        lemmas = frozenset(self.theory.lemmas)
        return self._attempt([goal], lemmas, self.theory.untouched, effort)[0]

    def _told(self, goal: Goal, effort: int = EFFORT) -> tuple[str, float]:
        """Ask again with the lemmas instantiated for the goal's own members."""
        lemmas = self.theory.lemmas_of(goal.relations)
        told = [self.theory.lemmas[name].at_hand(self.theory.encoding) for name in sorted(lemmas)]
        return self._alone(goal, lemmas, told, effort)

    def _attempts(self, goal: Goal) -> Iterator[Callable[[Goal], tuple[str, float]]]:
        """Yield further attempts at a goal that a first quick attempt left open, cheapest first."""
        if goal.relations is not None:
            yield partial(self._with_all, effort=GLANCE)
            yield self._instantiated
        if goal.relations is not None and self.thorough:
            yield self._with_all
            yield partial(self._told, effort=PATIENCE)
            for number in range(FRESH):
                yield partial(self._afresh, seed=1000 * (self.seed + 1) + number)
            yield self._again
            yield self._told

    def _instantiated(self, goal: Goal) -> tuple[str, float]:
        """Ask with the lemmas instantiated only for the members that the goal names."""
        began = time.perf_counter()
        effort = EFFORT if self.thorough else PATIENCE
        solver = new_solver("quantified", seed=self.seed, timeout=self.timeout, effort=effort)
        solver.add(self._trusted)
        solver.add(*goal.facts, goal.denied)
        for instance in self.theory.instances(goal):
            solver.add(instance)
        return answer(solver), time.perf_counter() - began

    def prove(self, goals: Iterable[Goal]) -> Iterator[Obligation]:
        """Answer every goal, in order."""
        for _, group in groupby(goals, lambda goal: (_where(goal), goal.relations)):
            yield from self._prove_alike(list(group))

    def settle(self, found: Iterable[Obligation | Goal]) -> Iterator[Obligation]:
        """Answer every goal, in order; the obligations that need no solver come last."""
        settled: list[Obligation] = []
        yield from self.prove(_asked(found, settled))
        yield from settled

    def _prove_alike(self, goals: Sequence[Goal]) -> Iterator[Obligation]:
        relations = goals[0].relations
        lemmas = self.theory.lemmas_of(relations)
        first = self._attempt(goals, lemmas, ())
        for goal, (verdict, seconds) in zip(goals, first, strict=True):
            for attempt in self._attempts(goal):
                if verdict == "unsat":
                    break
                verdict, more = attempt(goal)
                seconds += more
            yield goal.answered(self.theory.name, self.name, verdict, seconds)

    def _attempt(
        self,
        goals: Sequence[Goal],
        lemmas: frozenset[str],
        more: Sequence[Term],
        effort: int = HASTE,
    ) -> list[tuple[str, float]]:
        solver = self._solver(lemmas, effort)
        common = set.intersection(*(set(goal.fact_ids) for goal in goals))
        solver.push()
        solver.add([fact.named for fact in self._named(goals[0]) if fact.id in common])
        solver.add(list(more))
        answers = []
        for goal in goals:
            if self.proved is not None and self.proved.covers(goal, lemmas):
                answers.append(("unsat", 0.0))
                continue
            began = time.perf_counter()
            solver.push()
            rest = [fact for fact in self._named(goal) if fact.id not in common]
            verdict = self._refute(solver, goal, rest, None if more else lemmas)
            solver.pop()
            answers.append((verdict, time.perf_counter() - began))
        solver.pop()
        return answers

    def _named(self, goal: Goal) -> list[_NamedFact]:
        """Return a goal's facts with their Boolean constants; each constant is made only once."""
        found = []
        for number, fact in zip(goal.fact_ids, goal.facts, strict=True):
            known = self._facts.get(number)
            if known is None:
                name = z3.Bool(f"fact!{number}")
                known = _NamedFact(number, fact, name, z3.Implies(name, fact))
                self._facts[number] = known
            found.append(known)
        return found

    def _refute(
        self, solver: Any, goal: Goal, facts: Sequence[_NamedFact], lemmas: frozenset[str] | None
    ) -> str:
        """
        Ask whether a goal's facts refute its negated claim, and record which facts were used.

        Args:
            solver: A solver that already has the goal's other facts, by their constants.
            goal: The goal: facts, and the negated claim to refute.
            facts: The facts to add.
            lemmas: Names of the lemmas in the solver; None if the solver also has other formulas,
                so that a refutation must not be recorded.
        """
        solver.add([fact.named for fact in facts])
        solver.add(goal.denied)
        every = self._named(goal)
        verdict = answer(solver, [fact.name for fact in every])
        if verdict == "unsat" and self.proved is not None and lemmas is not None:
            used = {name.get_id() for name in solver.unsat_core()}
            ids = (fact.id for fact in every if fact.name.get_id() in used)
            self.proved.add(goal, lemmas, frozenset(ids))
        return verdict


def _asked(found: Iterable[Obligation | Goal], settled: list[Obligation]) -> Iterator[Goal]:
    """Yield the goals, and keep the obligations."""
    for one in found:
        if isinstance(one, Goal):
            yield one
        else:
            settled.append(one)


def _where(goal: Goal) -> tuple[str, str, str]:
    return goal.kind, goal.transition, goal.path
