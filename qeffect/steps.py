"""
A step that recurs: the transitions of one optimizer step, recorded once and committed as one.

A training step runs the same transitions in every epoch, and nothing but counters has moved in
between. So it is run once by its transitions, every guard of every action, and recorded: what the
transitions read before they wrote it, and what they left. Later the same step is checked by one
look at what was read, and committed by writing what was left.

Why that is the same as running the transitions one by one:

* *What is read decides.* A transition is a function of the columns and of its arguments. Entries
  that no transition of the step reads before it writes them have no say in what the step does.
* *What is read is the recorded start, moved.* Each entry of `COUNTERS` belongs to a family whose
  numbers are counted from one counter: epochs, tickets, effect tokens, replays, work of a caller,
  generations. All entries of a family may have moved by one amount, that of its counter; every
  other entry must be what it was. The arguments move alike: epochs of keys, generations of
  references, tokens and tickets. Nothing else about them may differ, or it is no longer this step.
* *Moving a family decides no guard.* Transitions compare a family's numbers with each other, copy
  them, and add one; beyond that they compare epochs and tickets with the number that stands for
  none, which is not moved and lies below all others (counters never fall), and generations with
  their maximum, which a step must not reach. So every guard says what it said, and every write is
  the recorded one, moved.

The last is not only argued: where a step is made, its transitions, the functions in force, are run
again from starts that are moved far apart, and have to be accepted and to end in the recorded end,
moved alike. What a contract holds beside its memory (free slots, reservations, device counts) is
compared and written in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, sub
from typing import Any, Final, NamedTuple, Protocol

from attrs import evolve, field, frozen

from .arguments import UNUSABLE
from .counts import DeviceCounts, advance
from .engine.memory import Memory
from .engine.stage import TRANSITIONS, Transitions
from .entries import Entries
from .keys import Cell, TapeRef
from .refusals import Refused
from .relations.constants import NEVER

__all__ = ["BASES", "COUNTERS", "Difference", "RecordedStep", "Recording", "Standing", "translated"]

#: One counter that a family's numbers are counted from: the family and the member of its index.
Group = tuple[str, Any]
#: By how much each counter has moved.
Amounts = Mapping[Group, int]
#: A transition with its arguments.
Event = tuple[str, tuple[Any, ...]]


class Counter(NamedTuple):
    """
    What a column's numbers count.

    Args:
        family: The numbers that are compared with each other.
        through: Columns that lead from the column's index to the family's member, one after the
            other; None for a family of one.
        none: The number that stands for none; it does not move. Where all a guard asks is whether
            an entry lies above another of its family, 0 is such a number too.
    """

    family: str
    through: tuple[str, ...] | None = ()
    none: int | None = None


#: The columns that hold counters; the entries of all others are the same at every step.
COUNTERS: Final[Mapping[str, Counter]] = {
    "weight_epoch": Counter("epoch", None),
    **{
        name: Counter("epoch", None, NEVER)
        for name in (
            "epoch_at",
            "forwarded",
            "cache_epoch",
            "bound",
            "opened",
            "named",
            "reduced",
            "spoiled",
            "final",
        )
    },
    "serial": Counter("ticket", None),  # of those that are out none is where a step begins or ends
    "token": Counter("token"),
    "rolled_at": Counter("token"),
    "scaled_at": Counter("token", ("slot_stage", "domain_of")),
    "replays": Counter("replay"),
    "waited": Counter("replay", ("domain_at",)),
    "produced": Counter("replay", ("slot_stage", "domain_of"), 0),
    "vacated": Counter("replay", ("slot_stage", "domain_of"), 0),
    "landed": Counter("replay", ("domain_of",), 0),
    "submitted": Counter("work"),
    "joined": Counter("work"),
    "ended_at": Counter("work", ("ended_on",), 0),
    "generation": Counter("generation"),
}

#: The column whose entry is the counter of each family.
BASES: Final[Mapping[str, str]] = {
    "epoch": "weight_epoch",
    "ticket": "serial",
    "token": "token",
    "replay": "replays",
    "work": "submitted",
    "generation": "generation",
}

#: The columns of these counters, in the order of their families.
_BASE_COLUMNS: Final = attrgetter(*BASES.values())

#: Transitions that a step which recurs is made of; all others are of failures and restarts.
RECUR: Final = frozenset(
    {
        "reserve",
        "bind",
        "check_refresh",
        "commit_refresh",
        "check_forward",
        "commit_forward",
        "check_dgrad",
        "commit_dgrad",
        "check_wgrad",
        "commit_wgrad",
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
        "commit_epoch",
    }
)

#: By how much the starts are moved over which a new step is tried.
_FAR: Final = (1, 1_000_003)


@frozen
class Difference:
    """
    Why a step cannot be committed as one now.

    Args:
        where: What is not the recorded start, as ``column[index]``, or what else of a contract.
        found: What is there.
        expected: The recorded entry, moved as its counter has.
        clause: What the step's transitions would be refused by; None where they would not be, or
            no transition was tried.

    >>> print(Difference("poisoned[0]", 1, 0, "order.poisoned"))
    poisoned[0] is 1; the recorded step wants 0 (order.poisoned)
    """

    where: str
    found: Any
    expected: Any
    clause: str | None = None

    def __str__(self) -> str:
        clause = "" if self.clause is None else f" ({self.clause})"
        return f"{self.where} is {self.found!r}; the recorded step wants {self.expected!r}{clause}"


@frozen
class Standing:
    """
    All that a contract holds at one moment and a step may move.

    Args:
        memory: Every column.
        free: The free slots of each stage, in their order.
        reserved: Slot by the cell that reserved it.
        counts: What the devices are held to have counted, by state domain; None where nothing is.
    """

    memory: Memory
    free: Mapping[int, tuple[int, ...]]
    reserved: Mapping[Cell, int]
    counts: Mapping[Hashable, DeviceCounts] | None


class Recorder(Protocol):
    """What a recording asks of a contract."""

    observer: Callable[[str, tuple[Any, ...], Any], None] | None
    transitions: Transitions

    def standing(self) -> Standing:
        """All that it holds now."""


class Recording:
    """
    A step that is being run by its transitions, and recorded.

    Args:
        contract: The contract; until `end` or `drop` this is its observer.

    Raises:
        ValueError: The contract has an observer, which every step has to tell of each action.
    """

    def __init__(self, contract: Recorder) -> None:
        if contract.observer is not None:
            raise ValueError("record_step: an observer is told of every action; take it off first")
        self._contract = contract
        self._start = contract.standing()
        self._events: list[Event] = []
        contract.observer = self._hear

    def _hear(self, transition: str, given: tuple[Any, ...], result: Any) -> None:
        self._events.append((transition, given))

    def drop(self) -> None:
        """Record no more; the step has failed, or is of no interest."""
        if self._contract.observer == self._hear:
            self._contract.observer = None

    def end(self) -> RecordedStep:
        """
        Return the step.

        Raises:
            ValueError: It cannot be told relative to its counters: something failed in it, or it
                depends on how far a counter has come.
        """
        contract = self._contract
        if contract.observer != self._hear:
            raise ValueError("the contract was given another observer in the step")
        self.drop()
        return RecordedStep.of(contract.transitions, self._start, self._events, contract.standing())


class _Seen:
    """A column that notes which entries are read before they are written, and which are written."""

    __slots__ = ("entries", "read", "written")

    def __init__(self, entries: Any) -> None:
        self.entries = entries.copy()
        self.read: dict[Any, None] = {}
        self.written: dict[Any, None] = {}

    def indices(self) -> Iterator[Any]:
        return iter(self.entries if isinstance(self.entries, dict) else range(len(self.entries)))

    def __getitem__(self, index: Any) -> Any:
        if index not in self.written:
            self.read[index] = None
        return self.entries[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.written[index] = None
        self.entries[index] = value


class _SeenMemory:
    """A memory of such columns."""

    def __init__(self, memory: Memory, names: Iterable[str]) -> None:
        self.columns = {name: _Seen(getattr(memory, name)) for name in names}
        vars(self).update(self.columns)

    @staticmethod
    def every(column: _Seen, value: Any) -> bool:
        return all(column[index] == value for index in column.indices())

    @staticmethod
    def fill(column: _Seen, value: Any) -> None:
        for index in column.indices():
            column[index] = value


def group_of(memory: Memory, name: str, index: Any, value: Any) -> Group | None:
    """Return the counter that an entry is counted from; None for one that does not move."""
    counter = COUNTERS.get(name)
    if counter is None or (counter.none is not None and value == counter.none):
        return None
    if counter.through is None:
        return counter.family, 0
    for column in counter.through:
        index = getattr(memory, column)[index]
    return counter.family, index


def groups(memory: Memory) -> Iterator[Group]:
    """Yield every counter of a memory."""
    for family, name in BASES.items():
        if family in ("epoch", "ticket"):
            yield family, 0
        else:
            yield from ((family, member) for member in range(len(getattr(memory, name))))


def translated(memory: Memory, amounts: Amounts) -> Memory:
    """Return a memory with every counter, and all that is counted from it, moved."""
    moved = memory.copy()
    for name in COUNTERS:
        column = getattr(moved, name)
        entries = getattr(memory, name)
        items = list(entries.items() if isinstance(entries, dict) else enumerate(entries))
        for index, value in items:
            group = group_of(memory, name, index, value)
            if group is not None:
                column[index] = value + amounts[group]
    return moved


def translated_event(memory: Memory, event: Event, amounts: Amounts) -> Event:
    """
    Return a transition whose arguments have moved as the counters have.

    Args:
        memory: Whose configuration and incarnation it is for.
        event: The transition.
        amounts: By how much each counter has moved.
    """
    transition, given = event
    named = dict(zip(TRANSITIONS[transition], given, strict=True))
    epoch = amounts["epoch", 0]
    place = named.get("slot", -1)
    for name, value in named.items():
        if name == "key":
            named[name] = evolve(value, epoch=value.epoch + epoch)
        elif name == "ref":
            moved = value.generation + amounts["generation", value.slot]
            named[name] = TapeRef(value.slot, moved, memory.incarnation[0])
        elif name == "epoch" or (name == "fill_epoch" and value >= 0):
            named[name] = value + epoch
        elif name == "ticket":
            named[name] = value + amounts["ticket", 0]
        elif name == "token":
            named[name] = value + amounts["token", memory.domain_of[given[0].stage]]
        elif name == "scales" and value >= 0:
            named[name] = value + amounts["token", memory.domain_of[memory.slot_stage[place]]]
    return transition, tuple(named.values())


@frozen(eq=False)
class RecordedStep:
    """
    One step of one contract, relative to the counters that it moves.

    Args:
        transitions: The transitions that it was made with.
        start: What the contract held before the step.
        events: Its transitions, in order.
        end: What the contract held after it.
        reads: By column, the entries that are read before they are written.
        writes: By column, the entries that are written.
    """

    transitions: Transitions = field(repr=False)
    start: Standing = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    end: Standing = field(repr=False)
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

    @classmethod
    def of(
        cls,
        transitions: Transitions,
        start: Standing,
        events: Sequence[Event],
        end: Standing,
    ) -> RecordedStep:
        """
        Make a step of what was recorded, and try it from starts that are moved.

        Args:
            transitions: The composed transitions.
            start: Before the first of the events.
            events: The transitions of the step, each of which was accepted.
            end: After the last.

        Raises:
            ValueError: A transition of a failure is among them, the events do not lead from the
                start to the end, or the step depends on how far a counter has come.
        """
        named = [transition for transition, _ in events]
        if odd := sorted({*named} - RECUR):
            raise ValueError(f"a step with {odd[0]} does not recur")
        if named.count("commit_epoch") != 1:
            raise ValueError("a step that does not commit its epoch once does not recur")
        seen = _SeenMemory(start.memory, transitions.columns)
        for transition, given in events:
            transitions.functions[transition](seen, *given)
        for name, column in seen.columns.items():
            if column.entries != getattr(end.memory, name):
                raise ValueError(f"the step's transitions leave another {name} than was found")
        step = cls(
            transitions,
            start,
            tuple(events),
            end,
            {n: tuple(c.read) for n, c in seen.columns.items() if c.read},
            {n: tuple(c.written) for n, c in seen.columns.items() if c.written},
        )
        for far in _FAR:
            step.try_moved(step._apart_by(far))
        return step

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__
        before, after = self.start.memory, self.end.memory
        every = tuple(groups(before))
        number = {group: n for n, group in enumerate(every)}
        stays = len(every)  # the place of an amount that is 0
        set_(self, "_groups", every)
        bases = tuple(_place(before, group) for group in every)
        set_(self, "_bases", bases)
        set_(self, "_began", tuple(was for _, _, was in bases))

        def entries(memory: Memory, indices: Mapping[str, Sequence[Any]]) -> Entries:
            def counter(name: str, index: Any, value: Any) -> int:
                group = group_of(memory, name, index, value)
                return stays if group is None else number[group]

            return Entries(memory, indices, counter, stays)

        set_(self, "_unmoved", (0,) * (len(every) + 1))
        still = {name: own for name, own in self.reads.items() if name not in COUNTERS}
        moving = {name: own for name, own in self.reads.items() if name in COUNTERS}
        set_(self, "_still", entries(before, still))
        set_(self, "_moving", entries(before, moving))
        touched = {*self.reads.get("generation", ()), *self.writes.get("generation", ())}
        most = [(slot, after.generation[slot]) for slot in sorted(touched)]
        set_(self, "_rising", tuple((number["generation", slot], last) for slot, last in most))
        set_(self, "_highest", max((last for _, last in most), default=0))
        left: dict[str, tuple[Any, ...]] = {}
        for name, written in self.writes.items():
            column, read = getattr(after, name), frozenset(self.reads.get(name, ()))
            kept = name not in COUNTERS
            indices = tuple(
                index
                for index in written
                # What was looked at and is the same in the end need not be written.
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
        set_(self, "_folds", folds)
        set_(self, "_counted", counted)

    @property
    def folds(self) -> Mapping[Hashable, tuple[int, int]]:
        """By state domain, what the step multiplies its digest by, and what it then adds."""
        return self._folds

    @property
    def counted(self) -> Mapping[int, tuple[int, ...]]:
        """By stage, how much the step adds to its counters."""
        return self._counted

    def _apart_by(self, far: int) -> Amounts:
        """Amounts of which no two are the same; a slot keeps away from its last generation."""
        amounts = {group: far * (n + 1) + n for n, group in enumerate(self._groups)}
        most = self.start.memory.generation_max[0] - 1
        for slot, last in enumerate(self.end.memory.generation):
            group = "generation", slot
            amounts[group] = max(min(amounts[group], most - last), 0)
        return amounts

    def try_moved(self, amounts: Amounts) -> None:
        """
        Run the transitions one by one from a start whose counters have moved.

        Args:
            amounts: By how much each of `counters` has; no slot comes to its last generation.

        Raises:
            ValueError: One is refused, or they leave something else than what `write` would.
        """
        found = translated(self.start.memory, amounts)
        for event in self.events:
            transition, given = translated_event(self.start.memory, event, amounts)
            try:
                self.transitions.functions[transition](found, *given)
            except Refused as refused:
                raise ValueError(
                    f"the step depends on how far its counters are: moved, {transition} is refused "
                    f"by {refused.clause}"
                ) from None
        wanted = translated(self.end.memory, amounts)
        for name in self.transitions.columns:
            if getattr(found, name) != getattr(wanted, name):
                raise ValueError(
                    f"the step depends on how far its counters are: moved, it leaves another {name}"
                )

    @property
    def counters(self) -> tuple[Group, ...]:
        """Every counter of the contract: its family, and the member of the column's index."""
        return self._groups

    def moved_by(self, memory: Memory) -> Amounts:
        """By how much each counter of a memory has moved since the step was recorded."""
        return dict(zip(self._groups, self._amounts(memory), strict=False))

    def differs(self, found: Standing) -> Difference | None:
        """
        Compare all that the step reads with what is there now.

        Args:
            found: What the contract holds now; its memory is looked at and not kept.

        Returns:
            The first difference; None where the step is what its transitions would do.
        """
        own, other = self.start.memory.incarnation[0], found.memory.incarnation[0]
        if other != own:  # of another contract, too, whose columns may be shorter
            return Difference("incarnation[0]", other, own)
        amounts = self._amounts(found.memory)
        odd = (
            self._below(found.memory, amounts)
            or self._another(found.memory)
            or self._apart(found.memory, amounts)
            or self._exhausted(found.memory, amounts)
        )
        if odd is not None:
            return self._named(odd, found.memory)
        return self._beside(found)

    def _amounts(self, memory: Memory) -> tuple[int, ...]:
        """By how much each counter has moved; at the end 0, for what does not move."""
        epochs, tickets, *others = _BASE_COLUMNS(memory)
        now = epochs[self._bases[0][1]], tickets[0], *chain.from_iterable(others)
        return *map(sub, now, self._began), 0

    def _below(self, memory: Memory, amounts: Sequence[int]) -> Difference | None:
        """A counter that has fallen; what is counted from it could be taken for none."""
        if min(amounts) >= 0:
            return None
        name, index, was = self._bases[amounts.index(min(amounts))]
        return Difference(f"{name}[{index}]", getattr(memory, name)[index], was)

    def _another(self, memory: Memory) -> Difference | None:
        """An entry that is no counter and not what it was."""
        if self._still.stand_in(memory, self._unmoved):
            return None
        return self._odd(memory, None)

    def _apart(self, memory: Memory, amounts: tuple[int, ...]) -> Difference | None:
        """An entry that has not moved by as much as its counter."""
        if self._moving.stand_in(memory, amounts):
            return None
        return self._odd(memory, amounts)

    def _odd(self, memory: Memory, amounts: Sequence[int] | None) -> Difference:
        """The first entry that is read and differs: one that moves where amounts are given."""
        start = self.start.memory
        wanted = start if amounts is None else translated(start, self.moved_by(memory))
        for name, indices in self.reads.items():
            if (name in COUNTERS) is (amounts is not None):
                found, own = getattr(memory, name), getattr(wanted, name)
                for index in indices:
                    if found[index] != own[index]:
                        return Difference(f"{name}[{index}]", found[index], own[index])
        raise AssertionError("two looks at the same entries differ")

    def _exhausted(self, memory: Memory, amounts: Sequence[int]) -> Difference | None:
        """A slot whose generation would reach the maximum, which no translation leaves alone."""
        most = memory.generation_max[0]
        if self._highest + max(amounts) < most:
            return None  # as every step but for the very last ones: no slot has come that far
        for group, last in self._rising:
            if last + amounts[group] >= most:
                slot = self._groups[group][1]
                return Difference(
                    f"generation[{slot}]", memory.generation[slot], f"less, for {most} is the last"
                )
        return None

    def _beside(self, found: Standing) -> Difference | None:
        """What a contract holds beside its memory, and is not what it was."""
        if found.free != self.start.free:
            return Difference("the list of free slots", found.free, self.start.free)
        if found.reserved != self.start.reserved:
            return Difference("the list of reserved slots", found.reserved, self.start.reserved)
        return None

    def _named(self, odd: Difference, memory: Memory) -> Difference:
        """Name the clause by which the step's transitions would be refused."""
        amounts, tried = self.moved_by(memory), memory.copy()
        for event in self.events:
            try:
                transition, given = translated_event(memory, event, amounts)
                self.transitions.functions[transition](tried, *given)
            except Refused as refused:
                return evolve(odd, clause=refused.clause)
            except (*UNUSABLE, ValueError):  # an entry that no contract comes to
                return odd
        return odd

    def recurs(self, other: RecordedStep) -> bool:
        """Whether another one is the same step: its start is this one's, moved, and its events."""
        if self.differs(other.start) is not None or len(self.events) != len(other.events):
            return False
        amounts = self.moved_by(other.start.memory)
        memory = self.start.memory
        return all(
            translated_event(memory, own, amounts) == event
            for own, event in zip(self.events, other.events, strict=True)
        )

    def write(self, memory: Memory) -> None:
        """Leave in a memory, which does not differ, what the step's transitions would."""
        self._left.write(memory, self._amounts(memory))


def _place(memory: Memory, group: Group) -> tuple[str, Any, int]:
    """Return the column and the index of a counter, and how far it has come."""
    family, member = group
    column = getattr(memory, BASES[family])
    if family == "epoch" and isinstance(column, dict):  # all stages have one, where steps commit
        member = next(iter(column))
    return BASES[family], member, column[member]
