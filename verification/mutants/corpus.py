"""
Situations to try mutants in: reachable states, and calls near the legal ones in each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from attrs import define, evolve, field, frozen

from qeffect.constants import DI, DW, GRAD, NO_SLOT, OUT
from qeffect.keys import TapeKey, TapeRef
from qeffect.refusals import Refused
from qeffect.stage import TRANSITIONS, transitions
from verification.concrete import Arbitrary, Setup, World

from .schedules import Action, schedule
from .setups import SETUPS
from .sites import Mutant, sites

__all__ = ["Corpus", "Probe", "corpus", "legal_schedules"]

#: Schedules of each setup, and situations kept in it of each outcome of each transition.
SEEDS: Final = 6
KEPT: Final = 5
#: Refused calls of each kind that are tried without the clause that refuses them.
TRIED: Final = 60


@frozen
class Probe:
    """
    One call in one reachable state.

    Args:
        setup: The process.
        trace: Accepted calls that lead to the state.
        transition: The transition called.
        arguments: Its arguments.
        clause: What the contract answers: the clause of its refusal, or None.
        arbitrary: What the history should follow to see what the call does.
    """

    setup: Setup = field(repr=False)
    trace: tuple[Action, ...] = field(repr=False)
    transition: str
    arguments: tuple[Any, ...]
    clause: str | None
    arbitrary: Arbitrary = field(repr=False)

    def world(self, omit: Sequence[str] = ()) -> World:
        """Return the state, with its history."""
        functions = transitions(omit)
        world = World(self.setup, self.arbitrary, frozenset(functions.relations))
        for name, arguments in self.trace:
            world.run(name, functions.functions[name], arguments)
        return world


@define
class Corpus:
    """
    Probes by transition and outcome.

    Args:
        omit: Relations left out.
        probes: Those kept, by transition and clause (None for accepted). First come those that
            one clause alone refuses: without it, nothing stands between the call and its harm.
    """

    omit: tuple[str, ...] = ()
    probes: dict[tuple[str, str | None], list[Probe]] = field(factory=dict)
    _counts: Counter[tuple[Any, ...]] = field(factory=Counter)
    _lenient: dict[tuple[str, str], Callable[..., Any]] = field(factory=dict)

    def of(self, transition: str, clauses: Sequence[str | None] | None = None) -> Iterator[Probe]:
        """Yield the probes of a transition with these outcomes, or all."""
        for (name, clause), found in self.probes.items():
            if name == transition and (clauses is None or clause in clauses):
                yield from found

    def add(self, probe: Probe, sole: bool) -> None:
        """Keep a probe."""
        found = self.probes.setdefault((probe.transition, probe.clause), [])
        found.insert(0 if sole else len(found), probe)

    def wants(self, most: int, *kind: Any) -> bool:
        """Count one more of a kind, and say whether there are not too many."""
        self._counts[kind] += 1
        return self._counts[kind] <= most

    def without(self, transition: str, clause: str) -> Callable[..., Any]:
        """Return a transition without the guards that raise a clause."""
        known = self._lenient.get((transition, clause))
        if known is None:
            guards = tuple(
                site
                for site in sites(self.omit)
                if (site.transition, site.clause, site.kind) == (transition, clause, "guard")
            )
            known = Mutant(guards, self.omit).function
            self._lenient[transition, clause] = known
        return known


@cache
def legal_schedules() -> tuple[tuple[Setup, tuple[Action, ...]], ...]:
    """Return legal schedules of every setup."""
    return tuple((setup, tuple(schedule(setup, seed))) for setup in SETUPS for seed in range(SEEDS))


@cache
def corpus(omit: tuple[str, ...] = ()) -> Corpus:
    """Return the situations along the legal schedules, one call off them, and after that call."""
    found = Corpus(omit)
    dice = random.Random(0)
    for setup, actions in legal_schedules():
        world = World(setup)
        scout = _Scout(found, world, dice)
        for position, (name, arguments) in enumerate(actions):
            trace = actions[:position]
            accepted = scout.look(trace, [(name, arguments), *candidates(world)])
            others = [action for action in accepted if action != (name, arguments)]
            if others and dice.random() < 0.4:
                strayed = world.copy()
                off = _Scout(found, strayed, dice)
                stray = off.stray(dice.choice(others))
                off.look((*trace, *stray), candidates(strayed))
            world.run(name, scout.functions[name], arguments)
    return found


class _Scout:
    """Tries calls in a world's state and keeps those of a kind that is still wanted."""

    def __init__(self, found: Corpus, world: World, dice: random.Random) -> None:
        self.found, self.world, self.dice = found, world, dice
        self.functions = transitions(found.omit).functions

    def look(self, trace: tuple[Action, ...], calls: Iterable[Action]) -> list[Action]:
        """Try calls, keep what is wanted, return those accepted."""
        accepted = []
        setup, memory = self.world.setup, self.world.laid.memory
        moment = self._moment()
        rehearsal = memory.copy()
        for transition, arguments in calls:
            clause: str | None = None
            sole = False
            try:
                self.functions[transition](rehearsal, *arguments)
            except Refused as refused:
                clause = refused.clause
                sole = self._sole(transition, arguments, clause, moment)
            else:
                rehearsal = memory.copy()
                accepted.append((transition, arguments))
            if self.found.wants(KEPT, setup.name, transition, clause, sole, moment):
                about = _about(self.world, transition, arguments)
                self.found.add(Probe(setup, trace, transition, arguments, clause, about), sole)
        return accepted

    def _sole(self, transition: str, arguments: tuple[Any, ...], clause: str, moment: Any) -> bool:
        """Whether nothing but this clause refuses the call."""
        if not self.found.wants(TRIED, "sole", self.world.setup.name, transition, clause, moment):
            return False
        try:
            self.found.without(transition, clause)(self.world.laid.memory.copy(), *arguments)
        except (Refused, KeyError, IndexError, TypeError):
            return False
        return True

    def _moment(self) -> tuple[bool, ...]:
        """Tell apart moments in which a call is likely to do different things."""
        st = self.world.laid.memory
        now = st.weight_epoch[self.world.setup.stages[0].stage]
        return now in st.final, now in st.spoiled, any(st.reducing), any(st.busy)

    def stray(self, call: Action) -> list[Action]:
        """Make a call that is not the schedule's next; most checks are followed by a commit."""
        world = self.world
        transition, arguments = call
        ticket = world.run(transition, self.functions[transition], arguments)
        done = [call]
        verb, _, action = transition.partition("_")
        if verb == "check" and self.dice.random() < 0.7:
            named = dict(zip(TRANSITIONS[transition], arguments, strict=True))
            slot = named.get("slot", getattr(named.get("ref"), "slot", None))
            place = named["stage"] if action == "refresh" else slot
            matrices = world.laid.memory.matrices
            evidence = (matrices[named["key"].stage],) if action in ("dgrad", "wgrad") else ()
            then: Action = (f"commit_{action}", (place, ticket, *evidence))
            done.append(then)
            world.run(then[0], self.functions[then[0]], then[1])
        if self.dice.random() < 0.5:
            for call in self._settling(world):
                world.run(call[0], self.functions[call[0]], call[1])
                done.append(call)
        return done

    def _settling(self, world: World) -> Iterator[Action]:
        """Leave nothing unbound and nobody waiting, so that other guards have the word."""
        st = world.laid.memory
        for slot, mask in enumerate(st.pending):
            cell, epoch = st.cell_at[slot], st.epoch_at[slot]
            if mask and st.bound[cell] != epoch and st.spoiled[cell[0]] != epoch:
                yield "bind", (TapeKey(epoch, *cell), st.destination_of[cell])
        for link in range(len(st.submitted)):
            yield "join", (link,)
            yield "wait", (link,)


def _about(world: World, transition: str, arguments: tuple[Any, ...]) -> Arbitrary:
    st = world.laid.memory
    named = dict(zip(TRANSITIONS[transition], arguments, strict=True))
    serial = st.serial[0] + 1 if transition.startswith("check_") else None
    arbitrary = Arbitrary().about(named, serial)
    if "ref" not in named:
        slot = arbitrary.slot
        ref = TapeRef(slot, st.generation[slot], st.incarnation[0])
        arbitrary = evolve(arbitrary, ref=ref)
    return arbitrary


def candidates(world: World) -> Iterator[Action]:
    """Yield calls worth trying in a state: the plausible ones, and each with one thing changed."""
    for transition, base in _plausible(world):
        names = TRANSITIONS[transition]
        yield transition, tuple(base[name] for name in names)
        for name in names:
            for value in _others(world, base, name):
                changed = {**base, name: value}
                yield transition, tuple(changed[n] for n in names)


def _plausible(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    st = world.laid.memory
    for config in world.setup.stages:
        stage = config.stage
        domain = st.domain_of[stage]
        link = list(st.domain_at).index(domain)
        own = list(world.laid.slots[stage])
        free = next((slot for slot in own if st.pending[slot] == 0), own[0])
        epoch = st.weight_epoch[stage]
        stale = int(st.cache_epoch[stage] != epoch)
        for cell in config.cells():
            key = TapeKey(epoch, *cell)
            slot = st.slot_of[cell] if st.slot_of[cell] != NO_SLOT else free
            given = {"key": key, "slot": slot, "token": st.token[domain], "link": link}
            yield "reserve", given
            yield "check_forward", {**given, "refresh": stale}
            yield "bind", {"key": key, "destination": st.destination_of[cell]}
        at = {"stage": stage, "link": link}
        yield "check_refresh", at
        yield "finalize", at
        ticket = {"stage": stage, "ticket": st.refreshing[stage]}
        yield "commit_refresh", ticket
        yield "abort_refresh", ticket
        for name in ("invalidate", "start_reduction", "finish_reduction", "fail_reduction"):
            yield name, {"stage": stage}
        for slot in own:
            yield from _of_slot(world, slot, link)
    yield "commit_epoch", {"epoch": st.weight_epoch[world.setup.stages[0].stage]}
    yield "checkpoint", {}
    epoch = st.weight_epoch[world.setup.stages[0].stage]
    yield "restore", {"epoch": epoch, "incarnation": st.incarnation[0] + 1}
    for link in range(len(st.submitted)):
        for name in ("submit", "join", "wait"):
            yield name, {"link": link}
    for domain in range(len(st.token)):
        yield "drain", {"domain": domain}


def _of_slot(world: World, slot: int, link: int) -> Iterator[tuple[str, dict[str, Any]]]:
    st = world.laid.memory
    stage = st.slot_stage[slot]
    ticket = {"slot": slot, "ticket": st.held[slot]}
    matrices = st.matrices[stage]
    for name in ("commit_forward", "abort_forward", "abort_dgrad", "abort_wgrad"):
        yield name, ticket
    yield "commit_dgrad", {**ticket, "queued": matrices}
    yield "commit_wgrad", {**ticket, "covered": matrices}
    cell = st.cell_at[slot]
    if cell is None:
        return
    key = TapeKey(st.epoch_at[slot], *cell)
    ref = TapeRef(slot, st.generation[slot], st.incarnation[0])
    named = {"key": key, "ref": ref, "link": link}
    yield "drop", named
    yield "check_dgrad", {**named, "token": st.token[st.domain_of[stage]]}
    first = int(st.opened[st.buffer_of[cell]] != key.epoch)
    destination = st.destination_of[cell]
    yield "check_wgrad", {**named, "destination": destination, "first": first}
    for bit in (OUT, GRAD):
        yield "read", {**named, "bit": bit}
        yield "finish_read", {**named, "bit": bit}


def _others(world: World, base: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield other values of an argument."""
    st, value = world.laid.memory, base[name]
    if name == "slot":
        yield from (slot for slot in (NO_SLOT, *range(len(st.pending))) if slot != value)
    elif name == "key":
        yield TapeKey(value.epoch + 1, *value.cell)
        if value.epoch:
            yield TapeKey(value.epoch - 1, *value.cell)
        cells = (cell for config in world.setup.stages for cell in config.cells())
        yield from (TapeKey(value.epoch, *cell) for cell in cells if cell != value.cell)
    elif name == "ref":
        yield evolve(value, generation=value.generation + 1)
        if value.generation:
            yield evolve(value, generation=value.generation - 1)
        yield evolve(value, incarnation=value.incarnation - 1)
        others = (slot for slot in range(len(st.pending)) if slot != value.slot)
        yield from (evolve(value, slot=slot, generation=st.generation[slot]) for slot in others)
    elif name == "token":
        yield value + 1
        yield value - 1
    elif name == "ticket":
        yield from {0, st.serial[0], st.serial[0] + 1, *st.held, *st.refreshing} - {value}
    elif name == "link":
        yield from (link for link in range(len(st.submitted)) if link != value)
    elif name in ("refresh", "first"):
        yield 1 - value
    elif name == "bit":
        yield from (bit for bit in (DI, DW, OUT, GRAD, DI | OUT, OUT | GRAD) if bit != value)
    elif name in ("destination", "queued", "covered"):
        yield (*value, "another")
    elif name == "epoch":
        yield value + 1
        if value:
            yield value - 1
    elif name == "incarnation":
        yield value - 1
