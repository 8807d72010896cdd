"""
A walker: one memory that is set to a state, tries every move there, and is set back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from attrs import define, field, frozen

from qeffect.engine.stage import STATE, TRANSITIONS, Transitions, transitions
from qeffect.refusals import Refused
from qeffect.relations.constants import DGRAD_BIT, RESERVED, WGRAD_BIT

from .cone import dependence, visible_columns
from .flat import FlatMemory
from .frames import Maker
from .moves import EVIDENCE, Move, Rel
from .quotient import normal_form
from .scopes import Scope, configuration

__all__ = ["Key", "Ready", "Ref", "Step", "Walker", "broken_promise"]


@frozen(eq=False)
class Key:
    """A key over dense cells."""

    epoch: int
    stage: int
    cell: int

    def __str__(self) -> str:
        return f"e{self.epoch}.s{self.stage}.c{self.cell}"


@frozen(eq=False)
class Ref:
    """A reference over small numbers."""

    slot: int
    generation: int
    incarnation: int

    def __str__(self) -> str:
        return f"slot {self.slot} generation {self.generation} incarnation {self.incarnation}"


@frozen(eq=False)
class Step:
    """
    One move with its arguments read from a state.

    Args:
        index: Position of the move in the walker's moves.
        move: The move.
        arguments: Arguments of its first transition, as the composed function takes them.
        place: Slot, stage or epoch that a second transition redeems the ticket at.
        evidence: The second transition's evidence.
    """

    index: int
    move: Move
    arguments: tuple[Any, ...]
    place: int = -1
    evidence: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = TRANSITIONS[self.move.steps[0]]
        told = [f"{n} {a}" for n, a in zip(names, self.arguments, strict=True)]
        named = [p for p in TRANSITIONS[self.move.steps[-1]] if p in EVIDENCE]
        told += [f"{name} {value}" for name, value in zip(named, self.evidence, strict=False)]
        return f"{self.move.label}({', '.join(told)})"


#: A move ready to run: index, first transition, its arguments, second transition or None, where
#: it redeems, its evidence, what brings the state that it leaves into normal form, and the twin
#: to run next if this one is accepted. A plain tuple, because the inner loops unpack it.
Ready = tuple[
    int,
    Callable[..., Any],
    tuple[Any, ...],
    Callable[..., Any] | None,
    int,
    tuple[int, ...],
    tuple[Callable[[], None], ...],
    Any,
]


@define
class _Group:
    """Moves whose arguments depend on the same few entries of the state."""

    key: Callable[[Any], Any]
    moves: list[tuple[int, Move]]
    known: dict[Any, list[Ready]] = field(factory=dict)


class Walker:
    """
    A scope's memory, its moves, and the normal form of its states.

    Args:
        scope: What is explored.
        composed: Transitions to run; the scope's own by default. A test gives mutants.
        also: Columns that a state must remember although no guard reads them.
    """

    def __init__(
        self, scope: Scope, composed: Transitions | None = None, also: tuple[str, ...] = ()
    ) -> None:
        self.scope = scope
        self.transitions = transitions(scope.omit) if composed is None else composed
        self.moves = tuple(Maker(scope, self.transitions).all())
        found = [dependence(self.transitions.functions[n], scope.off) for n in scope.transitions]
        asked = {column for move in self.moves for column, _ in move.reads}
        remembered = visible_columns(found).union(asked, also)
        self.kept = frozenset(remembered & STATE.keys())
        self._writes = dict(zip(scope.transitions, (one.writes for one in found), strict=True))
        self.memory = FlatMemory(scope, self.kept)
        self._rules = normal_form(scope, self.memory)
        self.normalise()
        self.initial = self.memory.freeze()
        self._stage_of = configuration(scope)["stage_of"]
        self._keys: dict[tuple[int, int], Key] = {}
        self._refs: dict[tuple[int, int, int], Ref] = {}
        self._groups = self._grouped()

    @property
    def written(self) -> frozenset[str]:
        """Columns that some transition of the scope writes."""
        return frozenset().union(*self._writes.values())

    def _grouped(self) -> list[_Group]:
        by_slot: dict[int, list[tuple[int, Move]]] = {}
        for index, move in enumerate(self.moves):
            anchor = move.arguments.get("ref.slot", -1)
            if "ticket" in move.arguments and "slot" in move.arguments:
                anchor = move.arguments["slot"]
            assert isinstance(anchor, int)
            by_slot.setdefault(anchor, []).append((index, move))
        groups = []
        for moves in by_slot.values():
            reads = sorted(set().union(*(move.reads for _, move in moves)))
            where = [self.memory.layout[column][index] for column, index in reads]
            groups.append(_Group(itemgetter(*where) if where else lambda _: None, moves))
        return groups

    def normalise(self) -> None:
        """Bring the memory's state into normal form, in place."""
        for rule in self._rules:
            rule.apply()

    # Trying moves

    def ready(self) -> Iterator[list[Ready]]:
        """Yield, group by group, the moves to try in the memory's state."""
        buffer = self.memory.buffer
        for group in self._groups:
            key = group.key(buffer)
            moves = group.known.get(key)
            if moves is None:
                moves = group.known[key] = self._listed(group)
            yield moves

    def _listed(self, group: _Group) -> list[Ready]:
        found: list[Ready] = []
        for index, move in group.moves:
            if not move.twin and self.applies(move):
                twin = None
                if index + 1 < len(self.moves) and self.moves[index + 1].twin:
                    twin = self._ready(index + 1, None)
                found.append(self._ready(index, twin))
        return found

    def applies(self, move: Move) -> bool:
        """Whether the move is presented in the memory's state."""
        st = self.memory
        return all((getattr(st, w.column)[w.index] == w.value) is w.equal for w in move.where)

    def step(self, index: int, memory: Any = None) -> Step:
        """
        Return a move with its arguments as a memory's state has them.

        Args:
            index: Position of the move.
            memory: The memory to read, of any kind; the walker's own by default.
        """
        st = self.memory if memory is None else memory
        move = self.moves[index]
        values = {n: _value(st, v) for n, v in move.arguments.items()}
        first = move.steps[0]
        arguments = tuple(self._argument(p, values) for p in TRANSITIONS[first])
        if len(move.steps) == 1:
            return Step(index, move, arguments)
        names = ("ref.slot", "slot", "stage", "epoch")
        place = next((values[name] for name in names if name in values), -1)
        evidence = tuple(values[p] for p in TRANSITIONS[move.steps[1]] if p in EVIDENCE)
        return Step(index, move, arguments, place, evidence)

    def _ready(self, index: int, twin: Ready | None) -> Ready:
        step = self.step(index)
        move = step.move
        first = self.transitions.functions[move.steps[0]]
        last = self.transitions.functions[move.steps[1]] if len(move.steps) > 1 else None
        wrote = set().union(*(self._writes[name] for name in move.steps))
        rules = tuple(rule.apply for rule in self._rules if rule.after & wrote)
        return index, first, step.arguments, last, step.place, step.evidence, rules, twin

    def _argument(self, parameter: str, values: Mapping[str, int]) -> Any:
        if parameter == "key":
            cell, epoch = values["key.cell"], values["key.epoch"]
            key = self._keys.get((cell, epoch))
            if key is None:
                key = self._keys[cell, epoch] = Key(epoch, self._stage_of[cell], cell)
            return key
        if parameter == "ref":
            parts = values["ref.slot"], values["ref.generation"], values["ref.incarnation"]
            ref = self._refs.get(parts)
            if ref is None:
                ref = self._refs[parts] = Ref(*parts)
            return ref
        return values[parameter]

    def run(self, step: Step, memory: Any = None) -> None:
        """
        Carry out a step.

        Raises:
            Refused: It is refused; of two transitions, the first may have been carried out.
        """
        st = self.memory if memory is None else memory
        functions = self.transitions.functions
        ticket = functions[step.move.steps[0]](st, *step.arguments)
        if len(step.move.steps) > 1:
            functions[step.move.steps[1]](st, step.place, ticket, *step.evidence)

    def edges(self, state: bytes) -> Iterator[tuple[int, str | None, bytes]]:
        """
        Yield (move, None, next state in normal form) or (move, clause, state) for every move.
        """
        memory = self.memory
        memory.thaw(state)
        for group in list(self.ready()):
            for ready in group:
                waiting: Ready | None = ready
                while waiting is not None:
                    index, first, arguments, last, place, evidence, rules, twin = waiting
                    clause, waiting = None, twin
                    try:
                        ticket = first(memory, *arguments)
                        if last is not None:
                            last(memory, place, ticket, *evidence)
                    except Refused as refused:
                        clause, waiting = refused.clause, None
                        memory.thaw(state)
                    else:
                        for rule in rules:
                            rule()
                    after = memory.freeze()
                    memory.thaw(state)
                    yield index, clause, after
                    memory.thaw(state)


def _value(st: Any, value: int | Rel) -> int:
    if isinstance(value, Rel):
        return int(getattr(st, value.column)[value.index] + value.offset)
    return value


def broken_promise(walker: Walker, index: int, clause: str, state: bytes) -> str | None:
    """
    Return how a refusal breaks a promise, or None: it changed the state, or refused a valid ticket.

    The walker's memory holds the state after the refused move; ``state`` is the state before it. A
    ticket in flight with whole evidence must be accepted, whatever happened in between.
    """
    move = walker.moves[index]
    changed = walker.memory.freeze() != state
    walker.memory.thaw(state)
    if len(move.steps) > 1:
        if changed and move.right:
            return f"{move.steps[1]} refused ({clause}) what its check had accepted"
        return None
    if changed:
        return f"{move.label} refused ({clause}) and yet changed the state"
    if move.right and "ticket" in move.arguments and _owed(walker.memory, move):
        return f"{move.label} refused ({clause}) a ticket in flight"
    return None


def _owed(st: Any, move: Move) -> bool:
    """Whether the ticket in flight where the move redeems is one of the move's own action."""
    action = move.label.partition("_")[2]
    if action == "update":
        return True
    if action == "refresh":
        ticket = st.refreshing[move.arguments["stage"]]
        return ticket not in list(st.held)
    mask = st.consumers[move.arguments["slot"]]
    if mask == RESERVED:
        return action == "forward"
    return action == ("dgrad" if mask & DGRAD_BIT else "wgrad" if mask & WGRAD_BIT else "")
