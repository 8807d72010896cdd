"""
The second solver, cvc5, which gets the same goals as Z3 through SMT-LIB.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final

import z3
from attrs import frozen

from ..symbolic.terms import Term
from .goals import Goal, Obligation, Theory

__all__ = ["ATTEMPTS", "Attempt", "Cvc5"]


@frozen
class Attempt:
    """
    One way to ask a goal: which lemmas of the theory are hypotheses, and which seed and timeout.

    Args:
        name: The attempt's name in reports.
        whole: Whether all lemmas are hypotheses; otherwise only the lemmas of the goal's relations
            are. A counterexample with only some hypotheses refutes nothing; a counterexample with
            all hypotheses contradicts Z3's proof.
        seed: Seed of the solver's random choices.
        most: Timeout in milliseconds; None for the timeout of `Cvc5`.
        instances: Whether the lemmas of the goal's relations are instantiated for the members that
            the goal names, instead of stated for all members.
    """

    name: str
    whole: bool
    seed: int = 0
    most: int | None = None
    instances: bool = False


#: The attempts, in order; the first attempt with an answer decides. If the lemmas of a goal's
#: relations are enough, the first attempt proves the goal in a fifth of a second on an idle core.
#: If they are not enough, cvc5 finds no counterexample either, and the next attempt follows.
ATTEMPTS: Final = (
    Attempt("lemmas of the goal's relations", whole=False, most=5_000),
    Attempt("every lemma", whole=True),
    Attempt("every lemma, seed 1", whole=True, seed=1),
    Attempt("lemmas of the goal's relations, seed 1", whole=False, seed=1),
    Attempt("lemmas for the goal's own members", whole=False, instances=True),
)


class Cvc5:
    """
    Runs cvc5 over the goals of one theory, each as a separate script.

    Args:
        theory: The theory whose lemmas are the hypotheses.
        timeout: Milliseconds for one attempt at a goal.

    Raises:
        ImportError: cvc5 is not installed; it is in the ``cvc5`` extra.
    """

    name = "cvc5"

    def __init__(self, theory: Theory, *, timeout: int = 10_000) -> None:
        import cvc5

        self._cvc5 = cvc5
        self.theory = theory
        self.timeout = timeout
        self._trusted = [t for c in theory.configuration for t in c.close(theory.encoding)]

    def prove(self, goals: Iterable[Goal]) -> Iterator[Obligation]:
        """Answer every goal, in order."""
        for goal in goals:
            began = time.perf_counter()
            verdict, attempt = self._answer(goal)
            seconds = time.perf_counter() - began
            yield goal.answered(self.theory.name, self.name, verdict, seconds, attempt)

    def hypotheses(self, goal: Goal, *, whole: bool, told: bool = False) -> list[Term]:
        """
        Return the hypotheses of a goal, without the goal's own facts.

        Args:
            goal: The goal.
            whole: Whether all lemmas are hypotheses. A goal about the initial state has none.
            told: Whether the lemmas of the goal's relations are instantiated for the members that
                the goal names.
        """
        if told:
            return [*self._trusted, *self.theory.instances(goal)]
        lemmas = self.theory.lemmas
        names = self.theory.lemmas_of(goal.relations)
        if whole and goal.relations is not None:
            names = frozenset(lemmas)
        encoding = self.theory.encoding
        closed = [term for name in sorted(names) for term in lemmas[name].close(encoding)]
        return [*self._trusted, *closed]

    def script(self, goal: Goal, *, whole: bool = False, told: bool = False) -> str:
        """Return a goal (facts and denial) as an SMT-LIB script; the expected answer is unsat."""
        solver = z3.Solver()
        hypotheses = self.hypotheses(goal, whole=whole, told=told)
        given = [*goal.facts, goal.denied]
        if told:  # instances contain the goal's terms, also constant arrays
            given, hypotheses = [*hypotheses, *given], []
        solver.add(hypotheses)
        solver.add(_without_constant_arrays(given))
        return "(set-logic ALL)\n" + str(solver.to_smt2())

    def _answer(self, goal: Goal) -> tuple[str, str]:
        for attempt in ATTEMPTS:
            script = self.script(goal, whole=attempt.whole, told=attempt.instances)
            limit = self.timeout if attempt.most is None else min(attempt.most, self.timeout)
            verdict = self._ask(script, attempt.seed, limit)
            told_all = attempt.whole or goal.relations is None
            if verdict == "unsat" or (verdict == "sat" and told_all):
                return verdict, attempt.name
        return "unknown", ""

    def _ask(self, script: str, seed: int, limit: int) -> str:
        solver = self._cvc5.Solver(self._cvc5.TermManager())
        solver.setOption("tlimit-per", str(limit))
        solver.setOption("seed", str(seed))
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


def _without_constant_arrays(terms: list[Term]) -> list[Term]:
    """
    Replace each constant array by a named array with a defining fact, since other solvers support
    constant arrays only of literal values.
    """
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
    # The entries of an array of arrays are constant arrays too, so they are named as well.
    return [z3.substitute(term, *names) for term in (*terms, *said)] if names else terms
