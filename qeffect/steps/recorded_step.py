"""
A recorded step: compared with a contract's state, then written over it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from itertools import chain, filterfalse
from operator import sub
from typing import Any, Final

from attrs import field, frozen

from ..counts import advance
from ..engine.concrete_memory import Memory
from ..engine.stage import Transitions
from ..refusals import Refused
from .access import TracedMemory
from .counters import (
    BASE_COLUMNS,
    Amounts,
    Event,
    Group,
    base_of,
    group_of,
    groups,
    is_counter,
    translated,
    translated_event,
)
from .entries import Entries
from .state import Difference, StepState

__all__ = ["RECUR", "RecordedStep"]


#: The transitions that a recorded step may contain; all others belong to failures and restarts.
RECUR: Final = frozenset(
    {
        "reserve",
        "skip",
        "bind",
        "check_refresh",
        "commit_refresh",
        "check_forward",
        "commit_forward",
        "check_dgrad",
        "commit_dgrad",
        "check_wgrad",
        "group_wgrad",
        "commit_wgrad",
        "ungroup_wgrad",
        "post_receive",
        "finish_receive",
        "read",
        "finish_read",
        "submit",
        "join",
        "wait",
        "finalize",
        "start_reduction",
        "finish_reduction",
        "start_weights_read",
        "finish_weights_read",
        "start_gradients_read",
        "finish_gradients_read",
        "next_walk",
        "check_update",
        "move_scales",
        "commit_update",
    }
)

#: The transitions that claim a slot, their second argument.
_CLAIMS: Final = frozenset({"reserve", "check_forward"})

#: How far the counters of a start are moved when a new step is tried from that start.
_FAR: Final = (1, 1_000_003)


@frozen(eq=False)
class RecordedStep:
    """
    One recorded step of one contract; its numbers are compared relative to the counters that the
    step moves.

    Args:
        transitions: The composed transitions that the step ran.
        start: The contract's state before the step.
        events: The step's transitions (contract calls) with their arguments, in order.
        end: The contract's state after the step.
        reads: For each column (array of the state), the indices of entries read before they are
            written.
        writes: For each column, the indices of entries written.
    """

    transitions: Transitions = field(repr=False)
    start: StepState = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    end: StepState = field(repr=False)
    reads: Mapping[str, tuple[Any, ...]]
    writes: Mapping[str, tuple[Any, ...]]
    _groups: tuple[Group, ...] = field(init=False, repr=False)
    _bases: tuple[tuple[str, Any, int], ...] = field(init=False, repr=False)
    _began: tuple[int, ...] = field(init=False, repr=False)
    _unmoved: tuple[int, ...] = field(init=False, repr=False)
    _still: Entries = field(init=False, repr=False)
    _moving: Entries = field(init=False, repr=False)
    _rising: tuple[tuple[int, int], ...] = field(init=False, repr=False)
    _highest: int = field(init=False, repr=False)
    _left: Entries = field(init=False, repr=False)
    _folds: Mapping[Hashable, tuple[int, int]] = field(init=False, repr=False)
    _counted: Mapping[int, tuple[int, ...]] = field(init=False, repr=False)
    _used: Set[int] = field(init=False, repr=False)
    _freed: Mapping[int, tuple[int, ...]] = field(init=False, repr=False)

    @classmethod
    def of(
        cls,
        transitions: Transitions,
        start: StepState,
        events: Sequence[Event],
        end: StepState,
    ) -> RecordedStep:
        """
        Make a step from a recording, and test the step from starts with other counter values.

        Args:
            transitions: The composed transitions that the step ran.
            start: The state before the first event.
            events: The transitions of the step, each of which was accepted.
            end: The state after the last event.

        Raises:
            ValueError: The events include a transition of a failure or restart, the events do not
                lead from the start to the end, or the step depends on the value of a counter.
        """
        named = [transition for transition, _ in events]
        if odd := sorted({*named} - RECUR):
            raise ValueError(f"cannot record a step with {odd[0]}: later steps would differ")
        if named.count("commit_update") != 1:
            raise ValueError("a recorded step must commit its epoch exactly once")
        before = start.memory
        if any(
            transition == "commit_forward" and before.reports_draws[before.slot_stage[given[0]]]
            for transition, given in events
        ):
            raise ValueError(
                "cannot record a step whose F report where they draw random numbers: each step "
                "draws different numbers"
            )
        seen = TracedMemory(start.memory, transitions.columns)
        for transition, given in events:
            transitions.functions[transition](seen, *given)
        for name, column in seen.columns.items():
            if column.entries != getattr(end.memory, name):
                raise ValueError(
                    f"column {name} of the contract differs from its value after the recorded "
                    "transitions; some transitions may not have been recorded"
                )
        step = cls(
            transitions,
            start,
            tuple(events),
            end,
            {n: tuple(c.read) for n, c in seen.columns.items() if c.read},
            {n: tuple(c.written) for n, c in seen.columns.items() if c.written},
        )
        for far in _FAR:
            step.try_moved(step._different_amounts(far))
        return step

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__
        before, after = self.start.memory, self.end.memory
        every = tuple(groups(before))
        number = {group: n for n, group in enumerate(every)}
        stays = len(every)  # the place of the amount that is always 0
        set_(self, "_groups", every)
        bases = tuple(base_of(before, group) for group in every)
        set_(self, "_bases", bases)
        set_(self, "_began", tuple(was for _, _, was in bases))

        def entries(memory: Memory, indices: Mapping[str, Sequence[Any]]) -> Entries:
            def counter(name: str, index: Any, value: Any) -> int:
                group = group_of(memory, name, index, value)
                return stays if group is None else number[group]

            return Entries(memory, indices, counter, stays)

        set_(self, "_unmoved", (0,) * (len(every) + 1))
        still = {name: own for name, own in self.reads.items() if not is_counter(name)}
        moving = {name: own for name, own in self.reads.items() if is_counter(name)}
        set_(self, "_still", entries(before, still))
        set_(self, "_moving", entries(before, moving))
        touched = {*self.reads.get("generation", ()), *self.writes.get("generation", ())}
        most = [(slot, after.generation[slot]) for slot in sorted(touched)]
        set_(self, "_rising", tuple((number["generation", slot], last) for slot, last in most))
        set_(self, "_highest", max((last for _, last in most), default=0))
        left: dict[str, tuple[Any, ...]] = {}
        for name, written in self.writes.items():
            column, read = getattr(after, name), frozenset(self.reads.get(name, ()))
            kept = not is_counter(name)
            indices = tuple(
                index
                for index in written
                # An entry that was compared and ends unchanged need not be written.
                if not (kept and index in read and getattr(before, name)[index] == column[index])
            )
            if indices:
                left[name] = indices
        set_(self, "_left", entries(after, left))
        folds: dict[Hashable, tuple[int, int]] = {}
        counted: dict[int, tuple[int, ...]] = {}
        for domain, then in (self.end.counts or {}).items():
            assert self.start.counts is not None
            first = self.start.counts[domain]
            stages = list(then.stages)
            factors, terms = advance(
                [first.digest, *chain.from_iterable(first.stages[s] for s in stages)],
                [then.digest, *chain.from_iterable(then.stages[s] for s in stages)],
            )
            folds[domain] = factors[0], terms[0]
            for stage in stages:
                own = zip(then.stages[stage], first.stages[stage], strict=True)
                counted[stage] = tuple(now - was for now, was in own)
        claimed = {given[1] for transition, given in self.events if transition in _CLAIMS}
        stay = set(chain.from_iterable(self.start.free.values())) - claimed
        ends = self.end.free.items()
        freed = {stage: tuple(n for n in own if n not in stay) for stage, own in ends}
        set_(self, "_freed", freed)
        set_(self, "_used", claimed.union(*freed.values()))
        set_(self, "_folds", folds)
        set_(self, "_counted", counted)

    @property
    def folds(self) -> Mapping[Hashable, tuple[int, int]]:
        """
        For each state domain, the factor and the term by which the step changes the domain's
        digest.
        """
        return self._folds

    @property
    def counted(self) -> Mapping[int, tuple[int, ...]]:
        """For each stage, the numbers that the step adds to the stage's counters."""
        return self._counted

    def _different_amounts(self, far: int) -> Amounts:
        """Return a different amount for each counter; slots stay below their last generation."""
        amounts = {group: far * (n + 1) + n for n, group in enumerate(self._groups)}
        most = self.start.memory.generation_max[0] - 1
        for slot, last in enumerate(self.end.memory.generation):
            group = "generation", slot
            amounts[group] = max(min(amounts[group], most - last), 0)
        return amounts

    def try_moved(self, amounts: Amounts) -> None:
        """
        Run the transitions one by one from a start whose counters are raised by given amounts.

        Args:
            amounts: The amount for each of `counters`; no slot may reach its last generation.

        Raises:
            ValueError: A transition is refused, or the end differs from what `write` would leave.
        """
        found = translated(self.start.memory, amounts)
        for event in self.events:
            transition, given = translated_event(self.start.memory, event, amounts)
            try:
                self.transitions.functions[transition](found, *given)
            except Refused as refused:
                raise ValueError(
                    "cannot record a step whose result depends on the values of its counters: when "
                    "the step runs again with all counters raised, "
                    f"{transition} is refused by {refused.clause}"
                ) from None
        wanted = translated(self.end.memory, amounts)
        for name in self.transitions.columns:
            if getattr(found, name) != getattr(wanted, name):
                raise ValueError(
                    "cannot record a step whose result depends on the values of its counters: when "
                    "the step runs again with all counters raised, it leaves another value than "
                    f"expected in column {name} of the contract's state"
                )

    @property
    def counters(self) -> tuple[Group, ...]:
        """Every counter of the contract, as pairs of the family's name and the counter's index."""
        return self._groups

    def moved_by(self, memory: Memory) -> Amounts:
        """By how much each counter of a memory has risen since the step was recorded."""
        return dict(zip(self._groups, self._amounts(memory), strict=False))

    def differs(self, found: StepState) -> Difference | None:
        """
        Compare every entry that the step reads with the current state.

        Args:
            found: The contract's current state; no reference to its memory is kept.

        Returns:
            The first difference, without a clause; None if committing the step equals running its
            transitions.
        """
        if not self.is_of(found.memory):  # also of another contract, whose columns may be shorter
            own, other = self.start.memory.incarnation[0], found.memory.incarnation[0]
            return Difference("incarnation[0]", other, own)
        memory = found.memory
        amounts = self._amounts(memory)
        if (
            min(amounts) >= 0
            and self._still.stand_in(memory, self._unmoved)
            and self._moving.stand_in(memory, amounts)
            and self._highest + max(amounts) < memory.generation_max[0]
            and found.reserved == self.start.reserved
        ):
            return None  # nearly always, and without the frames of the methods below
        odd = (
            self._fallen(memory, amounts)
            or self._changed(memory)
            or self._unlike_counter(memory, amounts)
            or self._exhausted(memory, amounts)
        )
        return odd or self._outside_memory(found)

    def is_of(self, memory: Memory) -> bool:
        """
        Whether a memory belongs to the contract that recorded the step, without a restore since
        then.
        """
        return bool(memory.incarnation[0] == self.start.memory.incarnation[0])

    def _amounts(self, memory: Memory) -> tuple[int, ...]:
        """How far each counter has moved; the last amount is 0, for entries that do not move."""
        epochs, tickets, *others = BASE_COLUMNS(memory)
        now = epochs[self._bases[0][1]], tickets[0], *chain.from_iterable(others)
        return *map(sub, now, self._began), 0

    def _fallen(self, memory: Memory, amounts: Sequence[int]) -> Difference | None:
        """Return a counter that has fallen; its numbers could then equal the number for "none"."""
        if min(amounts) >= 0:
            return None
        name, index, was = self._bases[amounts.index(min(amounts))]
        return Difference(f"{name}[{index}]", getattr(memory, name)[index], was)

    def _changed(self, memory: Memory) -> Difference | None:
        """Return an entry that is not a counter and has changed, or None."""
        if self._still.stand_in(memory, self._unmoved):
            return None
        return self._odd(memory, None)

    def _unlike_counter(self, memory: Memory, amounts: tuple[int, ...]) -> Difference | None:
        """Return an entry that has not moved as far as its counter, or None."""
        if self._moving.stand_in(memory, amounts):
            return None
        return self._odd(memory, amounts)

    def _odd(self, memory: Memory, amounts: Sequence[int] | None) -> Difference:
        """Return the first entry that differs; with amounts, compare only entries that move."""
        start = self.start.memory
        wanted = start if amounts is None else translated(start, self.moved_by(memory))
        for name, indices in self.reads.items():
            if is_counter(name) is (amounts is not None):
                found, own = getattr(memory, name), getattr(wanted, name)
                for index in indices:
                    if found[index] != own[index]:
                        return Difference(f"{name}[{index}]", found[index], own[index])
        raise AssertionError("two comparisons of the same entries disagree")

    def _exhausted(self, memory: Memory, amounts: Sequence[int]) -> Difference | None:
        """Return a slot that would reach its last generation; guards decide otherwise there."""
        most = memory.generation_max[0]
        if self._highest + max(amounts) < most:
            return None  # the usual case: no slot is near its last generation
        for group, last in self._rising:
            if last + amounts[group] >= most:
                slot = self._groups[group][1]
                return Difference(
                    f"generation[{slot}]",
                    memory.generation[slot],
                    f"less than {most}, the last generation",
                )
        return None

    def _outside_memory(self, found: StepState) -> Difference | None:
        """Return a part of the contract's state outside its memory that has changed, or None."""
        if found.reserved != self.start.reserved:
            return Difference("the list of reserved slots", found.reserved, self.start.reserved)
        return None

    def free_after(self, stage: int, free: Sequence[int]) -> tuple[int, ...]:
        """
        Return the free slots (sets of buffers) of a stage after the step, in their order.

        The order before the step may differ from the recorded order. The order only decides which
        slot the contract chooses, and the step uses the recorded slots.

        Args:
            stage: Index of the stage.
            free: The free slots before the step, in their order.
        """
        if tuple(free) == self.start.free[stage]:
            return self.end.free[stage]
        return (*filterfalse(self._used.__contains__, free), *self._freed[stage])

    def recurs(self, other: RecordedStep) -> bool:
        """Whether another step is the same: its start and events differ only in risen counters."""
        if self.differs(other.start) is not None or len(self.events) != len(other.events):
            return False
        amounts = self.moved_by(other.start.memory)
        memory = self.start.memory
        return all(
            translated_event(memory, own, amounts) == event
            for own, event in zip(self.events, other.events, strict=True)
        )

    def write(self, memory: Memory) -> None:
        """
        Write the state that the step's transitions would leave. Only for a memory in which
        `differs` found no difference.
        """
        self._left.write(memory, self._amounts(memory))
