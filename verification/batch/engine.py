"""
The engine: every move over a chunk of states, through the path table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import z3
from attrs import frozen
from numpy.typing import NDArray

from qeffect.engine.stage import STATE, TRANSITIONS, Transitions
from qeffect.relations.columns import CONFIG, Column
from qeffect.relations.constants import DGRAD_BIT, RESERVED, WGRAD_BIT
from qeffect.spec.predicates import Predicate

from ..explorer.moves import EVIDENCE, Move, Rel
from ..explorer.scopes import Scope, members_in
from ..judging import instances
from ..symbolic import Memory, raw
from ..symbolic.encoding import STAGE_OF
from .drafts import Chunk, Draft, narrowed
from .packing import Packing, Words
from .program import Bundle, Evaluation, Node, Program, Value, conjoin, equal, negate
from .quotient import Quotient
from .tally import Tally
from .trees import INTEGERS, Leaf, leaves, tree_of

__all__ = ["Arrival", "Engine"]


@frozen(eq=False, slots=True)
class Arrival:
    """
    The states to which one move leads from some states of a chunk.

    Args:
        move: Position of the move.
        paths: Paths taken, as (transition, position among its paths).
        rows: The states, by position in the chunk; None for all.
        words: The states that they lead to, in normal form.
    """

    move: int
    paths: tuple[tuple[str, int], ...]
    rows: NDArray[np.intp] | None
    words: Words


class Engine:
    """
    A scope's moves over packed states.

    Args:
        scope: What is explored.
        transitions: Its composed transitions.
        moves: Its moves.
        kept: Columns that make a state.
        predicates: What is checked of every state.

    Raises:
        ValueError: A state does not fit in two words, or a refusing path writes.
    """

    def __init__(
        self,
        scope: Scope,
        transitions: Transitions,
        moves: Sequence[Move],
        kept: frozenset[str],
        predicates: Iterable[Predicate] = (),
    ) -> None:
        self.scope = scope
        self.moves = moves
        self.packing = Packing(scope, kept)
        self.program = Program(frozenset((*CONFIG, *STATE, STAGE_OF)))
        self.quotient = Quotient(scope, kept)
        self.trees = {
            name: tree_of(name, transitions.functions[name], self.program, kept)
            for name in scope.transitions
        }
        self._claims = [self._claim(predicate) for predicate in predicates]

    def _claim(self, predicate: Predicate) -> tuple[str, Node, list[dict[str, int]]]:
        """Return a predicate's name, its node and every choice of its variables."""
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

    def _check(self, chunk: Chunk, tally: Tally) -> None:
        for name, node, choices in self._claims:
            for values in choices:
                truth = Evaluation(chunk, values, values, chunk.known).value(node)
                if truth is True or (truth is not False and truth.all()):
                    continue
                row = 0 if truth is False else int(truth.argmin())
                tally.broken = (name, tally.sighting(chunk, row, None), None)
                return

    # Running moves

    def expand(
        self, words: Words, tally: Tally, *, check: bool = True, wrong: bool = True
    ) -> Iterator[Arrival]:
        """
        Run every move from every state; count what happens and yield where moves lead.

        Args:
            words: The states.
            tally: What happened is added to it.
            check: Check the predicates first, and go no further where one is broken.
            wrong: Run moves with a wrong argument too.
        """
        chunk = Chunk(self.packing, words)
        if check:
            self._check(chunk, tally)
            if tally.broken is not None:
                return
        for index, move in enumerate(self.moves):
            if not (wrong or move.right):
                continue
            alive: Value = True
            for where in move.where:
                here = chunk.known.get(where)
                if here is None:
                    here = equal(chunk.entry(where.column, where.index), where.value)
                    here = chunk.known[where] = here if where.equal else negate(here)
                alive = conjoin(alive, here)
            count = chunk.size if alive is True else int(np.count_nonzero(alive))
            if count:
                yield from self._run(chunk, index, move, alive, count, tally)

    def _run(
        self, chunk: Chunk, index: int, move: Move, alive: Value, count: int, tally: Tally
    ) -> Iterator[Arrival]:
        arguments, names = self._arguments(chunk, move)
        evaluation = Evaluation(chunk, arguments, names, chunk.known)
        for leaf, mask, number in leaves(self.trees[move.steps[0]], evaluation, alive, count):
            path = leaf.path
            if path.clause is not None:
                if not move.twin:
                    self._refuse(tally, chunk, index, path.clause, mask, number)
                continue
            rows = None if number == chunk.size else np.flatnonzero(mask)
            draft = Draft(chunk, rows, _pinned(move), {})
            local = {n: narrowed(value, rows) for n, value in arguments.items()}
            ticket = _write(draft, leaf, local)
            taken = ((path.transition, path.index),)
            if len(move.steps) == 1:
                yield self._arrive(tally, index, taken, draft, number)
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
                seen = tally.sighting(draft.chunk, after.first_row, index)
                tally.refused[index, path.clause] += number
                tally.first_refused.setdefault((index, path.clause), seen)
                if move.right and tally.broken is None:
                    told = f"{name} refused ({path.clause}) what its check had accepted"
                    tally.broken = (told, seen, path.clause)
                continue
            _write(after, leaf, {n: narrowed(value, rows) for n, value in arguments.items()})
            paths = (*taken, (path.transition, path.index))
            yield self._arrive(tally, index, paths, after, number)

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
    ) -> Arrival:
        tally.accepted[index] += count
        for path in paths:
            if path not in tally.first_path:
                tally.first_path[path] = tally.sighting(draft.chunk, draft.first_row, index)
        self.quotient.normalise(draft)
        return Arrival(index, paths, draft.rows, draft.words(self.packing))

    def _refuse(
        self, tally: Tally, chunk: Chunk, index: int, clause: str, mask: Value, count: int
    ) -> None:
        tally.refused[index, clause] += count
        if (index, clause) not in tally.first_refused:
            origin = 0 if mask is True else int(mask.argmax())
            tally.first_refused[index, clause] = tally.sighting(chunk, origin, index)
        move = self.moves[index]
        if move.right and "ticket" in move.arguments and tally.broken is None:
            owed = conjoin(mask, _owed(chunk, move))
            if owed is True or (owed is not False and owed.any()):
                origin = 0 if owed is True else int(owed.argmax())
                told = f"{move.label} refused ({clause}) a ticket in flight"
                tally.broken = (told, tally.sighting(chunk, origin, index), clause)


def _now(draft: Draft, value: Any) -> Value:
    """A value of the state after a check, which changes nothing that evidence is compared with."""
    return (
        draft.entry(value.column, value.index) + value.offset if isinstance(value, Rel) else value
    )


def _write(draft: Draft, leaf: Leaf, arguments: Mapping[str, Value]) -> Value:
    """Carry out what a path writes; return the ticket that it issued, if any."""
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
    """Where the ticket in flight that the move redeems is one of the move's own action."""
    action = move.label.partition("_")[2]
    if action == "update":
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
