"""
Two reductions of torch's pipeline under DistributedDataParallel: one is missing, one comes early.

The texts for upstream have the reproducers, which torch alone runs on two CPU processes.
`tests/ranks/test_guard_replicas.py` shows what the guard says.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code import blocks
from tests.torch_release import NEEDS_DEFERRED

#: Seconds after which the processes are ended; they take about five.
LIMIT = 120


@NEEDS_DEFERRED
@pytest.mark.parametrize(
    "name",
    [
        "torch_replicas_not_reduced.md",
        pytest.param("torch_inferred_shapes_reduce_early.md", marks=pytest.mark.ci),
    ],
)
def test_the_reproducer_prints_what_the_text_says(tmp_path: Path, name: str) -> None:
    page = Path(__file__).with_name(name)
    (code,) = blocks(f"tests/failures/{name}", "python")
    (observed,) = re.findall(r"### Observed\n\n```\n(.*?)```", page.read_text(), re.DOTALL)
    script = tmp_path / "repro.py"
    script.write_text(code.text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )

    assert observed == done.stdout, done.stderr[-2000:]
    assert len(code.text.splitlines()) <= 60
