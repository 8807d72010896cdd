"""
The proofs: every obligation of every composition, by Z3, then by other seeds and by cvc5.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, Final

from attrs import define, field

from qeffect.countdown import Countdown
from qeffect.engine.stage import OPTIONAL
from qeffect.spec.promises import PAPER

from ..symbolic import Encoding
from . import bounded as in_steps
from . import witnesses as in_scope
from .completeness import completeness
from .finite import SCOPE
from .obligations import COMPOSITIONS, Composition, Goal, Obligation, changes, obligations
from .parallel import Part, run_parallel
from .recovery import recovery
from .recurring import recurring
from .second_solver import Cvc5
from .solvers import Z3, Proved
from .theorems import capture_in_own_pool, initial, refusals, restored, tickets, widths

__all__ = [
    "SEEDS",
    "Agreement",
    "ProofReport",
    "again",
    "choices",
    "everywhere",
    "run",
    "unbounded",
]

Progress = Callable[[str], None]

#: Seeds of the sweep.
SEEDS: Final = tuple(range(40))


@define
class Agreement:
    """
    The answer of another seed or solver to the goals of the full composition.

    Args:
        solver: ``z3`` or ``cvc5``.
        seed: Seed of the solver.
        goals: Number of goals asked.
        unsat: Number of goals proved.
        seconds: Wall-clock time.
        open: Goals without a proof.
        attempts: Number of goals that each attempt proved; empty where attempts are not named.
    """

    solver: str
    seed: int
    goals: int
    unsat: int
    seconds: float
    open: list[Obligation] = field(factory=list)
    attempts: dict[str, int] = field(factory=dict)

    def asdict(self) -> dict[str, Any]:
        """Return the answer as a plain dictionary."""
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
    The result of all proofs.

    Args:
        obligations: Every unbounded obligation, with its verdict.
        witnesses: For every path of every transition, whether some state takes it.
        bounded: Bounded proofs from the initial state, by number of steps.
        agreements: Answers of other seeds and solvers for the full composition.
        seconds: Time of the unbounded proofs, path tables included.
        parts: Wall-clock and processor time of each part. Parts run in parallel.
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
        """Number of distinct questions to the solver; the other obligations follow from them."""
        return sum(o.solver != "syntax" and o.seconds > 0.0 for o in self.obligations)

    @property
    def same_term(self) -> int:
        """Number of obligations that compare a term with itself."""
        return sum(obligation.solver == "syntax" for obligation in self.obligations)

    @property
    def implied(self) -> int:
        """Number of obligations that follow from an earlier answer."""
        return len(self.obligations) - self.questions - self.same_term

    @property
    def unknown(self) -> int:
        """Number of obligations that a solver gave up on; each is a failure."""
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

        A promise without an obligation in the full composition counts as not proved.
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


def run(
    progress: Progress | None = None,
    seeds: Iterable[int] = (),
    solvers: Sequence[str] = ("z3",),
    *,
    depth: int = in_steps.DEPTH,
    note: Progress | None = None,
) -> ProofReport:
    """
    Prove everything.

    Args:
        progress: Called with a progress line.
        seeds: Seeds of Z3. The proofs use the first; each other seed proves the goals of the full
            composition again.
        solvers: ``z3``, and ``cvc5`` to ask it the same goals too.
        depth: Steps of the bounded proofs.
        note: Told the first obligation without a proof at once.

    Raises:
        ImportError: cvc5 is asked for and not installed.
    """
    tell = progress or (lambda line: None)
    first, *others = [*seeds] or [0]
    parts: dict[str, Part] = {
        "bounded": lambda tell: _in_steps(depth, tell),
        "witnesses": _in_scope,
        "obligations": lambda tell: _everything(first, tell, note),
    }
    results = run_parallel(parts, tell)
    report = ProofReport(*(results[name].found for name in ("obligations", "witnesses", "bounded")))
    report.seconds = results["obligations"].seconds
    report.parts = {
        name: {"seconds": round(result.seconds, 1), "cpu": round(result.cpu, 1)}
        for name, result in results.items()
    }
    for agreement in again(others, solvers):
        report.agreements.append(agreement)
        tell(
            f"Proving. {agreement.solver}, seed {agreement.seed}: "
            f"{agreement.unsat} of {agreement.goals}"
        )
    return report


def _everything(seed: int, tell: Progress, note: Progress | None) -> list[Obligation]:
    found: list[Obligation] = []
    names: dict[str, None] = {}
    count = Countdown("compositions", len(COMPOSITIONS))
    unproved = 0
    for obligation in unbounded(seed=seed):
        found.append(obligation)
        names[obligation.composition] = None
        if not obligation.proved:
            unproved += 1
            if unproved == 1 and note is not None:
                note(
                    f"First finding. {obligation.transition} {obligation.path}: "
                    f"{obligation.name}: {obligation.verdict}"
                )
        tell(
            f"Proving. {count(min(len(names), len(COMPOSITIONS)) - 1)}, now "
            f"{obligation.composition}: {len(found):,} obligations"
        )
    return found


def _in_scope(tell: Progress) -> list[Obligation]:
    found = []
    for witness in in_scope.witnesses(Composition.of((), Encoding.finite(SCOPE))):
        found.append(witness)
        tell(f"Proving. Looking for states that take {witness.transition} {witness.path}")
    return found


def _in_steps(depth: int, tell: Progress) -> list[Obligation]:
    found = []
    for proof in in_steps.bounded(Composition.of((), Encoding.finite(in_steps.SCOPE)), depth):
        found.append(proof)
        tell(f"Proving. From the initial state, {proof.path} in {proof.seconds:.1f} s")
    return found


def unbounded(
    seed: int = 0, compositions: Iterable[tuple[str, ...]] = COMPOSITIONS
) -> Iterator[Obligation]:
    """
    Yield every unbounded obligation of every composition, with its verdict.

    Args:
        seed: Seed of Z3's own choices.
        compositions: The relations that each leaves out. Put compositions that leave out more
            first: their proofs are reused.
    """
    encoding = Encoding.sorted()
    proved = Proved()
    for omit in compositions:
        composition = Composition.of(omit, encoding)
        z3 = Z3(composition, seed=seed, proved=proved)
        mixed = [*changes(composition), *recurring(composition)]
        yield from z3.prove(chain(_goals(composition), _asked(mixed)))
        yield from (found for found in mixed if isinstance(found, Obligation))
        for found in refusals(composition):
            if isinstance(found, Obligation):
                yield found
            else:
                yield from z3.prove([found])
    wide = Composition.of((), Encoding.sorted(generation_bits=64))
    full = Composition.of((), encoding)
    yield from Z3(wide, seed=seed).prove(widths(wide, full))


def everywhere(fixed: Mapping[str, bool] | None = None) -> Iterator[Obligation]:
    """
    Yield the unbounded obligations of each composition that a contract may have.

    Args:
        fixed: Relations that all compositions leave out (True) or have (False); by default all
            choices are made.
    """
    yield from unbounded(compositions=choices(fixed or {}))


def choices(fixed: Mapping[str, bool]) -> list[tuple[str, ...]]:
    """
    Return the relations that each composition leaves out, those that leave out more first.

    Args:
        fixed: Relations that all of them leave out (True) or have (False).
    """
    numbers = range(len(OPTIONAL), -1, -1)
    left_out = chain.from_iterable(combinations(sorted(OPTIONAL), number) for number in numbers)
    return [omit for omit in left_out if all((name in omit) is out for name, out in fixed.items())]


def again(seeds: Sequence[int], solvers: Sequence[str] = ("z3",)) -> Iterator[Agreement]:
    """
    Yield the answers of other seeds, and of cvc5, to the goals of the full composition.

    Args:
        seeds: Seeds of Z3.
        solvers: Contains ``cvc5`` to ask cvc5 too.

    Raises:
        ImportError: cvc5 is asked for and not installed.
    """
    if not seeds and "cvc5" not in solvers:
        return
    composition = Composition.of((), Encoding.sorted())
    mixed = [*changes(composition), *recurring(composition)]
    goals = [*_goals(composition), *_asked(mixed)]
    for seed in seeds:
        yield _agreement(Z3(composition, seed=seed), goals, seed)
    if "cvc5" in solvers:
        yield _agreement(Cvc5(composition), goals, 0)


def _agreement(solver: Z3 | Cvc5, goals: list[Goal], seed: int) -> Agreement:
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


def _asked(found: Iterable[Obligation | Goal]) -> Iterator[Goal]:
    """Yield the goals that need a solver."""
    return (goal for goal in found if isinstance(goal, Goal))


def _goals(composition: Composition) -> Iterator[Goal]:
    yield from initial(composition)
    yield from obligations(composition)
    yield from tickets(composition)
    yield from restored(composition)
    yield from recovery(composition)
    if not composition.omit:
        yield from completeness(composition)
    if "capture" not in composition.omit:
        yield from capture_in_own_pool(composition)
