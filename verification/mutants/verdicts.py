"""
The verdict on a mutant (the contract with one guard, operand or update deleted).

The verdict asks these questions, in this order. Does the mutant accept a call in a reachable state
after which an invariant, a property of the history or a step property fails? Does it refuse an
action of a legal schedule? Does it refuse a call by another clause than the contract? Does any of
this happen in a contract that leaves a relation out? Does the mutant break an invariant from some
state that satisfies all invariants, reachable or not? Does it equal the contract in every state
that satisfies all invariants? The last answer is a proof for any number of slots and stages;
another guard must then be found that covers the mutant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import z3
from attrs import evolve, field, frozen

from qeffect.engine.stage import TRANSITIONS
from qeffect.refusals import Refused

from ..concrete_run import Focus
from ..proofs.finite import SCOPE, refuted, solver_of
from ..proofs.goals import Goal
from ..proofs.obligations import Composition, composition_name
from ..proofs.solvers import Z3
from ..symbolic import Encoding, Path
from ..symbolic.terms import Term
from .corpus import corpus, legal_schedules
from .probes import Probe, harm, outcome
from .sites import BREAKDOWN, Mutant, Site, sites

__all__ = ["CLASSES", "MutantVerdict", "judge", "prepare", "search"]

#: Kinds of kills in words, strongest first.
CLASSES: Final = {
    "state": "a state invariant fails",
    "history": "a property of the physical history fails",
    "step": "a promise to an accepted action fails",
    "legal": "a legal schedule is refused",
    "clause": "a refusal names another clause",
    "induction": "a property fails, though in no state that was reached",
}

#: Relations that are left out in turn, to see the effect of a guard without them.
ELSEWHERE: Final = ("order", "arena", "version")


@frozen
class MutantVerdict:
    """
    The verdict on a mutant.

    Args:
        mutant: The mutant. It leaves a relation out if the contract with all relations shows no
            difference.
        kind: One of ``CLASSES``, or ``equivalent`` or ``survived``.
        by: The failing predicate, the refused action, or the other clause; for an equivalent
            mutant, the guard that covers it.
        probe: A call in a reachable state that shows the difference from the contract.
        covering: The mutant that the probe runs, if it differs from ``mutant``: another guard is
            deleted too, or a relation is left out.
        seconds: Time of the verdict in seconds.
    """

    mutant: Mutant
    kind: str
    by: str
    probe: Probe | None = field(default=None, repr=False)
    covering: Mutant | None = field(default=None, repr=False)
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        """Whether a promise, a legal schedule or a clause's name detects the mutant."""
        return self.kind in CLASSES

    @property
    def shown(self) -> Mutant:
        """The mutant that the probe runs."""
        return self.covering or self.mutant

    @property
    def justified(self) -> bool:
        """Whether the mutant is killed, or equivalent and covered by another guard."""
        return self.killed or (self.kind == "equivalent" and self.covering is not None)

    def asdict(self) -> dict[str, Any]:
        """Return the verdict as a plain dictionary."""
        site = self.mutant.site
        return {
            "transition": site.transition,
            "half": site.half,
            "kind": site.kind,
            "deleted": site.text,
            "clause": site.clause,
            "left_out": list(self.mutant.omit),
            "verdict": self.kind,
            "by": self.by,
            "seconds": round(self.seconds, 3),
        }


def judge(mutant: Mutant, searched: tuple[str, ...] = tuple(TRANSITIONS)) -> MutantVerdict:
    """
    Return the verdict on a mutant.

    Args:
        mutant: The contract with one guard, operand or update deleted.
        searched: Transitions, including the mutant's own, whose mutants are tried together in
            reachable states. The verdict does not depend on the other transitions.
    """
    began = time.perf_counter()
    found = (
        _harms(mutant, searched)
        or _refuses_legal(mutant)
        or _names_another(mutant, searched)
        or _matters_elsewhere(mutant, searched)
        or _harms_by_induction(mutant)
        or _equivalent(mutant, searched)
        or MutantVerdict(mutant, "survived", "no difference from the contract was found")
    )
    return evolve(found, seconds=time.perf_counter() - began)


# In reachable states


def _harms(mutant: Mutant, searched: tuple[str, ...]) -> MutantVerdict | None:
    """Look for a call that the mutant accepts and that breaks a property."""
    for probe, failing in corpus(mutant.omit, searched).harmful.get(mutant.site, ()):
        kind, name = failing[0]
        return MutantVerdict(mutant, kind, name, probe)
    return None


def _refuses_legal(mutant: Mutant) -> MutantVerdict | None:
    """Look for a legal schedule with an action that the mutant refuses."""
    functions = mutant.functions.functions
    for process, actions in legal_schedules(mutant.omit):
        memory = process.lay_out().memory
        for position, (transition, arguments) in enumerate(actions):
            try:
                functions[transition](memory, *arguments)
            except Refused as refused:
                probe = Probe(process, actions[:position], transition, arguments, None, Focus())
                return MutantVerdict(
                    mutant, "legal", f"{transition} is refused: {refused.clause}", probe
                )
    return None


def _names_another(mutant: Mutant, searched: tuple[str, ...]) -> MutantVerdict | None:
    """Look for a call that the mutant refuses by another clause than the contract."""
    for answer, probes in corpus(mutant.omit, searched).renamed.get(mutant.site, {}).items():
        return MutantVerdict(mutant, "clause", f"{probes[0].clause} becomes {answer}", probes[0])
    return None


def _matters_elsewhere(mutant: Mutant, searched: tuple[str, ...]) -> MutantVerdict | None:
    """Look for an effect of the mutant in a contract that leaves a relation out."""
    elsewhere = [Mutant(mutant.deleted, (relation,)) for relation in ELSEWHERE]
    elsewhere = [other for other in elsewhere if mutant.site.relation not in other.omit]
    for look in (_harms, _names_another):
        for other in elsewhere:
            found = look(other, searched)
            if found is not None:
                return evolve(found, by=f"{found.by}, where {other.omit[0]} is left out")
    return None


# In all states that satisfy the invariants


@cache
def _finite(omit: tuple[str, ...]) -> tuple[Composition, Any]:
    composition = Composition.of(omit, Encoding.finite(SCOPE))
    return composition, solver_of(composition)


def _harms_by_induction(mutant: Mutant) -> MutantVerdict | None:
    """Look for a state in a finite scope, reachable or not, from which a property breaks."""
    composition, solver = _finite(mutant.omit)
    broken = Composition(mutant.omit, composition.encoding, mutant.functions)
    failing = next(refuted(broken, mutant.site.transition, solver), None)
    return None if failing is None else MutantVerdict(mutant, "induction", failing)


@cache
def _unbounded(omit: tuple[str, ...]) -> tuple[Composition, Z3]:
    composition = Composition.of(omit, Encoding.sorted())
    return composition, Z3(composition)


def _equivalent(mutant: Mutant, searched: tuple[str, ...]) -> MutantVerdict | None:
    """Prove that the mutant equals the contract wherever the invariants hold; find the cover."""
    composition, solver = _unbounded(mutant.omit)
    words = composition.vocabulary
    name = mutant.site.transition
    broken = Composition(mutant.omit, composition.encoding, mutant.functions)
    goals = []
    for ours in composition.paths[name]:
        for theirs in broken.paths[name]:
            differ = _difference(ours, theirs)
            if differ is not None:
                facts = (*ours.tests, *theirs.tests, *words.assumed(name))
                relations = frozenset(composition.functions.relations)
                goals.append(Goal("same", "mutant", name, "", relations, facts, differ))
    if not all(obligation.proved for obligation in solver.prove(goals)):
        return None
    return _covering(mutant, searched)


def _difference(ours: Path, theirs: Path) -> Term | None:
    """Return the condition under which two paths have different effects; None if they never do."""
    if ours.clause != theirs.clause:
        return z3.BoolVal(True)
    changed = [
        term != theirs.columns[column]
        for column, term in ours.columns.items()
        if not term.eq(theirs.columns[column])
    ]
    return z3.Or(changed) if changed else None


def _covering(mutant: Mutant, searched: tuple[str, ...]) -> MutantVerdict:
    """
    Find the guard that covers an equivalent mutant.

    If only the covering guard is deleted, the code that the mutant deletes would refuse. So
    deleting both does harm, or at least changes the clause of a refusal.
    """
    site = mutant.site
    named: MutantVerdict | None = None
    found = corpus(mutant.omit, searched)
    for other, together in _companions(site, mutant.omit):
        both, alone = Mutant(together, mutant.omit), Mutant((other,), mutant.omit)
        for probe in found.kept_calls(together[0]):
            try:
                if outcome(probe.run(mutant.omit), probe, alone) != site.clause:
                    continue
                clause = outcome(probe.run(mutant.omit), probe, both)
            except BREAKDOWN:
                continue
            done = harm(both, probe)
            if done:
                why = f"covered by {other.clause}; if both are deleted, {done[0][1]} fails"
                return MutantVerdict(mutant, "equivalent", why, probe, both)
            if clause != site.clause and named is None:
                why = (
                    f"covered by {other.clause}; if only {other.clause} is deleted, this guard "
                    f"refuses; if both are deleted, {clause or 'nothing'} refuses"
                )
                named = MutantVerdict(mutant, "equivalent", why, probe, both)
    if named is not None:
        return named
    return MutantVerdict(mutant, "equivalent", "found no guard that covers it")


def _companions(site: Site, omit: tuple[str, ...]) -> Iterator[tuple[Site, tuple[Site, ...]]]:
    """Yield each site that may cover the given site, with the sites to delete to remove both."""
    here = [other for other in sites(omit) if other.transition == site.transition]
    for other in here:
        inside = other.half == site.half and site.place[: len(other.place)] == other.place
        if other.kind == "guard" and not inside:
            yield other, (other, site)
    if site.kind == "operand":
        whole = site.place[: site.place.index("test")]
        guard = next(o for o in here if (o.half, o.place, o.kind) == (site.half, whole, "guard"))
        for other in here:
            if other.kind == "operand" and other.half == site.half and other != site:
                if other.place[: len(whole)] == whole:
                    yield other, (guard,)


def search(searched: tuple[str, ...]) -> None:
    """
    Try the mutants of some transitions in reachable states of the contract with all relations, so
    that the time of the first verdict does not include this search.
    """
    corpus((), searched)


def prepare(tell: Callable[[str], None]) -> None:
    """
    Try all mutants in reachable states of all compositions in advance, so that later verdicts are
    fast.

    Args:
        tell: Function that is called with a progress line per composition.
    """
    for omit in ((), *((relation,) for relation in ELSEWHERE)):
        tell(f"Mutants: trying them in reachable states: {composition_name(omit)}")
        corpus(omit, tuple(TRANSITIONS))
    for composition, _ in (_finite(()), _unbounded(())):
        assert composition.paths
