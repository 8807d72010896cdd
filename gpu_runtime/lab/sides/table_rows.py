"""
The rows of the complete-step tables; each row has a cell, a model, a schedule and a side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ...ranks.job import Job
from ...ranks.membership import Member
from ...runtime import Mode
from ...step.memory.arena import Rule
from ..statistics.paper import LARGE, SMALL
from .language import LAYERS, TINY_VOCABULARY, VOCABULARY, DrawnLanguage
from .pipelines import GuardedSide, NativeSide, build_guarded, build_native

__all__ = ["BEFORE", "CELLS", "PARTS", "REFERENCES", "TableRow", "table_rows"]

CELLS = (SMALL, LARGE, "tiny-m4")
PARTS = ("steps", "attribution", "resources", "weak", "mapping")
HISTORY = 16
BEFORE = 6
"""Number of steps, including the first, after which a side is compared with its reference."""
RULES: Mapping[str, Rule] = {"copied": "copied", "per_microbatch": "per_microbatch"}
"""For sides that do not accumulate into one destination: the kind of memory that dW writes to."""
REFERENCES = {
    "eager": "native",
    "replays": "native",
    "per_microbatch": "copied",
    "one launch": "replays",
}
"""
For each side, the reference side whose bits must be equal under the same schedule, because both
sides form the same sums.
"""


@attrs.frozen
class TableRow:
    """
    One row of the report, to be measured: one cell under one schedule, run by one side.

    Args:
        cell: Layer dimensions and microbatches of a step, such as `h4096-s256-m8`.
        model: `language` or `layers`.
        vpp: Stages of each rank.
        schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
        side: The way to run a step: `native`, `eager`, `copied`, `per_microbatch`, `replays`
            (captured, accumulating), or `one launch`.
        pp: Number of pipeline ranks.
    """

    cell: str
    model: str
    vpp: int
    schedule: str
    side: str
    pp: int = 2
    settling_steps = BEFORE
    copies = True
    split = False

    @property
    def name(self) -> dict[str, Any]:
        """The fields that name the row in a report."""
        return {**attrs.asdict(self), "microbatches": self.microbatches}

    @property
    def label(self) -> str:
        """The name of this row in progress lines."""
        return f"{self.cell}, {self.model}, {self.schedule}, {self.side}"

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return int(self.cell.rsplit("-m", 1)[1])

    @property
    def layers(self) -> str:
        """The row's layers, a name of `LAYERS`."""
        return self.cell.rsplit("-m", 1)[0]

    def job(self) -> Job:
        """The pipeline job that this row describes."""
        common: dict[str, Any] = {
            "schedule": self.schedule,
            "pp": self.pp,
            "vpp": self.vpp,
            "microbatches": self.microbatches,
            "config": LAYERS[self.layers],
            "history": HISTORY,
            "rule": RULES.get(self.side, "accumulate"),
        }
        if self.model == "layers":
            return Job(**common)
        tiny = self.layers == "tiny"
        return DrawnLanguage(**common, vocabulary=TINY_VOCABULARY if tiny else VOCABULARY)

    def make(self, member: Member) -> NativeSide | GuardedSide:
        """Build the pipeline that runs this row; every rank calls this method."""
        if self.side == "native":
            return build_native(member, self.job())
        modes: Mapping[str, Mode] = {"one launch": "one launch", "eager": "eager"}
        return build_guarded(member, self.job(), modes.get(self.side))


def table_rows(
    parts: Iterable[str],
    cells: Sequence[str],
    pp: int,
    *,
    microbatches: Sequence[int] = (2, 4, 8, 16, 32),
    mode: Mode = "replays",
) -> list[TableRow]:
    """
    The rows of some parts of the report, each row once, in the order of measuring. A row is one
    cell under one schedule, run by one side.

    Args:
        parts: Names of `PARTS`: `steps` runs native, replays and one launch of the language model
            in every cell; `attribution` adds eager steps, and copied and per-microbatch gradient
            destinations, in the last cell; `resources` runs ZB-V with several numbers of
            microbatches in the last cell, over two ranks; `weak` runs layers alone, one per stage,
            in every cell; `mapping` runs the model of four layers in the last cell.
        cells: Names of the cells (workloads), from `CELLS`.
        pp: Number of pipeline ranks.
        microbatches: Numbers of microbatches for `resources`.
        mode: How guarded steps run; with ``eager`` there are no rows of one launch.
    """
    sides = ("replays",) if mode == "eager" else ("replays", "one launch")
    last = cells[-1]
    wanted = tuple(parts)

    def both(cell: str, model: str, vpp: int, schedules: Sequence[str]) -> list[TableRow]:
        return [TableRow(cell, model, vpp, s, side, pp) for s in schedules for side in sides]

    rows: list[TableRow] = []
    for cell in cells:
        if "steps" in wanted or ("attribution" in wanted and cell == last):
            rows.append(TableRow(cell, "language", 2, "il", "native", pp))
        if "attribution" in wanted and cell == last:
            rows += [
                TableRow(cell, "language", 2, "il", side, pp)
                for side in ("eager", "copied", "per_microbatch")
            ]
        if "steps" in wanted:
            rows += both(cell, "language", 2, ("il", "zbv"))
        if "weak" in wanted:
            rows += both(cell, "layers", 2, ("il", "zbv"))
    if "mapping" in wanted:
        vpp, schedules = (1, ("1f1b", "izb")) if pp == 4 else (2, ("il", "zbv"))
        for model in ("language", "layers"):
            rows += both(last, model, vpp, schedules)
    if "resources" in wanted:
        layers = last.rsplit("-m", 1)[0]
        rows += [
            TableRow(f"{layers}-m{m}", "language", 2, "zbv", "replays", pp) for m in microbatches
        ]
    return list(dict.fromkeys(rows))
