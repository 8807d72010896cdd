"""
The command-line parser: each error is one line, and help never breaks a line inside a name that has
a hyphen.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

from ..text import decoded, near
from .command import UnusableError

__all__ = ["Parser", "missing_commands"]

#: By the type of an option, the name of the expected value in an error.
_EXPECTED: Final = {int: "a whole number", float: "a number"}
_EXIT_CODES: Final = (
    "exit codes: 0 everything kept the contract; 1 a violation was found; 2 the input cannot be "
    "used, or the run ended for another reason; 130 interrupted by Ctrl-C"
)


class _Help(argparse.HelpFormatter):
    """Formats help so that no line breaks inside a name that has a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """
    An argument parser whose errors are one line, with exit code 2.

    Options cannot be abbreviated: an abbreviation could become ambiguous when a later version adds
    an option. Every option refuses an empty value, which usually comes from an unset shell
    variable.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {"allow_abbrev": False, "formatter_class": _Help, "epilog": _EXIT_CODES}
        super().__init__(*args, **{**own, **kwargs})

        #: Declares the arguments once they are needed, since a command may import much for that.
        self.declare: Callable[[], None] | None = None
        #: For each command name, why the command may be missing.
        self.missing: dict[str, str] = {}

    def fill(self) -> None:
        """Declare the arguments, unless they are declared already."""
        declare, self.declare = self.declare, None
        if declare is not None:
            declare()

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        namespace, extra = super().parse_known_args(*args, **kwargs)
        if extra:  # said here and not by the parser above, which does not know the options
            options = [name for action in self._actions for name in action.option_strings]
            hint = near(next((word for word in extra if word.startswith("-")), ""), options)
            self.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
        return namespace, extra

    def error(self, message: str) -> NoReturn:
        plain = re.sub(r"\bargument (?=[-A-Z])", "", message)
        plain = plain.replace("expected one argument", "expected a value, found none")
        raise UnusableError(f"{plain} (see '{self.prog} --help')")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if isinstance(action, argparse._SubParsersAction):
            return arg_string  # a subcommand's arguments, which its own parser reads
        if not arg_string:
            raise argparse.ArgumentError(action, "expected a value, found an empty one")
        kind: Any = action.type
        if kind not in _EXPECTED:
            return super()._get_value(action, arg_string)
        try:
            return kind(arg_string)
        except ValueError:
            found = f"expected {_EXPECTED[kind]}, found {decoded(arg_string)!r}"
            raise argparse.ArgumentError(action, found) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if not isinstance(action, argparse._SubParsersAction):
            given = decoded(str(value))
            found = f"expected one of {', '.join(names)}, found {given!r}{near(value, names)}"
            raise argparse.ArgumentError(action, found)
        if value in self.missing:
            raise UnusableError(self.missing[value])
        self.error(
            f"unknown command {decoded(value)!r}; expected one of {', '.join(names)}"
            f"{near(value, names)}"
        )


def missing_commands(names: Iterable[str]) -> dict[str, str]:
    """Return one message per command name: QEffect is importable but not installed."""
    root = Path(__file__).resolve().parents[2]
    return {
        name: f"the command {name} is missing because QEffect is not installed here, only on the "
        f"path: run pip install -e . in {root}"
        for name in names
    }
