"""
The engine: every move over a chunk of states, through the path table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import z3
from attrs import define, field, frozen
from numpy.typing import NDArray

from qeffect.columns import CONFIG
from qeffect.constants import DI, DW, RESERVED
from qeffect.stage import STATE, TRANSITIONS, Transitions
from verification.explorer.moves import EVIDENCE, Move, Rel
from verification.explorer.scopes import Scope
from verification.symbolic import Encoding, Path, path_table

from .drafts import Chunk, Draft, narrowed
from .packing import Packing, Words
from .program import Bundle, Evaluation, Node, Program, Value, conjoin, equal, negate
from .quotient import Quotient

__all__ = ["Arrival", "Engine", "Tally"]


@frozen(eq=False)
class _Branch:
    test: Node
    yes: _Branch | _Leaf
    no: _Branch | _Leaf


@frozen(eq=False)
class _Leaf:
    path: Path
    writes: Mapping[str, Node]
    returned: Node | None


_Tree = _Branch | _Leaf


@frozen(eq=False, slots=True)
class Arrival:
    """
    Where one move leads from some states of a chunk.

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


@define
class Tally:
    """
    What happened, counted, with one state for each thing that did.

    Args:
        accepted: Accepted moves by move.
        refused: Refused moves by (move, clause).
        first_path: First state and move that took an accepting path of a transition.
        first_refused: First state in which each (move, clause) was refused.
        broken: Violations found without an invariant: what, and in which state by which move.
    """

    accepted: Counter[int] = field(factory=Counter)
    refused: Counter[tuple[int, str]] = field(factory=Counter)
    first_path: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = field(factory=dict)
    first_refused: dict[tuple[int, str], tuple[int, ...]] = field(factory=dict)
    broken: tuple[str, tuple[int, ...], int] | None = None


class Engine:
    """
    A scope's moves over packed states.

    Args:
        scope: What is explored.
        transitions: Its composed transitions.
        moves: Its moves.
        kept: Columns that make a state.

    Raises:
        ValueError: A state does not fit in two words, or a refusing path writes.
    """

    def __init__(
        self,
        scope: Scope,
        transitions: Transitions,
        moves: Sequence[Move],
        kept: frozenset[str],
    ) -> None:
        self.scope = scope
        self.moves = moves
        self.packing = Packing(scope, kept)
        self.program = Program(frozenset((*CONFIG, *STATE, "stage_of")))
        self.quotient = Quotient(scope, kept)
        table = path_table(transitions, Encoding.integers())
        self.table = {name: table[name] for name in scope.transitions}
        self.trees = {
            name: self._tree(paths, 0, frozenset(kept)) for name, paths in self.table.items()
        }

    def _tree(self, paths: Sequence[Path], depth: int, kept: frozenset[str]) -> _Tree:
        if len(paths) == 1 and len(paths[0].tests) == depth:
            path = paths[0]
            if path.clause is not None and path.written:
                raise ValueError(f"{path.transition} writes on its way to refuse {path.clause}")
            writes = {n: self.program.node(t) for n, t in path.written.items() if n in kept}
            returned = None if path.returned is None else self.program.node(path.returned)
            return _Leaf(path, writes, returned)
        test = _plain(paths[0].tests[depth])
        yes = [p for p in paths if p.tests[depth].eq(test)]
        no = [p for p in paths if not p.tests[depth].eq(test)]
        node = self.program.node(test)
        return _Branch(node, self._tree(yes, depth + 1, kept), self._tree(no, depth + 1, kept))

    # Running moves

    def expand(self, words: Words, tally: Tally) -> Iterator[Arrival]:
        """Run every move from every state; count what happens and yield where moves lead."""
        chunk = Chunk(self.packing, words)
        for index, move in enumerate(self.moves):
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
        for leaf, mask, number in _leaves(self.trees[move.steps[0]], evaluation, alive, count):
            path = leaf.path
            if path.clause is not None:
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
        place = next(
            move.arguments[a] for a in ("ref.slot", "slot", "stage") if a in move.arguments
        )
        arguments = {f"arg.{TRANSITIONS[name][0]}": place, "arg.ticket": ticket}
        arguments |= {f"arg.{a}": move.arguments[a] for a in TRANSITIONS[name] if a in EVIDENCE}
        evaluation = Evaluation(draft, arguments, {a: a for a in arguments}, {})
        for leaf, mask, number in _leaves(self.trees[name], evaluation, True, count):
            rows = None if number == count else np.flatnonzero(mask)
            after = draft if rows is None else draft.narrow(rows)
            path = leaf.path
            if path.clause is not None:
                origin = 0 if after.rows is None else int(after.rows[0])
                state = _state(draft.chunk, origin)
                tally.refused[index, path.clause] += number
                tally.first_refused.setdefault((index, path.clause), state)
                if move.right and tally.broken is None:
                    told = f"{name} refused ({path.clause}) what its check had accepted"
                    tally.broken = (told, state, index)
                continue
            _write(after, leaf, {n: narrowed(value, rows) for n, value in arguments.items()})
            paths = (*taken, (path.transition, path.index))
            yield self._arrive(tally, index, paths, after, number)

    def _arguments(self, chunk: Chunk, move: Move) -> tuple[dict[str, Value], dict[str, Any]]:
        values: dict[str, Value] = {}
        names: dict[str, Any] = {}
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
                origin = 0 if draft.rows is None else int(draft.rows[0])
                tally.first_path[path] = (index, _state(draft.chunk, origin))
        self.quotient.normalise(draft)
        return Arrival(index, paths, draft.rows, draft.words(self.packing))

    def _refuse(
        self, tally: Tally, chunk: Chunk, index: int, clause: str, mask: Value, count: int
    ) -> None:
        tally.refused[index, clause] += count
        if (index, clause) not in tally.first_refused:
            origin = 0 if mask is True else int(mask.argmax())
            tally.first_refused[index, clause] = _state(chunk, origin)
        move = self.moves[index]
        if move.right and "ticket" in move.arguments and tally.broken is None:
            owed = conjoin(mask, _owed(chunk, move))
            if owed is True or (owed is not False and owed.any()):
                origin = 0 if owed is True else int(owed.argmax())
                told = f"{move.label} refused ({clause}) a ticket in flight"
                tally.broken = (told, _state(chunk, origin), index)


def _leaves(
    tree: _Tree, evaluation: Evaluation, alive: Value, count: int
) -> Iterator[tuple[_Leaf, Value, int]]:
    """Yield the leaves that some of the states reach, with which and how many."""
    while isinstance(tree, _Branch):
        truth = evaluation.value(tree.test)
        if isinstance(truth, bool):
            tree = tree.yes if truth else tree.no
            continue
        yes = conjoin(alive, truth)
        number = int(np.count_nonzero(yes))
        if number == count:
            tree = tree.yes
        elif number == 0:
            tree = tree.no
        else:
            yield from _leaves(tree.yes, evaluation, yes, number)
            alive = ~yes if alive is True else alive ^ yes
            count -= number
            tree = tree.no
    yield tree, alive, count


def _write(draft: Draft, leaf: _Leaf, arguments: Mapping[str, Value]) -> Value:
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


def _state(chunk: Chunk, row: int) -> tuple[int, ...]:
    return tuple(int(word[row]) for word in chunk.words)


def _owed(chunk: Chunk, move: Move) -> Value:
    """Where the ticket in flight that the move redeems is one of the move's own action."""
    action = move.label.partition("_")[2]
    if action == "refresh":
        stage = move.arguments["stage"]
        assert isinstance(stage, int)
        ticket = chunk.entry("refreshing", stage)
        own: Value = True
        for slot in range(chunk.width("held")):
            own = conjoin(own, negate(equal(chunk.entry("held", slot), ticket)))
        return own
    slot = move.arguments["slot"]
    assert isinstance(slot, int)
    mask = chunk.entry("pending", slot)
    waiting = mask == RESERVED
    if action == "forward":
        return waiting
    dgrad = (mask & DI) != 0
    if action == "dgrad":
        return conjoin(dgrad, negate(waiting))
    return conjoin(negate(dgrad), conjoin((mask & DW) != 0, negate(waiting)))


def _plain(test: Any) -> Any:
    """A test without its negation."""
    while z3.is_not(test):
        test = test.arg(0)
    return test
