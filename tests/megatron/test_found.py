"""What was found in Megatron-core: the bug reports, and their reproducers, run unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code import blocks
from tests.megatron.ranks import RELEASES, folder_of

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("megatron_stale_weights.md", "megatron_batched_messages.md")
#: Runs a script where Triton is not installed, which Megatron-core imports.
RUN = "from qeffect.gpu_runtime.lab.sides.as_cpu import install; import runpy, sys; install()\n"
RUN += "runpy.run_path(sys.argv[1], run_name='__main__')"


def text_of(name: str) -> str:
    return f"tests/failures/{name}"


@pytest.mark.megatron
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_reproducer_prints_what_its_text_says(release: str, name: str, tmp_path: Path) -> None:
    """Over every release: the lines of the section *Observed*."""
    script = tmp_path / "repro.py"
    script.write_text(blocks(text_of(name), "python")[0].text)
    path = os.pathsep.join([str(folder_of(release)), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 0 == done.returncode, done.stderr
    observed = (ROOT / text_of(name)).read_text().partition("### Observed")[2]
    assert observed.split("```")[1].strip() == done.stdout.strip()


@pytest.mark.parametrize("name", TEXTS)
def test_a_reproducer_is_short(name: str) -> None:
    """At most 60 lines, without a name of QEffect in them."""
    text = blocks(text_of(name), "python")[0].text

    assert len(text.splitlines()) <= 60
    assert "qeffect" not in text
