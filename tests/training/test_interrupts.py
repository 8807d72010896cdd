"""
Ctrl-C ends `qeffect runtime train` within two seconds, wherever it is, on one rank and on two.
"""

from __future__ import annotations

import json
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
from qeffect.gpu_runtime.training.checkpoint.lock import FolderLock
from qeffect.gpu_runtime.training.checkpoint.status import STATUS
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
rank = os.environ.get("RANK", "0")

class Importing:
    def find_spec(self, name, *_):
        if name == "torch":
            (here / rank).touch()
            time.sleep(600)

def meet_slowly(timeout):
    (here / os.environ["RANK"]).touch()
    if os.environ["RANK"] == "1":
        time.sleep(600)
    meet(timeout)

if os.environ["SLOW"] == "import":
    sys.meta_path.insert(0, Importing())
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
if os.environ["SLOW"] == "start":
    membership._meet = meet_slowly
if os.environ["SLOW"] == "save":
    # Only the checkpoint's own files: a lock and a status are written before the first step.
    sync = os.fsync
    os.fsync = lambda file: (
        time.sleep(600)
        if ".partial-" in os.readlink(f"/proc/self/fd/{file}") and rank in os.environ["SLEEPERS"]
        else sync(file)
    )
sys.exit(main())
"""

#: One action takes seconds: attention over 8,192 tokens.
LONG_STEP = SMALL.replace("sequence = 16", "sequence = 8192").replace("heads = 2", "heads = 1")


def started(folder: Path, slow: str, ranks: int, *, sleepers: str = "01") -> subprocess.Popen[str]:
    """Start a run that stays where it is told to be slow; in a save only the sleepers stay."""
    program = configured(folder, slow, ranks)
    command, environment = [sys.executable], {"SLOW": slow, "SLEEPERS": sleepers}
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    elif slow == "start":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **address}
    return begun([*command, *program], environment)


def begun(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process in a group of its own."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def configured(folder: Path, slow: str, ranks: int, limits: str = "") -> list[str]:
    """Write a run and the program that makes it slow; return what starts them."""
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
    if slow in ("import", "start", "save"):
        run += '[checkpoint]\nfolder = "kept"\nevery = 1\n'
    if ranks > 1 or slow == "start":
        run = run.replace("[parallel]", "[parallel]\npp = 2")
    (folder / "run.toml").write_text(run + limits)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return [str(program), "runtime", "train", str(folder / "run.toml")]


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
        "import": lambda: (folder / "0").exists() and (folder / "1").exists(),
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


@pytest.mark.parametrize(
    ("place", "dead"),
    [("evaluation", 0), pytest.param("evaluation", 1, marks=pytest.mark.nightly),
     pytest.param("save", 0, marks=pytest.mark.nightly),
     pytest.param("save", 1, marks=pytest.mark.ci)]
)  # fmt: skip
def test_a_death_between_two_steps_has_a_cause(
    place: str, dead: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The rank that is left says who is gone and where, and then ends."""
    process = started(tmp_path, place, 2, sleepers=str(dead))
    processes.append(process)
    wait(process, reached(tmp_path, place))

    os.kill(of_rank(dead, descendants(process.pid)), signal.SIGKILL)
    out, err = process.communicate(timeout=60)

    named = {"save": "checkpoint"}.get(place, place)
    assert f"Every rank stopped: rank {dead}, step 1, {named}: the process has ended" in out, err
    if place == "save" and dead:
        told = json.loads((tmp_path / "kept" / STATUS).read_text())
        assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "gone", True)
        assert told["cause"].startswith("rank 1, step 1, checkpoint: the process has ended")


@pytest.mark.parametrize(
    ("place", "dead"),
    [pytest.param("import", 0, marks=pytest.mark.ci), ("start", 1),
     pytest.param("import", 1, marks=pytest.mark.nightly),
     pytest.param("start", 0, marks=pytest.mark.nightly)]
)  # fmt: skip
def test_a_death_in_the_start_has_a_cause(
    place: str, dead: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """Before torch is imported, and while the ranks meet; the status file says it if rank 0 can."""
    process = started(tmp_path, place, 2)
    processes.append(process)
    wait(process, reached(tmp_path, place))

    os.kill(of_rank(dead, descendants(process.pid)), signal.SIGKILL)
    out, err = process.communicate(timeout=60)

    doing = "importing" if place == "import" else "meeting the other ranks"
    said = f"rank {dead}, start: the process has ended (rank {1 - dead} was {doing})"
    assert [f"qeffect: Every rank stopped: {said}"] == [
        line for line in err.splitlines() if line.startswith("qeffect: ")
    ]
    assert "" == out
    if place == "start" and dead:
        told = json.loads((tmp_path / "kept" / STATUS).read_text())
        assert (told["state"], told["ended_by"], told["cause"]) == ("ended", "gone", said)
        assert told["resume"]


@pytest.mark.ci
def test_a_rank_that_refuses_in_the_start_speaks_alone(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The other one, which torchrun then ends, does not say that a process has ended."""
    (tmp_path / "kept").mkdir()
    lock = FolderLock(tmp_path / "kept")
    try:
        process = started(tmp_path, "start", 2)
        processes.append(process)
        out, err = process.communicate(timeout=60)
    finally:
        lock.release()

    assert "" == out
    (line,) = [line for line in err.splitlines() if line.startswith("qeffect: ")]
    assert "[checkpoint] folder" in line


def of_rank(rank: int, ids: list[int]) -> int:
    """The process that the launcher started as a rank."""
    place = f"RANK={rank}".encode()
    named = [n for n in ids if place in Path(f"/proc/{n}/environ").read_bytes().split(b"\0")]
    assert len(named) == 1
    return named[0]
