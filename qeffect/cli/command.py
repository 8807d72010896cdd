"""
What a command is: its arguments, the work it does, and the outcome it hands back.
"""

from __future__ import annotations

import argparse
import enum
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TextIO

from attrs import field, frozen

__all__ = ["Command", "Exit", "Outcome", "Progress", "Unusable", "needs"]


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    FINE = 0
    VIOLATION = 1
    UNUSABLE = 2


class Unusable(Exception):  # noqa: N818 - it names the user's input, not an error of ours
    """Input that cannot be checked; its message is one line for the user."""


def _tuple(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(lines)


@frozen
class Outcome:
    """
    What a command found.

    Args:
        verdict: ``accepted`` or ``refused``.
        data: The JSON object, without the verdict.
        text: Lines for a person.
    """

    verdict: str
    data: Mapping[str, Any] = field(factory=dict)
    text: tuple[str, ...] = field(default=(), converter=_tuple)

    @property
    def exit(self) -> Exit:
        """The exit code."""
        return Exit.FINE if self.verdict == "accepted" else Exit.VIOLATION


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
            Unusable: The input cannot be checked.
        """


@frozen
class Progress:
    """One line a second on standard error while long work runs."""

    stream: TextIO = field(factory=lambda: sys.stderr)
    enabled: bool = True
    _last: list[float] = field(factory=lambda: [time.monotonic()], init=False)

    def __call__(self, line: str) -> None:
        """Show a line, unless one was shown less than a second ago."""
        now = time.monotonic()
        if self.enabled and now - self._last[0] >= 1:
            self._last[0] = now
            print(line, file=self.stream, flush=True)


def needs(extra: str, load: Callable[[], Any]) -> Any:
    """
    Import what an optional extra brings.

    Raises:
        Unusable: It is not installed; the message says how to get it.
    """
    try:
        return load()
    except ModuleNotFoundError as error:
        raise Unusable(
            f"this needs {error.name}, which is not installed: pip install 'qeffect[{extra}]'"
        ) from error
