"""
Asking solvers: Z3 with lemmas by relation, and cvc5 through SMT-LIB.

Instances of the lemmas are found by matching terms (no model search): a claim that needs more
answers ``unknown`` soon, and ``unknown`` is a failure. Searches for models are done in finite
scopes, where every query is free of quantifiers and decided.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import z3
from attrs import define, field

from ..symbolic.terms import Term
from .obligations import Composition, Goal, Obligation
from .vocabulary import Claim

__all__ = ["Z3", "Cvc5", "Proved"]

#: Lemmas that number things: each instance makes terms for the next, so they wait for others.
_NUMBERING = frozenset(
    {
        "capture.every-slot-seated",
        "capture.every-seat-taken",
        "epoch.every-cell-placed",
        "epoch.every-place-taken",
    }
)

#: Effort for one attempt in Z3's own units, which no other load on the machine takes from it: about
#: a third of a second for a goal at first, less for what helps at once or not at all, and a second
#: or two for one alone. Goals that are left then have the whole timeout.
HASTE: Final = 400_000
GLANCE: Final = 50_000
PATIENCE: Final = 2_000_000


@define
class Proved:
    """
    What has been proved so far, so that a claim that follows from it is not proved again.

    A denial refuted from some lemmas and facts is refuted from more. Compositions share most of
    their paths; those that leave more out have fewer tests, and are proved first.
    """

    _found: dict[int, list[tuple[frozenset[str], frozenset[int], Any]]] = field(
        factory=lambda: defaultdict(list)
    )

    def add(self, goal: Goal, lemmas: frozenset[str], facts: frozenset[int]) -> None:
        """
        Remember that some facts of a goal refute its denial.

        Args:
            goal: The goal.
            lemmas: Names of the lemmas that were at hand.
            facts: Ids of the goal's facts that the refutation used.
        """
        self._found[goal.denied.get_id()].append((lemmas, facts, goal))  # the goal keeps ids alive

    def covers(self, goal: Goal, lemmas: frozenset[str]) -> bool:
        """Whether fewer lemmas and facts were enough before."""
        facts = frozenset(fact.get_id() for fact in goal.facts)
        return any(
            fewer <= lemmas and known <= facts
            for fewer, known, _ in self._found.get(goal.denied.get_id(), ())
        )


class Z3:
    """
    Z3 over the lemmas of one composition.

    Args:
        composition: Whose lemmas are the hypotheses.
        seed: Seed of the solver's own choices.
        proved: What is known already; None to prove everything.
        timeout: Milliseconds for one attempt at a goal alone.
    """

    name = "z3"

    def __init__(
        self,
        composition: Composition,
        *,
        seed: int = 0,
        proved: Proved | None = None,
        timeout: int = 10_000,
    ) -> None:
        self.composition = composition
        self.seed = seed
        self.proved = proved
        self.timeout = timeout
        words = composition.vocabulary
        self._trusted = [t for c in words.configuration() for t in words.close(c)]
        self._lemmas = {c.name: c for c in words.invariants(words.before)}
        self._solvers: dict[tuple[frozenset[str], int], Any] = {}

    def lemmas(self, relations: frozenset[str] | None) -> frozenset[str]:
        """Return the names of the lemmas that speak of no other relations; none for None."""
        if relations is None:
            return frozenset()
        return frozenset(n for n, claim in self._lemmas.items() if claim.needs <= relations)

    def _solver(self, lemmas: frozenset[str], effort: int) -> Any:
        key = lemmas, effort
        if key not in self._solvers:
            self._solvers[key] = self._new_solver(lemmas, effort)
        return self._solvers[key]

    def _new_solver(self, lemmas: frozenset[str], effort: int | None) -> Any:
        solver = z3.Solver()
        solver.set("auto_config", False)
        solver.set("mbqi", False)
        solver.set("timeout", self.timeout)
        if effort is not None:
            solver.set("rlimit", effort)
        solver.set("random_seed", self.seed)
        solver.add(self._trusted)
        words = self.composition.vocabulary
        for name in sorted(lemmas):
            weight = 2 if name in _NUMBERING else 1
            solver.add(list(words.close(self._lemmas[name], weight)))
        return solver

    def _alone(
        self,
        goal: Goal,
        lemmas: frozenset[str],
        more: Sequence[Term] = (),
        effort: int | None = None,
    ) -> tuple[str, float]:
        """Ask a solver of its own, that no earlier goal has led astray."""
        began = time.perf_counter()
        solver = self._new_solver(lemmas, effort)
        solver.add(*goal.facts, goal.denied, *more)
        verdict = str(solver.check())
        if verdict == "unsat" and self.proved is not None:
            self.proved.add(goal, lemmas, frozenset(fact.get_id() for fact in goal.facts))
        return verdict, time.perf_counter() - began

    def _again(self, goal: Goal) -> tuple[str, float]:
        return self._alone(goal, self.lemmas(goal.relations))

    def _with_all(self, goal: Goal, effort: int = HASTE) -> tuple[str, float]:
        """Ask again with every lemma, and with what is known of columns that nobody writes."""
        lemmas = frozenset(self._lemmas)
        return self._attempt([goal], lemmas, self.composition.untouched, effort)[0]

    def _told(self, goal: Goal, effort: int | None = None) -> tuple[str, float]:
        """Ask again with the lemmas of the members at hand, whatever the denial matches."""
        lemmas = self.lemmas(goal.relations)
        told = [self._at_hand(self._lemmas[name]) for name in sorted(lemmas)]
        return self._alone(goal, lemmas, told, effort)

    def _attempts(self, goal: Goal) -> Iterator[Callable[[Goal], tuple[str, float]]]:
        """What is tried with a goal that haste left open: what costs little before the rest."""
        if goal.relations is not None:
            yield partial(self._with_all, effort=GLANCE)
            yield partial(self._told, effort=PATIENCE)
            yield self._again
            yield self._with_all
            yield self._told

    def _at_hand(self, claim: Claim) -> Term:
        """Return a lemma of the very members that a denial of it would name."""
        enc = self.composition.encoding
        nulls = [
            (enc.const(f"var.{n}", sort), enc.null(sort)) for n, sort in claim.variables.items()
        ]
        return z3.Or(*(term == null for term, null in nulls if null is not None), claim.body)

    def prove(self, goals: Iterable[Goal]) -> Iterator[Obligation]:
        """Answer every goal, in order."""
        for _, group in groupby(goals, lambda goal: (_where(goal), goal.relations)):
            yield from self._prove_alike(list(group))

    def _prove_alike(self, goals: Sequence[Goal]) -> Iterator[Obligation]:
        relations = goals[0].relations
        lemmas = self.lemmas(relations)
        first = self._attempt(goals, lemmas, ())
        for goal, (verdict, seconds) in zip(goals, first, strict=True):
            for attempt in self._attempts(goal):
                if verdict == "unsat":
                    break
                verdict, more = attempt(goal)
                seconds += more
            yield goal.answered(self.composition.name, self.name, verdict, seconds)

    def _attempt(
        self,
        goals: Sequence[Goal],
        lemmas: frozenset[str],
        more: Sequence[Term],
        effort: int = HASTE,
    ) -> list[tuple[str, float]]:
        solver = self._solver(lemmas, effort)
        common = set.intersection(*({f.get_id() for f in g.facts} for g in goals))
        solver.push()
        solver.add([_named(f) for f in goals[0].facts if f.get_id() in common])
        solver.add(list(more))
        answers = []
        for goal in goals:
            if self.proved is not None and self.proved.covers(goal, lemmas):
                answers.append(("unsat", 0.0))
                continue
            began = time.perf_counter()
            solver.push()
            rest = [f for f in goal.facts if f.get_id() not in common]
            verdict = self._refute(solver, goal, rest, None if more else lemmas)
            solver.pop()
            answers.append((verdict, time.perf_counter() - began))
        solver.pop()
        return answers

    def _refute(
        self, solver: Any, goal: Goal, facts: Sequence[Term], lemmas: frozenset[str] | None
    ) -> str:
        """
        Ask whether a goal's facts refute its denial, and remember which of them did.

        Args:
            solver: One that has the other facts of the goal already, by name.
            goal: The goal.
            facts: Those to add.
            lemmas: Names of the lemmas at hand; None where what is at hand is more than lemmas,
                and a refutation is not remembered.
        """
        solver.add([_named(fact) for fact in facts])
        solver.add(goal.denied)
        verdict = str(solver.check([_name(fact) for fact in goal.facts]))
        if verdict == "unsat" and self.proved is not None and lemmas is not None:
            used = {name.get_id() for name in solver.unsat_core()}
            ids = (fact.get_id() for fact in goal.facts if _name(fact).get_id() in used)
            self.proved.add(goal, lemmas, frozenset(ids))
        return verdict

    def script(self, goal: Goal) -> str:
        """Return a goal as an SMT-LIB script that a solver should call unsat."""
        solver = z3.Solver()
        words = self.composition.vocabulary
        solver.add(self._trusted)
        for name in sorted(self.lemmas(goal.relations)):
            solver.add(list(words.close(self._lemmas[name])))
        solver.add(_without_constant_arrays([*goal.facts, goal.denied]))
        return "(set-logic ALL)\n" + str(solver.to_smt2())


def _without_constant_arrays(terms: list[Term]) -> list[Term]:
    """Name arrays of one value and say so: other solvers want a literal there."""
    found: dict[int, Term] = {}
    todo = list(terms)
    seen: dict[int, Term] = {}
    while todo:
        term = todo.pop()
        if term.get_id() not in seen:
            seen[term.get_id()] = term
            if z3.is_K(term):
                found[term.get_id()] = term
            todo += term.children()
    said = []
    names = []
    for number, term in enumerate(found.values()):
        name = z3.Const(f"filled!{number}", term.sort())
        index = z3.Const("index!", term.sort().domain())
        said.append(z3.ForAll([index], z3.Select(name, index) == term.arg(0)))
        names.append((term, name))
    return [z3.substitute(term, *names) for term in terms] + said if names else terms


def _name(fact: Term) -> Term:
    """Return the proposition that stands for a fact, so that a refutation can say what it used."""
    return z3.Bool(f"fact!{fact.get_id()}")


def _named(fact: Term) -> Term:
    return z3.Implies(_name(fact), fact)


def _where(goal: Goal) -> tuple[str, str, str]:
    return goal.kind, goal.transition, goal.path


class Cvc5:
    """
    cvc5 over the same goals, each a script of its own.

    Args:
        composition: Whose lemmas are the hypotheses.
        timeout: Milliseconds for one goal.

    Raises:
        ImportError: cvc5 is not installed; it is in the ``cvc5`` extra.
    """

    name = "cvc5"

    def __init__(self, composition: Composition, *, timeout: int = 10_000) -> None:
        import cvc5

        self._cvc5 = cvc5
        self._scripts = Z3(composition)
        self.composition = composition
        self.timeout = timeout

    def prove(self, goals: Iterable[Goal]) -> Iterator[Obligation]:
        """Answer every goal, in order."""
        for goal in goals:
            began = time.perf_counter()
            verdict = self._ask(self._scripts.script(goal))
            seconds = time.perf_counter() - began
            yield goal.answered(self.composition.name, self.name, verdict, seconds)

    def _ask(self, script: str) -> str:
        solver = self._cvc5.Solver(self._cvc5.TermManager())
        solver.setOption("tlimit-per", str(self.timeout))
        parser = self._cvc5.InputParser(solver)
        parser.setStringInput(self._cvc5.InputLanguage.SMT_LIB_2_6, script, "goal")
        symbols = parser.getSymbolManager()
        answer = "unknown"
        while True:
            command = parser.nextCommand()
            if command.isNull():
                return answer
            said = command.invoke(solver, symbols).strip()
            if said in ("sat", "unsat", "unknown"):
                answer = said
