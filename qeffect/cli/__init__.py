"""
The command line: ``qeffect check``, ``faults``, ``plan``, ``replay``, ``bench``, ``check-all``, and
the commands that the packages above the kernel register, such as ``qeffect runtime``.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Final, NoReturn

from ..launched import START, trains
from ..refusals import Refused
from ..report import commit
from ..text import decoded, escaped
from .bench import Bench
from .check import Check
from .check_all import CheckAll
from .command import Command, Exit, Group, Outcome, Progress, UnusableError, brief, end_line
from .faults import Faults
from .interrupts import INTERRUPTED_RUNS, Interrupts
from .parsing import Parser, missing_commands
from .plan import Plan
from .replay import Replay

__all__ = ["main"]

#: Numbers with commas between them, the first one negative.
_NEGATIVE_LIST: Final = re.compile(r"-[0-9.]+(?:\s*,\s*-?[0-9.]+)*")
#: Commands of the layers above the kernel, whose entry points exist only once QEffect is installed.
_REGISTERED: Final = ("explore", "failures", "prove", "ranks", "runtime")


def commands() -> Iterable[Command | Group]:
    """Yield the kernel's commands, then the commands of the packages above the kernel."""
    yield from (Check(), Faults(), Plan(), Replay(), Bench(), CheckAll())
    for entry in _entries():
        yield entry.load()()


def _entries() -> list[EntryPoint]:
    return sorted(entry_points(group="qeffect.commands"), key=lambda entry: entry.name)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    root = Parser(
        prog="qeffect",
        description="Check FP8 pipeline training over CUDA graphs against a contract: the rules "
        "for its actions.",
    )
    root.add_argument(
        "--version", action=_Version, nargs=0, help="print the version and the commit, and exit"
    )
    _add(root, commands())
    if not _entries():
        root.missing = missing_commands(_REGISTERED)
    return root


class _Version(argparse.Action):
    """Prints the installed version and the source commit, then ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            number = version("qeffect")
        except PackageNotFoundError:
            number = "of a source tree that is not installed"
        print(f"qeffect {number.partition('+')[0]}, commit {commit()}")
        parser.exit()


def _add(parent: argparse.ArgumentParser, below: Iterable[Command | Group]) -> None:
    """Add each command to a parser as a subcommand; a group also gets its own subcommands."""
    subparsers = parent.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=Parser
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
    output.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    output.add_argument("--quiet", action="store_true", help="print no progress lines")
    sub.set_defaults(run=command.run)


def main(argv: Sequence[str] | None = None, *, before: Sequence[str] = ()) -> int:
    """
    Run a command.

    If ``argv`` is None, the command owns its process: Ctrl-C then ends the process and its
    children with exit code 130.

    Args:
        argv: Arguments without the program's name; by default those of this process.
        before: Words to insert before the arguments, such as ``runtime``.

    Returns:
        0 if everything kept the contract, 1 if a violation was found, 2 for unusable input, 130
        after an interrupt.
    """
    given = [*before, *(sys.argv[1:] if argv is None else argv)]
    as_json = "--json" in given
    interrupts = Interrupts(partial(_interrupted, as_json))
    if argv is not None:
        return _main(given, as_json, interrupts)
    _occupy_standard_streams()
    if trains(given):
        START.arm()
    return interrupts.run(partial(_main, given, as_json, interrupts))


def _occupy_standard_streams() -> None:
    """
    Open /dev/null for each closed standard stream. Otherwise a file that the command opens would
    get the stream's number, and a library's message for standard error would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _main(given: list[str], as_json: bool, interrupts: Interrupts) -> int:
    ending = _ending(given)
    if ending is not None:
        INTERRUPTED_RUNS.clear()
    if trains(given):
        START.leave()
    if ending is None and not interrupts.announced:
        return _interrupted(as_json)
    text = _text(ending, as_json) if isinstance(ending, Outcome) else ""
    if not interrupts.last_word():
        return int(Exit.INTERRUPTED)
    if not isinstance(ending, Outcome):
        return _unusable(str(ending), as_json)
    unprinted = _print(text)
    # A reader that closes the pipe early, such as ``head``, has what it wanted.
    if unprinted is None or isinstance(unprinted, BrokenPipeError):
        return int(ending.exit)
    _complain(f"standard output cannot be written: {unprinted.strerror or unprinted}")
    return int(Exit.UNUSABLE)


def _ending(given: list[str]) -> Outcome | str | None:
    """Run a command. Return its outcome, an error message for bad input, or None if interrupted."""
    try:
        args = parser().parse_args(_attached(given))
        outcome: Outcome = args.run(args, Progress(enabled=not args.quiet))
        return outcome
    except (UnusableError, Refused) as error:  # Refused: a configuration that the contract refuses
        return brief(str(error), given)
    except KeyboardInterrupt:
        return None
    except (MemoryError, RecursionError, UnicodeError) as error:  # extreme input raises these
        return brief(f"unusable input: {_said(error)}", given)
    except Exception as error:  # a bug of QEffect; Python's exit code 1 would mean a violation
        if sys.flags.dev_mode:
            traceback.print_exception(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        said = (
            f"internal error at {place}: {_said(error)}; run the command with "
            "python -X dev -m qeffect to see the traceback"
        )
        return brief(said, given)
    finally:
        end_line()


def _attached(given: Sequence[str]) -> list[str]:
    """
    Attach a list that begins with a dash to its option; argparse would read the list as an option.

    >>> _attached(["check", "--te-order", "-1,1"])
    ['check', '--te-order=-1,1']
    """
    words: list[str] = []
    for word in given:
        if words and re.fullmatch(r"--[a-z-]+", words[-1]) and _NEGATIVE_LIST.fullmatch(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _text(outcome: Outcome, as_json: bool) -> str:
    if as_json:
        return json.dumps(outcome.record())
    # A name in the input may hold control characters, or characters that the terminal lacks.
    text = "\n".join(escaped(decoded(line)) for lines in outcome.text for line in lines.split("\n"))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _print(text: str) -> OSError | None:
    """Print a text to standard output; return the error if printing failed, otherwise None."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        print(text, flush=True)
    except OSError as error:
        # The interpreter flushes the rest of the buffer at its end: send that to /dev/null.
        with suppress(AttributeError, OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _complain(line: str) -> None:
    """Print one line to standard error, if the process has one."""
    end_line()
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"qeffect: {line}", file=sys.stderr, flush=True)


def _unusable(line: str, as_json: bool) -> int:
    if as_json:
        _print(json.dumps({"verdict": "unusable", "error": line}))
    _complain(line)
    return int(Exit.UNUSABLE)


def _interrupted(as_json: bool) -> int:
    if os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("RANK", "0") != "0":
        return int(Exit.INTERRUPTED)  # torchrun's rank 0 reports the interrupt for all ranks
    if as_json:
        _print(json.dumps({"verdict": "interrupted"}))
    line = "interrupted"
    with suppress(Exception):  # a folder that cannot be read, or the run has just ended
        line += f". {INTERRUPTED_RUNS.pop()()}"
    _complain(line)
    return int(Exit.INTERRUPTED)
