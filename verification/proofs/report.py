"""
The report of the proofs: every obligation with its verdict, and the answers that other seeds and
solvers gave.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, field

from qeffect.spec.promises import PAPER

from .goals import Goal, Obligation, Theory
from .second_solver import Cvc5
from .solvers import Z3

__all__ = ["Agreement", "ProofReport", "agree", "agreements"]


@define
class Agreement:
    """
    The answers of another seed or solver to goals that were proved before.

    Args:
        solver: ``z3`` or ``cvc5``.
        seed: Seed of the solver.
        goals: Number of goals asked.
        unsat: Number of goals proved.
        seconds: Wall-clock time in seconds.
        open: Goals without a proof.
        attempts: Number of goals that each named attempt proved; empty for a solver without named
            attempts.
    """

    solver: str
    seed: int
    goals: int
    unsat: int
    seconds: float
    open: list[Obligation] = field(factory=list)
    attempts: dict[str, int] = field(factory=dict)

    @property
    def counted(self) -> str:
        """The number of proved goals as text, for progress lines."""
        return f"{self.solver}, seed {self.seed}: {self.unsat} of {self.goals}"

    @property
    def text(self) -> str:
        """The answers in one line."""
        named = (f", {count} from {name}" for name, count in self.attempts.items())
        return f"{self.counted} agree{''.join(named)}"

    def asdict(self) -> dict[str, Any]:
        """Return the answers as a plain dictionary."""
        return {
            "solver": self.solver,
            "seed": self.seed,
            "goals": self.goals,
            "unsat": self.unsat,
            "seconds": round(self.seconds, 3),
            "open": [obligation.asdict() for obligation in self.open],
            "attempts": self.attempts,
        }


@define
class ProofReport:
    """
    The result of all proofs, of the contract or of the ranks' protocol.

    Args:
        obligations: Every unbounded obligation, with its verdict.
        witnesses: For every path of every transition, whether some state takes the path.
        bounded: Bounded proofs from the initial state, by number of steps.
        agreements: Answers of other seeds and solvers for the contract with all relations.
        seconds: Wall-clock time of all parts, in seconds.
        parts: Wall-clock and processor time of each part, in seconds. Parts run in parallel.
    """

    obligations: list[Obligation] = field(factory=list)
    witnesses: list[Obligation] = field(factory=list)
    bounded: list[Obligation] = field(factory=list)
    agreements: list[Agreement] = field(factory=list)
    seconds: float = 0.0
    parts: dict[str, dict[str, float]] = field(factory=dict)

    @property
    def unsat(self) -> int:
        """Number of obligations proved."""
        return sum(obligation.verdict == "unsat" for obligation in self.obligations)

    @property
    def questions(self) -> int:
        """Number of distinct queries to the solver; the other obligations follow from them."""
        return sum(o.solver != "syntax" and o.seconds > 0.0 for o in self.obligations)

    @property
    def same_term(self) -> int:
        """Number of obligations without a query: the transition leaves their values unchanged."""
        return sum(obligation.solver == "syntax" for obligation in self.obligations)

    @property
    def implied(self) -> int:
        """Number of obligations that follow from an earlier answer of the solver."""
        return len(self.obligations) - self.questions - self.same_term

    @property
    def unknown(self) -> int:
        """Number of obligations on which a solver gave up; each counts as a failure."""
        return sum(obligation.verdict == "unknown" for obligation in self.obligations)

    @property
    def open(self) -> list[Obligation]:
        """The obligations without the expected verdict."""
        asked = (*self.obligations, *self.witnesses, *self.bounded)
        again = [obligation for agreement in self.agreements for obligation in agreement.open]
        return [*(obligation for obligation in asked if not obligation.proved), *again]

    def paper(self) -> dict[str, bool]:
        """
        Return for each invariant of the paper whether all of its promises are proved.

        A promise that has no obligation in the contract with all relations counts as not proved.
        """
        full = [o for o in self.obligations if o.composition == "full"]
        asked = {obligation.name for obligation in full}
        missed = {obligation.name for obligation in self.open}
        return {
            name: asked - missed >= {*invariant.promises, *invariant.theorems}
            for name, invariant in PAPER.items()
        }

    def by_kind(self) -> dict[str, int]:
        """Count the obligations of each kind."""
        found: dict[str, int] = {}
        for obligation in self.obligations:
            found[obligation.kind] = found.get(obligation.kind, 0) + 1
        return found

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary, ready for JSON."""
        return {
            "questions": self.questions,
            "implied": self.implied,
            "same_term": self.same_term,
            "obligations": [obligation.asdict() for obligation in self.obligations],
            "unsat": self.unsat,
            "unknown": self.unknown,
            "seconds": round(self.seconds, 3),
            "parts": self.parts,
            "by_kind": self.by_kind(),
            "paper": self.paper(),
            "covered": sum(obligation.expected == "unsat" for obligation in self.witnesses),
            "witnesses": [obligation.asdict() for obligation in self.witnesses],
            "bounded": [obligation.asdict() for obligation in self.bounded],
            "agreements": [agreement.asdict() for agreement in self.agreements],
            "open": [obligation.asdict() for obligation in self.open],
        }


def agreements(
    asked: Sequence[tuple[Theory, Sequence[Goal]]], seeds: Sequence[int], solvers: Sequence[str]
) -> Iterator[Agreement]:
    """
    Yield the answers of other seeds, and of cvc5 if requested, to the goals of some theories.

    Args:
        asked: The theories, each with its goals.
        seeds: Seeds of Z3's random choices, each of which gives a further answer.
        solvers: Names of solvers; if ``cvc5`` is among them, cvc5 is asked too.

    Raises:
        ImportError: cvc5 is requested but not installed.
    """
    for seed in seeds:
        yield _together([agree(Z3(theory, seed=seed), goals, seed) for theory, goals in asked])
    if "cvc5" in solvers:
        yield _together([agree(Cvc5(theory), goals, 0) for theory, goals in asked])


def agree(solver: Z3 | Cvc5, goals: Sequence[Goal], seed: int) -> Agreement:
    """Return the answer of a solver to goals that were proved before."""
    began = time.perf_counter()
    answers = list(solver.prove(goals))
    missing = [answer for answer in answers if not answer.proved]
    return Agreement(
        solver.name,
        seed,
        len(goals),
        len(answers) - len(missing),
        time.perf_counter() - began,
        missing,
        dict(Counter(answer.attempt for answer in answers if answer.proved and answer.attempt)),
    )


def _together(parts: Sequence[Agreement]) -> Agreement:
    """Join the answers of one solver and seed to several parts of the goals."""
    attempts: Counter[str] = Counter()
    for part in parts:
        attempts.update(part.attempts)
    return Agreement(
        parts[0].solver,
        parts[0].seed,
        sum(part.goals for part in parts),
        sum(part.unsat for part in parts),
        sum(part.seconds for part in parts),
        [obligation for part in parts for obligation in part.open],
        dict(attempts),
    )
