"""
The command line: ``qeffect check``, ``faults``, ``plan``, ``replay``, ``bench``, and the commands
that other layers register, alone or as a group such as ``qeffect runtime``.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from ..refusals import Refused
from ..text import escaped
from .bench import Bench
from .check import Check
from .command import Command, Exit, Group, Outcome, Progress, UnusableError, brief
from .faults import Faults
from .plan import Plan
from .replay import Replay

__all__ = ["main"]


class _Help(argparse.HelpFormatter):
    """Help whose lines never end within a name that has a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """
    An argument parser whose complaints are one line and exit with 2.

    Options are typed whole: half of one would be another option as soon as a longer one is added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})

        #: Declares the arguments once they are needed; a command may import much to do so.
        self.declare: Callable[[], None] | None = None

    def fill(self) -> None:
        """Declare the arguments, unless they are declared already."""
        declare, self.declare = self.declare, None
        if declare is not None:
            declare()

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UnusableError(f"{message} (see '{self.prog} --help')")


def commands() -> Iterable[Command | Group]:
    """Yield the kernel's commands, then those of the layers above it."""
    yield from (Check(), Faults(), Plan(), Replay(), Bench())
    for entry in sorted(entry_points(group="qeffect.commands"), key=lambda e: e.name):
        yield entry.load()()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    root = _Parser(
        prog="qeffect",
        description="Check that FP8 pipeline training over captured graphs keeps its contract.",
    )
    _add(root, commands())
    return root


def _add(parent: argparse.ArgumentParser, below: Iterable[Command | Group]) -> None:
    """Add commands below a parser, and the commands of a group below the group's."""
    subparsers = parent.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for command in below:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if hasattr(command, "commands"):
            _add(sub, command.commands())
        else:
            sub.declare = partial(_declare, sub, command)


def _declare(sub: argparse.ArgumentParser, command: Command) -> None:
    command.add_arguments(sub)
    output = sub.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--quiet", action="store_true", help="show no progress on stderr")
    sub.set_defaults(run=command.run)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv: Arguments without the program's name; by default the process's own.

    Returns:
        0 when everything kept the contract, 1 when something did not, 2 for unusable input.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in given
    try:
        args = parser().parse_args(given)
        outcome = args.run(args, Progress(enabled=not args.quiet))
        unprinted = _print(_text(outcome, as_json))
    except UnusableError as error:
        return _unusable(brief(str(error), given), as_json)
    except Refused as refused:  # a configuration that the contract refuses
        return _unusable(brief(str(refused), given), as_json)
    except KeyboardInterrupt:
        return _unusable("interrupted", as_json)
    except (MemoryError, RecursionError, UnicodeError) as error:  # what input may ask for
        return _unusable(brief(f"unusable input: {_said(error)}", given), as_json)
    except Exception as error:  # a fault of ours; Python's own exit code would say violation
        if sys.flags.dev_mode:
            traceback.print_exception(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return _unusable(
            brief(f"internal error at {place}: {_said(error)}; python -X dev shows more", given),
            as_json,
        )
    if unprinted is None:
        return int(outcome.exit)
    # A reader that has gone away, such as ``head``, has what it wanted: nothing is said then.
    if not isinstance(unprinted, BrokenPipeError):
        _complain(f"standard output cannot be written: {unprinted.strerror or unprinted}")
    return int(Exit.UNUSABLE)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _text(outcome: Outcome, as_json: bool) -> str:
    if as_json:
        return json.dumps(outcome.record())
    # A name in the input may hold what moves a cursor, or what the terminal cannot spell.
    text = "\n".join(escaped(line) for lines in outcome.text for line in lines.split("\n"))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _print(text: str) -> OSError | None:
    """Print to standard output, all of it; return why it was not taken, None where it was."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer goes nowhere: the interpreter flushes it at its end.
        with suppress(AttributeError, OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _complain(line: str) -> None:
    """Print one line to standard error, where there is one."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"qeffect: {line}", file=sys.stderr, flush=True)


def _unusable(line: str, as_json: bool) -> int:
    if as_json:
        _print(json.dumps({"verdict": "unusable", "error": line}))
    _complain(line)
    return int(Exit.UNUSABLE)
