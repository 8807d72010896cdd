"""
The plain explorer: it handles one state at a time, in Python lists. It exists only to check the
NumPy explorer.

It runs the composed functions themselves, keeps states as tuples in a dictionary, and has a second
implementation of the normal form. `qeffect.verification.explorer.exploration` must find the same
states, moves, refusals and violations. Tests compare both explorers on small scopes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from attrs import define, field

from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import STATE
from qeffect.refusals import Refused
from qeffect.relations.constants import DGRAD_BIT, NEVER, RESERVED, WGRAD_BIT
from qeffect.spec.predicates import Predicate

from ..claims import failing
from .moves import Move
from .quotient import VACATES
from .scopes import configuration, members_in, sizes
from .space import Space
from .steps import Step, step_of

__all__ = ["PlainExplorer", "normal_form"]

#: The kept columns in normal form, one after another in the order of STATE.
State = tuple[int, ...]


@define(eq=False)
class PlainExplorer:
    """
    Explores a state space one state at a time.

    Args:
        space: The state space to explore.
        predicates: Predicates to check in every state.

    Attributes:
        memory: The columns (arrays) of the state, as lists. Columns that are not part of a state
            have arbitrary values.
        initial: The state from which the exploration starts.
        parents: For every visited state, the state and the move that first led to it.
        accepted: For each move (a call that the explorer tries), how often it was accepted.
        refused: For each (move, clause), how often the clause refused the move.
        depth: Number of moves from the initial state to the farthest state.
        violation: The first violation and the schedule that leads to it, or None.
    """

    space: Space
    predicates: tuple[Predicate, ...] = ()
    memory: Any = field(init=False)
    initial: State = field(init=False)
    parents: dict[State, tuple[State, int] | None] = field(init=False, factory=dict)
    accepted: Counter[int] = field(init=False, factory=Counter)
    refused: Counter[tuple[int, str]] = field(init=False, factory=Counter)
    depth: int = field(init=False, default=0)
    violation: tuple[str, list[str]] | None = field(init=False, default=None)
    _kept: list[list[int]] = field(init=False)
    _where: list[list[tuple[list[int], int, int, bool]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        columns = configuration(self.space.scope) | self.space.initial()
        self.memory = SimpleNamespace(**columns, every=Memory.every, fill=Memory.fill)
        self._kept = [columns[name] for name in STATE if name in self.space.kept]
        self.initial = self.state()
        self._where = [
            [(columns[w.column], w.index, w.value, w.equal) for w in move.where]
            for move in self.space.moves
        ]

    def state(self) -> State:
        """Bring the memory into normal form and return it as a state."""
        normal_form(self.space, self.memory)
        return self._as_it_is()

    def _as_it_is(self) -> State:
        return tuple([entry for column in self._kept for entry in column])

    def restore(self, state: State) -> None:
        """Set the memory to a state."""
        start = 0
        for column in self._kept:
            column[:] = state[start : start + len(column)]
            start += len(column)

    def step(self, index: int, memory: Any = None) -> Step:
        """
        Return a move (a call that the explorer tries) with its arguments read from a memory, by
        default the explorer's own memory.
        """
        st = self.memory if memory is None else memory
        stages = self.memory.stage_of
        return step_of(self.space.moves[index], stages, lambda name, i: getattr(st, name)[i])

    def run(self, step: Step, memory: Any = None) -> None:
        """
        Carry out a step.

        Raises:
            Refused: The step is refused. If the step has two transitions, the first may already
                have changed the memory.
        """
        st = self.memory if memory is None else memory
        functions = self.space.transitions.functions
        ticket = functions[step.move.steps[0]](st, *step.arguments)
        if len(step.move.steps) > 1:
            functions[step.move.steps[1]](st, step.place, ticket, *step.evidence)

    def edges(self, state: State) -> Iterator[tuple[int, str | None, State]]:
        """Yield (move, None, the next state) if the contract accepts the move, or (move, clause,
        the memory after the refusal)."""
        taken = False  # whether the last move was tried: its twin begins with the same check
        self.restore(state)
        for index, move in enumerate(self.space.moves):
            tried = (
                taken
                if move.twin
                else all(
                    (column[place] == value) is equal
                    for column, place, value, equal in self._where[index]
                )
            )
            taken = False
            if tried:
                try:
                    self.run(self.step(index))
                except Refused as refused:
                    after = self._as_it_is()
                    yield index, refused.clause, after
                else:
                    taken, after = True, self.state()
                    yield index, None, after
                if taken or after != state:
                    self.restore(state)

    def explore(self) -> PlainExplorer:
        """Visit every reachable state, breadth first, and stop at the first violation."""
        frontier = [self.initial]
        self.parents[self.initial] = None
        if self._breaks(self.initial):
            return self
        while frontier:
            following: list[State] = []
            for state in frontier:
                for index, clause, after in self.edges(state):
                    if clause is not None:
                        self.refused[index, clause] += 1
                        told = self._broken_promise(index, clause, state, after)
                        if told:
                            self.violation = told, [*self.schedule(state), self._text(state, index)]
                            return self
                        continue
                    self.accepted[index] += 1
                    if after not in self.parents:
                        self.parents[after] = state, index
                        following.append(after)
                        if self._breaks(after):
                            return self
            self.depth += bool(following)
            frontier = following
        return self

    def schedule(self, state: State) -> list[str]:
        """Return the moves (calls) of a shortest schedule to a state."""
        came = self.parents[state]
        return [] if came is None else [*self.schedule(came[0]), self._text(*came)]

    def _text(self, state: State, index: int) -> str:
        self.restore(state)
        return str(self.step(index))

    def _breaks(self, state: State) -> bool:
        self.restore(state)
        for name, _ in failing(self.predicates, members_in(self.space.scope), self.memory):
            self.violation = name, self.schedule(state)
            return True
        return False

    def _broken_promise(self, index: int, clause: str, before: State, after: State) -> str:
        """Return how a refusal breaks a promise of the contract; empty if it breaks no promise."""
        move = self.space.moves[index]
        if len(move.steps) > 1:
            broken = after != before and move.right
            return f"{move.steps[1]} refused ({clause}) after its check was accepted" * broken
        if after != before:
            return f"{move.label} refused ({clause}) but changed the state"
        redeems = "ticket" in move.arguments and "leader" not in move.arguments
        owed = move.right and redeems and _owed(self.memory, move)
        return f"{move.label} refused ({clause}) although its ticket is in flight" * owed


def _owed(st: Any, move: Move) -> bool:
    """Return whether the move's ticket was issued to the action that the move ends."""
    action = move.label.partition("_")[2]
    if action in ("update", "evaluation"):
        return True
    if action == "refresh":
        return st.refreshing[move.arguments["stage"]] not in st.held
    mask = st.consumers[move.arguments["slot"]]
    if mask == RESERVED:
        return action == "forward"
    return action == ("dgrad" if mask & DGRAD_BIT else "wgrad" if mask & WGRAD_BIT else "")


def normal_form(space: Space, st: Any) -> None:
    """Bring a memory into normal form, in place; `quotient` explains why each rule is sound."""
    scope, n = space.scope, sizes(space.scope)
    for name, values in space.initial().items():
        if name not in space.kept:
            getattr(st, name)[:] = values
    for slot, mask in enumerate(st.consumers):
        cell = st.cell_at[slot]
        if mask == 0 == st.moving[slot]:  # free: no guard reads its last tape
            if scope.fresh_keys and cell != -1 and st.slot_of[cell] == -1:
                st.forwarded[cell] = NEVER
            st.cell_at[slot], st.epoch_at[slot] = -1, NEVER
        if mask in (0, RESERVED):  # nothing is produced yet
            st.produced[slot] = 0
        if mask & VACATES and not st.receives[st.slot_stage[slot]]:
            st.vacated[slot] = 0
        waits = st.joined[st.ended_on[slot]] < st.ended_at[slot]
        st.ended_at[slot], st.ended_on[slot] = int(waits), st.ended_on[slot] if waits else 0
    tickets = [st.held, st.busy, st.refreshing, st.filling, st.writing, st.optimizing]
    tickets.append(st.evaluating)
    flying = sorted({ticket for column in tickets for ticket in column} - {0})
    for column in tickets:
        column[:] = [1 + flying.index(ticket) if ticket else 0 for ticket in column]
    st.serial[0] = len(flying)
    for link in range(n["link"]):
        ahead = st.submitted[link] - st.joined[link]
        st.submitted[link], st.joined[link] = (ahead > 0) - (ahead < 0), 0
    for domain in range(n["domain"]):
        _number_replays(space, st, domain)
    if st.named[0] != st.weight_epoch[0]:
        st.named[0], st.consumer[0] = NEVER, 0
    if not any(st.unawaited) and not any(st.unseen) and st.optimizing[0] == 0:
        st.updater[0] = 0
    for domain in range(n["domain"]):
        own = [s for s, at in enumerate(st.domain_of) if at == domain]
        if not any(st.final[s] == st.weight_epoch[s] for s in own):
            st.unwaited[domain] = 0  # a finalize computes it again before the update
    st.cursor[:] = [place if st.tenants[p] else 0 for p, place in enumerate(st.cursor)]
    st.incarnation[0] = 0
    for cell, mark in enumerate(st.forwarded):
        slot = st.slot_of[cell]
        if scope.fresh_keys and mark != NEVER:  # every next key of a cell is fresh
            if slot == -1:
                st.forwarded[cell] = NEVER
            elif st.epoch_at[slot] != 0:
                st.forwarded[cell] = 0 if mark == st.epoch_at[slot] else NEVER
                st.epoch_at[slot] = 0


def _number_replays(space: Space, st: Any, domain: int) -> None:
    """Renumber, from 1, a domain's replays for which some link has not waited yet."""
    stages = [s for s, at in enumerate(st.domain_of) if at == domain]
    slots = [s for s, stage in enumerate(st.slot_stage) if stage in stages]
    links = [link for link, at in enumerate(st.domain_at) if at == domain]
    entries = [(column, slot) for column in (st.produced, st.vacated) for slot in slots]
    entries += [(st.landed, stage) for stage in stages]
    drops = "vacated" in space.kept and "drop" in space.scope.transitions
    last = [(st.replays, domain)]
    awaited = min(st.waited[link] for link in links)
    marks = {column[i] for column, i in (*entries, *(last if drops else ()))}
    marks = {mark for mark in marks if mark > awaited}
    for column, i in (*entries, *((st.waited, link) for link in links), *last):
        column[i] = sum(mark <= column[i] for mark in marks)
