"""
An index of the positions of all actions of a schedule, made in one pass; the checks compare these
positions.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs

from .actions import PER_STAGE, Atom, Kind, Schedule
from .transport import DEFAULT, Transport

Event = tuple[Kind, int, int]
"""An action's kind, stage and microbatch."""


class Occurrence(NamedTuple):
    """The place of an indivisible action: its rank, and its position in the rank's row."""

    rank: int
    position: int
    atom: Atom


@attrs.frozen
class Index:
    """
    The first occurrence of every action, and lists of repeated, misplaced and stray actions.

    Args:
        schedule: The indexed schedule.
        first: The first occurrence of each (kind, stage, microbatch); rows are read in rank order.
        repeated: Later occurrences of messages, waits for sends and computations, each with the
            first occurrence of the same action.
        stray_stages: Actions of stages that the pipeline does not have.
        misplaced: Actions that are not on the rank of their stage.
        stray_microbatches: Actions of microbatches beyond the configured number.
        per_stage: The UNSHARD, RESHARD, REDUCE_GRAD and WAIT_REDUCE_GRAD entries, ordered by rank
            and by their position in the row.
        transport: How the runtime carries messages.
    """

    schedule: Schedule
    first: dict[Event, Occurrence]
    repeated: list[tuple[Occurrence, Occurrence]]
    stray_stages: list[Occurrence]
    misplaced: list[Occurrence]
    stray_microbatches: list[Occurrence]
    per_stage: list[Occurrence]
    transport: Transport = DEFAULT

    def get(self, kind: Kind, stage: int, microbatch: int) -> Occurrence | None:
        """Return the first occurrence of an action; `None` if the action does not occur."""
        return self.first.get((kind, stage, microbatch))

    def home(self, stage: int) -> int | None:
        """Return the rank of a stage; `None` if the pipeline or this table lacks the stage."""
        return self.schedule.stage_to_rank.get(stage)

    def before(self, earlier: Occurrence | None, later: Occurrence) -> bool:
        """Return whether both actions are on the same rank, and `earlier` comes first."""
        return (
            earlier is not None and earlier.rank == later.rank and earlier.position < later.position
        )


def index_of(schedule: Schedule, transport: Transport | None = None) -> Index:
    """
    Index a schedule, in time linear in its actions.

    Args:
        schedule: The schedule.
        transport: How the runtime carries messages; by default as torch does.
    """
    index = Index(schedule, {}, [], [], [], [], [], transport or DEFAULT)
    homes = schedule.stage_to_rank
    for rank, atoms in enumerate(schedule.atoms):
        for position, atom in enumerate(atoms):
            spot = Occurrence(rank, position, atom)
            home = homes.get(atom.stage)
            if home is None:
                index.stray_stages.append(spot)
                continue
            if home != rank:
                index.misplaced.append(spot)
                # Indexed nevertheless, so that the action is not reported as missing too.
            if atom.kind in PER_STAGE:
                index.per_stage.append(spot)
                continue
            if atom.microbatch >= schedule.num_microbatches:
                index.stray_microbatches.append(spot)
                continue
            event = (atom.kind, atom.stage, atom.microbatch)
            earlier = index.first.setdefault(event, spot)
            if earlier is not spot:
                index.repeated.append((spot, earlier))
    return index
