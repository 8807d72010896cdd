"""
Ctrl-C ends `qeffect runtime train` within two seconds at any moment, on one rank and on two ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qeffect.cli.interrupts import INTERRUPTED, descendants
from qeffect.gpu_runtime.training.checkpoint.lock import FolderLock
from qeffect.gpu_runtime.training.checkpoint.status import STATUS
from tests.cli.test_interrupts import (
    PROMISED_S,
    START_S,
    alive,
    interrupted,
    pytestmark,  # noqa: F401
    require_promise,
)
from tests.cli.test_interrupts import processes as processes
from tests.ports import free_port
from tests.profiles import few
from tests.ranks.rank_logs import replayed_run

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
if os.environ["SLOW"] == "built":
    from qeffect.gpu_runtime.training import loop

    build = loop.build_worker

    def build_slowly(*args, **named):
        made = build(*args, **named)
        if rank in os.environ["SLEEPERS"]:
            (here / rank).touch()
            time.sleep(600)
        return made

    loop.build_worker = build_slowly
if os.environ["SLOW"] == "action" and rank in os.environ["SLEEPERS"]:
    from qeffect.gpu_runtime.step.actions import GuardedActions

    def forward_slowly(*args, **named):
        (here / rank).touch()
        time.sleep(600)

    GuardedActions.forward = forward_slowly
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

LOGS = 'event_logs = "logs"\n'

#: One action takes seconds: attention over 8,192 tokens.
LONG_STEP = SMALL.replace("sequence = 16", "sequence = 8192").replace("heads = 2", "heads = 1")


def started(folder: Path, slow: str, ranks: int, *, sleepers: str = "01") -> subprocess.Popen[str]:
    """Start a run that stops at a given place; in a save or an action only the sleeping ranks stop
    there."""
    program = configured(folder, slow, ranks)
    command, environment = [sys.executable], {"SLOW": slow, "SLEEPERS": sleepers}
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    elif slow == "start":
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **address}
    return begun([*command, *program], environment)


def begun(
    command: list[str], environment: dict[str, str], *, reads: bool = False
) -> subprocess.Popen[str]:
    """Start a process in a group of its own; one that reads has an input that stays open."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if reads else None,
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
    run = CONFIG + 'log = "log.jsonl"\n' + (LOGS if ranks > 1 else "")
    if slow == "step":
        run = run.replace(SMALL.format(vocabulary=256, layers=2), LONG_STEP).format(
            vocabulary=256, layers=2
        )
    if slow == "evaluation":
        run += "evaluate_every = 1\nevaluate_windows = 1000000\n"
        run = run.replace('train = "train.npy"', 'train = "train.npy"\nheld_out = "held.npy"')
    if slow in ("import", "start", "built", "step", "action", "save"):
        run += '[checkpoint]\nfolder = "kept"\nevery = 1\n'
    if ranks > 1 or slow == "start":
        run = run.replace("[parallel]", "[parallel]\npp = 2")
    (folder / "run.toml").write_text(run + limits)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    return [str(program), "runtime", "train", str(folder / "run.toml")]


def reached(folder: Path, slow: str) -> Callable[[], bool]:
    """Whether a run is at the place where it is slow, or a moment before it."""
    log, kept = folder / "log.jsonl", folder / "kept"
    return {
        "import": lambda: (folder / "0").exists() and (folder / "1").exists(),
        "start": (folder / "0").exists,
        "built": lambda: (folder / "0").exists() or (folder / "1").exists(),
        "action": lambda: (folder / "0").exists() or (folder / "1").exists(),
        "step": log.exists,
        "evaluation": lambda: log.exists() and '"step"' in log.read_text(),
        "save": lambda: any(kept.glob(".partial-*/*.distcp")),
    }[slow]


def wait(process: subprocess.Popen[str], at: Callable[[], bool], seconds: float = START_S) -> None:
    """Wait until a run is somewhere."""
    deadline = time.monotonic() + seconds
    while not at():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)


@pytest.mark.ci
@pytest.mark.parametrize("slow", few(["start", "step", "evaluation", "save"], (1,), ()))
def test_one_rank_ends_at_once(
    slow: str, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """One line, exit code 130, no process left; a rank that waits for another one ends too."""

    def once() -> float:
        folder = a_folder(tmp_path, processes)
        process = started(folder, slow, 1)
        processes.append(process)
        wait(process, reached(folder, slow))

        seconds, out, err = interrupted(process, False)

        assert (INTERRUPTED, "") == (process.returncode, out)
        then = "Start it again; nothing was saved, because [checkpoint] folder is empty"
        if slow != "evaluation":
            then = "Start it again, with or without --resume; nothing was saved yet"
        assert err.splitlines()[-1] == f"qeffect: interrupted. {then}"
        assert "Traceback" not in err
        if slow == "step":
            assert '"step"' not in (folder / "log.jsonl").read_text()
        return seconds

    require_promise(once)


def a_folder(folder: Path, processes: list[subprocess.Popen[str]]) -> Path:
    """Make a folder for the next try."""
    made = folder / f"try{len(processes)}"
    made.mkdir()
    return made


@pytest.mark.parametrize("slow", few(["start", "step", "save", "evaluation"], (), (1,)))
def test_two_ranks_end_at_once(
    slow: str, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The first rank says one line for both; the launcher adds its own, and takes its own time."""

    def once() -> float:
        folder = a_folder(tmp_path, processes)
        process = started(folder, slow, 2)
        processes.append(process)
        wait(process, reached(folder, slow))
        ranks = descendants(process.pid)

        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        while any(map(alive, ranks)) and time.monotonic() < began + 5 * PROMISED_S:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        _, err = process.communicate(timeout=30)

        assert len(ranks) >= 2
        assert 1 == err.count("qeffect: interrupted")
        if slow != "start":  # where no rank has a log yet
            replayed_run(folder / "logs", {"step": 0}.get(slow, 2))
        return seconds

    require_promise(once)


@pytest.mark.parametrize(
    ("place", "dead"),
    [pytest.param("evaluation", 0, marks=pytest.mark.nightly),
     pytest.param("evaluation", 1, marks=pytest.mark.nightly),
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

    assert replayed_run(tmp_path / "logs", 2).stops == 1
    named = {"save": "checkpoint"}.get(place, place)
    assert f"Every rank stopped: rank {dead}, step 1, {named}: the process has ended" in out, err
    if place == "save" and dead:
        told = json.loads((tmp_path / "kept" / STATUS).read_text())
        assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "gone", True)
        assert told["cause"].startswith("rank 1, step 1, checkpoint: the process has ended")


@pytest.mark.parametrize(
    "dead", [pytest.param(0, marks=pytest.mark.nightly), pytest.param(1, marks=pytest.mark.ci)]
)
def test_a_death_in_a_step_has_a_cause(
    dead: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The survivor names the action that it waited for; torchrun's SIGTERM changes nothing."""
    process = started(tmp_path, "action", 2, sleepers=str(dead))
    processes.append(process)
    wait(process, reached(tmp_path, "action"))

    os.kill(of_rank(dead, descendants(process.pid)), signal.SIGKILL)
    out, err = process.communicate(timeout=60)

    (line,) = [line for line in out.splitlines() if line.startswith("Every rank stopped: ")]
    found = re.fullmatch(
        rf"Every rank stopped: rank {dead}, step 0, (.+): the process has ended.*", line
    )
    assert found is not None, out + err
    assert re.match(r"[01](SEND|RECV)_[FB]\d", found[1]), line
    assert out.splitlines()[-1] == "Start it again, with or without --resume; nothing was saved yet"
    if dead:  # rank 0 writes it
        told = json.loads((tmp_path / "kept" / STATUS).read_text())
        assert (told["state"], told["ended_by"], told["resume"]) == ("ended", "gone", True)
        assert f"Every rank stopped: {told['cause']}" == line


@pytest.mark.parametrize(
    ("place", "dead"),
    [pytest.param("import", 0, marks=pytest.mark.nightly),
     pytest.param("start", 1, marks=pytest.mark.ci),
     pytest.param("built", 0, marks=pytest.mark.nightly),
     pytest.param("built", 1, marks=pytest.mark.nightly),
     pytest.param("import", 1, marks=pytest.mark.nightly),
     pytest.param("start", 0, marks=pytest.mark.nightly)]
)  # fmt: skip
def test_a_death_in_the_start_has_a_cause(
    place: str, dead: int, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """In an import, while the ranks meet, in a wait for the other rank after that."""
    process = started(tmp_path, place, 2, sleepers=str(dead))
    processes.append(process)
    wait(process, reached(tmp_path, place))

    os.kill(of_rank(dead, descendants(process.pid)), signal.SIGKILL)
    out, err = process.communicate(timeout=60)

    doing = {"import": "importing", "start": "meeting the other ranks"}
    said = (
        f"rank {dead}, start: the process has ended "
        f"(rank {1 - dead} was {doing.get(place, 'building the model')})"
    )
    assert [f"Every rank stopped: {said}"] == [
        line.removeprefix("qeffect: ")
        for line in (out + err).splitlines()
        if line.removeprefix("qeffect: ").startswith("Every rank")
    ]
    assert "internal error" not in err
    assert "not every rank answered" not in out + err
    begin = "Start it again, " + (
        "with --resume if it has checkpoints"
        if place == "import"
        else "with or without --resume; nothing was saved yet"
    )
    assert 1 == (out + err).count(begin)
    if place in ("start", "built") and dead:  # rank 0 writes it
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
