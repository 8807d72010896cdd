"""
Claims: the predicates that must hold of a memory in a composition, their instances, and the failing
instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, Final

from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import OPTIONAL, RELATIONS
from qeffect.spec.predicates import Predicate
from qeffect.stage_config import StageConfig

__all__ = ["MANDATORY", "Members", "failing", "instances", "members_of", "seen", "speaks_of"]

#: Relations that are in every composition.
MANDATORY: Final = frozenset(RELATIONS) - OPTIONAL

#: The members of each index sort.
Members = Mapping[str, Sequence[Any]]


def speaks_of(predicate: Predicate, relations: frozenset[str]) -> bool:
    """Whether a predicate applies to a choice of optional relations."""
    return predicate.needs <= relations | MANDATORY and predicate.without not in relations


def instances(predicate: Predicate, members: Members) -> Iterator[tuple[Any, ...]]:
    """Yield every choice of values for a predicate's variables, in order."""
    return product(*(members[sort] for sort in predicate.variables.values()))


def failing(
    predicates: Iterable[Predicate], members: Members, *subjects: Any
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """
    Yield the name of each predicate that does not hold, with the first values of its variables.

    Args:
        predicates: The predicates that should hold.
        members: The members of each index sort.
        subjects: The arguments of the predicates: the memory, and for some the history and the
            transition's arguments.
    """
    for predicate in predicates:
        for values in instances(predicate, members):
            named = dict(zip(predicate.variables, values, strict=True))
            if not predicate.function(*subjects, **named):
                yield predicate.name, values
                break


def members_of(memory: Memory, stages: Sequence[StageConfig]) -> dict[str, Sequence[Any]]:
    """Return the members of each index sort in a process's memory."""
    cells = [cell for config in stages for cell in config.cells()]
    slots = range(len(memory.consumers))
    return {
        "one": range(1),
        "slot": slots,
        "cell": cells,
        "stage": [config.stage for config in stages],
        "domain": range(len(memory.token)),
        "link": range(len(memory.submitted)),
        "caller": range(1 + max(memory.caller_at)),
        "pool": range(len(memory.cursor)),
        "buffer": range(len(memory.opened)),
        "bucket": range(len(memory.stage_at)),
        "place": range(max(len(slots), len(cells))),
    }


def seen(memory: Memory) -> Any:
    """
    Return a view of a memory for predicates: an index outside a column reads 0, an unspecified
    value.

    The view follows the memory, whose columns are written in place.
    """
    columns = {name: _Column(getattr(memory, name)) for name in memory._names}
    return SimpleNamespace(**columns, stage_of=_Stages(), fill=Memory.fill)


class _Column:
    __slots__ = ("entries",)

    def __init__(self, entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.entries[index]
        except (KeyError, IndexError, TypeError):
            return 0


class _Stages:
    """The column ``stage_of``: the first part of each cell."""

    def __getitem__(self, cell: Any) -> int:
        return int(cell[0]) if cell else 0
