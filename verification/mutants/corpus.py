"""
The corpus: calls that distinguish mutants from the contract.

The calls are tried in states along legal schedules, or a few calls away from these states. In each
state, every candidate call is made on the contract and on the mutants of its transition. A call is
kept if a mutant gives another answer than the contract or leaves another state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

from attrs import define, evolve, field

from qeffect.countdown import Countdown
from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import TRANSITIONS, transitions
from qeffect.keys import TapeKey
from qeffect.refusals import Refused
from qeffect.relations.constants import NEVER
from qeffect.spec.transitions import TRANSITIONS as WRITTEN

from ..calls import Action, Call
from ..concrete_run import ConcreteRun
from ..process import Process
from ..walks.schedules import Schedule, ScheduleWalk
from .byhand import by_hand, telling
from .candidates import candidates, moved, share
from .probes import Probe, about, harm
from .processes import MUTANT_PROCESSES
from .sites import BREAKDOWN, Site, mutant, sites

__all__ = ["TELL", "Corpus", "corpus", "legal_schedules"]

#: Function that `corpus` calls with a progress line before each schedule that it tries; None to
#: print no progress.
TELL: Final[ContextVar[Callable[[str], None] | None]] = ContextVar("TELL", default=None)

#: Random walks through each process's life, and the steps of each.
SEEDS: Final = 8
LENGTH: Final = 60
#: How often, per process and after each kind of call, a call whose name begins as in `_OFTEN` is
#: made out of order.
STRAYS: Final = 2
_OFTEN: Final = ("check_", "invalidate", "drain")
#: Probability with which a schedule is left for `STEPS` calls: with all relations (`WANDER`), and
#: with a relation left out (`WANDER_ELSEWHERE`).
WANDER: Final = 0.1
WANDER_ELSEWHERE: Final = 0.3
STEPS: Final = 6
#: Maximum number of kept calls: calls that show a mutant's harm, and calls per other answer of the
#: mutant.
KEPT: Final = 3
#: Maximum number, per moment, of calls that a mutant accepts and that are judged.
JUDGED: Final = 10
#: A mutant is tried until enough of its answers differ from the contract's. If harm was found,
#: `FEW` judged and `FEW` other differences are enough. In any case, `ENOUGH_JUDGED` judged
#: differences, or `ENOUGH` differences in total, are enough.
FEW: Final = 40
ENOUGH_JUDGED: Final = 200
ENOUGH: Final = 1500


@define
class Corpus:
    """
    The calls that distinguish the mutants of a composition from the contract.

    Args:
        omit: Relations that the contract leaves out.
        searched: Transitions whose mutants are tried.
        harmful: For each site, calls that the site's mutant accepts although a predicate fails
            afterwards, each with the class and name of the failing predicates.
        renamed: For each site, calls that the contract refuses and the site's mutant refuses by
            another clause or with a Python error; grouped by that clause or the error's text.
    """

    omit: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    harmful: dict[Site, list[tuple[Probe, list[tuple[str, str]]]]] = field(factory=dict)
    renamed: dict[Site, dict[str, list[Probe]]] = field(factory=dict)
    _counts: Counter[tuple[Any, ...]] = field(factory=Counter)
    _untold: dict[str, dict[Site, Any]] = field(factory=dict)

    def kept_calls(self, site: Site) -> Iterator[Probe]:
        """Yield every kept call for a site."""
        yield from (probe for probe, _ in self.harmful.get(site, ()))
        for probes in self.renamed.get(site, {}).values():
            yield from probes

    def look_for(self, wanted: Sequence[Site]) -> None:
        """Start to look for calls that distinguish these mutants."""
        for site in wanted:
            function = mutant(site, self.omit).function
            self._untold.setdefault(site.transition, {})[site] = function

    @property
    def searching(self) -> bool:
        """Whether the search still needs calls for some mutant."""
        return any(self._untold.values())

    def untold(self, transition: str) -> list[tuple[Site, Any]]:
        """Return the sites of a transition that still need calls, each with its mutant."""
        return list(self._untold.get(transition, {}).items())

    def wants(self, site: Site, clause: str | None, answer: str | None, moment: Any) -> bool:
        """
        Record that the mutant of a site answers a call differently; return whether to keep the
        call.

        Args:
            site: The place in the code that the mutant lacks.
            clause: The clause of the contract's refusal; None if the contract accepts.
            answer: The clause of the mutant's refusal, or the text of its Python error; None if the
                mutant accepts.
            moment: A value that names the situation of the call; only a few calls per situation are
                kept.
        """
        self._counts[site,] += 1
        # A refusal of what the contract accepts tells nothing: the call need not be legal.
        kept = self.renamed.get(site, {}).get(answer or "", ())
        keeps = clause is not None and len(kept) < KEPT
        if answer is None:
            keeps = self.few(JUDGED, site, moment)
            self._counts[site, "judged"] += keeps
        judged, harmful = self._counts[site, "judged"], len(self.harmful.get(site, ()))
        done = harmful >= KEPT and judged >= FEW and self._counts[site,] - judged >= FEW
        if done or judged >= ENOUGH_JUDGED or self._counts[site,] >= ENOUGH:
            self._untold[site.transition].pop(site, None)
        return keeps

    def tell(self, site: Site, answer: str | None, probe: Probe) -> None:
        """Keep a call that the mutant of a site answers differently."""
        if answer is None:
            failing = harm(mutant(site, self.omit), probe)
            if failing:
                self._keep_harmful(site, probe, failing)
        else:
            self.renamed.setdefault(site, {}).setdefault(answer, []).append(probe)

    def _keep_harmful(self, site: Site, probe: Probe, failing: list[tuple[str, str]]) -> None:
        kept = self.harmful.setdefault(site, [])
        kept.append((probe, sorted(failing, key=_rank)))
        kept.sort(key=lambda found: _rank(found[1][0]))  # stable: earlier calls stay first
        del kept[KEPT:]

    def few(self, most: int, *kind: Any) -> bool:
        """Count one more call of a kind; return whether the count is still within the maximum."""
        self._counts[kind] += 1
        return self._counts[kind] <= most


def _rank(failing: tuple[str, str]) -> int:
    return ("state", "history", "step").index(failing[0])


@cache
def legal_schedules(
    omit: tuple[str, ...] = (),
) -> tuple[tuple[Process, tuple[Action, ...]], ...]:
    """
    Return legal schedules of every process: random ones and hand-written ones. The oracle of the
    random walks decides what is legal.

    Args:
        omit: Relations that the contract leaves out. A call that is legal with a relation is legal
            without it, with two exceptions: a refresh without the relation version, which defines
            when a cache is fresh, and a grouped dW without the arena. Without the arena, schedules
            with a grouped dW are left out.
    """
    pairs = [(own, _walked(own, without_version="version" in omit)) for own in MUTANT_PROCESSES]
    walked = [
        (own, life)
        for own, process in pairs
        for seed in range(SEEDS)
        for life in _walk(process, seed).lives()
    ]
    written = [
        (own, life)
        for own, process in pairs
        for schedule in by_hand(process)
        for life in schedule.lives()
    ]
    own, process = pairs[0]
    told = [(own, telling(process, life)) for life in _walk(process, 0).lives()]
    refused = {call.name for call in WRITTEN if call.relation in omit}
    found = (*walked, *written, *told)
    return tuple((own, life) for own, life in found if not refused & {name for name, _ in life})


def _walked(process: Process, *, without_version: bool) -> Process:
    """Return the same process, beginning in epoch 0, for schedules."""
    if not without_version:
        return evolve(process, epoch=0)
    stages = [evolve(config, reports_fills=False, refresh_pool=None) for config in process.stages]
    order = tuple(graph for graph in process.capture_order if graph[-1] != "refresh")
    return evolve(process, epoch=0, stages=stages, omit={"version"}, capture_order=order)


def _walk(process: Process, seed: int) -> Schedule:
    """Return a random schedule of a process; with odd seeds it ends with a failed reduction."""
    dice = random.Random(seed)
    walk = ScheduleWalk(process)
    for _ in range(LENGTH):
        walk.step(dice.getrandbits(64))
    if seed % 2 and any(config.reduces for config in process.stages):
        bucket = None
        while bucket is None:  # each complete epoch has a running reduction
            walk.step(dice.getrandbits(64))
            reductions = walk.shadow.reductions.items()
            bucket = next((bucket for bucket, it in reductions if it.running), None)
        walk.call(Call("fail_reduction", {"bucket": bucket}))
        walk.step(dice.getrandbits(64))
    return walk.schedule


@cache
def corpus(omit: tuple[str, ...], searched: tuple[str, ...]) -> Corpus:
    """
    Return the calls that distinguish the mutants of a composition from the contract.

    If relations are left out, only mutants are tried that do no harm in the contract with all
    relations. The visited states, and so the calls found for a mutant, do not depend on the other
    mutants.

    Args:
        omit: Relations that the contract leaves out.
        searched: Transitions whose mutants are tried.
    """
    found = Corpus(omit, searched)
    wanted = [site for site in sites(omit) if site.transition in searched]
    found.look_for([site for site in wanted if not omit or _is_harmless(site, searched)])
    if not found.searching:
        return found
    dice = random.Random(0)
    schedules, tell = legal_schedules(omit), TELL.get()
    count = Countdown("schedules", len(schedules))
    what = "trying them in reachable states"
    if omit:
        what = f"trying those that did no harm so far, in contracts without {', '.join(omit)}"
    for number, (process, actions) in enumerate(schedules):
        if tell is not None:
            tell(f"Mutants: {what}: {count(number)}")
        run = ConcreteRun(process, relations=frozenset(transitions(omit).relations))
        scout = _Scout(found, run, dice)
        for position, (name, arguments) in enumerate(actions):
            trace = actions[:position]
            accepted = scout.look(trace, (name, arguments))
            others = [action for action in accepted if action != (name, arguments)]
            after = trace[-1][0] if trace else ""
            for call in _strays(found, (process.name, after), others, dice):
                strayed = run.copy()
                off = _Scout(found, strayed, dice)
                off.look((*trace, *off.stray(call)))
            if dice.random() < (WANDER_ELSEWHERE if omit else WANDER):
                _wander(found, run.copy(), trace, others, dice)
            run.take(name, scout.functions[name], arguments)
    return found


def _evidence(run: ConcreteRun, transition: str, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the evidence of an action that did exactly what its check requested."""
    if transition == "check_update":
        return ()
    if transition == "check_evaluation":
        return NEVER, 0
    st = run.laid.memory
    stage = named["stage"] if "stage" in named else named["key"].stage
    whole, epoch = st.matrices[stage], st.weight_epoch[stage]
    if transition == "check_refresh":
        return whole, epoch
    if transition == "check_forward":
        begun = st.drawn[st.domain_of[stage]] + 1
        return whole, epoch if named["refresh"] else NEVER, moved(st, stage), begun
    if transition == "check_dgrad":
        slot = named["ref"].slot
        scales = moved(st, stage), st.scaled_at[slot]
        return whole, *scales, st.drawn_at[slot], *share(st, stage)
    return (whole,)


def _movements(run: ConcreteRun) -> Iterator[Action]:
    """For each domain whose scales must be updated before its weight update ends, yield the call
    that updates them."""
    st = run.laid.memory
    stages = {st.domain_of[config.stage]: config.stage for config in run.process.stages}
    for domain, stage in stages.items():
        if st.gathered[domain]:
            yield "move_scales", (stage, 1)


def _is_harmless(site: Site, searched: tuple[str, ...]) -> bool:
    full = corpus((), searched)
    refuses = site.kind in ("guard", "operand") and full.renamed.get(site)
    return not full.harmful.get(site) and not refuses


def _strays(
    found: Corpus, where: tuple[str, str], others: Sequence[Action], dice: random.Random
) -> Iterator[Action]:
    """Yield accepted calls that are not in the schedule: a few of each kind, more F, dI and dW."""
    kinds = sorted({transition for transition, _ in others})
    chosen = [dice.choice(kinds)] if kinds and dice.random() < 0.25 else []
    chosen += [
        kind
        for kind in kinds
        if kind.startswith(_OFTEN) and found.few(STRAYS, "stray", *where, kind)
    ]
    for kind in chosen:
        yield dice.choice([call for call in others if call[0] == kind])


def _wander(
    found: Corpus,
    run: ConcreteRun,
    trace: tuple[Action, ...],
    calls: list[Action],
    dice: random.Random,
) -> None:
    """Leave the schedule, and continue with random accepted calls of all kinds."""
    scout = _Scout(found, run, dice)
    for _ in range(STEPS):
        kinds = sorted({transition for transition, _ in calls if transition != "restore"})
        if not kinds:
            return
        kind = dice.choice(kinds + 2 * [kind for kind in kinds if kind.startswith(_OFTEN)])
        name, arguments = dice.choice([call for call in calls if call[0] == kind])
        run.take(name, scout.functions[name], arguments)
        trace = (*trace, (name, arguments))
        calls = scout.look(trace)


class _Scout:
    """Tries calls in the state of a run, on the contract and on its mutants."""

    def __init__(self, found: Corpus, run: ConcreteRun, dice: random.Random) -> None:
        self.found, self.run, self.dice = found, run, dice
        self.functions = transitions(found.omit).functions

    def look(self, trace: tuple[Action, ...], *planned: Action) -> list[Action]:
        """Try calls, keep the calls that distinguish a mutant, and return the accepted calls."""
        accepted = []
        memory = self.run.laid.memory
        after = memory.copy()
        rehearsal = memory.copy()
        moment = self._moment()
        for transition, arguments in (*planned, *candidates(self.run)):
            clause: str | None = None
            try:
                self.functions[transition](after, *arguments)
            except Refused as refused:
                clause = refused.clause
            else:
                if self.run.trusted(transition, arguments):
                    accepted.append((transition, arguments))
            for site, function in self.found.untold(transition):
                answer = _answer(function, rehearsal, arguments)
                differs = answer != clause or (clause is None and not _alike(rehearsal, after))
                if differs and self.found.wants(site, clause, answer, moment):
                    followed = about(self.run, transition, arguments)
                    probe = Probe(self.run.process, trace, transition, arguments, clause, followed)
                    self.found.tell(site, answer, probe)
                if answer is None or answer.endswith(")"):  # the mutant wrote, or may have written
                    rehearsal = memory.copy()
            if clause is None:
                after = memory.copy()
        return accepted

    def _moment(self) -> tuple[Any, ...]:
        """Return a value that is equal in situations where calls are likely to have equal
        effects."""
        st = self.run.laid.memory
        now = st.weight_epoch[self.run.process.stages[0].stage]
        final, spoiled = now in st.final, now in st.spoiled
        return self.run.process.name, final, spoiled, any(st.reducing), any(st.busy)

    def stray(self, call: Action) -> list[Action]:
        """
        Make a call that is not the next call of the schedule, and commit most checks.
        """
        run = self.run
        transition, arguments = call
        ticket = run.take(transition, self.functions[transition], arguments)
        done = [call]
        verb, _, action = transition.partition("_")
        if verb == "check" and self.dice.random() < 0.7:
            named = dict(zip(TRANSITIONS[transition], arguments, strict=True))
            slot = named.get("slot", getattr(named.get("ref"), "slot", None))
            place = {"refresh": "stage", "evaluation": "stage", "update": "epoch"}.get(action)
            place = slot if place is None else named[place]
            evidence = _evidence(run, transition, named)
            if action == "update":
                for movement in _movements(run):
                    run.take(movement[0], self.functions[movement[0]], movement[1])
                    done.append(movement)
            then: Action = (f"commit_{action}", (place, ticket, *evidence))
            done.append(then)
            run.take(then[0], self.functions[then[0]], then[1])
        if self.dice.random() < 0.5:
            for call in self._settling(run):
                run.take(call[0], self.functions[call[0]], call[1])
                done.append(call)
        return done

    def _settling(self, run: ConcreteRun) -> Iterator[Action]:
        """Yield calls that bind every tape and wait on every link, so that other guards decide."""
        st = run.laid.memory
        updates = st.optimizing[0] != 0 or st.half_updated[0] != 0
        for slot, mask in enumerate(() if updates else st.consumers):
            cell, epoch = st.cell_at[slot], st.epoch_at[slot]
            if mask and st.bound[cell] != epoch and st.spoiled[cell[0]] != epoch:
                yield "bind", (TapeKey(epoch, *cell), st.destination_of[cell])
        for link in range(len(st.submitted)):
            yield "join", (link,)
            yield "wait", (link,)


def _answer(function: Any, memory: Memory, arguments: tuple[Any, ...]) -> str | None:
    """Return the clause of a refusal or the text of a Python error; None if accepted."""
    try:
        function(memory, *arguments)
    except Refused as refused:
        return refused.clause
    except BREAKDOWN as error:
        return repr(error)
    return None


def _alike(ours: Memory, theirs: Memory) -> bool:
    return all(getattr(ours, name) == getattr(theirs, name) for name in ours._names)
