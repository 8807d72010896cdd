"""
Ctrl-C: every long-running command ends with one line and exit code 130, and leaves no process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qeffect.cli.interrupts import INTERRUPTED, descendants

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc, to find child processes"
)

#: Commands that take long, and what each says once it has begun.
LONG = {
    "check --random 100000": "Checking: ",
    "explore --scope pool-4-5-4": "Exploring: ",
    "explore --scope pool-4-5-4 --batch": "Exploring: ",
    "prove": "Proving: ",
    "ranks": "Proving: ",
    "bench": "Measuring: ",
}
#: Commands that the profile dev leaves out: each ends as another one that it interrupts.
OFTEN_ENOUGH = (
    "explore --scope pool-4-5-4",
    "explore --scope pool-4-5-4 --batch",
    "check --random 100000",
    "runtime demo --steps 1000",
    "runtime compare --sets stepwise --device cpu",
)
#: Seconds within which a command ends, as its help promises.
PROMISED_S = 2.0
START_S = 120.0


def require_promise(once: Callable[[], float]) -> None:
    """
    Require that a command ends in time, in the better of two tries: tests share their machine.

    Args:
        once: Starts and interrupts a command; returns the seconds until it ended.
    """
    first = once()
    assert first < PROMISED_S or min(first, once()) < PROMISED_S


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended with the test, each the leader of a group of its own."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def started(command: str, *program: str) -> subprocess.Popen[str]:
    """Start a command in a group of its own, as a shell does for a terminal."""
    return subprocess.Popen(
        [sys.executable, *(program or ("-m", "qeffect")), *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def interrupted(process: subprocess.Popen[str], whole_group: bool) -> tuple[float, str, str]:
    """Interrupt a process; return how long it went on, and what it printed after that."""
    family = descendants(process.pid)
    began = time.monotonic()
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    seconds = time.monotonic() - began
    deadline = began + 5
    while any(map(alive, family)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [] == [child for child in family if alive(child)]
    return seconds, out, err


def alive(process: int) -> bool:
    """Whether a process runs; one whose end nobody has asked about yet does not."""
    with suppress(OSError):
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[
            0
        ] not in "ZX"
    return False


def wait_for(process: subprocess.Popen[str], said: str) -> None:
    """Wait until a command says that it has begun."""
    assert process.stderr is not None
    deadline = time.monotonic() + START_S
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(said):
            return
        assert time.monotonic() < deadline, seen
    raise AssertionError(f"the command ended before it printed {said!r}; it printed {seen}")


def ended_with_children(process: subprocess.Popen[str], children: int, whole_group: bool) -> float:
    """
    Interrupt a command once it has started its processes: it ends with one line.

    `interrupted` requires that none of the processes stays.

    Args:
        process: The command.
        children: How many processes below it to wait for.
        whole_group: Whether to signal its group, as a terminal does, or the command alone.

    Returns:
        The seconds until it ended.
    """
    deadline = time.monotonic() + START_S
    while len(descendants(process.pid)) < children:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)

    seconds, out, err = interrupted(process, whole_group)

    assert (INTERRUPTED, "", "qeffect: interrupted\n") == (process.returncode, out, err)
    return seconds


def both_ways(commands: Iterable[str]) -> list[object]:
    """Each command interrupted alone and with its group, in turn; the other way is nightly."""
    return [
        pytest.param(
            command,
            bool(way),
            id=f"{command}-{('alone', 'group')[way]}",
            marks=pytest.mark.nightly
            if way != number % 2
            else pytest.mark.ci
            if command in OFTEN_ENOUGH
            else (),
        )
        for number, command in enumerate(commands)
        for way in (0, 1)
    ]


@pytest.mark.parametrize(("command", "whole_group"), both_ways(LONG))
def test_every_long_command_ends_at_once(
    command: str, whole_group: bool, processes: list[subprocess.Popen[str]]
) -> None:
    """The signal to the process alone, and to its whole group as a terminal sends it."""

    def once() -> float:
        process = started(command)
        processes.append(process)
        wait_for(process, LONG[command])
        return said_nothing_else(process, LONG[command], whole_group)

    require_promise(once)


def said_nothing_else(process: subprocess.Popen[str], said: str, whole_group: bool) -> float:
    """Interrupt a command: one line, besides those of its progress; the seconds until its end."""
    seconds, out, err = interrupted(process, whole_group)
    lines = [line for line in err.splitlines() if not line.startswith(said)]
    assert (INTERRUPTED, "", ["qeffect: interrupted"]) == (process.returncode, out, lines)
    return seconds


#: Makes a place of a command take long: these commands would otherwise end before the signal.
SLOWED = """
import importlib, os, sys, time
from qeffect.cli import main

def slowly(*_, **__):
    print("at the place", file=sys.stderr, flush=True)
    time.sleep(600)

module, _, name = os.environ["SLOW"].partition(":")
setattr(importlib.import_module(module), name, slowly)
sys.exit(main())
"""
TRAINING = "qeffect.gpu_runtime.training"
#: Commands that end soon, each with a place that it passes, and the mark of its row.
SHORT = {
    "failures": ("qeffect.verification.failures.failure:run", "ci"),
    "faults": ("qeffect.faults:run", "ci"),
    "check --fixtures": ("qeffect.cli.check:check", ""),
    "check-all qeffect/schedule/fixtures": ("qeffect.cli.check_all:check", "nightly"),
    "replay spec/logs/valid/buckets.jsonl": ("qeffect.log.replayer:replay", "ci"),
    "plan --te-order 1,-1": ("qeffect.cli.plan:plan", "ci"),
    "runtime bisect a.jsonl b.jsonl": (f"{TRAINING}.bisect_command:read_digests", "ci"),
    "runtime doctor": ("qeffect.gpu_runtime.doctor:examine", "ci"),
    "runtime export step-00000003 --out w.safetensors": (
        f"{TRAINING}.export_command:read_weights",
        "nightly",
    ),
    "runtime pipeline --pp 1 --schedule 1f1b": (
        "qeffect.gpu_runtime.lab.commands.pipeline:join_ranks",
        "nightly",
    ),
}


@pytest.mark.parametrize(
    ("command", "place"),
    [
        pytest.param(command, place, id=command, marks=getattr(pytest.mark, mark) if mark else ())
        for command, (place, mark) in SHORT.items()
    ],
)
def test_every_short_command_ends_at_once(
    command: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    processes: list[subprocess.Popen[str]],
) -> None:
    """In the middle of its work, though that seldom lasts."""
    monkeypatch.setenv("SLOW", place)

    def once() -> float:
        process = started(command, "-c", SLOWED)
        processes.append(process)
        wait_for(process, "at the place")
        return said_nothing_else(process, "at the place", False)

    require_promise(once)


#: Leaves out the proofs, which come first and take minutes.
PROVED = """
import sys
from qeffect.cli import main
from qeffect.verification.proofs import prove
from qeffect.verification.proofs.report import ProofReport

prove.run = lambda **_: ProofReport()
sys.exit(main())
"""


@pytest.mark.nightly
def test_mutants_behind_proofs_end_at_once(processes: list[subprocess.Popen[str]]) -> None:
    """`prove --mutants` searches the states of all transitions, and then tries the mutants."""

    def once() -> float:
        process = started("prove --mutants", "-c", PROVED)
        processes.append(process)
        wait_for(process, "Mutants: ")
        return said_nothing_else(process, "Mutants: ", True)

    require_promise(once)


@pytest.mark.nightly
def test_a_corpus_ends_at_once(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    """While a library trains the vocabulary, outside of Python."""

    def once() -> float:
        out = tmp_path / f"corpus{len(processes)}"
        process = started(f"runtime corpus --out {out} --any-version")
        processes.append(process)
        wait_for(process, "Reading the standard library")
        time.sleep(2.0)
        assert process.poll() is None
        seconds = said_nothing_else(process, "Reading the standard library", False)
        assert not out.exists() or not list(out.iterdir())
        return seconds

    require_promise(once)


@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(False, id="alone", marks=pytest.mark.nightly),
        pytest.param(True, id="group", marks=pytest.mark.ci),
    ],
)
def test_mutants_end_at_once(whole_group: bool, processes: list[subprocess.Popen[str]]) -> None:
    """While mutants are tried in reachable states, which takes long and says little."""

    def once() -> float:
        process = started("prove --only check_dgrad")
        processes.append(process)
        time.sleep(5.0)
        assert process.poll() is None
        return said_nothing_else(process, "Mutants: ", whole_group)

    require_promise(once)


#: Commands that start processes, and how many: torchrun and its two ranks, or a process per side.
PARENTS = {
    "runtime demo --ranks 2 --steps 1000": 3,
    "runtime demo --steps 1000": 1,
    "runtime compare --sets stepwise --device cpu": 1,
}


@pytest.mark.ci
@pytest.mark.parametrize(("command", "whole_group"), both_ways(PARENTS))
def test_processes_that_a_command_started_end_with_it(
    command: str, whole_group: bool, processes: list[subprocess.Popen[str]]
) -> None:
    """None of them prints, and none stays."""

    def once() -> float:
        process = started(command)
        processes.append(process)
        return ended_with_children(process, PARENTS[command], whole_group)

    require_promise(once)


def test_an_interrupt_as_json(processes: list[subprocess.Popen[str]]) -> None:
    """One object, as for every other end."""
    process = started("check --random 100000 --json")
    processes.append(process)
    wait_for(process, "Checking: ")

    _, out, _ = interrupted(process, False)

    assert (INTERRUPTED, '{"verdict": "interrupted"}\n') == (process.returncode, out)


def test_a_job_in_the_background_of_a_script_ignores_it(
    processes: list[subprocess.Popen[str]],
) -> None:
    """A shell ignores SIGINT for such jobs, and Ctrl-C is not meant for them."""
    words = 'trap "" INT; exec "$0" -m qeffect check --random 100000'
    process = subprocess.Popen(
        ["sh", "-c", words, sys.executable],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    processes.append(process)
    wait_for(process, "Checking: ")

    os.kill(process.pid, signal.SIGINT)
    wait_for(process, "Checking: ")

    assert process.poll() is None


#: Sends SIGINT to its own process as soon as a module is looked for; Python loads it at its start.
SITE = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
#: The console script, as pip writes it.
SCRIPT = "import sys\nfrom qeffect.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("how", ["module", "script"])
@pytest.mark.parametrize(
    "module", ["qeffect.checkpoint", "qeffect.cli", "argparse", "qeffect.verification.commands"]
)
def test_an_interrupt_during_imports(tmp_path: Path, how: str, module: str) -> None:
    """One line and no traceback, from the package's first import on."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    script = tmp_path / "qeffect"
    script.write_text(SCRIPT)
    program = ["-m", "qeffect"] if how == "module" else [str(script)]
    done = subprocess.run(
        [sys.executable, *program, "faults"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "INTERRUPT_AT": module,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        },
        check=False,
    )

    assert (INTERRUPTED, "", "qeffect: interrupted\n") == (
        done.returncode, done.stdout, done.stderr
    )  # fmt: skip


def test_a_library_keeps_its_signals(tmp_path: Path) -> None:
    """Only the command's own process blocks SIGINT when it imports the package."""
    program = "import signal, qeffect; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert "set()\n" == done.stdout
