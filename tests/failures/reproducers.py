"""Run the reproducer in a bug report for another project."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.docs.code import blocks

__all__ = ["require_observed"]

#: Seconds after which the processes are ended; they take about five.
LIMIT = 120


def require_observed(name: str, folder: Path) -> None:
    """
    Run the reproducer of a bug report; it must print what the report observed, and have at most 60
    lines of code.

    Args:
        name: Name of the bug report, a file beside this module.
        folder: An empty folder.
    """
    page = Path(__file__).with_name(name)
    (code,) = blocks(f"tests/failures/{name}", "python")
    (observed,) = re.findall(r"### Observed\n\n```\n(.*?)```", page.read_text(), re.DOTALL)
    script = folder / "repro.py"
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
