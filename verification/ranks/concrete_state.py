"""
The state of a few ranks as one list of numbers, on which the protocol's transitions run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from attrs import frozen

from qeffect.refusals import Refused
from qeffect.spec.launches import LAUNCH_COLUMNS
from qeffect.spec.predicates import Predicate
from qeffect.spec.ranks import NOBODY, RANK_COLUMNS

__all__ = ["NEVER", "ConcreteState", "Impossible", "Size", "Total", "broken"]

#: Columns whose entries are NOBODY at first.
NEVER = frozenset(
    {
        *("life", "shard_life", "refused", "offered", "drawn_in", "seat", "drew", "name"),
        *("report", "part_round"),
    }
)


class Impossible(Exception):  # noqa: N818 - an outcome in the model, not an error
    """A transition is not possible in a state, which is different from a refusal."""


@frozen
class Size:
    """
    The size of a state: how many ranks, slots, messages and so on it has.

    Args:
        ranks: Number of ranks.
        attempts: Maximum number of attempts (runs of all ranks from a checkpoint); with launches,
            the maximum number of rebuilds.
        slots: Number of slots of each rank.
        messages: Number of messages in a step, by (sender, receiver).
        kinds: Number of messages that differ in stage, microbatch or direction.
        steps: Maximum number of steps that a rank begins in an attempt.
        launches: Whether each step is one launch of a CUDA graph.
    """

    ranks: int = 2
    attempts: int = 2
    slots: int = 1
    messages: Mapping[tuple[int, int], int] = {}
    kinds: int = 1
    steps: int = 2
    launches: bool = False

    @property
    def members(self) -> Mapping[str, range]:
        """
        The range of each sort. It has one message position more than needed, so that a rank can
        also post a wrong message.
        """
        entries = max(self.messages.values(), default=0)
        places = entries * self.steps
        return {
            "one": range(1),
            "rank": range(self.ranks),
            "attempt": range(self.attempts + 1),
            "name": range(self.attempts),
            "slot": range(self.slots),
            "message": range(self.kinds),
            "place": range(places + 1 if places else 0),
            "entry": range(entries),
        }


class _Column:
    """A column of the state: a section of the state's list."""

    __slots__ = ("buffer", "dropped", "end", "start", "strides")

    def __init__(self, buffer: list[int], start: int, lengths: list[int]) -> None:
        self.buffer = buffer
        self.start = start
        self.end = start + prod(lengths)
        self.strides = [prod(lengths[i + 1 :]) for i in range(len(lengths))]
        self.dropped = False

    def _at(self, index: tuple[int, ...]) -> int:
        return self.start + sum(i * n for i, n in zip(index, self.strides, strict=False))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            if len(self.strides) == 1:
                return self.buffer[self.start + index]
            at = self.start + index * self.strides[0]
            return self.buffer[at : at + self.strides[0]]
        return self.buffer[self._at(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.dropped:
            return
        if isinstance(value, _Column):
            self.buffer[self.start : self.end] = value.buffer[value.start : value.end]
        elif isinstance(value, list):
            at = self.start + index * self.strides[0]
            self.buffer[at : at + self.strides[0]] = value
        elif isinstance(index, int):
            self.buffer[self.start + index] = int(value)
        else:
            self.buffer[self._at(index)] = int(value)


class ConcreteState:
    """
    The state of all ranks. Transitions read and write it; predicates read it.

    Args:
        size: The number of ranks, slots, messages and so on.
    """

    def __init__(self, size: Size) -> None:
        self.size = size
        self.members = size.members
        self.buffer: list[int] = []
        self.without: frozenset[str] = frozenset()
        self._lengths = {}
        self._spaces: dict[str, list[tuple[int, ...]]] = {}
        columns = LAUNCH_COLUMNS if size.launches else RANK_COLUMNS
        for name, (indices, _) in columns.items():
            if name == "total":
                continue
            lengths = [len(self.members[index]) for index in indices]
            self._lengths[name] = lengths
            setattr(self, name, _Column(self.buffer, len(self.buffer), lengths))
            self.buffer += [NOBODY if name in NEVER else 0] * prod(lengths)
        self.total = Total(size.messages)
        for (r, q), count in size.messages.items():
            self.messages[r, q] = count

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def leave_out(self, without: frozenset[str]) -> None:
        """Disable the named conditions; the name ``COLUMN =`` disables all writes of COLUMN."""
        self.without = without
        for name in self._lengths:
            getattr(self, name).dropped = f"{name} =" in without

    def when(self, condition: Any) -> None:
        """
        Require a condition that makes a transition possible.

        Raises:
            Impossible: The condition does not hold.
        """
        if not condition:
            raise Impossible

    def need(self, name: str, condition: Any) -> None:
        """
        Check a condition of the protocol.

        Raises:
            Refused: The condition does not hold.
        """
        if not condition and name not in self.without:
            raise Refused(f"ranks.{name}")

    def every(self, sorts: str, holds: Callable[..., Any]) -> bool:
        """Return whether a condition holds for all members of the named sorts."""
        space = self._spaces.get(sorts)
        if space is None:
            space = list(product(*(self.members[sort] for sort in sorts.split())))
            self._spaces[sorts] = space
        return all(holds(*given) for given in space)

    def zeros(self, column: str) -> list[int]:
        """Return a row of zeros for a column."""
        return [0] * prod(self._lengths[column][1:])


class Total:
    """Looks up the total number of messages from one rank to another in a number of steps."""

    def __init__(self, messages: Mapping[tuple[int, int], int]) -> None:
        self.messages = messages

    def __getitem__(self, index: tuple[int, int, int]) -> int:
        r, q, steps = index
        return self.messages.get((r, q), 0) * steps


def broken(predicates: Any, state: ConcreteState) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each predicate that does not hold, with its first counterexample."""
    for predicate in predicates:
        given = _counterexample(predicate, state)
        if given is not None:
            yield predicate.name, given


def _counterexample(predicate: Predicate, state: ConcreteState) -> tuple[int, ...] | None:
    function = predicate.function
    for given in product(*(state.members[sort] for sort in predicate.variables.values())):
        if not function(state, *given):
            return given
    return None
