"""What the ranks run in the tests of `second_runs`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from qeffect.cli import main
from qeffect.gpu_runtime.lab.comparisons import second_runs
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import join
from tests.ranks import recorded


def reported(options: list[str]) -> tuple[int, dict[str, Any]]:
    """The command's exit code and its outcome on this rank."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(["runtime", "report", "second_runs", *options, "--json", "--quiet"])
    return code, json.loads(out.getvalue() or "{}")


def launched(job: Job, count: int) -> list[dict[str, Any]]:
    """Flip bits in launches of a job on a CPU, with the stand-in for graphs."""
    member = join("cpu", second_runs.LIMITS)
    recorded.install()

    def beside(action: Callable[[], None], _: float) -> None:
        recorded.STREAM.submit(action)

    return second_runs.flips_in_launches(member, job, "reference", count, disturb=beside)
