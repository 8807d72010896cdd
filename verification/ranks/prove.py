"""
Proofs for any number of ranks: every promise and lemma holds initially, and every transition keeps
it.

Ranks are members of an uninterpreted sort; slots and places are integers. This module makes the
goals; `qeffect.verification.proofs` proves and reports them like the contract's goals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import z3
from attrs import field, frozen

from qeffect.spec.launches import LAUNCH_PROMISES, LAUNCH_STEPS
from qeffect.spec.predicates import Predicate
from qeffect.spec.ranks import RANK_PROMISES, RANK_STEPS

from ..column_reads import ColumnReads
from ..proofs.goals import Claim, Goal, Obligation, lemmas_within
from ..proofs.report import Agreement, ProofReport, agreements
from ..proofs.solvers import Z3
from ..symbolic import Encoding
from ..symbolic.terms import Term
from .launch_lemmas import LAUNCH_LEMMAS
from .launches import LAUNCHES
from .lemmas import CONFIGURATION, LEMMAS
from .protocol import TRANSITIONS, RankTransition
from .symbolic_state import COLUMNS, ENCODING, SymbolicState, Symbols, fresh, initial, run

__all__ = ["PROTOCOLS", "Protocol", "again", "goals", "prove", "run_proofs"]


@frozen(slots=False)
class Protocol:
    """
    A protocol to prove: its transitions, and the predicates that they must keep. It is a theory for
    the solvers.

    Args:
        name: The protocol's name in reports.
        transitions: The transitions, by name.
        given: Assumptions about the configuration.
        invariants: Predicates that hold in every reachable state.
        steps: Predicates that hold whenever a transition is taken.
    """

    name: str
    transitions: Mapping[str, RankTransition] = field(repr=False)
    given: tuple[Predicate, ...] = field(repr=False)
    invariants: tuple[Predicate, ...] = field(repr=False)
    steps: tuple[Predicate, ...] = field(repr=False)

    @property
    def encoding(self) -> Encoding:
        """The encoding of the sorts."""
        return ENCODING

    @cached_property
    def configuration(self) -> list[Claim]:
        """The assumptions about the configuration."""
        return [_claim(predicate, fresh()) for predicate in self.given]

    @cached_property
    def lemmas(self) -> dict[str, Claim]:
        """The predicates that hold in every state before a transition, by name."""
        return {predicate.name: _claim(predicate, fresh()) for predicate in self.invariants}

    @property
    def untouched(self) -> Sequence[Term]:
        """Facts about columns that no transition writes: none, since all columns are written."""
        return ()

    @cached_property
    def reads(self) -> dict[str, frozenset[str]]:
        """The columns that each invariant reads."""
        found = {}
        for predicate in self.invariants:
            state = ColumnReads(SymbolicState(fresh()))
            Claim.of(predicate, ENCODING, state)
            found[predicate.name] = frozenset(state.read & COLUMNS.keys())
        return found

    def lemmas_of(self, relations: frozenset[str] | None) -> frozenset[str]:
        """Return the names of all lemmas; no names if `relations` is None."""
        return lemmas_within(self.lemmas, relations)

    def instances(self, goal: Goal) -> Iterator[Term]:
        """
        Yield the lemmas that hold before a goal's transition, for the members that the goal names.
        """
        sorts = self._sorts(goal)
        space = _members([(ENCODING.const(name, sort), sort) for name, sort in sorts.items()])
        for claim in (*self.configuration, *self.lemmas.values()):
            own = [ENCODING.const(f"var.{name}", sort) for name, sort in claim.variables.items()]
            if len(own) <= _MANY:
                for values in product(*(space[sort] for sort in claim.variables.values())):
                    yield z3.substitute(claim.body, *zip(own, values, strict=True))
            elif sorts.keys() >= {f"var.{name}" for name in claim.variables}:
                yield claim.body

    def _sorts(self, goal: Goal) -> dict[str, str]:
        """Return the sorts of a goal's constants: transition arguments and claim variables."""
        arguments = self.transitions[goal.transition].arguments if goal.transition else ()
        known = self.lemmas.get(goal.name)
        return {
            **{f"arg.{number}": sort for number, sort in enumerate(arguments)},
            **{f"var.{n}": s for n, s in (known.variables if known else {}).items()},
        }


#: A claim with more variables is not instantiated for every combination of members.
_MANY: Final = 3


def _members(named: Sequence[tuple[Term, str]]) -> dict[str, list[Term]]:
    """Return the terms of each sort: those that a goal names, and their entries in columns."""
    state = SymbolicState(fresh())
    space: dict[str, list[Term]] = {
        sort: [member for member, its in named if its == sort]
        for sort in ("rank", "place", "entry", "message", "attempt", "count", "name")
    }
    space["name"].append(state.offered[0].term)
    if space["name"][1:]:
        space["rank"].append(state.lead[0].term)
    for rank in map(ENCODING.sym, space["rank"]):
        turn = state.round[rank].term
        space["attempt"] += [state.life[rank].term, turn, turn - 1]
        space["name"].append(state.name[rank].term)
        step = state.step[rank].term
        space["count"] += [step, step + 1]
    return space


#: The two protocols: hosts agree on the commit of a step, or each step is one launch.
PROTOCOLS: Final = (
    Protocol("hosts", TRANSITIONS, (*CONFIGURATION,), (*RANK_PROMISES, *LEMMAS), (*RANK_STEPS,)),
    Protocol(
        "launches",
        LAUNCHES,
        (*CONFIGURATION,),
        (*LAUNCH_PROMISES, *LAUNCH_LEMMAS),
        (*LAUNCH_STEPS,),
    ),
)


def run_proofs(
    progress: Callable[[str], None] | None = None,
    seeds: Iterable[int] = (),
    solvers: Sequence[str] = ("z3",),
    *,
    note: Callable[[str], None] | None = None,
) -> ProofReport:
    """
    Prove every obligation of every protocol.

    Args:
        progress: Function that is called with progress lines.
        seeds: Seeds of Z3. The proofs use the first seed; each further seed proves the goals again.
        solvers: ``z3``; add ``cvc5`` to give it the same goals too.
        note: Function that is called at once with the first obligation that has no proof.

    Raises:
        ImportError: cvc5 is requested but not installed.
    """
    first, *others = [*seeds] or [0]
    report = ProofReport()
    for obligation in prove(seed=first, progress=progress):
        if note is not None and not obligation.proved and not report.open:
            note(f"First finding: {obligation.found}: {obligation.verdict}")
        report.obligations.append(obligation)
    for agreement in again(others, solvers):
        report.agreements.append(agreement)
        if progress is not None:
            progress(f"Proving: {agreement.counted} obligations proved again")
    return report


def prove(
    *,
    transition: str = "",
    without: frozenset[str] = frozenset(),
    seed: int = 0,
    thorough: bool = True,
    progress: Callable[[str], None] | None = None,
    instead: Mapping[str, RankTransition] = MappingProxyType({}),
) -> Iterator[Obligation]:
    """
    Prove every obligation, or only those of one transition.

    Args:
        transition: The only transition to prove; by default all transitions and the initial state.
        without: For a mutant, names of the conditions that the transition lacks, and ``COLUMN =``
            for each write that it lacks.
        seed: Seed of the solver.
        thorough: Whether goals that cheap attempts leave open get further attempts.
        progress: Function that is called with progress lines.
        instead: Transitions that replace those with the same name.
    """
    for protocol in PROTOCOLS:
        solver = Z3(protocol, seed=seed, thorough=thorough)
        if not transition:
            yield from solver.prove(_initially(protocol))
        for taken in protocol.transitions.values():
            if transition in ("", taken.name):
                if progress is not None:
                    progress(f"Proving: {taken.name}")
                taken = instead.get(taken.name, taken)
                yield from solver.settle(_kept(protocol, taken, without))


def again(seeds: Sequence[int], solvers: Sequence[str] = ("z3",)) -> Iterator[Agreement]:
    """
    Yield the answers of other seeds, and of cvc5, to the same goals.

    Args:
        seeds: Seeds of Z3.
        solvers: Names of solvers; if ``cvc5`` is among them, cvc5 is asked too.

    Raises:
        ImportError: cvc5 is requested but not installed.
    """
    asked = [(protocol, list(goals(protocol))) for protocol in PROTOCOLS]
    yield from agreements(asked, seeds, solvers)


def goals(protocol: Protocol) -> Iterator[Goal]:
    """Yield all goals of a protocol."""
    yield from _initially(protocol)
    for transition in protocol.transitions.values():
        yield from (one for one in _kept(protocol, transition) if isinstance(one, Goal))


def _initially(protocol: Protocol) -> Iterator[Goal]:
    """Yield goals for: the invariants hold in the initial state."""
    state = initial()
    for predicate in protocol.invariants:
        denied = _claim(predicate, state).denied(ENCODING)
        yield Goal(predicate.name, "initial", "", "", None, (), denied)


def _kept(
    protocol: Protocol, transition: RankTransition, without: frozenset[str] = frozenset()
) -> Iterator[Obligation | Goal]:
    """
    Yield goals for: a transition has its step properties, and keeps the invariants.

    If a transition writes no column of an invariant, the invariant is the same term before and
    after the transition, and no solver is needed.
    """
    before = fresh()
    conditions, after, arguments = run(transition, before, without)
    written = {name for name in COLUMNS if not _same(name, before, after)}
    for step in protocol.steps:
        if transition.name in step.transitions:
            taken = _claim(step, before, *arguments)
            yield _goal(taken, "step", transition, conditions)
    for predicate in protocol.invariants:
        if protocol.reads[predicate.name] & written:
            earlier = protocol.lemmas[predicate.name].body
            claim = _claim(predicate, after)
            yield _goal(claim, "inductive", transition, [*conditions, earlier])
        else:
            kept = predicate.name, "inductive", protocol.name, transition.name, ""
            yield Obligation(*kept, "syntax", "unsat", 0.0)


def _goal(claim: Claim, kind: str, transition: RankTransition, facts: Sequence[Term]) -> Goal:
    denied = claim.denied(ENCODING)
    return Goal(claim.name, kind, transition.name, "", claim.needs, tuple(facts), denied)


def _claim(predicate: Predicate, symbols: Symbols, *arguments: Any) -> Claim:
    return Claim.of(predicate, ENCODING, SymbolicState(symbols), *arguments)


def _same(name: str, before: Symbols, after: Symbols) -> bool:
    one = COLUMNS[name][0] == ("one",)
    old = z3.K(z3.IntSort(), z3.Select(before[name], 0)) if one else before[name]
    return bool(after[name].eq(old))
