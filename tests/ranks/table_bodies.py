"""What the ranks run in the tests of `report tables`."""

from __future__ import annotations

import argparse
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.lab.commands import peers, tables
from qeffect.gpu_runtime.lab.runner.rank_process import Findings
from qeffect.gpu_runtime.lab.sides import model_rows
from qeffect.gpu_runtime.lab.sides.language import PeerRow, PeerSettings
from qeffect.gpu_runtime.lab.sides.pipelines import build_guarded, isolation
from qeffect.gpu_runtime.lab.sides.table_rows import TableRow
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.training import balance
from tests.runtime import stand_ins

from .bodies import LIMITS


def tables_command(argv: list[str]) -> tuple[int, str, str]:
    """Run `qeffect runtime tables`; return the exit code and the rank's output."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["runtime", "report", "tables", *argv])
    return code, out.getvalue(), err.getvalue()


def one_fails() -> list[dict[str, Any]]:
    """Measure three rows of the report (each a workload run in one way), of which the second cannot
    be built on rank 1."""
    member = join("cpu", LIMITS)
    args = argparse.Namespace(rounds=1, steps=1, native_steps=1)
    row = TableRow("tiny-m2", "layers", 2, "zbv", "replays")
    build = Job.stages

    def fails(job: Job, *args: Any, **options: Any) -> Any:
        if member.rank == 1:
            raise BackendError("not today")
        return build(job, *args, **options)

    found = []
    for stages in (build, fails, build):
        Job.stages = stages  # type: ignore[method-assign]
        with isolation(member):
            found.append(tables.measure_row(member, args, row, {}, [row]))
    return found


def peers_of_ours(folder: str) -> list[dict[str, Any]]:
    """Measure native and replays of a small cell (workload), as `report peers` does."""
    join("cpu", LIMITS)
    cells = ["tiny-m2"]
    asked = PeerSettings(
        cells=cells,
        rounds=1,
        steps=1,
        native_steps=1,
        device="cpu",
        profile=False,
        settling_steps=3,
    )
    text = io.StringIO()
    # The last row has scales of an epoch without a group.
    rows = [
        *peers.rows_of("ours", cells, asked),
        PeerRow("tiny-m2", "replays", "il", asked, group=1),
    ]
    peers.measure_ours("cpu", rows, Path(folder), Findings(text))
    lines = map(json.loads, text.getvalue().splitlines())
    return [line["row"]["rows"] for line in lines if "row" in line]


def captured_facts() -> dict[str, Any]:
    """The facts that are reported of replays of a small cell, with stand-ins for graphs."""
    member = join("cpu", LIMITS)
    row = TableRow("tiny-m4", "language", 2, "zbv", "replays")
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.install(patch)
        side = build_guarded(member, row.job(), "replays")
        side.step()
        facts = side.facts()
        slots = sum(memory.table.num_slots for memory in side.worker.runtime.memories.values())
        variants = len(side.worker.runtime.executor.wgrads)  # type: ignore[union-attr]
        side.close()
    return {**facts, "sum of slots": slots, "variants": variants}


def models_command(argv: list[str]) -> tuple[int, str, str]:
    """Run `qeffect runtime report models`; return the exit code and the rank's output."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["runtime", "report", "models", *argv])
    return code, out.getvalue(), err.getvalue()


def unmeasured_parts() -> str:
    """The error on each rank if rank 1 cannot measure the parts of a model (embedding, layer,
    head)."""
    member = join("cpu", LIMITS)
    measure = balance.measure_times

    def fails(*args: Any, **options: Any) -> Any:
        if member.rank == 1:
            raise BackendError("not today")
        return measure(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "measure_times", fails)
        try:
            model_rows.measured_cut(member, model_rows.ModelRow("tiny-s16-m4", "native", "il"))
        except BackendError as error:
            return str(error)
    return ""
