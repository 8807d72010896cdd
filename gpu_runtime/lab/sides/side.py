"""
The interface of every side, which rounds, comparisons, profiles and training runs call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
from torch import Tensor

from ...backends.protocol import StageBackend
from ...runtime import Mode
from ...step.optimizer import Optimizer

__all__ = ["Column", "NamedRow", "RankSide", "Side"]


class Side(Protocol):
    """One way to run an optimizer step."""

    def step(self) -> None:
        """Enqueue one optimizer step, without waiting for the device."""

    def facts(self) -> Mapping[str, Any]:
        """Further numbers that the side reports about itself: graphs, arena bytes, slots."""

    def close(self) -> None:
        """Release device memory and connections."""


class Column(Side, Protocol):
    """A side of the step tables, which runs a cell (workload) in its own process."""

    def build(self) -> None:
        """Build the parts of every column: parameters, optimizer, data."""

    def warm(self) -> None:
        """
        Build the parts that only this column needs before its first step: warm-up, capture, arenas.
        """


class RankSide(Side, Protocol):
    """
    One rank's share of a side (a way to run a step of a pipeline), built and ready for its first
    step.

    Attributes:
        first_steps: Number of steps that belong to the side's set-up.
        mode: How the runtime runs a step: ``eager``, ``replays`` or ``one launch``; ``eager`` for a
            side without graphs.
        optimizer: The optimizer of the rank's stages.
    """

    first_steps: int
    mode: Mode
    optimizer: Optimizer

    @property
    def stages(self) -> Mapping[int, StageBackend]:
        """The rank's stages by index."""

    @property
    def launches(self) -> int:
        """Number of launches among the steps whose losses were read."""

    def drain(self) -> None:
        """Wait until every step has ended, on every rank."""

    def losses_of(self, step: int) -> list[float]:
        """
        The losses of a step by microbatch, on the rank of the last stage; waits for the device.
        """

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, not copied; waits for the device."""


@attrs.frozen
class NamedRow:
    """
    A row of a report over ranks, with the fields of its name: one cell under one schedule, run by
    one side.

    Args:
        cell: The workload: the measured layers and their number of microbatches.
        side: The side (a way to run a step, such as `native`) that runs the cell.
        schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
    """

    cell: str
    side: str
    schedule: str

    @property
    def name(self) -> dict[str, Any]:
        """Cell, side and schedule."""
        return {"cell": self.cell, "side": self.side, "schedule": self.schedule}

    @property
    def label(self) -> str:
        """The name of this row in progress lines."""
        return ", ".join(self.name.values())
