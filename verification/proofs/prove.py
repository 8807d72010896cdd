"""
Run the proofs: every obligation of every composition by Z3, then again by other seeds and by cvc5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Final

from qeffect.countdown import Countdown
from qeffect.engine.stage import OPTIONAL

from ..symbolic import Encoding
from . import bounded as in_steps
from . import witnesses as in_scope
from .completeness import completeness
from .finite import SCOPE
from .goals import Goal, Obligation
from .obligations import COMPOSITIONS, Composition, changes, obligations
from .parallel import Part, run_parallel
from .recovery import recovery
from .recurring import recurring
from .report import Agreement, ProofReport, agreements
from .solvers import Z3, Proved
from .theorems import capture_in_own_pool, initial, refusals, restored, tickets, widths

__all__ = [
    "SEEDS",
    "again",
    "choices",
    "everywhere",
    "makers",
    "named",
    "run",
    "unbounded",
]

Progress = Callable[[str], None]

#: Seeds of the sweep.
SEEDS: Final = tuple(range(40))


def run(
    progress: Progress | None = None,
    seeds: Iterable[int] = (),
    solvers: Sequence[str] = ("z3",),
    *,
    depth: int = in_steps.DEPTH,
    note: Progress | None = None,
) -> ProofReport:
    """
    Prove all obligations of the contract.

    Args:
        progress: Function that is called with progress lines.
        seeds: Seeds of Z3. The proofs use the first seed; each further seed proves the goals of the
            contract with all relations again.
        solvers: ``z3``; add ``cvc5`` to give it the same goals too.
        depth: Maximum number of steps in the bounded proofs.
        note: Function that is called at once with the first obligation that has no proof.

    Raises:
        ImportError: cvc5 is requested but not installed.
    """
    tell = progress or (lambda line: None)
    first, *others = [*seeds] or [0]
    parts: dict[str, Part] = {
        "bounded": lambda tell: _in_steps(depth, tell),
        "witnesses": _in_scope,
        "recurring": lambda tell: _recurring(first, tell),
        "widths": lambda _: list(_widths(first)),
        "obligations": lambda tell: _everything(first, tell, note),
    }
    began = time.perf_counter()
    results = run_parallel(parts, tell)
    found = {name: result.found for name, result in results.items()}
    every = [*found["obligations"], *found["recurring"], *found["widths"]]
    report = ProofReport(every, found["witnesses"], found["bounded"])
    report.seconds = time.perf_counter() - began
    report.parts = {
        name: {"seconds": round(result.seconds, 1), "cpu": round(result.cpu, 1)}
        for name, result in results.items()
    }
    for agreement in again(others, solvers):
        report.agreements.append(agreement)
        tell(f"Proving: {agreement.counted} obligations proved again")
    return report


def _everything(seed: int, tell: Progress, note: Progress | None) -> list[Obligation]:
    found: list[Obligation] = []
    names: dict[str, None] = {}
    count = Countdown("compositions", len(COMPOSITIONS))
    unproved = 0
    for obligation in _of_compositions(seed, COMPOSITIONS):
        found.append(obligation)
        names[obligation.composition] = None
        if not obligation.proved:
            unproved += 1
            if unproved == 1 and note is not None:
                note(f"First finding: {obligation.found}: {obligation.verdict}")
        tell(
            f"Proving: {count(min(len(names), len(COMPOSITIONS)) - 1)}, now "
            f"{obligation.composition}: {len(found):,} obligations"
        )
    return found


def _told(
    obligations: Iterable[Obligation], line: Callable[[int, Obligation], str], tell: Progress
) -> list[Obligation]:
    """Collect obligations in a list; after each, report their number and the obligation."""
    found: list[Obligation] = []
    for obligation in obligations:
        found.append(obligation)
        tell(f"Proving: {line(len(found), obligation)}")
    return found


def _recurring(seed: int, tell: Progress) -> list[Obligation]:
    return _told(
        _of_steps(seed, COMPOSITIONS),
        lambda number, _: f"{number:,} obligations about steps committed in one call",
        tell,
    )


def _in_scope(tell: Progress) -> list[Obligation]:
    return _told(
        in_scope.witnesses(Composition.of((), Encoding.finite(SCOPE))),
        lambda _, one: f"looking for a state from which {one.transition} takes path {one.path}",
        tell,
    )


def _in_steps(depth: int, tell: Progress) -> list[Obligation]:
    return _told(
        in_steps.bounded(Composition.of((), Encoding.finite(in_steps.SCOPE)), depth),
        lambda _, one: f"from the initial state, {one.path} in {one.seconds:.1f} s",
        tell,
    )


def unbounded(
    seed: int = 0, compositions: Iterable[tuple[str, ...]] = COMPOSITIONS
) -> Iterator[Obligation]:
    """
    Yield every unbounded obligation of every composition, with its verdict.

    Args:
        seed: Seed of Z3's random choices.
        compositions: The relations that each composition leaves out. Put the compositions that
            leave out the most relations first, since their proofs are reused.
    """
    chosen = tuple(compositions)
    yield from _of_compositions(seed, chosen)
    yield from _of_steps(seed, chosen)
    yield from _widths(seed)


def _of_compositions(seed: int, compositions: Iterable[tuple[str, ...]]) -> Iterator[Obligation]:
    """Yield each composition's obligations, except those about steps committed in one call."""
    encoding = Encoding.sorted()
    proved = Proved()
    for omit in compositions:
        composition = Composition.of(omit, encoding)
        z3 = Z3(composition, seed=seed, proved=proved)
        yield from z3.settle(chain(_goals(composition), changes(composition)))
        for found in refusals(composition):
            if isinstance(found, Obligation):
                yield found
            else:
                yield from z3.prove([found])


def _of_steps(seed: int, compositions: Iterable[tuple[str, ...]]) -> Iterator[Obligation]:
    """Yield the obligations about steps committed in one call, which share no other proofs."""
    encoding = Encoding.sorted()
    proved = Proved()
    for omit in compositions:
        composition = Composition.of(omit, encoding)
        yield from Z3(composition, seed=seed, proved=proved).settle(recurring(composition))


def _widths(seed: int) -> Iterator[Obligation]:
    """Yield the obligations about generations of 64 bits."""
    wide = Composition.of((), Encoding.sorted(generation_bits=64))
    full = Composition.of((), Encoding.sorted())
    yield from Z3(wide, seed=seed).prove(widths(wide, full))


def everywhere(fixed: Mapping[str, bool] | None = None) -> Iterator[Obligation]:
    """
    Yield the unbounded obligations of each composition that a contract may have.

    Args:
        fixed: Relations that all compositions leave out (True) or have (False). By default the
            compositions cover every choice of relations.
    """
    yield from unbounded(compositions=choices(fixed or {}))


def choices(fixed: Mapping[str, bool]) -> list[tuple[str, ...]]:
    """
    Return the relations that each composition leaves out, in descending order of their number.

    Args:
        fixed: Relations that all compositions leave out (True) or have (False).
    """
    numbers = range(len(OPTIONAL), -1, -1)
    left_out = chain.from_iterable(combinations(sorted(OPTIONAL), number) for number in numbers)
    return [omit for omit in left_out if all((name in omit) is out for name, out in fixed.items())]


def again(seeds: Sequence[int], solvers: Sequence[str] = ("z3",)) -> Iterator[Agreement]:
    """
    Yield the answers of other seeds, and of cvc5, to the goals of the contract with all relations.

    Args:
        seeds: Seeds of Z3's random choices, each of which gives a further answer.
        solvers: Names of solvers; if ``cvc5`` is among them, cvc5 is asked too.

    Raises:
        ImportError: cvc5 is requested but not installed.
    """
    if not seeds and "cvc5" not in solvers:
        return
    composition = Composition.of((), Encoding.sorted())
    mixed = [*changes(composition), *recurring(composition)]
    goals = [*_goals(composition), *_asked(mixed)]
    yield from agreements([(composition, goals)], seeds, solvers)


def named(name: str) -> tuple[list[Obligation], list[str]]:
    """
    Prove the obligations with one name, with all relations in force.

    Args:
        name: The id of a promise or a lemma, or the name of a theorem. A promise that is proved for
            several families of numbers has one obligation per family.

    Returns:
        The obligations with their verdicts, and the list of valid names.
    """
    composition = Composition.of((), Encoding.sorted())
    mixed = chain(_goals(composition), changes(composition), recurring(composition))
    found = [*mixed, *refusals(composition)]
    chosen = [one for one in found if one.name.partition(": ")[0] == name]
    names = dict.fromkeys(one.name.partition(": ")[0] for one in found)
    return list(Z3(composition, proved=Proved()).settle(chosen)), sorted(names)


def _asked(found: Iterable[Obligation | Goal]) -> Iterator[Goal]:
    """Yield the goals that need a solver."""
    return (goal for goal in found if isinstance(goal, Goal))


def makers(composition: Composition) -> tuple[Callable[[Composition], Iterator[Goal]], ...]:
    """Return the functions that make the goals of a composition, in the order of the proofs."""
    last = [] if composition.omit else [completeness]
    if "capture" not in composition.omit:
        last.append(capture_in_own_pool)
    return (initial, obligations, tickets, restored, recovery, *last)


def _goals(composition: Composition) -> Iterator[Goal]:
    for make in makers(composition):
        yield from make(composition)
