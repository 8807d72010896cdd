"""
Questions to a solver (goals) and their answers (obligations), for the transitions of the contract
and of the ranks' protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import z3
from attrs import field, frozen

from qeffect.spec.predicates import Predicate

from ..symbolic import Encoding
from ..symbolic.terms import Term, raw

__all__ = ["Claim", "Goal", "Obligation", "Theory", "lemmas_within"]


@frozen
class Claim:
    """
    A predicate as a solver term over its variables.

    Args:
        name: The predicate's name.
        needs: Relations that the predicate reads.
        variables: Sort of each variable.
        body: The term; a variable NAME is a constant ``var.NAME`` in it.
    """

    name: str
    needs: frozenset[str]
    variables: Mapping[str, str]
    body: Term = field(repr=False)

    @classmethod
    def of(cls, predicate: Predicate, encoding: Encoding, *subjects: Any) -> Claim:
        """Return a predicate about the given memory, history and arguments as a claim."""
        variables = {
            name: encoding.sym(encoding.const(f"var.{name}", sort))
            for name, sort in predicate.variables.items()
        }
        body = raw(predicate.function(*subjects, **variables))
        return cls(predicate.name, predicate.needs, predicate.variables, body)

    def close(self, encoding: Encoding, weight: int = 1) -> Iterator[Term]:
        """Yield the claim for all values of its variables: with quantifiers, or value by value."""
        variables = {f"var.{name}": sort for name, sort in self.variables.items()}
        yield from encoding.close(variables, self.body, weight)

    def denied(self, encoding: Encoding) -> Term:
        """Return the negated claim: the claim fails for some values of its variables."""
        if encoding.members:
            return z3.Not(z3.And(list(self.close(encoding))))
        members = [term != null for term, null in self._with_sentinels(encoding)]
        return z3.And(*members, z3.Not(self.body))

    def at_hand(self, encoding: Encoding) -> Term:
        """Return the claim about the constants that `denied` puts in place of its variables."""
        nulls = [term == null for term, null in self._with_sentinels(encoding)]
        return z3.Or(*nulls, self.body)

    def _with_sentinels(self, encoding: Encoding) -> Iterator[tuple[Term, Term]]:
        """Yield each variable whose sort has a sentinel (such as NO_SLOT), with the sentinel."""
        for name, sort in self.variables.items():
            null = encoding.null(sort)
            if null is not None:
                yield encoding.const(f"var.{name}", sort), null


@frozen
class Obligation:
    """
    One proof obligation and its verdict.

    Args:
        name: The name of the claimed predicate or theorem.
        kind: ``initial``, ``inductive``, ``step``, ``change``, ``refusal``, ``commit``,
            ``capture``, ``restore``, ``recovery``, ``recurring``, ``complete``, ``width``; for a
            search, ``witness`` or ``bounded``.
        composition: The relations in use, or the name of the ranks' protocol.
        transition: The transition; empty for the initial state.
        path: The path through the transition: its clause or ``accepted``, and its position; empty
            if the transition has a single path.
        solver: ``z3``, ``cvc5``, or ``syntax`` if both sides are the same term.
        verdict: ``unsat``, ``sat`` or ``unknown``.
        seconds: Time of the answer in seconds; 0 if the proof follows from an earlier proof.
        expected: The verdict that proves the obligation.
        attempt: The attempt of a second solver that gave the verdict, or empty.
    """

    name: str
    kind: str
    composition: str
    transition: str
    path: str
    solver: str
    verdict: str
    seconds: float
    expected: str = "unsat"
    attempt: str = ""

    @property
    def proved(self) -> bool:
        """Whether the verdict is the expected verdict, which is never ``unknown``."""
        return self.verdict == self.expected

    @property
    def found(self) -> str:
        """The transition, the path and the claim, as text."""
        where = " ".join(filter(None, (self.transition, self.path)))
        return f"{where or 'initially'}: {self.name}"

    @property
    def text(self) -> str:
        """The obligation in one line, with its verdict."""
        return f"  {self.verdict:8} {self.found}"

    def asdict(self) -> dict[str, Any]:
        """Return the record as a plain dictionary."""
        names = ("name", "kind", "composition", "transition", "path", "solver", "verdict")
        return {
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 4),
            "proved": self.proved,
        }


@frozen
class Goal:
    """
    An obligation as a question to a solver: to prove the claim, the solver must show that the facts
    and the negated claim contradict each other.

    Args:
        name, kind, transition, path: The fields of the resulting ``Obligation``.
        relations: Relations whose lemmas are the hypotheses of the first attempt; None for claims
            about the initial state, which have no hypotheses.
        facts: The path's tests, the assumptions, and the claim before the transition.
        denied: The negation of the claim, as a solver term.
    """

    name: str
    kind: str
    transition: str
    path: str
    relations: frozenset[str] | None
    facts: tuple[Term, ...] = field(repr=False)
    denied: Term = field(repr=False)
    #: The solver's ids of the facts, in order.
    fact_ids: tuple[int, ...] = field(init=False, repr=False, eq=False)

    @fact_ids.default
    def _ids_of_facts(self) -> tuple[int, ...]:
        return tuple(fact.get_id() for fact in self.facts)

    def answered(
        self, composition: str, solver: str, verdict: str, seconds: float, attempt: str = ""
    ) -> Obligation:
        """Return the goal as an obligation with a solver's verdict."""
        return Obligation(
            self.name,
            self.kind,
            composition,
            self.transition,
            self.path,
            solver,
            verdict,
            seconds,
            attempt=attempt,
        )


class Theory(Protocol):
    """The lemmas and facts that a solver may use for goals about some transitions."""

    @property
    def name(self) -> str:
        """The name of the composition or protocol."""

    @property
    def encoding(self) -> Encoding:
        """The encoding of the sorts."""

    @property
    def configuration(self) -> Sequence[Claim]:
        """The assumptions about the configuration."""

    @property
    def lemmas(self) -> Mapping[str, Claim]:
        """The lemmas, which hold in every state before a transition, by name."""

    @property
    def untouched(self) -> Sequence[Term]:
        """Facts about the columns that no transition writes: they keep their initial values."""

    def lemmas_of(self, relations: frozenset[str] | None) -> frozenset[str]:
        """Return the names of the lemmas that need only these relations; no names for None."""

    def instances(self, goal: Goal) -> Iterator[Term]:
        """Yield the lemmas of a goal's relations, each for the members that the goal names."""


def lemmas_within(lemmas: Mapping[str, Claim], relations: frozenset[str] | None) -> frozenset[str]:
    """Return the names of the lemmas that need only these relations; no names for None."""
    if relations is None:
        return frozenset()
    return frozenset(name for name, claim in lemmas.items() if claim.needs <= relations)
