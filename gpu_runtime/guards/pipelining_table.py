"""
The table of a `torch.distributed.pipelining` schedule, in a form that lets a guard follow its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Protocol

from qeffect.keys import Cell, cell_of
from qeffect.schedule.actions import Kind, Schedule
from qeffect.schedule.infer import from_actions
from qeffect.schedule.torch_tables import SINGLE, torch_schedule
from qeffect.schedule.transport import Transport

from .works import Event

__all__ = [
    "GuardedRow",
    "ReadActions",
    "RowGuard",
    "declared_order",
    "event_of",
    "table_of",
    "transport_of",
]


#: How many actions `ReadActions` keeps.
_READ = 1 << 16


class RowGuard(Protocol):
    """An object that follows torch's pass over a row (the actions of one rank)."""

    def begin(self, step: int, action: Any) -> None:
        """Check an action of the row before torch runs it."""

    def end(self, step: int, action: Any) -> None:
        """Commit an action of the row after torch has run it."""


def event_of(action: Any) -> Event:
    """Return torch's action as an event."""
    microbatch = -1 if action.microbatch_index is None else action.microbatch_index
    return action.computation_type.value, action.stage_index, microbatch


class ReadActions:
    """
    Caches the event and the text of each of torch's actions, because steps repeat the same actions.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, tuple[Event, str]]] = {}

    def __call__(self, action: Any) -> tuple[Event, str]:
        """Return an action's event and its text, such as ``1F0``."""
        found = self._read.get(id(action))
        if found is None or found[0] is not action:  # the kept action keeps its id
            if len(self._read) >= _READ:  # of tables that are made anew for each step
                self._read.clear()
            found = action, (event_of(action), str(action))
            self._read[id(action)] = found
        return found[1]


class GuardedRow(list[Any]):
    """
    A rank's row of actions. The row calls a guard before and after each action runs.

    The row calls the guard only during the first pass, which is the step. torch makes a second pass
    only to print the row after an action has failed.

    Args:
        row: torch's actions.
        guard: The guard that is called in the first pass.
    """

    def __init__(self, row: list[Any], guard: RowGuard) -> None:
        super().__init__(row)
        self._guard: RowGuard | None = guard

    def __iter__(self) -> Iterator[Any]:
        guard, self._guard = self._guard, None
        if guard is None:
            yield from super().__iter__()
            return
        for step, action in enumerate(super().__iter__()):
            guard.begin(step, action)
            yield action
            guard.end(step, action)


def table_of(schedule: Any) -> Schedule | None:
    """
    Return the table that a schedule executes; None if the schedule is a user's own class without a
    table.
    """
    name = type(schedule).__name__
    order: Mapping[int, Any] | None = getattr(schedule, "pipeline_order_with_comms", None)
    if order is not None:
        return from_actions(
            {rank: list(row) for rank, row in order.items()},
            source=name,
            num_stages=schedule._num_stages,
            num_microbatches=schedule._n_microbatches,
        )
    if name in SINGLE and type(schedule).__module__.startswith("torch."):
        return torch_schedule(
            name, pp=schedule._num_stages, microbatches=schedule._n_microbatches, comms=True
        )
    return None


def transport_of(stages: list[Any]) -> Transport | None:
    """
    Return how torch's stages send messages; None if the stages do not say so, or use torch's
    default.
    """
    for name, queues in (("p2p_per_edge", "edge"), ("p2p_per_direction", "direction")):
        if any(getattr(stage, name, False) for stage in stages):
            return Transport(queues=queues)
    return None


def declared_order(table: Schedule, stages: list[Any]) -> Mapping[Hashable, list[tuple[str, Cell]]]:
    """
    Return the order of F and dI on one rank, in the form that a contract takes.

    Args:
        table: The table.
        stages: torch's stages of the rank.
    """
    rank = table.stage_to_rank[stages[0].stage_index]
    names = {Kind.FORWARD: "F", Kind.DGRAD: "dI"}
    return {
        0: [
            (names[atom.kind], cell_of(atom.stage, atom.microbatch, 0, 0))
            for atom in table.atoms[rank]
            if atom.kind in names
        ]
    }
