"""
Evaluate predicates on a contract's memory: find their instances, and the instances that fail.
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

#: The members of each kind of index, such as slot or stage.
Members = Mapping[str, Sequence[Any]]


def speaks_of(predicate: Predicate, relations: frozenset[str]) -> bool:
    """Return whether a predicate applies when exactly these optional relations are in use."""
    return predicate.needs <= relations | MANDATORY and predicate.without not in relations


def instances(predicate: Predicate, members: Members) -> Iterator[tuple[Any, ...]]:
    """Yield every combination of values for a predicate's variables, in a fixed order."""
    return product(*(members[sort] for sort in predicate.variables.values()))


def failing(
    predicates: Iterable[Predicate], members: Members, *subjects: Any
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """
    Yield the name of each predicate that fails, with the first values of its variables for which it
    fails.

    Args:
        predicates: The predicates that should hold.
        members: For each kind of index (such as slot or stage), the values that an index can have.
        subjects: The arguments of the predicates: the memory, and for some predicates the history
            and the transition's arguments.
    """
    for predicate in predicates:
        for values in instances(predicate, members):
            named = dict(zip(predicate.variables, values, strict=True))
            if not predicate.function(*subjects, **named):
                yield predicate.name, values
                break


def members_of(memory: Memory, stages: Sequence[StageConfig]) -> dict[str, Sequence[Any]]:
    """Return, for each kind of index of a memory (such as slot or stage), its valid values."""
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
    Return a view of a memory for predicates. In the view, an index outside a column (one array of
    the state) reads 0, which stands for an unspecified value.

    The view shows later changes too, because the memory's columns are changed in place.
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
    """The column (array of the state) ``stage_of``: it maps each cell (a stage and a microbatch) to
    its stage."""

    def __getitem__(self, cell: Any) -> int:
        return int(cell[0]) if cell else 0
