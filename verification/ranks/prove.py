"""
Proofs for any number of ranks: every promise and lemma holds at first, and every transition keeps
it.

Ranks are members of an uninterpreted sort; slots and places are integers. A goal is first asked
with hypotheses instantiated for the ranks and places that the goal names. If that does not prove
the goal, it is asked again with the quantified hypotheses. Only ``unsat`` is a proof; ``unknown``
is a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import signature
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import z3
from attrs import asdict, frozen

from qeffect.spec.launches import LAUNCH_PROMISES, LAUNCH_STEPS
from qeffect.spec.predicates import Predicate
from qeffect.spec.ranks import RANK_PROMISES, RANK_STEPS

from ..column_reads import ColumnReads
from ..symbolic import Sym
from ..symbolic.solver import TIMEOUT, answer, new_solver
from .launches import LAUNCH_LEMMAS, LAUNCHES
from .lemmas import CONFIGURATION, LEMMAS
from .protocol import TRANSITIONS, RankTransition
from .symbolic_state import (
    COLUMNS,
    SymbolicState,
    Symbols,
    closed,
    fresh,
    holds,
    initial,
    run,
    variables,
)

__all__ = ["PROTOCOLS", "Answer", "Protocol", "prove"]


@frozen
class Protocol:
    """
    What is proved together: transitions, and what they keep.

    Args:
        transitions: The transitions, by name.
        given: What a configuration is.
        invariants: What holds in every reachable state.
        steps: What holds whenever a transition is taken.
    """

    transitions: Mapping[str, RankTransition]
    given: tuple[Predicate, ...]
    invariants: tuple[Predicate, ...]
    steps: tuple[Predicate, ...]


#: Steps whose commit the hosts agree on, and steps that are launches.
PROTOCOLS: Final = (
    Protocol(TRANSITIONS, (*CONFIGURATION,), (*RANK_PROMISES, *LEMMAS), (*RANK_STEPS,)),
    Protocol(LAUNCHES, (), (*LAUNCH_PROMISES, *LAUNCH_LEMMAS), (*LAUNCH_STEPS,)),
)
_CLAIMS: Final = {claim.name: claim for one in PROTOCOLS for claim in (*one.given, *one.invariants)}
#: A claim with more variables is not instantiated for every combination of members.
_MANY: Final = 3


@frozen
class Answer:
    """
    The answer to one obligation.

    Args:
        transition: The transition, or ``initially``.
        claim: The promise or lemma that must hold after the transition, or when it is taken.
        verdict: ``unsat`` for a proof; ``kept`` where the transition writes none of the claim's
            columns; else ``sat`` or ``unknown``.
        seconds: Time of the answer.
    """

    transition: str
    claim: str
    verdict: str
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether the claim is proved."""
        return self.verdict in ("unsat", "kept")

    def record(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        return asdict(self)


def prove(
    *,
    transition: str = "",
    without: frozenset[str] = frozenset(),
    seed: int = 0,
    timeout: int = TIMEOUT,
    progress: Callable[[str], None] | None = None,
    instead: Mapping[str, RankTransition] = MappingProxyType({}),
) -> Iterator[Answer]:
    """
    Prove every obligation, or those of one transition.

    Args:
        transition: The only transition to prove; by default all, and the initial state.
        without: Names of needs that the transition does not ask, ``COLUMN =`` for columns that it
            does not write.
        seed: Seed of the solver.
        timeout: Timeout per question in milliseconds.
        progress: Called with a progress line.
        instead: Transitions that are proved instead of those of the same name.
    """
    for protocol in PROTOCOLS:
        if not transition:
            yield from _initially(protocol, (seed, timeout))
        for taken in protocol.transitions.values():
            if transition in ("", taken.name):
                if progress is not None:
                    progress(f"Proving. {taken.name}")
                taken = instead.get(taken.name, taken)
                yield from _kept(protocol, taken, without, (seed, timeout))


def _initially(protocol: Protocol, how: tuple[int, int]) -> Iterator[Answer]:
    state = initial()
    given = [closed(claim, state) for claim in protocol.given]
    for claim in protocol.invariants:
        began = time.perf_counter()
        verdict = _ask([*given, z3.Not(holds(claim, state))], how)
        yield Answer("initially", claim.name, verdict, time.perf_counter() - began)


def _kept(
    protocol: Protocol, transition: RankTransition, without: frozenset[str], how: tuple[int, int]
) -> Iterator[Answer]:
    before = fresh()
    conditions, after, arguments = run(transition, before, without)
    written = {name for name in COLUMNS if not _same(name, before, after)}
    for step in protocol.steps:
        if transition.name in step.transitions:
            names = list(signature(step.function).parameters)[1:]
            given = dict(zip(names, arguments.values(), strict=True))
            denied = z3.Not(holds(step, before, **given))
            yield _answer(protocol, transition, step, before, arguments, conditions, denied, how)
    for claim in protocol.invariants:
        if not _reads(claim.name) & written:
            yield Answer(transition.name, claim.name, "kept", 0.0)
            continue
        denied = z3.Not(holds(claim, after))
        yield _answer(protocol, transition, claim, before, arguments, conditions, denied, how)


def _answer(
    protocol: Protocol,
    transition: RankTransition,
    claim: Predicate,
    before: Symbols,
    arguments: dict[str, Any],
    conditions: list[Any],
    denied: Any,
    how: tuple[int, int],
) -> Answer:
    began = time.perf_counter()
    sorts = dict(zip(arguments, transition.arguments, strict=True))
    members = dict(arguments)
    if not claim.transitions:
        members |= variables(claim.variables)
        sorts |= claim.variables
    near = list(_instances(protocol, before, members, sorts))
    verdict = _ask([*near, *conditions, denied], how)
    if verdict != "unsat":
        known = [closed(one, before) for one in (*protocol.given, *protocol.invariants)]
        verdict = _ask([*known, *near, *conditions, denied], how)
    return Answer(transition.name, claim.name, verdict, time.perf_counter() - began)


def _instances(
    protocol: Protocol, before: Symbols, members: dict[str, Any], sorts: dict[str, str]
) -> Iterator[Any]:
    """Yield the hypotheses, instantiated for the members that a goal names."""
    state = SymbolicState(before)
    space: dict[str, list[Any]] = {
        sort: [member for name, member in members.items() if sorts[name] == sort]
        for sort in ("rank", "place", "attempt", "count", "name")
    }
    space["name"].append(state.offered[0].term)
    if space["name"][1:]:
        space["rank"].append(state.lead[0].term)
    for rank in space["rank"]:
        turn = state.round[Sym(rank, {})].term
        space["attempt"] += [state.life[Sym(rank, {})].term, turn, turn - 1]
        space["name"].append(state.name[Sym(rank, {})].term)
        step = state.step[Sym(rank, {})].term
        space["count"] += [step, step + 1]
    for claim in (*protocol.given, *protocol.invariants):
        if len(claim.variables) > _MANY:
            # Only the goal's own members, if the goal has as many.
            if claim.variables.keys() <= members.keys():
                yield _template(claim.name)
            continue
        bound = variables(claim.variables).values()
        for values in product(*(space[sort] for sort in claim.variables.values())):
            yield z3.substitute(_template(claim.name), *zip(bound, values, strict=True))


@cache
def _template(name: str) -> Any:
    """Return a claim about the state before, as a term over its variables' constants."""
    return holds(_CLAIMS[name], fresh())


def _ask(facts: list[Any], how: tuple[int, int]) -> str:
    seed, timeout = how
    solver = new_solver("quantified", seed=seed, timeout=timeout)
    solver.add(facts)
    return answer(solver)


def _same(name: str, before: Symbols, after: Symbols) -> bool:
    one = COLUMNS[name][0] == ("one",)
    old = z3.K(z3.IntSort(), z3.Select(before[name], 0)) if one else before[name]
    return bool(after[name].eq(old))


@cache
def _reads(name: str) -> frozenset[str]:
    """Return the columns that a claim reads."""
    claim = _CLAIMS[name]
    state = ColumnReads(SymbolicState(fresh()))
    claim.function(state, **{n: Sym(t, {}) for n, t in variables(claim.variables).items()})
    return frozenset(state.read & COLUMNS.keys())
