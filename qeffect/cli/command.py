"""
What a command is: its arguments, the work it does, and the outcome it hands back.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TextIO

from attrs import field, frozen

from ..report import UnusableError
from ..text import decoded, escaped
from .interrupts import INTERRUPTED

__all__ = [
    "PLACE",
    "Command",
    "Exit",
    "Group",
    "Outcome",
    "Progress",
    "UnusableError",
    "brief",
    "end_line",
    "needs",
    "refuse_unused",
]

#: What every refusal says in JSON, whichever command found it.
PLACE = ("clause", "rank", "step", "action")
#: The longest value and the longest path that an error line repeats whole.
_VALUE, _PATH = 60, 240
#: Seconds between two drawings of a line that stays.
_REDRAWN_S: Final = 0.1
#: The stream whose last line stays and is not ended, if there is one.
_HELD: Final[list[TextIO]] = []


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    FINE = 0
    VIOLATION = 1
    UNUSABLE = 2
    INTERRUPTED = INTERRUPTED


_EXITS = {"accepted": Exit.FINE, "unusable": Exit.UNUSABLE}


def _tuple(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(lines)


@frozen
class Outcome:
    """
    The outcome of a command.

    Args:
        verdict: ``accepted``, ``refused``, or ``unusable`` if the command cannot work on this
            machine.
        data: The JSON object, without the verdict.
        text: Lines for a person.
    """

    verdict: str
    data: Mapping[str, Any] = field(factory=dict)
    text: tuple[str, ...] = field(default=(), converter=_tuple)

    @property
    def exit(self) -> Exit:
        """The exit code."""
        return _EXITS.get(self.verdict, Exit.VIOLATION)

    def record(self) -> dict[str, Any]:
        """
        The JSON object.

        A refusal always says which clause, rank, step and action; None where that has no meaning.
        """
        place = dict.fromkeys(PLACE) if self.verdict == "refused" else {}
        return {"verdict": self.verdict, **place, **self.data}


class Command(Protocol):
    """A subcommand; upper layers register theirs in the ``qeffect.commands`` entry points."""

    name: str
    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """
        Do the work.

        Raises:
            UnusableError: The input cannot be checked.
        """


class Group(Protocol):
    """Commands below one word, such as those of ``qeffect runtime``."""

    name: str
    help: str

    def commands(self) -> Iterable[Command]:
        """Yield the commands in the order in which the help lists them."""


@frozen
class Progress:
    """
    Lines on standard error while long work runs: one a second, or on a terminal one that stays.

    A line that cannot be written is lost, and the work goes on: the reader of a pipe may have
    ended, or the disk of a file may be full.
    """

    stream: TextIO = field(factory=lambda: sys.stderr)
    enabled: bool = True
    _last: list[float] = field(factory=lambda: [time.monotonic()], init=False)

    def __call__(self, line: str) -> None:
        """Show a line, unless one was shown less than a second ago."""
        now = time.monotonic()
        if self.enabled and now - self._last[0] >= 1:
            self._last[0] = now
            self.note(line)

    def stay(self, line: str) -> None:
        """
        Show a line in the place of the last one on a terminal; elsewhere as `__call__`.

        The place is redrawn at most ten times a second. A longer line than the terminal is cut.
        """
        if not (self.enabled and self.stays):
            return self(line)
        now = time.monotonic()
        if now - self._last[0] >= _REDRAWN_S:
            self._last[0] = now
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r{line[:width]}\x1b[K")
            _HELD[:] = [self.stream]

    @property
    def stays(self) -> bool:
        """Whether the stream is a terminal that can draw a line again."""
        return self.stream.isatty() and os.environ.get("TERM") != "dumb"

    def note(self, line: str) -> None:
        """Show a line that is worth showing however soon it comes, such as a first finding."""
        if self.enabled:
            # In one piece: an interrupt's line may come from beside.
            clear = "\r\x1b[K" if _HELD else ""
            _HELD.clear()
            self._write(f"{clear}{line}\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            _discard(self.stream)


def _discard(stream: TextIO) -> None:
    """
    Drop what a stream holds and could not write: Python would write it again at the end of the
    process, fail, and change the exit code.
    """
    with suppress(OSError, ValueError):
        number = stream.fileno()
        kept, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
            stream.flush()
        finally:
            os.dup2(kept, number)
            os.close(kept)
            os.close(null)


def end_line() -> None:
    """Leave the line that `Progress.stay` has drawn, before another one is printed."""
    for stream in _HELD:
        Progress(stream)._write("\n")
    _HELD.clear()


def refuse_unused(
    args: argparse.Namespace, options: Iterable[str], why: str, *, wants: str | None = None
) -> None:
    """
    Refuse given options that have no effect with the rest of the command line.

    Args:
        args: The parsed arguments; an option that was not given is None or False.
        options: The options as a user types them.
        why: Why they have no effect.
        wants: What to add so that they do, if anything.

    Raises:
        UnusableError: One of them was given; the message says to leave it out, or what to add.
    """
    values = {option: getattr(args, option.lstrip("-").replace("-", "_")) for option in options}
    given = {o: value for o, value in values.items() if value is not None and value is not False}
    if given:
        typed = (o if value is True else f"{o} {brief(str(value))}" for o, value in given.items())
        leave = f"leave out {' and '.join(given)}"
        remedy = leave if wants is None else f"add {wants} (or {leave})"
        raise UnusableError(f"{' and '.join(typed)} given, but {why}; {remedy}")


def brief(message: str, values: Iterable[str] = ()) -> str:
    """
    Make one printable line of a message, with the middle of every very long value left out.

    >>> brief("--hidden wants less than " + "9" * 5000)
    '--hidden wants less than 9999999999999999999999999999999999999999...99999999999999999'

    Args:
        message: The message; a long word of it is a value.
        values: Further values that it may repeat, blanks and all.
    """
    for value in values:
        if len(value) > _VALUE and any(c.isspace() for c in value):
            message = message.replace(value, _middle_out(value))
    line = escaped(decoded(" ".join(message.split())))
    return re.sub(rf"\S{{{_VALUE + 1},}}", lambda found: _middle_out(found[0]), line)


def _middle_out(value: str) -> str:
    longest = _PATH if "/" in value and " " not in value else _VALUE
    return value if len(value) <= longest else f"{value[: longest - 20]}...{value[-17:]}"


def needs(extra: str, load: Callable[[], Any]) -> Any:
    """
    Import a module that an optional extra installs.

    Raises:
        UnusableError: It is not installed; the message says how to get it.
    """
    try:
        return load()
    except ModuleNotFoundError as error:
        raise UnusableError(
            f"the package {error.name} is missing: pip install 'qeffect[{extra}]'"
        ) from error
