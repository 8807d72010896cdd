"""
Proof obligations: the properties that each path of each transition must preserve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import z3
from attrs import field, frozen

from qeffect.engine.stage import OPTIONAL, STATE, Transitions, transitions
from qeffect.relations.columns import Column
from qeffect.spec.predicates import Predicate

from ..claims import MANDATORY
from ..symbolic import Encoding, Path, PathTable, merge, path_table
from ..symbolic.terms import Term, lift
from .goals import Claim, Goal, Obligation, lemmas_within
from .instances import smallest_instances
from .vocabulary import Vocabulary

__all__ = [
    "COMPOSITIONS",
    "Composition",
    "changes",
    "composition_name",
    "obligations",
]

#: The compositions to prove: with every relation, without each optional relation, and without all
#: of them.
COMPOSITIONS: tuple[tuple[str, ...], ...] = (
    ("arena", "capture", "completion", "order", "reduction", "version"),
    ("arena",),
    ("capture",),
    ("completion",),
    ("order",),
    ("reduction",),
    ("version",),
    (),
)


def composition_name(omit: Sequence[str]) -> str:
    """Return a composition's name, which tells the relations that it leaves out.

    >>> composition_name(("order",))
    'without order'
    """
    if not omit:
        return "full"
    return "bare" if len(omit) == len(OPTIONAL) else f"without {', '.join(omit)}"


@frozen(slots=False)
class Composition:
    """
    The contract's transitions for one choice of relations, as paths, with the predicates to prove.

    Args:
        omit: Relations that the composition leaves out.
        encoding: The encoding of the sorts as Z3 sorts.
        functions: The composed transitions of the kernel or of a mutant.
    """

    omit: tuple[str, ...]
    encoding: Encoding
    functions: Transitions = field(repr=False)

    @classmethod
    def of(cls, omit: Sequence[str], encoding: Encoding) -> Composition:
        """Return a composition of the kernel's own transitions."""
        return cls(tuple(omit), encoding, transitions(omit))

    @property
    def name(self) -> str:
        """The composition's name."""
        return composition_name(self.omit)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The predicates that must hold for the composition."""
        return Vocabulary(self.encoding, self.functions.relations)

    @cached_property
    def configuration(self) -> list[Claim]:
        """The assumptions about the configuration."""
        return self.vocabulary.configuration()

    @cached_property
    def lemmas(self) -> dict[str, Claim]:
        """The lemmas, which hold in every state before a transition, by name."""
        words = self.vocabulary
        return {claim.name: claim for claim in words.invariants(words.before)}

    def lemmas_of(self, relations: frozenset[str] | None) -> frozenset[str]:
        """Return the names of the lemmas that need only these relations; no names for None."""
        return lemmas_within(self.lemmas, relations)

    def instances(self, goal: Goal) -> Iterator[Term]:
        """Yield the lemmas of a goal's relations, instantiated with the goal's smallest terms."""
        chosen = [self.lemmas[name] for name in sorted(self.lemmas_of(goal.relations))]
        yield from smallest_instances(chosen, goal, self.encoding)

    @cached_property
    def every_path(self) -> PathTable:
        """Every path of every transition."""
        return path_table(self.functions, self.encoding)

    @cached_property
    def paths(self) -> PathTable:
        """Every path, after joining paths that leave the same state and give the same answer."""
        return {name: self._merged(found) for name, found in self.every_path.items()}

    def paths_of(self, transition: str) -> tuple[Path, ...]:
        """Return the joined paths of one transition only."""
        one = Transitions(
            self.functions.relations, {transition: self.functions.functions[transition]}
        )
        return self._merged(path_table(one, self.encoding)[transition])

    def _merged(self, found: tuple[Path, ...]) -> tuple[Path, ...]:
        known = self.encoding.memo.get(("merged", id(found)))
        if known is None:
            known = (found, merge(found))  # keeps the paths, so that their id stays unique
            self.encoding.memo["merged", id(found)] = known
        joined: tuple[Path, ...] = known[1]
        return joined

    @cached_property
    def untouched(self) -> list[Term]:
        """Facts about the columns that no transition writes: they keep their initial values."""
        written = {n for paths in self.paths.values() for p in paths for n in p.written}
        found = []
        for name, column in STATE.items():
            if name not in written and column.initial is not None:
                found += self._is_initial(name, column)
        return found

    def _is_initial(self, name: str, column: Column) -> list[Term]:
        term = self.encoding.column(name, column)
        if not z3.is_array(term):
            return [term == lift(column.initial, term.sort(), self.encoding.constants)]
        index = self.encoding.const("var.i", column.index)
        value = lift(column.initial, term.sort().range(), self.encoding.constants)
        return list(self.encoding.close({"var.i": column.index}, z3.Select(term, index) == value))


def slice_of(predicate: Predicate | Claim) -> frozenset[str]:
    """Return the relations whose lemmas are likely to be enough to prove a predicate."""
    relations = predicate.needs | MANDATORY
    return relations | {"version"} if "order" in relations else relations


def obligations(composition: Composition) -> Iterator[Goal]:
    """
    Yield the goals for every accepting path of every transition.

    If the path changes no column that a predicate reads, the predicate is the same term before and
    after the path. It then holds by hypothesis, and no goal is needed.
    """
    words = composition.vocabulary
    before = {claim.name: claim for claim in words.invariants(words.before)}
    for transition, paths in composition.paths.items():
        assumed = words.assumed(transition)
        steps = words.steps(transition)
        for path in paths:
            if path.clause is not None:
                continue
            facts = (*path.tests, *assumed)
            for step in steps:
                yield _goal(words, step, "step", path, facts)
            for claim in words.disturbed(words.after(path)):
                earlier = before[claim.name].body
                if not claim.body.eq(earlier):
                    yield _goal(words, claim, "inductive", path, (*facts, earlier))


def changes(composition: Composition) -> Iterator[Obligation | Goal]:
    """
    Yield the goals about changes that every accepting path must make, or must not make.

    Most paths change none of a promise's columns. Then the terms before and after the path are the
    same, and no solver is needed.
    """
    words = composition.vocabulary
    for transition, paths in composition.paths.items():
        assumed = words.assumed(transition)
        for path in paths:
            if path.clause is not None:
                continue
            for claim in words.changes(path):
                if z3.is_true(z3.simplify(claim.body)):
                    yield Obligation(
                        claim.name,
                        "change",
                        composition.name,
                        transition,
                        path.label,
                        "syntax",
                        "unsat",
                        0.0,
                    )
                else:
                    yield _goal(words, claim, "change", path, (*path.tests, *assumed))


def _goal(words: Vocabulary, claim: Claim, kind: str, path: Path, facts: tuple[Term, ...]) -> Goal:
    return Goal(
        claim.name,
        kind,
        path.transition,
        path.label,
        slice_of(claim),
        facts,
        words.denied(claim),
    )
