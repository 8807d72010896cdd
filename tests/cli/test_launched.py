"""
A rank whose peer died in the start hears of it twice, and says so once.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

#: The first of two ranks has ended; SIGTERM and a broken connection tell the second one.
PROGRAM = """
import os, signal, sys, time
from qeffect import launched

os.environ |= {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
launched._ranks = lambda: ([1], [0])
launched.START.arm()

def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)

def disconnected():
    print("caller:", launched.START.gone()[1], flush=True)

for news in sys.argv[1:]:
    globals()[news]()
launched.START.leave()
"""


@pytest.mark.parametrize(
    ("news", "told", "code"),
    [
        pytest.param(("terminated",), "qeffect: Every rank stopped: ", 2, marks=pytest.mark.ci),
        pytest.param(("disconnected",), "caller: ", 0, marks=pytest.mark.ci),
        (("terminated", "disconnected"), "qeffect: Every rank stopped: ", 2),
        (("disconnected", "terminated"), "caller: ", 0),
    ],
)
def test_the_cause_is_said_once(news: tuple[str, ...], told: str, code: int) -> None:
    """Whichever news comes first decides which thread says the cause."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *news], capture_output=True, text=True, timeout=60
    )
    said = [f"{told}rank 0, start: the process has ended (rank 1 was importing)"]
    if told.startswith("qeffect"):  # otherwise the caller says how to go on
        said.append("qeffect: Start the run again, with --resume if it has checkpoints")
    assert (run.stdout + run.stderr).splitlines() == said
    assert run.returncode == code
