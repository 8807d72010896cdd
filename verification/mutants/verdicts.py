"""
What becomes of a mutant, and how it is decided.

In turn: does the broken transition accept a call in a reachable state after which an invariant, a
property of the history or a step property fails? Does it refuse an action of a legal schedule? Does
it name another clause? Does it break an invariant from some state that satisfies them all, though
none was reached? Or is it the same function on every state that satisfies them? The last is a proof
over unbounded sorts, and then some other guard must be found that does its work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import z3
from attrs import evolve, field, frozen

from qeffect.refusals import Refused
from qeffect.stage import transitions
from verification.concrete import World
from verification.obligations import Composition, Goal
from verification.solvers import Z3
from verification.symbolic import Encoding, Path
from verification.symbolic.terms import Term
from verification.witnesses import SCOPE

from .corpus import Probe, corpus, legal_schedules
from .sites import Mutant, sites

__all__ = ["CLASSES", "Verdict", "judge"]

#: How a mutant is killed, best first.
CLASSES: Final = ("state", "history", "step", "legal", "clause", "induction")

#: What a broken function may raise that is no refusal.
_BREAKDOWN: Final = (KeyError, IndexError, TypeError)

_RANK = {kind: number for number, kind in enumerate(CLASSES)}


@frozen
class Verdict:
    """
    What became of a mutant.

    Args:
        mutant: The mutant.
        kind: One of ``CLASSES``; ``equivalent`` or ``survived``.
        by: The predicate that fails, or what is refused or named instead; for an equivalent one
            what does its work.
        probe: The call that shows it, in a reachable state.
        covering: What the call shows it with, where that is not the mutant alone: another guard
            deleted too, or a relation left out.
        seconds: What it took.
    """

    mutant: Mutant
    kind: str
    by: str
    probe: Probe | None = field(default=None, repr=False)
    covering: Mutant | None = field(default=None, repr=False)
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        """Whether it behaves differently in a way that matters."""
        return self.kind in CLASSES

    @property
    def justified(self) -> bool:
        """Whether it is killed, or equivalent with another guard doing its work."""
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
            "verdict": self.kind,
            "by": self.by,
            "seconds": round(self.seconds, 3),
        }


def judge(mutant: Mutant) -> Verdict:
    """Decide what becomes of a mutant."""
    began = time.perf_counter()
    found = (
        _harms(mutant)
        or _refuses_legal(mutant)
        or _names_another(mutant)
        or _harms_by_induction(mutant)
        or _equivalent(mutant)
        or Verdict(mutant, "survived", "nothing tells it apart")
    )
    return evolve(found, seconds=time.perf_counter() - began)


# In reachable states


def _probes(mutant: Mutant) -> Iterator[Probe]:
    """Yield the situations in which the mutant may differ, the likely ones first."""
    site, all_probes = mutant.site, corpus(mutant.omit)
    clauses = {s.clause for s in mutant.deleted if s.clause}
    if site.kind == "guard":
        yield from all_probes.of(site.transition, sorted(clauses))
        return
    if clauses:
        yield from all_probes.of(site.transition, sorted(clauses))
    yield from all_probes.of(site.transition, [None])
    if clauses:
        yield from (p for p in all_probes.of(site.transition) if p.clause not in {None, *clauses})


def _outcome(world: World, probe: Probe, mutant: Mutant) -> str | None:
    """Run the broken transition; return its clause, or None when it accepts."""
    try:
        world.run(probe.transition, mutant.function, probe.arguments)
    except Refused as refused:
        return refused.clause
    return None


def _harms(mutant: Mutant) -> Verdict | None:
    """Look for a call that it accepts and that leaves a property broken."""
    best: Verdict | None = None
    for probe in _probes(mutant):
        for kind, name in _harm(mutant, probe):
            if best is None or _RANK[kind] < _RANK[best.kind]:
                best = Verdict(mutant, kind, name, probe)
        if best is not None and best.kind == "state":
            break
        if best is not None and probe.clause is None:
            break  # an update: what is broken here is broken everywhere
    return best


def _harm(mutant: Mutant, probe: Probe) -> list[tuple[str, str]]:
    """Return what fails, by class and name, when it accepts a call; nothing when it refuses."""
    world = probe.world(mutant.omit)
    if not world.trusted(probe.transition, probe.arguments):
        return []
    before = set(world.broken_invariants()) if mutant.omit else set()
    steps = list(world.broken_steps(probe.transition, probe.arguments))
    try:
        clause = _outcome(world, probe, mutant)
    except _BREAKDOWN:
        return []  # it broke down before it did harm
    if clause is not None:
        return []
    return [*(b for b in world.broken_invariants() if b not in before), *steps]


def _refuses_legal(mutant: Mutant) -> Verdict | None:
    """Look for a legal schedule with an action that it refuses."""
    name = mutant.site.transition
    own = transitions(mutant.omit).functions
    for setup, actions in legal_schedules():
        memory = setup.lay_out().memory
        for position, (transition, arguments) in enumerate(actions):
            function = mutant.function if transition == name else own[transition]
            try:
                function(memory, *arguments)
            except Refused as refused:
                about = next(iter(corpus(mutant.omit).of(name))).arbitrary
                probe = Probe(setup, actions[:position], transition, arguments, None, about)
                return Verdict(mutant, "legal", f"{transition} is refused: {refused.clause}", probe)
    return None


def _names_another(mutant: Mutant) -> Verdict | None:
    """Look for a refusal that it gives another name."""
    for probe in _probes(mutant):
        if probe.clause is None:
            continue
        try:
            clause = _outcome(probe.world(mutant.omit), probe, mutant)
        except _BREAKDOWN as error:
            return Verdict(mutant, "clause", f"{probe.clause} becomes {error!r}", probe)
        if clause != probe.clause:
            named = clause or "accepted"
            return Verdict(mutant, "clause", f"{probe.clause} becomes {named}", probe)
    return None


# In all states that satisfy the invariants


@cache
def _finite(omit: tuple[str, ...]) -> tuple[Composition, Any]:
    composition = Composition.of(omit, Encoding.finite(SCOPE))
    words = composition.vocabulary
    solver = z3.SimpleSolver()
    for claim in (*words.configuration(), *words.invariants(words.before)):
        solver.add(list(words.close(claim)))
    return composition, solver


def _harms_by_induction(mutant: Mutant) -> Verdict | None:
    """Look for any state from which it breaks a property, in a finite scope."""
    composition, solver = _finite(mutant.omit)
    words = composition.vocabulary
    broken = Composition(mutant.omit, composition.encoding, mutant.functions)
    name = mutant.site.transition
    for path in broken.paths[name]:
        if path.clause is not None:
            continue
        claims = [*words.disturbed(words.after(path)), *words.steps(name)]
        solver.push()
        solver.add(path.condition, *words.assumed(name))
        solver.add(z3.Or([words.denied(claim) for claim in claims]))
        satisfied = solver.check() == z3.sat
        failing = ""
        if satisfied:
            model = solver.model()
            failing = next(
                claim.name
                for claim in claims
                if z3.is_true(model.eval(words.denied(claim), model_completion=True))
            )
        solver.pop()
        if satisfied:
            elsewhere = _harms_elsewhere(mutant)
            if elsewhere is None:
                return Verdict(mutant, "induction", failing)
            why = f"{failing}; reached without {elsewhere.mutant.omit[0]}: {elsewhere.by}"
            return Verdict(mutant, "induction", why, elsewhere.probe, elsewhere.mutant)
    return None


@cache
def _unbounded(omit: tuple[str, ...]) -> tuple[Composition, Z3]:
    composition = Composition.of(omit, Encoding.sorted())
    return composition, Z3(composition)


def _equivalent(mutant: Mutant) -> Verdict | None:
    """Prove that it does the same wherever the invariants hold, and find what covers it."""
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
    return _covering(mutant)


def _difference(ours: Path, theirs: Path) -> Term | None:
    """Return when two paths, both taken, differ in what they do; None for never."""
    if ours.clause != theirs.clause:
        return z3.BoolVal(True)
    changed = [
        term != theirs.columns[column]
        for column, term in ours.columns.items()
        if not term.eq(theirs.columns[column])
    ]
    return z3.Or(changed) if changed else None


def _covering(mutant: Mutant) -> Verdict:
    """
    Find what does an equivalent mutant's work.

    That is a guard without which what the mutant deletes is what refuses, so that deleting both
    does harm, or at least names the refusal otherwise; or a relation without which the mutant does
    harm.
    """
    site = mutant.site
    named: Verdict | None = None
    for other in sites(mutant.omit):
        if (other.transition, other.kind) != (site.transition, "guard") or other == site:
            continue
        both, alone = Mutant((other, site), mutant.omit), Mutant((other,), mutant.omit)
        for probe in corpus(mutant.omit).of(site.transition, [other.clause]):
            try:
                if _outcome(probe.world(mutant.omit), probe, alone) != site.clause:
                    continue
                clause = _outcome(probe.world(mutant.omit), probe, both)
            except _BREAKDOWN:
                continue
            harm = _harm(both, probe)
            if harm:
                why = f"covered by {other.clause}; without both, {harm[0][1]} fails"
                return Verdict(mutant, "equivalent", why, probe, both)
            if clause != site.clause and named is None:
                why = f"covered by {other.clause}; without it, this refuses, else {clause} would"
                named = Verdict(mutant, "equivalent", why, probe, both)
    if named is not None:
        return named
    elsewhere = _harms_elsewhere(mutant)
    if elsewhere is not None:
        why = f"covered by {elsewhere.mutant.omit[0]}; without it, {elsewhere.by} fails"
        return Verdict(mutant, "equivalent", why, elsewhere.probe, elsewhere.mutant)
    return Verdict(mutant, "equivalent", "nothing was found that covers it")


def _harms_elsewhere(mutant: Mutant) -> Verdict | None:
    """Look for harm in a reachable state of a composition that leaves a relation out."""
    for relation in _ELSEWHERE:
        if not mutant.omit and relation != mutant.site.relation:
            found = _harms(Mutant(mutant.deleted, (relation,)))
            if found is not None:
                return found
    return None


_ELSEWHERE: Final = ("order",)


def others(found: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts that are neither kills nor justified equivalents."""
    return [verdict for verdict in found if not verdict.justified]
