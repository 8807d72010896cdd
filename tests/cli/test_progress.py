"""
Progress on a terminal is a single line that is updated; elsewhere it is at most one line per
second.
"""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qeffect.cli import command, main
from qeffect.cli.command import Progress, end_line


class Terminal(io.StringIO):
    """A stream that draws lines again."""

    def isatty(self) -> bool:
        """It does."""
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds from one look at the clock to the next."""
    step = [0.25]
    times = itertools.accumulate(itertools.chain([0.0], (step[0] for _ in itertools.count())))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    return step


def test_a_line_stays_on_a_terminal() -> None:
    """Each replaces the last one; a note stands above, and what follows begins a line."""
    stream = Terminal()
    progress = Progress(stream)
    progress.stay("first")
    progress.stay("second")
    progress.note("noted")
    progress.stay("third")
    end_line()
    end_line()
    progress.note("last")
    assert stream.getvalue() == ("\rfirst\x1b[K\rsecond\x1b[K\r\x1b[Knoted\n\rthird\x1b[K\nlast\n")


def test_a_line_that_stays_fits_the_terminal() -> None:
    """A wrapped line could not be drawn again."""
    stream = Terminal()
    Progress(stream).stay("x" * 50)
    end_line()
    assert stream.getvalue() == f"\r{'x' * 19}\x1b[K\n"


def test_the_line_is_redrawn_ten_times_a_second(clock: list[float]) -> None:
    """However fast steps are."""
    clock[0] = 0.03
    stream = Terminal()
    progress = Progress(stream)
    for n in range(34):
        progress.stay(str(n))
    end_line()
    assert 7 <= stream.getvalue().count("\r") <= 10


@pytest.mark.parametrize("terminal", [False, True])
def test_elsewhere_a_line_a_second(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """In a file, and on a terminal that cannot draw a line again."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal() if terminal else io.StringIO()
    progress = Progress(stream)
    for n in range(13):
        progress.stay(str(n))
    end_line()
    assert stream.getvalue() == "3\n7\n11\n"


def test_a_quiet_command_draws_nothing() -> None:
    """On a terminal too."""
    stream = Terminal()
    Progress(stream, enabled=False).stay("line")
    end_line()
    assert stream.getvalue() == ""


def test_an_error_stands_below_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's last word does not hang on to its progress."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)

    def faults(_: object, __: object, progress: Progress) -> None:
        progress.stay("working")
        raise command.UnusableError("no good")

    monkeypatch.setattr("qeffect.cli.faults.Faults.run", faults)
    assert main(["faults"]) == 2
    assert stream.getvalue() == "\rworking\x1b[K\nqeffect: no good\n"


@pytest.mark.parametrize("full", [True, False])
def test_lines_that_cannot_be_written_are_lost(full: bool) -> None:
    """The work goes on, and the exit code is its own; later lines are written again."""
    body = (
        "import os, sys\n"
        "from qeffect.cli.command import Progress\n"
        "progress = Progress()\n"
        "progress.note('one')\n"
        "progress.note('two')\n"
        "os.dup2(1, 2)\n"
        "progress.note('three')\n"
    )
    read, write = os.pipe()
    os.close(read)
    if full:
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    ran = subprocess.run(
        [sys.executable, "-c", body], stdout=subprocess.PIPE, stderr=write, check=False
    )
    os.close(write)
    assert (ran.returncode, ran.stdout) == (0, b"three\n")


def test_a_closed_stream_is_no_file_of_the_command(tmp_path: Path) -> None:
    """What a library writes to the number of standard error does not reach another file."""
    body = (
        "import os, sys\n"
        "from qeffect import cli\n"
        "def _main(*_):\n"
        "    with open(sys.argv[1], 'wb'):\n"
        "        os.write(2, b'a library speaks')\n"
        "    return 0\n"
        "cli._main = _main\n"
        "sys.exit(cli.main())\n"
    )
    ran = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", body, str(tmp_path / "file")],
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert (ran.returncode, (tmp_path / "file").read_bytes()) == (0, b"")
