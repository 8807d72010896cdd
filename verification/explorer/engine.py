"""
The engine of the explorer: it runs every move (a call that the explorer tries) on a chunk of
states, by the paths of the composed functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import z3
from attrs import frozen
from numpy.typing import NDArray

from qeffect.engine.stage import STATE, TRANSITIONS
from qeffect.relations.columns import CONFIG, Column
from qeffect.relations.constants import DGRAD_BIT, RESERVED, WGRAD_BIT
from qeffect.spec.predicates import Predicate

from ..claims import instances
from ..symbolic import Memory, raw
from ..symbolic.encoding import STAGE_OF
from .drafts import Chunk, Draft, narrowed
from .moves import EVIDENCE, Move, Rel
from .packing import OutOfRangeError, Packing, Words
from .program import Bundle, Evaluation, Node, Program, Value, conjoin, equal, negate
from .quotient import Quotient
from .scopes import members_in
from .space import Space
from .tally import Tally
from .trees import INTEGERS, Leaf, leaves, tree_of

__all__ = ["Arrival", "Engine"]


@frozen(eq=False, slots=True)
class Arrival:
    """
    The states that one move (a call that the explorer tries) reaches from some states of a chunk.

    Args:
        move: Position of the move in the list of moves.
        paths: Paths taken, each as a transition and the path's position in that transition.
        rows: Positions in the chunk of the states before the move; None for all positions.
        words: The states after the move, in normal form; each state is packed into 64-bit integers.
    """

    move: int
    paths: tuple[tuple[str, int], ...]
    rows: NDArray[np.intp] | None
    words: Words


class Engine:
    """
    Runs the moves of a state space on packed states.

    Args:
        space: The space to explore.
        predicates: Predicates to check in every state.

    Raises:
        ValueError: The scope's entries are too large to pack.
    """

    def __init__(self, space: Space, predicates: Iterable[Predicate] = ()) -> None:
        self.space = space
        self.scope = space.scope
        self.moves = space.moves
        self.packing = Packing(space.scope, space.kept)
        self.program = Program(frozenset((*CONFIG, *STATE, STAGE_OF)))
        self.quotient = Quotient(space.scope, space.kept)
        self.trees = {
            name: tree_of(name, space.transitions.functions[name], self.program, space.kept)
            for name in space.scope.transitions
        }
        self._claims = [self._claim(predicate) for predicate in predicates]

    def _claim(self, predicate: Predicate) -> tuple[str, Node, list[dict[str, int]]]:
        """Return a predicate's name, its compiled node, and every choice of its variables."""
        terms = {n: INTEGERS.column(n, c) for n, c in {**CONFIG, **STATE}.items()}
        terms[STAGE_OF] = INTEGERS.column(STAGE_OF, Column("cell", "stage"))
        names = [f"var.{name}" for name in predicate.variables]
        variables = [INTEGERS.sym(z3.Int(name)) for name in names]
        body = raw(predicate.function(Memory(INTEGERS, terms), *variables))
        choices = instances(predicate, members_in(self.scope))
        return (
            predicate.name,
            self.program.node(body),
            [dict(zip(names, values, strict=True)) for values in choices],
        )

    def initial(self) -> Words:
        """Return the initial state."""
        return np.array(self.packing.pack(self.space.initial()), np.int64)[:, np.newaxis]

    def _broken(self, states: Chunk | Draft, known: dict[Any, Value]) -> tuple[str, int] | None:
        """Return the first predicate that fails in some state, and the position of one such
        state."""
        for name, node, choices in self._claims:
            for values in choices:
                truth = Evaluation(states, values, values, known).value(node)
                if truth is True or (truth is not False and truth.all()):
                    continue
                return name, 0 if truth is False else int(truth.argmin())
        return None

    # Running moves

    def expand(
        self,
        words: Words,
        tally: Tally,
        *,
        check: bool = True,
        moves: Iterable[int] | None = None,
    ) -> Iterator[Arrival]:
        """
        Run moves (calls that the explorer tries) from every state, count the outcomes, and yield
        the states that the moves lead to.

        Args:
            words: The states, each packed into 64-bit integers.
            tally: The counts to add to.
            check: Whether to check the predicates first, and to stop if a predicate fails.
            moves: Positions of the moves to run; by default all moves.

        Raises:
            OutOfRangeError: A move produced a value outside the range of a packed state, and no
                predicate failed.
        """
        chunk = Chunk(self.packing, words)
        broken = self._broken(chunk, chunk.known) if check else None
        if broken is not None:
            tally.breaks(broken[0], tally.sighting(chunk, broken[1]))
            return
        for index in range(len(self.moves)) if moves is None else moves:
            alive, count = self.candidates(chunk, index)
            if count:
                yield from self._run(chunk, index, self.moves[index], alive, count, tally)

    def candidates(self, chunk: Chunk, index: int) -> tuple[Value, int]:
        """Return a mask of the states of a chunk in which a move is tried, and their number."""
        alive: Value = True
        for where in self.moves[index].where:
            here = chunk.known.get(where)
            if here is None:
                here = equal(chunk.entry(where.column, where.index), where.value)
                here = chunk.known[where] = here if where.equal else negate(here)
            alive = conjoin(alive, here)
        return alive, chunk.size if alive is True else int(np.count_nonzero(alive))

    def _run(
        self, chunk: Chunk, index: int, move: Move, alive: Value, count: int, tally: Tally
    ) -> Iterator[Arrival]:
        arguments, names = self._arguments(chunk, move)
        evaluation = Evaluation(chunk, arguments, names, chunk.known)
        for leaf, mask, number in leaves(self.trees[move.steps[0]], evaluation, alive, count):
            path = leaf.path
            if path.clause is not None:
                if not move.twin:
                    self._refuse(tally, chunk, index, leaf, mask, number)
                if leaf.writes:
                    self._unchanged(tally, chunk, index, leaf, mask, arguments)
                continue
            rows = None if number == chunk.size else np.flatnonzero(mask)
            draft = Draft(chunk, rows, _pinned(move), {})
            local = {n: narrowed(value, rows) for n, value in arguments.items()}
            ticket = _write(draft, leaf, local)
            taken = ((path.transition, path.index),)
            if len(move.steps) == 1:
                yield from self._arrive(tally, index, taken, draft, number)
            else:
                yield from self._redeem(tally, index, taken, draft, ticket, number)

    def _redeem(
        self,
        tally: Tally,
        index: int,
        taken: tuple[tuple[str, int], ...],
        draft: Draft,
        ticket: Value,
        count: int,
    ) -> Iterator[Arrival]:
        move = self.moves[index]
        name = move.steps[1]
        places = ("ref.slot", "slot", "stage", "epoch")
        place = _now(draft, next(move.arguments[a] for a in places if a in move.arguments))
        arguments: dict[str, Value] = {f"arg.{TRANSITIONS[name][0]}": place, "arg.ticket": ticket}
        arguments |= {
            f"arg.{a}": _now(draft, move.arguments[a]) for a in TRANSITIONS[name] if a in EVIDENCE
        }
        evaluation = Evaluation(draft, arguments, {a: a for a in arguments}, {})
        for leaf, mask, number in leaves(self.trees[name], evaluation, True, count):
            rows = None if number == count else np.flatnonzero(mask)
            after = draft if rows is None else draft.narrow(rows)
            path = leaf.path
            if path.clause is not None:
                seen = tally.sighting(draft.chunk, after.first_row, index, path.clause)
                tally.refused[index, path.clause] += number
                tally.first_refused.setdefault((index, path.clause), seen)
                if move.right:
                    told = f"{name} refused ({path.clause}) after its check was accepted"
                    tally.breaks(told, seen)
                continue
            _write(after, leaf, {n: narrowed(value, rows) for n, value in arguments.items()})
            paths = (*taken, (path.transition, path.index))
            yield from self._arrive(tally, index, paths, after, number)

    def _arguments(self, chunk: Chunk, move: Move) -> tuple[dict[str, Value], dict[str, Any]]:
        values: dict[str, Value] = {}
        names: dict[str, Value] = {}
        for flat, value in move.arguments.items():
            name = f"arg.{flat}"
            names[name] = value
            if isinstance(value, Rel):
                known = chunk.known.get(value)
                if known is None:
                    known = chunk.entry(value.column, value.index)
                    known = chunk.known[value] = known + value.offset if value.offset else known
                values[name] = known
            else:
                values[name] = value
        return values, names

    def _arrive(
        self,
        tally: Tally,
        index: int,
        paths: tuple[tuple[str, int], ...],
        draft: Draft,
        count: int,
    ) -> Iterator[Arrival]:
        tally.accepted[index] += count
        for path in paths:
            if path not in tally.first_path:
                tally.first_path[path] = tally.sighting(draft.chunk, draft.first_row, index)
        self.quotient.normalise(draft)
        try:
            words = draft.words(self.packing)
        except OutOfRangeError:  # the ranges are right for a kernel that keeps its invariants
            broken = self._broken(draft, {})
            if broken is None:
                raise
            row = broken[1] if draft.rows is None else int(draft.rows[broken[1]])
            tally.breaks(broken[0], tally.sighting(draft.chunk, row, index))
        else:
            yield Arrival(index, paths, draft.rows, words)

    def _refuse(
        self, tally: Tally, chunk: Chunk, index: int, leaf: Leaf, mask: Value, count: int
    ) -> None:
        clause = leaf.path.clause
        assert clause is not None
        tally.refused[index, clause] += count
        if (index, clause) not in tally.first_refused:
            seen = tally.sighting(chunk, _first(mask), index, clause)
            tally.first_refused[index, clause] = seen
        move = self.moves[index]
        if move.right and "ticket" in move.arguments and "leader" not in move.arguments:
            owed = conjoin(mask, _owed(chunk, move))
            if owed is True or (owed is not False and owed.any()):
                told = f"{move.label} refused ({clause}) although its ticket is in flight"
                tally.breaks(told, tally.sighting(chunk, _first(owed), index, clause))

    def _unchanged(
        self,
        tally: Tally,
        chunk: Chunk,
        index: int,
        leaf: Leaf,
        mask: Value,
        arguments: Mapping[str, Value],
    ) -> None:
        """Record a violation if a refusal changes the state."""
        rows = None if mask is True else np.flatnonzero(mask)
        draft = Draft(chunk, rows, {}, {})
        _write(draft, leaf, {n: narrowed(value, rows) for n, value in arguments.items()})
        changed: Value = False
        for key, after in draft.changed.items():
            changed = changed | (draft.before(key) != after)
        if np.any(changed):
            row = int(np.argmax(changed))
            row = row if rows is None else int(rows[row])
            clause = leaf.path.clause
            told = f"{self.moves[index].label} refused ({clause}) but changed the state"
            tally.breaks(told, tally.sighting(chunk, row, index, clause))


def _first(mask: Value) -> int:
    """Return the position of the first state that is set in a mask."""
    return 0 if mask is True else int(mask.argmax())


def _now(draft: Draft, value: Any) -> Value:
    """
    Return a value of the state after the check of an action. The check leaves the values unchanged
    that the guards of the commit compare with the evidence.
    """
    return (
        draft.entry(value.column, value.index) + value.offset if isinstance(value, Rel) else value
    )


def _write(draft: Draft, leaf: Leaf, arguments: Mapping[str, Value]) -> Value:
    """Carry out the writes of a path; return the ticket that the path issued, or None."""
    evaluation = Evaluation(draft, arguments, {a: a for a in arguments}, {})
    ticket = None if leaf.returned is None else evaluation.value(leaf.returned)
    after: dict[tuple[str, int], Value] = {}
    for column, node in leaf.writes.items():
        value = evaluation.value(node)
        if isinstance(value, Bundle):
            touched = range(draft.width(column)) if value.filled is not None else value.changed
            for index in touched:
                after[column, index] = value.entry(draft, index)
        else:
            after[column, 0] = value
    draft.changed.update(after)
    return ticket


def _pinned(move: Move) -> dict[tuple[str, int], int]:
    return {(w.column, w.index): w.value for w in move.where if w.equal}


def _owed(chunk: Chunk, move: Move) -> Value:
    """Return a mask of the states in which the move's ticket was issued to the action that the move
    ends."""
    action = move.label.partition("_")[2]
    if action in ("update", "evaluation"):
        return True
    if action == "refresh":
        stage = move.arguments["stage"]
        assert isinstance(stage, int)
        ticket = chunk.entry("refreshing", stage)
        own: Value = True
        for other in range(chunk.width("held")):
            own = conjoin(own, negate(equal(chunk.entry("held", other), ticket)))
        return own
    slot = move.arguments["slot"]
    assert isinstance(slot, int)
    mask: Value = chunk.entry("consumers", slot)
    waiting = mask == RESERVED
    if action == "forward":
        return waiting
    dgrad = (mask & DGRAD_BIT) != 0
    if action == "dgrad":
        return conjoin(dgrad, negate(waiting))
    return conjoin(negate(dgrad), conjoin((mask & WGRAD_BIT) != 0, negate(waiting)))
