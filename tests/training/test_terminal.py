"""What a person sees who trains on a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from .helpers import CONFIG, text


@pytest.mark.ci
def test_a_run_draws_its_steps_in_one_line(tmp_path: Path) -> None:
    """Loss, rate, norm, speed, skipped updates, time to the end; notes stand above, once each."""
    text(tmp_path)
    run = CONFIG.replace("warmup = 2", "warmup = 2\nclip_norm = 1.0").replace("= 3\n", "= 30\n")
    (tmp_path / "run.toml").write_text(run)
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "qeffect", "runtime", "train", str(tmp_path / "run.toml")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    drawn = b""
    with suppress(OSError):  # Linux ends a terminal that nobody has open any more like this
        while part := os.read(master, 4096):
            drawn += part
    os.close(master)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, drawn
    assert "in the last" in said
    steps = re.findall(
        r"\rstep (\d+)  loss \d\.\d{4}  rate 0\.\d+  norm [\d.]+  [\d,]+ tokens/s  [\d.]+ ms  "
        r"0 skipped  0:\d\d left\x1b\[K",
        drawn.decode(),
    )
    assert steps, drawn
    assert [int(step) for step in steps] == sorted({int(step) for step in steps})
    ended = [line for line in drawn.decode().splitlines() if line.strip()]
    assert 1 == sum("run.toml: 2 layers" in line for line in ended)
    assert drawn.endswith(b"\x1b[K\r\n")
