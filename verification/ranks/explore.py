"""
Exploration of a few ranks: check that the promises hold in every state, and that the end of the run
is reachable from every state.

The search is breadth first, so that a violation has a shortest trace. Every rank may fail, refuse,
give up or crash at any point, as often as the scope's limit of faults allows. The search also
checks progress. Every state except the end has a step without a fault, and from every state steps
without faults lead to the end. In a finite graph, this is progress under fair scheduling: a run
that never ends would visit some state infinitely often and never take the step that leads to the
end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, Final

from attrs import field, frozen

from qeffect.refusals import Refused
from qeffect.spec.launches import LAUNCH_PROMISES, LAUNCH_STEPS
from qeffect.spec.predicates import Predicate
from qeffect.spec.ranks import BETWEEN, NOBODY, RANK_PROMISES, RANK_STEPS, STEP

from .concrete_state import ConcreteState, Impossible, Size, broken
from .launch_lemmas import LAUNCH_LEMMAS
from .launch_stops import AT_ONCE, REASONS, STOPS
from .launches import LAUNCHES
from .lemmas import LEMMAS
from .protocol import TRANSITIONS, RankTransition

__all__ = ["SCOPES", "Found", "RankScope", "explore"]


@frozen
class RankScope:
    """
    A scope: the small case that one exploration of the ranks covers.

    Args:
        name: The scope's name.
        size: Numbers of ranks, slots, messages and so on.
        goal: The epoch that all ranks must reach.
        faults: Maximum number of faults.
        leave_out: Transitions that are not explored.
        at_once: Whether stopping takes fewer steps, because other scopes cover all orders of stops
            and causes. A rank then publishes its reason and cuts its connections in one step, and
            names the cause in one step with its report or its end (`launch_stops`).
        says: A description of the scope for the report.
    """

    name: str
    size: Size
    goal: int
    faults: int
    leave_out: frozenset[str] = frozenset()
    at_once: bool = False
    says: str = ""

    @property
    def transitions(self) -> list[RankTransition]:
        """The transitions that are explored."""
        found = LAUNCHES if self.size.launches else TRANSITIONS
        if self.at_once:
            found = {name: AT_ONCE.get(name, t) for name, t in found.items() if name not in STOPS}
        return [t for t in found.values() if t.name not in self.leave_out]


_MESSAGES: Final = frozenset({"post_send", "post_receive", "transfer", "release"})
_ACTIONS: Final = frozenset({"act", "end_act", "fail"})
_IN_PLACE: Final = frozenset({"begin_again", "start_again", "run_late"})
_CHECKPOINTS: Final = frozenset({"write_shard", "publish"})
_SAVES: Final = frozenset({"leave_launches", "write_part", "resume_launches", "publish_parts"})
_ANEW: Final = frozenset({"end_launched", "begin_anew", "start_anew"})

#: Scopes by name.
SCOPES: Final[Mapping[str, RankScope]] = {
    scope.name: scope
    for scope in (
        RankScope(
            "two-ranks",
            Size(2, attempts=2, steps=1),
            goal=1,
            faults=1,
            leave_out=_MESSAGES | _IN_PLACE,
            says="two ranks, one step, checkpoints, one fault anywhere",
        ),
        RankScope(
            "three-ranks",
            Size(3, attempts=2, steps=1),
            goal=1,
            faults=1,
            leave_out=_MESSAGES | _CHECKPOINTS | _ACTIONS | _IN_PLACE,
            says="three ranks, one step, one fault anywhere",
        ),
        RankScope(
            "messages",
            Size(2, attempts=1, slots=1, messages={(0, 1): 1}, steps=2),
            goal=2,
            faults=0,
            leave_out=_CHECKPOINTS | _ACTIONS,
            says="two ranks, two steps, one message per step",
        ),
        RankScope(
            "messages-and-faults",
            Size(2, attempts=2, slots=1, messages={(0, 1): 1}, steps=1),
            goal=1,
            faults=1,
            leave_out=_CHECKPOINTS | _ACTIONS | _IN_PLACE,
            says="two ranks, one step, one message, one fault anywhere",
        ),
        RankScope(
            "messages-both-ways",
            Size(2, attempts=1, slots=2, messages={(0, 1): 1, (1, 0): 1}, steps=1),
            goal=1,
            faults=0,
            leave_out=_CHECKPOINTS | _ACTIONS | {"release"},
            says="two ranks, one step, one message each way, two slots",
        ),
        RankScope(
            "two-messages",
            Size(2, attempts=1, slots=2, messages={(0, 1): 2}, steps=1),
            goal=1,
            faults=0,
            leave_out=_CHECKPOINTS | _ACTIONS | {"release"},
            says="two ranks, one step, two messages in one channel, two slots",
        ),
        RankScope(
            "exchanged-messages",
            Size(2, attempts=2, slots=1, messages={(0, 1): 2}, kinds=2, steps=1),
            goal=1,
            faults=1,
            leave_out=_CHECKPOINTS
            | _ACTIONS
            | _IN_PLACE
            | {"release", "crash", "give_up", "refuse"},
            says="two ranks, two messages in one channel, one end posts a wrong message once",
        ),
        RankScope(
            "in-place",
            Size(2, attempts=2, steps=1),
            goal=1,
            faults=1,
            leave_out=_MESSAGES | _CHECKPOINTS | _ACTIONS | {"refuse", "crash"},
            says="two ranks, one step, one attempt in place, one fault anywhere",
        ),
        RankScope(
            "two-steps",
            Size(2, attempts=2, steps=2),
            goal=2,
            faults=1,
            leave_out=_MESSAGES | _ACTIONS | _IN_PLACE,
            says="two ranks, two steps, checkpoints, one fault anywhere",
        ),
        RankScope(
            "two-launches",
            Size(2, attempts=1, launches=True),
            goal=2,
            faults=1,
            leave_out=_SAVES | _ANEW | {"run_out"},
            at_once=True,
            says="two ranks, two steps of one launch each, rebuilds, one fault anywhere",
        ),
        RankScope(
            "stopped-launches",
            Size(2, attempts=1, launches=True),
            goal=1,
            faults=1,
            leave_out=_SAVES | _ANEW,
            says="two ranks, one step of one launch, stops in every order, one fault anywhere",
        ),
        RankScope(
            "saved-launches",
            Size(2, attempts=1, launches=True),
            goal=1,
            faults=1,
            leave_out=frozenset({"vote_no", "fail_host", "run_out", "report_epoch"}),
            at_once=True,
            says="two ranks, one step of one launch, checkpoints, a rank that dies anywhere",
        ),
        RankScope(
            "saved-and-rebuilt",
            Size(2, attempts=1, launches=True),
            goal=1,
            faults=1,
            leave_out=_ANEW | {"vote_no", "die", "run_out"},
            at_once=True,
            says="two ranks, one step of one launch, checkpoints, a rebuild after any host fails",
        ),
        RankScope(
            "launched-messages",
            Size(2, attempts=1, messages={(0, 1): 1, (1, 0): 1}, launches=True),
            goal=2,
            faults=1,
            leave_out=_SAVES | _ANEW | {"run_out", "die"},
            at_once=True,
            says="two ranks, two launches with a message each way, rebuilds, one fault anywhere",
        ),
        RankScope(
            "exchanged-in-launches",
            Size(2, attempts=1, messages={(0, 1): 2}, kinds=2, launches=True),
            goal=1,
            faults=1,
            leave_out=_SAVES | _ANEW | {"run_out"},
            at_once=True,
            says="two ranks, a launch with two messages, one end captures a wrong message once",
        ),
        RankScope(
            "launched-through-three",
            Size(
                3,
                attempts=1,
                messages={(0, 1): 1, (1, 2): 1, (2, 1): 1, (1, 0): 1},
                launches=True,
            ),
            goal=1,
            faults=0,
            leave_out=_SAVES | _ANEW | {"run_out"},
            at_once=True,
            says="three ranks, one launch with a message each way between neighbours",
        ),
    )
}


@frozen
class Found:
    """
    The result of an exploration.

    Args:
        scope: Name of the scope.
        states: Number of reachable states.
        steps: Number of transitions between these states.
        taken: How often each transition was taken.
        refused: How often each condition of the protocol was not met.
        apart: Number of states in which a rank has stopped and the weights of another rank are one
            step ahead.
        violation: A promise's name, ``deadlock``, or ``end unreachable``; empty without a
            violation.
        trace: The transitions that lead from the initial state to the violation.
    """

    scope: str
    states: int
    steps: int
    taken: Counter[str] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)
    apart: int = 0
    violation: str = ""
    trace: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "scope": self.scope,
            "states": self.states,
            "steps": self.steps,
            "taken": dict(sorted(self.taken.items())),
            "refused": dict(sorted(self.refused.items())),
            "apart": self.apart,
            "violation": self.violation or None,
            "trace": list(self.trace),
        }


class _Search:
    def __init__(
        self,
        scope: RankScope,
        transition: str,
        without: frozenset[str],
        lemmas: bool,
        instead: Mapping[str, RankTransition],
    ) -> None:
        self.scope = scope
        self.mutated = transition
        self.ignored = REASONS if scope.at_once else frozenset[str]()
        self.without = without | self.ignored
        self.state = ConcreteState(scope.size)
        self.state.leave_out(self.ignored)
        launches = scope.size.launches
        promises, also, steps = (
            (LAUNCH_PROMISES, LAUNCH_LEMMAS, LAUNCH_STEPS)
            if launches
            else (RANK_PROMISES, LEMMAS, RANK_STEPS)
        )
        self.promises: list[Predicate] = [*promises, *(also if lemmas else ())]
        self.steps_of = {
            t.name: [p for p in steps if t.name in p.transitions] for t in scope.transitions
        }
        self.apart = 0
        members = scope.size.members
        self.moves = [
            (instead.get(t.name, t), given)
            for t in scope.transitions
            for given in product(*(members[sort] for sort in t.arguments))
        ]
        start = (*self.state.buffer, 0)
        self.number = {start: 0}
        self.states = [start]
        self.parents: list[tuple[int, int]] = [(-1, -1)]
        self.onward: list[list[int]] = []
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def run(self) -> Found:
        """Search."""
        violation = self._broken()
        at = 0
        while not violation and at < len(self.states):
            violation = self._expand(at)
            at += 1
        if violation:
            return self._found(violation, len(self.states) - 1)
        stuck = self._stuck()
        return self._found(*stuck) if stuck else self._found("", 0)

    def _found(self, violation: str, last: int) -> Found:
        trace = []
        while last > 0:
            last, move = self.parents[last]
            transition, given = self.moves[move]
            trace.append(f"{transition.name}({_told(transition, given)})")
        return Found(
            self.scope.name,
            len(self.states),
            sum(self.taken.values()),
            self.taken,
            self.refused,
            self.apart,
            violation,
            tuple(reversed(trace)),
        )

    def _expand(self, at: int) -> str:
        state, scope = self.state, self.scope
        here = self.states[at]
        faults = here[-1]
        onward: list[int] = []
        self.onward.append(onward)
        buffer = state.buffer
        for index, (transition, given) in enumerate(self.moves):
            buffer[:] = here[:-1]
            # A refusal of a spoiled epoch follows from the failure and does not count as a second
            # fault.
            follows = transition.name == "refuse" and state.spoiled[given[0]] == 1
            fault = (transition.fault or self._misplaced(transition.name, given)) and not follows
            if fault and faults == scope.faults:
                continue
            if not self._wanted(transition.name, given, faults):
                continue
            mutated = transition.name == self.mutated
            if mutated:
                state.leave_out(self.without)
            broken_step = ""
            try:
                steps = self.steps_of[transition.name]
                failing = [p.name for p in steps if not p.function(state, *given)]
                transition.run(state, *given)
                broken_step = failing[0] if failing else ""
            except Impossible:
                continue
            except Refused as refused:
                self.refused[refused.clause] += 1
                continue
            finally:
                if mutated:
                    state.leave_out(self.ignored)
            self.taken[transition.name] += 1
            after = (*buffer, faults + fault)
            number = self.number.get(after)
            new = number is None
            if number is None:
                number = self.number[after] = len(self.states)
                self.states.append(after)
                self.parents.append((at, index))
            elif broken_step:
                self.states.append(after)
                self.parents.append((at, index))
            if broken_step:
                return broken_step
            if new:
                violation = self._broken()
                if violation:
                    return violation
            if not fault and number != at:
                onward.append(number)
        return ""

    def _misplaced(self, name: str, given: tuple[int, ...]) -> bool:
        """
        Return whether a rank posts or captures a message that is not the next message of its row.
        """
        state = self.state
        if name in ("capture_send", "capture_receive"):
            r, q, message = given
            graph = state.graph_sends if name == "capture_send" else state.graph_receives
            return bool(message != graph[r, q] % self.scope.size.kinds)
        if name not in ("post_send", "post_receive"):
            return False
        r, q, _, message = given
        sends = name == "post_send"
        posted = state.sent[r, q] if sends else state.taken[r, q]
        before = state.sent_before[r, q] if sends else state.taken_before[r, q]
        return bool(message != (posted - before) % self.scope.size.kinds)

    def _wanted(self, name: str, given: tuple[int, ...], faults: int) -> bool:
        """Return whether a move stays within the limits of the scope."""
        state, scope = self.state, self.scope
        if name == "launch":
            return bool(state.launched[given[0]] < scope.goal)
        if name == "rebuild":
            return bool(state.round[given[0]] < scope.size.attempts)
        if name == "begin_anew":
            return bool(state.newest[0] < scope.size.attempts)
        if name in ("begin_attempt", "begin_again"):
            return bool(state.attempt[0] < min(faults + 1, scope.size.attempts))
        if name == "offer":  # names that nobody has drawn are interchangeable
            return all(state.drawn_in[a] != NOBODY for a in range(given[1]))
        if name == "decide":  # the lowest of several equal choices, as in the runtime
            r, p = given
            kinds = [
                1 + state.lost[q] if state.life[q] == state.life[r] and state.said[q] else 0
                for q in range(p + 1)
            ]
            return kinds[p] not in kinds[:p]
        if name == "choose_cause":  # the lowest of several equal choices, as in the runtime
            r, p = given
            same = [_why(state, q, state.round[r]) for q in range(p + 1)]
            return same[p] not in same[:p]
        if name in ("post_send", "post_receive"):
            posted = state.sent if name == "post_send" else state.taken
            return bool(posted[given[:2]] < len(state.members["place"]))
        if name in ("begin_step", "act", "release"):
            r = given[0]
            if name == "begin_step":
                return bool(state.epoch[r] < scope.goal and state.step[r] < scope.size.steps)
            if name == "act":
                return bool(state.live[r] == 0)
            return bool(state.generation[r, given[1]] == 0 and state.phase[r] == STEP)
        return True

    def _broken(self) -> str:
        self.apart += _apart(self.state)
        for name, _ in broken(self.promises, self.state):
            return name
        return ""

    def _ended(self, number: int) -> bool:
        state = self.state
        state.buffer[:] = self.states[number][:-1]
        if self.scope.size.launches:
            return self._launches_ended()
        return all(
            state.up[r] == 1
            and state.epoch[r] >= self.scope.goal
            and state.phase[r] == BETWEEN
            and state.leaving[r] == 0
            for r in range(self.scope.size.ranks)
        )

    def _launches_ended(self) -> bool:
        """Return whether all ranks know of the last step, or have stopped for a new attempt."""
        state, ranks = self.state, range(self.scope.size.ranks)
        if all(
            state.dead[r] == state.quits[r] == 0 and state.known[r] >= self.scope.goal
            for r in ranks
        ):
            return True
        if "begin_anew" in {t.name for t in self.scope.transitions}:
            return False  # the ranks start from a checkpoint
        if not all(state.cut[r] == 1 for r in ranks):
            return False
        reports = {state.report[state.round[r], r] for r in ranks if state.dead[r] == 0}
        lost = any(state.dead[r] == 1 for r in ranks)
        return NOBODY not in reports and (lost or len(reports) > 1)

    def _stuck(self) -> tuple[str, int] | None:
        """Return a state from which the protocol's own steps do not lead to the end."""
        ended = [self._ended(n) for n in range(len(self.states))]
        for number, onward in enumerate(self.onward):
            if not onward and not ended[number]:
                return "deadlock", number
        back: list[list[int]] = [[] for _ in self.states]
        for number, onward in enumerate(self.onward):
            for after in onward:
                back[after].append(number)
        todo = deque(number for number, end in enumerate(ended) if end)
        reaches = list(ended)
        while todo:
            for before in back[todo.popleft()]:
                if not reaches[before]:
                    reaches[before] = True
                    todo.append(before)
        left = [number for number, reached in enumerate(reaches) if not reached]
        return ("end unreachable", left[0]) if left else None


def _why(state: ConcreteState, q: int, n: int) -> int:
    """
    Return what a rank has published in a round: nothing, a failure, a vote no, or a lost
    connection.
    """
    if state.round[q] != n or state.said[q] == 0:
        return 0
    return int(1 + state.read_no[q] + 2 * state.lost[q])


def _apart(state: ConcreteState) -> bool:
    """Return whether a rank has stopped while the weights of another rank are one step ahead."""
    ranks = range(state.size.ranks)
    if state.size.launches:
        return any(
            state.round[r] == state.round[q]
            and state.cut[q] == 1
            and state.ran[q] == state.launched[q]
            and state.weights[q] < state.weights[r]
            for r in ranks
            for q in ranks
        )
    return any(
        state.life[r] == state.life[q]
        and state.up[q] == 0
        and state.ended[q] == 1
        and state.epoch[q] < state.epoch[r]
        for r in ranks
        for q in ranks
    )


def _told(transition: RankTransition, given: tuple[int, ...]) -> str:
    return ", ".join(f"{sort} {one}" for sort, one in zip(transition.arguments, given, strict=True))


def explore(
    scope: RankScope,
    *,
    transition: str = "",
    without: frozenset[str] = frozenset(),
    lemmas: bool = True,
    instead: Mapping[str, RankTransition] = MappingProxyType({}),
) -> Found:
    """
    Visit every state of a scope, and stop at the first violation.

    Args:
        scope: The scope to explore.
        transition: For a mutant, the transition that lacks conditions or writes.
        without: Names of the conditions that this transition lacks, and ``COLUMN =`` for each write
            that it lacks.
        lemmas: Whether to check the lemmas of the proofs too.
        instead: Transitions that replace those with the same name.
    """
    return _Search(scope, transition, without, lemmas, instead).run()
