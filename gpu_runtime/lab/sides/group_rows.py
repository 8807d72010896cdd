"""
The rows of the report of grouped weight gradients. The model consists of layers only, one layer per
stage.

Each row runs one schedule of one cell with one data type of gradient destinations. With fp32
destinations, the optimizer has fp32 master weights. The row `today` moves (updates) FP8 scales at
every action and computes the weight gradients of each microbatch separately. Each further row moves
scales once per step, and computes the weight gradients of `group` microbatches as one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ...backends.layers import LayerConfig
from ...ranks.job import Job
from ...ranks.membership import Member
from ...runtime import Mode
from ...training.state import by_layer
from ...training.state_digest import state_digest
from .language import LAYERS, MAIN_GRADS
from .pipelines import GuardedSide, LaunchSide, build_guarded

__all__ = ["CELLS", "DTYPES", "SCHEDULES", "GroupCell", "GroupRow", "group_rows"]

SCHEDULES = ("il", "zbv")
DTYPES = MAIN_GRADS
"""Data types of gradient destinations, by name."""
HISTORY = 16


@attrs.frozen
class GroupCell:
    """
    A cell, that is, a workload: layer dimensions and number of microbatches.

    Args:
        config: Dimensions of a layer; each stage has one layer.
        microbatches: Microbatches per step.
        steps: Steps per round by default.
    """

    config: LayerConfig
    microbatches: int
    steps: int


CELLS: Mapping[str, GroupCell] = {
    "h2048-s256-m4": GroupCell(LAYERS["h2048-s256"], 4, 20),
    "h4096-s256-m8": GroupCell(LAYERS["h4096-s256"], 8, 15),
    "h4096-s1024-m8": GroupCell(LAYERS["h4096-s1024"], 8, 10),
    "tiny": GroupCell(LAYERS["tiny"], 4, 2),
}
"""Workloads by name; `tiny` is for a CPU."""


@attrs.frozen
class GroupRow:
    """
    One row of the report, to be measured: one cell (workload) under one schedule, with one group
    size.

    Args:
        cell: Name of the cell, one of `CELLS`.
        schedule: One of `SCHEDULES`.
        dtype: One of `DTYPES`, the type of gradient destinations.
        scales: When scales move: `action` (at every action) in rows of `today`, otherwise `epoch`
            (once per step).
        group: Microbatches whose weight gradients are one product.
        pp: Number of pipeline ranks.
        launches: Whether each step is one launch; otherwise a step consists of replays on a GPU, or
            of eager calls on a CPU.
    """

    cell: str
    schedule: str
    dtype: str
    scales: str = "action"
    group: int = 1
    pp: int = 2
    launches: bool = True
    settling_steps = 4
    """Number of steps before the digest and the first round, the same in each row."""

    @property
    def side(self) -> str:
        """`today`, or `grouped`."""
        return "today" if self.scales == "action" else "grouped"

    @property
    def name(self) -> dict[str, Any]:
        """The fields that name the row in the report."""
        named = ("cell", "schedule", "dtype", "scales", "group")
        return {field: getattr(self, field) for field in named}

    @property
    def label(self) -> str:
        """The name of this row in progress lines."""
        side = self.side if self.side == "today" else f"group {self.group}"
        return f"{self.cell}, {self.schedule}, {self.dtype}, {side}"

    def job(self) -> Job:
        """The pipeline job that this row describes."""
        cell = CELLS[self.cell]
        return Job(
            schedule=self.schedule,
            pp=self.pp,
            microbatches=cell.microbatches,
            config=cell.config,
            history=HISTORY,
            rule="accumulate",
            scales=self.scales,  # type: ignore[arg-type]
            wgrad_group=self.group,
        )

    def make(self, member: Member) -> GuardedSide:
        """Build the pipeline that runs this row; every rank calls this method."""
        mode: Mode | None = "one launch" if self.launches else None
        return build_guarded(member, self.job(), mode, dtype=DTYPES[self.dtype])

    def digest(self, side: GuardedSide) -> str:
        """
        The digest of all ranks' parameters, moments and scales between two steps; every rank calls
        this method.
        """
        whole = side.whole if isinstance(side, LaunchSide) else None
        if whole is not None:
            whole.leave()  # waits for the launches in flight
        found = state_digest(side.worker, by_layer(self.job().layers))
        if whole is not None:
            whole.resume()
        return found


def group_rows(
    cells: Sequence[str],
    schedules: Sequence[str],
    dtypes: Sequence[str],
    groups: Sequence[int],
    *,
    pp: int,
    launches: bool,
) -> list[GroupRow]:
    """
    The rows (each one schedule and group size) of some cells (workloads), in the order of
    measuring.

    For each cell, data type and schedule, the rows are: `today`, each group size that divides the
    cell's number of microbatches, and `today` again to show the spread of the baseline.

    Args:
        cells: Names of the cells, from `CELLS`.
        schedules: Names of the schedules, from `SCHEDULES`.
        dtypes: Names of `DTYPES`.
        groups: Group sizes (microbatches per product); empty for all powers of two.
        pp: Number of pipeline ranks.
        launches: Whether each step is one launch.
    """
    rows = []
    for cell in cells:
        whole = CELLS[cell].microbatches
        sizes = sorted(set(groups)) if groups else [2**n for n in range(whole.bit_length())]
        for dtype in dtypes:
            for schedule in schedules:
                today = GroupRow(cell, schedule, dtype, pp=pp, launches=launches)
                grouped = [
                    attrs.evolve(today, scales="epoch", group=size)
                    for size in sizes
                    if whole % size == 0
                ]
                rows += [today, *grouped, today]
    return rows
