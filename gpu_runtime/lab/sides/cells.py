"""
The cells of the speed and memory tables: dimensions of the layers, and the order of the actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from qeffect.report import UnusableError
from qeffect.schedule.torch_tables import torch_schedule

from ...backends.layers import LayerConfig
from ...step.plan.order import Order


@attrs.frozen
class BenchCell:
    """
    One workload: a rank's stages, one transformer layer each, and the order of their actions.

    Args:
        name: Name of the cell in tables.
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        sequence: Tokens in a microbatch.
        microbatches: Number of microbatches per step.
        heads: Attention heads; None means hidden / 128.
        schedule: torch's schedule class, whose table determines the order of actions.
        pp: Number of ranks in the schedule's table.
        vpp: Number of stages per rank.
        rank: The rank whose actions are run; the table lists the actions of each rank in one row.
        chained: Whether each stage feeds the next. False if the actions belong to one rank of a
            longer pipeline; every stage then has its own input and output tensors.
    """

    name: str
    hidden: int
    ffn: int
    sequence: int
    microbatches: int
    heads: int | None = None
    schedule: str = "ScheduleInterleaved1F1B"
    pp: int = 1
    vpp: int = 2
    rank: int = 0
    chained: bool = True

    @property
    def config(self) -> LayerConfig:
        """The layer dimensions, in the form that backends take."""
        heads = self.hidden // 128 if self.heads is None else self.heads
        return LayerConfig(self.hidden, self.ffn, heads, self.sequence)

    def order(self) -> Order:
        """
        The order of the rank's actions: its row of the schedule's table, which the installed torch
        generates.
        """
        table = torch_schedule(
            self.schedule, pp=self.pp, vpp=self.vpp, microbatches=self.microbatches
        )
        return Order.of_rank(table, self.rank)

    def to_json(self) -> dict[str, Any]:
        """The cell as plain data, for reports and for worker processes."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchCell:
        """Read the cell that `to_json` wrote."""
        return cls(**data)


CELLS: tuple[BenchCell, ...] = (
    BenchCell("h2048-s256-m4", 2048, 8192, 256, 4),
    BenchCell("h4096-s256-m8", 4096, 11008, 256, 8),
    BenchCell("h4096-s4096-m4", 4096, 11008, 4096, 4),
)
"""The three cells of the tables: launch-bound, in between, and compute-bound."""

TINY = BenchCell("tiny", 32, 64, 16, 4, heads=2)
"""A cell that a CPU runs in milliseconds, to exercise the harness."""

SWEEP_MICROBATCHES = (2, 4, 8, 16, 32)


def sweep_cell(base: BenchCell, microbatches: int, *, rank: int = 1) -> BenchCell:
    """
    The cell (workload) with the actions of one rank of ZB-V over two ranks, and with another cell's
    dimensions.

    The default is rank 1, because rank 1 finishes more microbatches out of order than rank 0.
    """
    return attrs.evolve(
        base,
        name=f"zbv-pp2-rank{rank}-m{microbatches}",
        microbatches=microbatches,
        schedule="ScheduleZBVZeroBubble",
        pp=2,
        vpp=2,
        rank=rank,
        chained=False,
    )


def cells_named(names: Iterable[str]) -> list[BenchCell]:
    """
    The cells with the given indices or names.

    >>> [cell.name for cell in cells_named(["0", "tiny"])]
    ['h2048-s256-m4', 'tiny']

    Raises:
        UnusableError: A name is unknown.
    """
    known = {cell.name: cell for cell in (*CELLS, TINY)}
    known.update({str(n): cell for n, cell in enumerate(CELLS)})
    found = []
    for name in names:
        if name not in known:
            raise UnusableError(f"unknown cell {name!r}; choose from {', '.join(known)}")
        found.append(known[name])
    return found
