"""
Run the contract on plain memory together with a history of physical effects, and evaluate the
specification's predicates on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

from attrs import define, evolve, field, frozen

from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import TRANSITIONS
from qeffect.keys import TapeRef
from qeffect.process_layout import ProcessLayout
from qeffect.spec.predicates import Predicate
from qeffect.spec.promises import ASSUMED, STEPS

from .claims import failing, members_of, seen, speaks_of
from .induction import HISTORY, INVARIANTS
from .induction.ghosts import GHOSTS
from .induction.history import advance
from .process import Process

__all__ = ["ConcreteRun", "Focus"]


@frozen
class Focus:
    """
    The single slot, link (a pair of streams), stage, reference to a tape, ticket (the number of an
    action in flight) and random-generator position that the history records in detail. Each may be
    chosen freely.

    Args:
        slot, link, stage: The slot, link and stage to record.
        ref: The reference to record.
        ticket: The ticket to record.
        number: The position of the random generator to record.
    """

    slot: int = 0
    link: int = 0
    stage: int = 0
    ref: TapeRef = field(factory=lambda: TapeRef(0, 0, 1))
    ticket: int = 1
    number: int = 0

    def about(self, arguments: Mapping[str, Any], returned: int | None) -> Focus:
        """Return a focus on the slot, stage, reference and so on that an action names."""
        changes = {
            n: arguments[n] for n in ("slot", "link", "stage", "ref", "ticket") if n in arguments
        }
        if "ref" in arguments:
            changes["slot"] = arguments["ref"].slot
        if "key" in arguments:
            changes["stage"] = arguments["key"].stage
        if "draws" in arguments:
            changes["number"] = arguments["draws"]
        if returned is not None:
            changes["ticket"] = returned
        if changes.get("slot", 0) < 0:
            del changes["slot"]
        return evolve(self, **changes)


class _Total(dict[Any, Any]):
    """A column (an array) of the history. An index outside the column reads 0, an unspecified
    value."""

    def __missing__(self, index: Any) -> int:
        return 0


@define
class ConcreteRun:
    """
    A run of transitions on a memory, together with the history of their physical effects.

    Args:
        process: The configuration of the process.
        focus: What the history records in detail; may be chosen freely.
        relations: The relations in use; predicates that need other relations do not apply.
    """

    process: Process
    focus: Focus = field(factory=Focus)
    relations: frozenset[str] = frozenset()
    laid: ProcessLayout = field(init=False, repr=False)
    st: Memory = field(init=False, repr=False)
    h: Any = field(init=False, repr=False)
    _seen: Any = field(init=False, repr=False)
    _members: dict[str, Sequence[Any]] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.laid = self.process.lay_out()
        self.st = self.laid.memory
        self._members = members_of(self.st, self.process.stages)
        self._seen = seen(self.st)
        self.h = SimpleNamespace(**{name: self._ghost(name) for name in GHOSTS})
        self._number()
        self._follow()

    def _ghost(self, name: str) -> _Total:
        ghost = GHOSTS[name]
        spaces = [self._members[index] for index in ghost.indices]
        keys = spaces[0] if len(spaces) == 1 else product(*spaces)
        return _Total(dict.fromkeys(keys, ghost.initial))

    def _number(self) -> None:
        """
        In the history, number the cells (microbatches) of each stage, and the slots of each memory
        pool.
        """
        h, st = self.h, self.st
        for config in self.process.stages:
            for place, cell in enumerate(config.cells()):
                h.place[cell] = place
                h.placed[config.stage, place] = cell
        for pool in self._members["pool"]:
            slots = [slot for slot in self._members["slot"] if st.pool_of[slot] == pool]
            h.slots[pool] = len(slots)
            for seat, slot in enumerate(slots):
                h.seat[slot] = seat
                h.seated[pool, seat] = slot

    def _follow(self) -> None:
        h, a = self.h, self.focus
        h.weights[0] = self.process.epoch
        h.slot[0], h.link[0], h.stage[0] = a.slot, a.link, a.stage
        h.ref_slot[0], h.ref_generation[0] = a.ref.slot, a.ref.generation
        h.ref_incarnation[0], h.ticket[0] = a.ref.incarnation, a.ticket
        h.number[0] = a.number

    # Transitions

    def take(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """
        Run a transition and, if it is accepted, record its effect in the history.

        Raises:
            Refused: The transition refused the call.
        """
        returned = function(self.st, *arguments)
        advance(name, self._seen, self.h, arguments, returned)
        return returned

    def copy(self) -> ConcreteRun:
        """Return an independent run with the same memory and history."""
        twin = ConcreteRun(self.process, self.focus, self.relations)
        for name in self.st._names:
            ours, theirs = getattr(self.st, name), getattr(twin.st, name)
            if isinstance(ours, dict):
                theirs.update(ours)
            else:
                theirs[:] = ours
        for name in GHOSTS:
            column = getattr(twin.h, name)
            column.clear()
            column.update(getattr(self.h, name))
        return twin

    # Predicates

    def broken_invariants(self) -> Iterator[tuple[str, str]]:
        """Yield the invariants that do not hold, as (class, name)."""
        yield from self._broken("state", INVARIANTS, self._seen)
        yield from self._broken("history", HISTORY, self._seen, self.h)

    def broken_steps(
        self, transition: str, arguments: tuple[Any, ...]
    ) -> Iterator[tuple[str, str]]:
        """Yield the step properties that would not hold if the transition were accepted now."""
        given = SimpleNamespace(**dict(zip(TRANSITIONS[transition], arguments, strict=True)))
        steps = (p for p in STEPS if transition in p.transitions)
        yield from self._broken("step", steps, self._seen, self.h, given)

    def trusted(self, transition: str, arguments: tuple[Any, ...]) -> bool:
        """Return whether the arguments satisfy the contract's assumptions about its caller."""
        given = SimpleNamespace(**dict(zip(TRANSITIONS[transition], arguments, strict=True)))
        assumed = (p for p in ASSUMED if transition in p.transitions)
        return not list(self._broken("assumed", assumed, self._seen, self.h, given))

    def _broken(
        self, kind: str, predicates: Iterable[Predicate], *subjects: Any
    ) -> Iterator[tuple[str, str]]:
        claimed = (p for p in predicates if speaks_of(p, self.relations))
        for name, _ in failing(claimed, self._members, *subjects):
            yield kind, name
