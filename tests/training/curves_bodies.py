"""What the ranks run in the tests of loss curves."""

from __future__ import annotations

import gc
import io
import itertools
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qeffect.cli import main
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.lab.commands import curves
from qeffect.gpu_runtime.lab.commands import pipeline as command
from qeffect.gpu_runtime.lab.runner.training_run import RunControl, RunName, train_run
from qeffect.gpu_runtime.lab.sides.torch_pipeline import NativePipeline
from qeffect.gpu_runtime.ranks.membership import join
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.training import balance
from qeffect.gpu_runtime.training.balance import Times
from qeffect.gpu_runtime.training.job_assembly import open_job
from tests.ranks.bodies import LIMITS
from tests.runtime import fake_te


def in_turn(config: str, names: list[str], limits: list[int]) -> list[dict[str, Any]]:
    """
    Train runs in the same processes; return for each run the number of pipelines that exist when it
    has ended.

    The runs use a stand-in for Transformer Engine, whose scales belong to the process.
    """
    sys.modules.update(fake_te.modules())
    te.library.cache_clear()
    member = join("cpu", LIMITS)
    said = []
    for text, limit in zip(names, limits, strict=True):
        named, asked = RunName.of(text), 0

        def over(limit: int = limit) -> bool:
            nonlocal asked
            asked += 1
            return asked >= limit

        own = named.of_file(Path(config), None, None)
        record = train_run(member, named, own, open_job(own), RunControl(windows=6, over=over))
        gc.collect()
        alive = sum(isinstance(one, (Worker, NativePipeline)) for one in gc.get_objects())
        said.append({**record, "alive": alive})
    return said


def measured_apart(config: str, out: str) -> tuple[int, list[list[int]], int]:
    """
    The exit code, the cuts of two runs, and the number of measurements; each measurement gives
    other times.
    """
    member = join("cpu", LIMITS)
    assert member.world == 1
    alike, slow = (
        Times((first, 0.0, 0.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)) for first in (0.0, 900.0)
    )
    given = iter([alike, slow, slow])
    balance.measure_times = lambda *_, **__: next(given)  # type: ignore[assignment]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        runs = ["--runs", "native:zbv:0", "guarded:zbv:0", "--commit", "1" * 40]
        code = main(["runtime", "report", "curves", config, *runs, "--out", out])
    report = json.loads(Path(out).read_text())
    cuts = [run["cut"] for run in report["raw"]["runs"]]
    assert report["configuration"]["times"]["te"]["layer_times"] == [3.0] * 4
    return code, cuts, 3 - len(list(given))


def limited(config: str, runs: list[str], out: str, looks: list[int]) -> list[tuple[int, str]]:
    """
    Run under time limits that end after a number of clock readings; return exit codes and output.

    The clock stands still for that number of readings, and then exceeds the limit.
    """
    command._LAST_WORD_S = 0.0
    join("cpu", LIMITS)
    said = []
    for limit in looks:
        counted = itertools.count()
        clock = SimpleNamespace(
            monotonic=lambda c=counted, n=limit: 99.0 * (next(c) >= n),
            perf_counter=time.perf_counter,
        )
        curves.time = clock  # type: ignore[assignment]
        shown = io.StringIO()
        with redirect_stdout(shown), redirect_stderr(io.StringIO()):
            words = ["--runs", *runs, "--limit-s", "9", "--commit", "1" * 40, "--out"]
            code = main(["runtime", "report", "curves", config, *words, f"{out}{limit}.json"])
        said.append((code, shown.getvalue()))
    return said


def commands(cases: list[list[str]]) -> list[tuple[int, str, str]]:
    """Run several `qeffect runtime curves` commands in turn; return exit codes and output."""
    command._LAST_WORD_S = 0.0
    said = []
    for case in cases:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["runtime", "report", "curves", *case])
        said.append((code, out.getvalue(), err.getvalue()))
    return said
