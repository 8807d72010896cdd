"""
The interface of a command: it declares its arguments, runs, and returns an outcome.
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

#: Keys that every refusal has in JSON, in every command.
PLACE = ("clause", "rank", "step", "action")
#: The longest value and the longest path that an error line repeats whole.
_VALUE, _PATH = 60, 240
#: Seconds between two drawings of a line that is redrawn in place.
_REDRAWN_S: Final = 0.1
#: The stream on which `Progress.stay` drew a line that has no newline yet; empty without such a
#: line.
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
        data: The fields of the JSON object, without the verdict.
        text: The lines to print for the user.
    """

    verdict: str
    data: Mapping[str, Any] = field(factory=dict)
    text: tuple[str, ...] = field(default=(), converter=_tuple)

    @property
    def exit(self) -> Exit:
        """The process's exit code for this outcome."""
        return _EXITS.get(self.verdict, Exit.VIOLATION)

    def record(self) -> dict[str, Any]:
        """
        The outcome as a JSON object.

        A refusal always has the fields clause, rank, step and action; a field that does not apply
        is None.
        """
        place = dict.fromkeys(PLACE) if self.verdict == "refused" else {}
        return {"verdict": self.verdict, **place, **self.data}


class Command(Protocol):
    """
    A subcommand. Packages above the kernel register theirs as entry points of the group
    ``qeffect.commands``.
    """

    name: str
    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """
        Run the command and return its outcome.

        Raises:
            UnusableError: The input cannot be checked.
        """


class Group(Protocol):
    """A group of subcommands under one name, such as ``qeffect runtime``."""

    name: str
    help: str

    def commands(self) -> Iterable[Command]:
        """Yield the commands in the order in which the help lists them."""


@frozen
class Progress:
    """
    Shows progress on standard error: at most one line per second, or one redrawn line on a
    terminal.

    If a line cannot be written, for example to a closed pipe or a full disk, the line is dropped
    and the command continues.
    """

    stream: TextIO = field(factory=lambda: sys.stderr)
    enabled: bool = True
    _last: list[float] = field(factory=lambda: [time.monotonic()], init=False)

    def __call__(self, line: str) -> None:
        """Show a line, unless another line was shown less than a second ago."""
        now = time.monotonic()
        if self.enabled and now - self._last[0] >= 1:
            self._last[0] = now
            self.note(line)

    def stay(self, line: str) -> None:
        """
        Redraw the last line on a terminal; on any other stream, show a line as `__call__` does.

        The line is redrawn at most ten times a second, and cut to the width of the terminal.
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
        """Whether the stream is a terminal that can redraw a line."""
        return self.stream.isatty() and os.environ.get("TERM") != "dumb"

    def note(self, line: str) -> None:
        """
        Show an important line, such as a first finding, at once; the limit of one line per second
        does not apply.
        """
        if self.enabled:
            # In one write: an interrupt's line may come from another thread.
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
    Drop the buffered text that a stream could not write. Otherwise Python would try to write the
    text again at the end of the process, fail, and change the exit code.
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
    """End the line that `Progress.stay` has drawn, before another line is printed."""
    for stream in _HELD:
        Progress(stream)._write("\n")
    _HELD.clear()


def refuse_unused(
    args: argparse.Namespace, options: Iterable[str], why: str, *, wants: str | None = None
) -> None:
    """
    Refuse options that have no effect in combination with the rest of the command line.

    Args:
        args: The parsed arguments; an option that was not given is None or False.
        options: The options as a user types them.
        why: Why the options have no effect.
        wants: What to add to the command line so that the options have an effect; None if nothing
            helps.

    Raises:
        UnusableError: One of the options was given; the message says what to leave out or to add.
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
    Return a message as one printable line; the middle of a very long value is cut out.

    >>> brief("--hidden wants less than " + "9" * 5000)
    '--hidden wants less than 9999999999999999999999999999999999999999...99999999999999999'

    Args:
        message: The message; each of its long words is treated as a value.
        values: Further values that the message may contain; they may contain blanks.
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
        UnusableError: The extra is not installed; the message says how to install it.
    """
    try:
        return load()
    except ModuleNotFoundError as error:
        raise UnusableError(
            f"the package {error.name} is missing: pip install 'qeffect[{extra}]'"
        ) from error
