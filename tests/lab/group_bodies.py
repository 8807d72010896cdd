"""What a rank does in the tests of the report of grouped weight gradients."""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.lab.commands import groups
from qeffect.gpu_runtime.lab.runner.rank_process import Findings
from qeffect.gpu_runtime.lab.sides.group_rows import GroupRow, group_rows
from qeffect.gpu_runtime.lab.sides.pipelines import GuardedSide
from qeffect.gpu_runtime.ranks.membership import Member


def one_fails() -> tuple[list[dict[str, Any]], list[str]]:
    """
    Measure four rows of the report (each one schedule and group size), of which the third cannot be
    built; return the rows and the progress lines.
    """
    build = GroupRow.make

    def make(row: GroupRow, member: Member) -> GuardedSide:
        if row.group == 4:
            raise BackendError("not today")
        return build(row, member)

    GroupRow.make = make  # type: ignore[method-assign]
    args = argparse.Namespace(device="cpu", rounds=1, steps=1, digests=[])
    rows = group_rows(["tiny"], ["il"], ["bf16"], [1, 4], pp=1, launches=False)
    said = io.StringIO()
    groups._measure(args, rows, Findings(said))
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    return (
        [line["row"] for line in lines if "row" in line],
        [line["note"] for line in lines if "note" in line],
    )
