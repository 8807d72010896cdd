"""
Ctrl-C ends `qeffect runtime train` within two seconds, wherever it is, on one rank and on two.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qeffect.cli.interrupts import INTERRUPTED, descendants
from tests.cli.test_interrupts import LIMIT_S, START_S, alive, interrupted, pytestmark  # noqa: F401
from tests.cli.test_interrupts import processes as processes
from tests.profiles import few

from .helpers import CONFIG, SMALL, text

#: Runs the command as ``python -m qeffect`` does; a place that would be passed at once takes long.
PROGRAM = """
import os, pathlib, sys, time
from qeffect.cli import main
from qeffect.gpu_runtime.ranks import membership

meet, here = membership._meet, pathlib.Path(__file__).parent

def meet_slowly(timeout):
    (here / os.environ["RANK"]).touch()
    if os.environ["RANK"] == "1":
        time.sleep(600)
    meet(timeout)

if os.environ["SLOW"] == "start":
    membership._meet = meet_slowly
if os.environ["SLOW"] == "save":
    # Only the checkpoint's own files: a lock and a status are written before the first step.
    sync = os.fsync
    os.fsync = lambda file: (
        time.sleep(600) if ".partial-" in os.readlink(f"/proc/self/fd/{file}") else sync(file)
    )
sys.exit(main())
"""

#: One action takes seconds: attention over 8,192 tokens.
LONG_STEP = SMALL.replace("sequence = 16", "sequence = 8192").replace("heads = 2", "heads = 1")


def started(folder: Path, slow: str, ranks: int) -> subprocess.Popen[str]:
    """Start a run that stays where it is told to be slow."""
    text(folder, repeats=1500)
    text(folder, "held.npy", repeats=1500)
    run = CONFIG + 'log = "log.jsonl"\n'
    if slow == "step":
        run = run.replace(SMALL.format(vocabulary=256, layers=2), LONG_STEP).format(
            vocabulary=256, layers=2
        )
    if slow == "evaluation":
        run += "evaluate_every = 1\nevaluate_windows = 1000000\n"
        run = run.replace('train = "train.npy"', 'train = "train.npy"\nheld_out = "held.npy"')
    if slow == "save":
        run += '[checkpoint]\nfolder = "kept"\nevery = 1\n'
    if ranks > 1 or slow == "start":
        run = run.replace("[parallel]", "[parallel]\npp = 2")
    (folder / "run.toml").write_text(run)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command, environment = [sys.executable], {"OMP_NUM_THREADS": "1", "SLOW": slow}
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    elif slow == "start":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **address}
    return subprocess.Popen(
        [*command, str(program), "runtime", "train", str(folder / "run.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, **environment},
    )


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reached(folder: Path, slow: str) -> Callable[[], bool]:
    """Whether a run is at the place where it is slow, or a moment before it."""
    log, kept = folder / "log.jsonl", folder / "kept"
    return {
        "start": (folder / "0").exists,
        "step": log.exists,
        "evaluation": lambda: log.exists() and '"step"' in log.read_text(),
        "save": lambda: any(kept.glob(".partial-*/*.distcp")),
    }[slow]


def wait(process: subprocess.Popen[str], at: Callable[[], bool]) -> None:
    """Wait until a run is somewhere."""
    deadline = time.monotonic() + START_S
    while not at():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)


@pytest.mark.parametrize("slow", few(["start", "step", "evaluation", "save"], [1]))
def test_one_rank_ends_at_once(
    slow: str, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """One line, exit code 130, no process left; a rank that waits for another one ends too."""
    process = started(tmp_path, slow, 1)
    processes.append(process)
    wait(process, reached(tmp_path, slow))

    seconds, out, err = interrupted(process, False)

    assert (INTERRUPTED, "") == (process.returncode, out)
    assert err.splitlines()[-1] == "qeffect: interrupted"
    assert "Traceback" not in err
    if slow == "step":
        assert '"step"' not in (tmp_path / "log.jsonl").read_text()
    assert seconds < LIMIT_S


@pytest.mark.parametrize(
    "slow", [pytest.param("start", marks=pytest.mark.ci), "step",
             pytest.param("evaluation", marks=pytest.mark.nightly),
             pytest.param("save", marks=pytest.mark.ci)]
)  # fmt: skip
def test_two_ranks_end_at_once(
    slow: str, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The first rank says one line for both; the launcher adds its own, and takes its own time."""
    process = started(tmp_path, slow, 2)
    processes.append(process)
    wait(process, reached(tmp_path, slow))
    ranks = descendants(process.pid)

    os.killpg(process.pid, signal.SIGINT)
    deadline = time.monotonic() + LIMIT_S
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [rank for rank in ranks if alive(rank)]
    _, err = process.communicate(timeout=30)

    assert len(ranks) >= 2
    assert [] == left
    assert 1 == err.count("qeffect: interrupted")


@pytest.mark.parametrize("dead", few([0, 1], [0]))
def test_a_death_in_an_evaluation_has_a_cause(
    dead: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The rank that is left says who is gone and where, and then ends."""
    process = started(tmp_path, "evaluation", 2)
    processes.append(process)
    wait(process, reached(tmp_path, "evaluation"))

    os.kill(of_rank(dead, descendants(process.pid)), signal.SIGKILL)
    out, err = process.communicate(timeout=60)

    assert f"Every rank stopped: rank {dead}, step 1, evaluation: the process has ended" in out, err


def of_rank(rank: int, ids: list[int]) -> int:
    """The process that the launcher started as a rank."""
    place = f"RANK={rank}".encode()
    named = [n for n in ids if place in Path(f"/proc/{n}/environ").read_bytes().split(b"\0")]
    assert len(named) == 1
    return named[0]
