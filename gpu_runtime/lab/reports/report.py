"""
Reports of measurements: derived figures by kind, and merging of parts into one report.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qeffect.report import UnusableError, read_json, require_place

from ... import report
from ...report import SCHEMA, environment
from ..statistics.derive import DERIVE
from .text import LINES

__all__ = [
    "ALIKE",
    "SCHEMA",
    "Report",
    "UnusableError",
    "add_report_options",
    "environment",
    "read_part",
    "require_alike",
    "require_place",
]

ALIKE = ("commit", "gpu", "driver", "gpu_memory_mib", "python", "packages")
"""Fields of the environment that must be equal in all parts of one report."""


class Report(report.Report):
    """
    A report of one kind, such as `bench`. `DERIVE` maps each kind to the function that computes its
    derived figures.
    """

    def __init__(
        self,
        kind: str,
        path: Path | None,
        environment: Mapping[str, Any],
        configuration: Mapping[str, Any],
        raw: dict[str, Any],
    ) -> None:
        super().__init__(kind, path, environment, configuration, raw, derive=DERIVE[kind])

    def lines(self) -> list[str]:
        """The tables that a command prints last."""
        return list(LINES[self.kind](self.to_json()))


def add_report_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """
    Declare `--out` and `--commit`, the options of every command that writes a report.

    Args:
        parser: The command's parser.
        required: Whether `--out` must be given.
    """
    parser.add_argument(
        "--out", type=Path, required=required, metavar="F", help="file of the JSON report"
    )
    parser.add_argument(
        "--commit", metavar="SHA", help="commit that the report names, if not run in a git checkout"
    )


def read_part(path: Path, kind: str) -> dict[str, Any]:
    """
    Read a report that will become a part of another report.

    Args:
        path: The JSON file of the report.
        kind: The expected kind; `qeffect runtime report KIND` makes a report of this kind.

    Raises:
        UnusableError: The file is not a report of this kind, or its figures cannot be derived.
    """
    try:
        part = read_json(path)
    except UnusableError as error:
        raise UnusableError(f"--merge {error}") from None
    found = part.get("kind") if isinstance(part, dict) and part.get("schema") == SCHEMA else None
    again = f"make one with qeffect runtime report {kind}"
    if found != kind:
        raise UnusableError(
            f"--merge {path}: expected a report of kind {kind!r}, found {found!r}; {again}"
        )
    for name, types in _PARTS.items():
        if not isinstance(part.get(name), types):
            raise UnusableError(
                f"--merge {path}: expected a complete report, found one without {name}; {again}"
            )
    try:
        LINES[kind]({**part, "derived": DERIVE[kind](part["raw"])})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnusableError(
            f"--merge {path}: expected complete measurements in raw, found incomplete "
            f"measurements ({type(error).__name__}: {error}); {again}"
        ) from None
    made: dict[str, Any] = part
    return made


_PARTS: Mapping[str, type] = {
    "environment": dict,
    "configuration": dict,
    "raw": dict,
    "complete": bool,
}


def require_alike(parts: Iterable[tuple[Path, Mapping[str, Any]]]) -> None:
    """
    Require that reports agree in some facts.

    Args:
        parts: The file of each report, with the facts (by name) that must be equal in all reports.

    Raises:
        UnusableError: A fact of a report differs from the same fact of the first report.
    """
    (whence, first), *others = parts
    for path, own in others:
        for name in sorted(own.keys() | first.keys()):
            if own.get(name) != first.get(name):
                raise UnusableError(
                    f"--merge {path}: {name} is {own.get(name)!r}, expected {first.get(name)!r} "
                    f"as in {whence}; merge only parts with one configuration, commit and machine"
                )
