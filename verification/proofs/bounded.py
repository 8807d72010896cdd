"""
Bounded proofs: no violation occurs within a number of accepted transitions from the initial state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import z3

from ..symbolic import Path
from ..symbolic.encoding import ARGUMENTS, STAGE_OF
from ..symbolic.solver import answer, new_solver
from ..symbolic.terms import Term
from .goals import Obligation
from .ground import BITS, Grounding, Known, Value
from .obligations import Composition
from .theorems import beginning

__all__ = ["DEPTH", "SCOPE", "Unrolling", "bounded", "scope_name"]

#: Members of each sort.
SCOPE: Mapping[str, int] = {
    "slot": 2,
    "cell": 2,
    "stage": 1,
    "domain": 1,
    "link": 1,
    "caller": 1,
    "pool": 1,
    "buffer": 1,
    "bucket": 1,
    "opaque": 2,
}
#: Number of transitions in a row.
DEPTH = 8

#: Greatest first epoch, restored epoch and generation. Together with the depth they stay in the
#: range of the integers.
_GREATEST = 3


def scope_name(scope: Mapping[str, int]) -> str:
    """Return a scope's sizes as text.

    >>> scope_name({"slot": 2, "cell": 1})
    '2 slots, 1 cell'
    """
    return ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in scope.items())


class Unrolling:
    """
    A sequence of accepted transitions from the initial state, as one formula.

    Each step of the formula is a choice among all accepting paths, so there is one formula for all
    sequences.

    Args:
        composition: A composition in a finite encoding.
    """

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.words = composition.vocabulary
        self.ground = Grounding(composition.encoding)
        self.solver = new_solver("bits")
        self.accepting: list[Path] = [
            path for paths in composition.paths.values() for path in paths if path.clause is None
        ]
        self.taken: list[list[Term]] = []
        self.arguments: list[dict[str, Value]] = []
        self._base = dict(self.words.before.columns())
        self._after = [dict(self.words.after(path).columns()) for path in self.accepting]
        self._denied = [self.words.denied(c) for c in self.words.invariants(self.words.before)]
        self._settled = -1  # the last state that is known to satisfy all predicates
        self.states = [self._begin()]

    def _begin(self) -> dict[str, Value]:
        stage_of = self.words.state(self.words.before).stage_of.term
        epoch = self.composition.encoding.const("first_epoch", "int")
        constants = {**self._base, STAGE_OF: stage_of, "first_epoch": epoch}
        arbitrary = {}
        for name, term in constants.items():
            arbitrary[name] = self.ground.fresh(name, term.sort())
            self.solver.add(self.ground.possible(arbitrary[name], term.sort()))
        start, facts = beginning(self.composition)
        known: Known = {}
        for fact in facts:
            self.solver.add(self.ground.value(fact, arbitrary, known))
        for claim in self.words.configuration():
            for term in self.words.close(claim):
                self.solver.add(self.ground.value(term, arbitrary, known))
        small = [arbitrary["first_epoch"], arbitrary["generation_max"]]
        self.solver.add([value <= _GREATEST for value in small])
        first = {n: self.ground.value(t, arbitrary, known) for n, t in start.columns()}
        return {**first, STAGE_OF: arbitrary[STAGE_OF]}

    @property
    def depth(self) -> int:
        """Number of steps in the sequence."""
        return len(self.taken)

    def extend(self) -> None:
        """Add one more step to the sequence."""
        step = self.depth
        arguments, taken, after = self._step(self.solver, self.states[-1], str(step))
        self.solver.add(arguments["arg.epoch"] <= _GREATEST + step)
        self.taken.append(taken)
        self.arguments.append(arguments)
        self.states.append(after)

    def _step(
        self, solver: Any, before: Mapping[str, Value], label: str
    ) -> tuple[dict[str, Value], list[Term], dict[str, Value]]:
        """Return a step's arguments, the conditions of its path, and the state after the step."""
        arguments = {}
        for name, sort in ARGUMENTS.items():
            z3_sort = self.composition.encoding.sorts[sort]
            arguments[f"arg.{name}"] = self.ground.fresh(f"{name}@{label}", z3_sort)
            solver.add(self.ground.possible(arguments[f"arg.{name}"], z3_sort))
        given = {**before, **arguments}
        known: Known = {}
        taken = [z3.Bool(f"{p.transition}#{p.index}@{label}") for p in self.accepting]
        solver.add(z3.PbEq([(choice, 1) for choice in taken], 1))
        for choice, path in zip(taken, self.accepting, strict=True):
            needed = z3.And(path.condition, *self.words.assumed(path.transition))
            solver.add(z3.Implies(choice, self.ground.value(needed, given, known)))
        after: dict[str, Value] = dict(before)
        for name, base in self._base.items():
            movers = [
                (choice, moved[name])
                for choice, moved in zip(taken, self._after, strict=True)
                if not moved[name].eq(base)
            ]
            if movers:
                after[name] = self.ground.fresh(f"{name}@after {label}", base.sort())
                value = before[name]
                for choice, term in movers:
                    moved_to = self.ground.value(term, given, known)
                    value = _either(choice, moved_to, value)
                solver.add(self.ground.same(after[name], value))
        return arguments, taken, after

    def _broken(
        self,
        before: Mapping[str, Value],
        arguments: Mapping[str, Value],
        taken: list[Term],
        after: Mapping[str, Value],
    ) -> list[Term]:
        """
        Return a term for each invariant and each step property: the term is true if a step breaks
        the property.
        """
        known: Known = {}
        broken = [self.ground.value(term, after, known) for term in self._denied]
        given = {**before, **arguments}
        known = {}
        for choice, path in zip(taken, self.accepting, strict=True):
            for claim in self.words.steps(path.transition):
                denied = self.ground.value(self.words.denied(claim), given, known)
                broken.append(z3.And(choice, denied))
        return broken

    def _last(self) -> list[Term]:
        return self._broken(self.states[-2], self.arguments[-1], self.taken[-1], self.states[-1])

    def violation(self) -> Term:
        """
        Return the term that is true if the last step breaks a step property, or if the state after
        this step breaks an invariant.
        """
        return z3.Or(self._last())

    @cached_property
    def suspects(self) -> frozenset[int]:
        """
        Return the violations that one step can cause from some state that satisfies all invariants.

        Not all these states are reachable, and integers of a few bits wrap around, so some of the
        violations are not real. All other violations are ruled out without a search in reachable
        states.
        """
        solver = new_solver("bits")
        before = {STAGE_OF: self.states[0][STAGE_OF]}
        for name, base in self._base.items():
            before[name] = self.ground.fresh(f"{name}@any", base.sort())
            solver.add(self.ground.possible(before[name], base.sort()))
        stage_of = self.words.state(self.words.before).stage_of.term
        solver.add(self.ground.possible(before[STAGE_OF], stage_of.sort()))
        known: Known = {}
        for term in self._denied:
            solver.add(z3.Not(self.ground.value(term, before, known)))
        for claim in self.words.configuration():
            for term in self.words.close(claim):
                solver.add(self.ground.value(term, before, known))
        left = {}
        arguments, taken, after = self._step(solver, before, "any")
        solver.add(arguments["arg.epoch"] <= _GREATEST + DEPTH)
        for number, term in enumerate(self._broken(before, arguments, taken, after)):
            left[number] = z3.Bool(f"broken {number}")
            solver.add(left[number] == term)
        found: set[int] = set()
        while left:
            some = z3.Bool(f"one of {len(left)}")
            solver.add(z3.Implies(some, z3.Or(list(left.values()))))
            verdict = answer(solver, [some])
            if verdict == "unsat":
                break
            # Add the violations that an unknown leaves open, and all violations of the model
            # together.
            model = solver.model() if verdict == "sat" else None
            hit = {n for n, name in left.items() if model is None or z3.is_true(model[name])}
            found |= hit
            left = {n: name for n, name in left.items() if n not in hit}
        return frozenset(found)

    def check(self) -> str:
        """
        Ask the solver whether a violation is reachable in exactly this number of steps.

        If no violation is reachable, the search for later steps uses this result: it looks only for
        violations that one step can cause.
        """
        broken = self._last()
        asked = broken
        if self._settled == self.depth - 1 and self.depth <= DEPTH:
            asked = [term for n, term in enumerate(broken) if n in self.suspects]
        self.solver.push()
        self.solver.add(z3.Or(asked))
        verdict = answer(self.solver)
        self.solver.pop()
        if verdict == "unsat":
            self._settled = self.depth
            self.solver.add(z3.Not(z3.Or(broken)))
        return verdict

    def reaches(self, transition: str) -> str:
        """Ask the solver whether the last step can be an accepted call of this transition."""
        choices = [
            choice
            for choice, path in zip(self.taken[-1], self.accepting, strict=True)
            if path.transition == transition
        ]
        return answer(self.solver, [z3.Or(choices)])


def _either(test: Term, yes: Value, no: Value) -> Any:
    if isinstance(yes, dict):
        return {key: _either(test, yes[key], no[key]) for key in yes}
    return z3.If(test, yes, no)


def bounded(
    composition: Composition, depth: int = DEPTH, scope: Mapping[str, int] = SCOPE
) -> Iterator[Obligation]:
    """
    Yield, for each number of steps up to a depth, the proof that no violation is reachable in so
    many steps.

    Args:
        composition: A composition whose encoding has this scope.
        depth: Maximum number of transitions in a sequence.
        scope: Number of members of each sort (slots, cells, stages and so on).
    """
    unrolling = Unrolling(composition)
    within = f"{scope_name(scope)}, integers of {BITS} bits"
    for steps in range(1, depth + 1):
        began = time.perf_counter()
        unrolling.extend()
        verdict = unrolling.check()
        yield Obligation(
            f"no violation in {steps} transitions ({within})",
            "bounded",
            composition.name,
            "",
            f"depth {steps}",
            "z3",
            verdict,
            time.perf_counter() - began,
        )
