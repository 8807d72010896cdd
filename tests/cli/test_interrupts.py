"""
Ctrl-C: every command that takes long ends with one line and code 130, and leaves no process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qeffect.cli.interrupts import INTERRUPTED, descendants

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="children are looked for in /proc"
)

#: Commands that take long, and what each says once it has begun.
LONG = {
    "check --random 100000": "Checking. ",
    "explore --scope pool-4-5-4": "Exploring. ",
    "explore --scope pool-4-5-4 --batch": "Exploring. ",
    "prove": "Proving. ",
    "ranks": "Proving. ",
    "bench": "Measuring. ",
}
#: Seconds within which a command ends; twice the promise, since tests share their machine.
LIMIT_S = 4.0
START_S = 120.0


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended with the test, each the leader of a group of its own."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def started(command: str) -> subprocess.Popen[str]:
    """Start a command in a group of its own, as a shell does for a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "qeffect", *command.split()],
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
    raise AssertionError(f"it ended before it began: {seen}")


def require_end_with_children(
    process: subprocess.Popen[str], children: int, whole_group: bool
) -> None:
    """
    Interrupt a command once it has started its processes: it ends in time, with one line.

    `interrupted` requires that none of the processes stays.

    Args:
        process: The command.
        children: How many processes below it to wait for.
        whole_group: Whether to signal its group, as a terminal does, or the command alone.
    """
    deadline = time.monotonic() + START_S
    while len(descendants(process.pid)) < children:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)

    seconds, out, err = interrupted(process, whole_group)

    assert (INTERRUPTED, "", "qeffect: interrupted\n") == (process.returncode, out, err)
    assert seconds < LIMIT_S


def both_ways(commands: Iterable[str]) -> list[object]:
    """Each command interrupted alone and with its group, in turn; the other way is nightly."""
    return [
        pytest.param(
            command,
            bool(way),
            id=f"{command}-{('alone', 'group')[way]}",
            marks=() if way == number % 2 else pytest.mark.nightly,
        )
        for number, command in enumerate(commands)
        for way in (0, 1)
    ]


@pytest.mark.parametrize(("command", "whole_group"), both_ways(LONG))
def test_every_long_command_ends_at_once(
    command: str, whole_group: bool, processes: list[subprocess.Popen[str]]
) -> None:
    """The signal to the process alone, and to its whole group as a terminal sends it."""
    process = started(command)
    processes.append(process)
    wait_for(process, LONG[command])

    seconds, out, err = interrupted(process, whole_group)

    lines = [line for line in err.splitlines() if not line.startswith(LONG[command])]
    assert (INTERRUPTED, "", ["qeffect: interrupted"]) == (process.returncode, out, lines)
    assert seconds < LIMIT_S


@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(False, id="alone", marks=pytest.mark.nightly),
        pytest.param(True, id="group", marks=pytest.mark.ci),
    ],
)
def test_mutants_end_at_once(whole_group: bool, processes: list[subprocess.Popen[str]]) -> None:
    """While mutants are tried in reachable states, which takes long and says little."""
    process = started("prove --only check_dgrad")
    processes.append(process)
    time.sleep(5.0)
    assert process.poll() is None

    seconds, out, err = interrupted(process, whole_group)

    lines = [line for line in err.splitlines() if not line.startswith("Mutants. ")]
    assert (INTERRUPTED, "", ["qeffect: interrupted"]) == (process.returncode, out, lines)
    assert seconds < LIMIT_S


#: Commands that start processes, and how many: torchrun and its two ranks, or a process per side.
PARENTS = {
    "runtime demo --ranks 2 --steps 1000": 3,
    "runtime demo --steps 1000": 1,
    "runtime compare --sets stepwise --device cpu": 1,
}


@pytest.mark.parametrize(("command", "whole_group"), both_ways(PARENTS))
def test_processes_that_a_command_started_end_with_it(
    command: str, whole_group: bool, processes: list[subprocess.Popen[str]]
) -> None:
    """None of them prints, and none stays."""
    process = started(command)
    processes.append(process)
    require_end_with_children(process, PARENTS[command], whole_group)


def test_an_interrupt_as_json(processes: list[subprocess.Popen[str]]) -> None:
    """One object, as for every other end."""
    process = started("check --random 100000 --json")
    processes.append(process)
    wait_for(process, "Checking. ")

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
    wait_for(process, "Checking. ")

    os.kill(process.pid, signal.SIGINT)
    wait_for(process, "Checking. ")

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
