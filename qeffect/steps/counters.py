"""
Counters: the columns (arrays of the contract's state) whose entries rise from step to step, and how
the entries are raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple

from attrs import evolve

from ..engine.concrete_memory import Memory
from ..engine.stage import TRANSITIONS
from ..keys import TapeRef
from ..relations.constants import NEVER

__all__ = [
    "BASES",
    "BASE_COLUMNS",
    "COUNTERS",
    "Amounts",
    "Counter",
    "Event",
    "Group",
    "base_of",
    "group_of",
    "groups",
    "is_counter",
    "moved_between",
    "translated",
    "translated_event",
]

#: A counter that numbers of a family are counted from: the family's name, and the counter's index.
Group = tuple[str, Any]

#: How far each counter has moved.
Amounts = Mapping[Group, int]

#: A transition with its arguments.
Event = tuple[str, tuple[Any, ...]]


class Counter(NamedTuple):
    """
    How the numbers of one column are counted.

    Args:
        family: Name of the family; guards compare numbers only within one family.
        through: Columns that lead from an index of this column to the index of the entry's counter:
            an entry of one column is the index into the next column. Empty if both indices are
            equal; None if the family has only one counter.
        none: The number for "none", which never moves; None if the column has no such number. It is
            0 if guards only test which of two numbers of the family is larger.
    """

    family: str
    through: tuple[str, ...] | None = ()
    none: int | None = None


#: The columns that hold counters. Entries of all other columns are the same at every step.
COUNTERS: Final[Mapping[str, Counter]] = {
    "weight_epoch": Counter("epoch", None),
    **{
        name: Counter("epoch", None, NEVER)
        for name in (
            "epoch_at",
            "forwarded",
            "skipped",
            "cache_epoch",
            "bound",
            "opened",
            "named",
            "reduced",
            "spoiled",
            "final",
        )
    },
    "serial": Counter("ticket", None),  # no ticket is out when a step begins or ends
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
BASE_COLUMNS: Final = attrgetter(*BASES.values())


def group_of(memory: Memory, name: str, index: Any, value: Any) -> Group | None:
    """Return the counter that an entry belongs to; None if the entry does not move."""
    counter = COUNTERS.get(name)
    if counter is None or (counter.none is not None and value == counter.none):
        return None
    if counter.through is None:
        return counter.family, 0
    for column in counter.through:
        index = getattr(memory, column)[index]
    return counter.family, index


def is_counter(name: str) -> bool:
    """Whether a column holds counters."""
    return name in COUNTERS


def groups(memory: Memory) -> Iterator[Group]:
    """Yield every counter of a memory."""
    for family, name in BASES.items():
        if family in ("epoch", "ticket"):
            yield family, 0
        else:
            yield from ((family, member) for member in range(len(getattr(memory, name))))


def moved_between(start: Memory, now: Memory) -> dict[Group, int]:
    """Return by how much each counter has risen from one memory of a contract to a later one."""
    return {group: base_of(now, group)[2] - base_of(start, group)[2] for group in groups(now)}


def translated(memory: Memory, amounts: Amounts) -> Memory:
    """
    Return a copy of a contract's memory in which each counter, and each entry that belongs to the
    counter, is larger by the counter's amount.
    """
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
    Return a transition whose arguments are raised by the amounts of their counters.

    Args:
        memory: The memory whose configuration and incarnation the arguments refer to.
        event: The transition with its arguments.
        amounts: By how much each counter has risen.
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


def base_of(memory: Memory, group: Group) -> tuple[str, Any, int]:
    """Return the column, the index and the value of a counter."""
    family, member = group
    column = getattr(memory, BASES[family])
    if family == "epoch" and isinstance(column, dict):  # all stages have the same epoch
        member = next(iter(column))
    return BASES[family], member, column[member]
