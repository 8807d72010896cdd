"""
Reports: raw numbers, what follows from them, and where they were measured.

A report is written again after every part that is done, each time whole, so that a run that is
killed leaves a valid report of what it had; `complete` says whether it reached its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from qeffect import report
from qeffect.report import UnusableError, read_json, require_place, write_json

from ..runner import device
from ..statistics.derive import DERIVE
from .text import LINES

__all__ = [
    "ALIKE",
    "SCHEMA",
    "Report",
    "UnusableError",
    "environment",
    "read_part",
    "require_alike",
    "require_place",
]

SCHEMA = "qeffect-runtime-report-1"

ALIKE = ("commit", "gpu", "driver", "gpu_memory_mib", "python", "packages")
"""What reports that become one have to agree in, of the environment."""


@attrs.define(eq=False)
class Report:
    """
    A report being written.

    Args:
        kind: One of the kinds that `derive` knows.
        path: Where it is written; None keeps it in memory.
        environment: Where it is measured.
        configuration: What was asked for, as plain data.
        raw: The measurements; grows in place.

    Raises:
        UnusableError: Nothing can be written there.
    """

    kind: str
    path: Path | None
    environment: Mapping[str, Any]
    configuration: Mapping[str, Any]
    raw: dict[str, Any]
    complete: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        require_place(self.path)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, its derived part computed from the raw one now."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "complete": self.complete,
            "environment": dict(self.environment),
            "configuration": dict(self.configuration),
            "derived": DERIVE[self.kind](self.raw),
            "raw": self.raw,
        }

    def lines(self) -> list[str]:
        """What a command prints of it last."""
        return list(LINES[self.kind](self.to_json()))

    def save(self) -> None:
        """Write the report, whole or not at all."""
        if self.path is not None:
            write_json(self.path, self.to_json())

    def finish(self) -> dict[str, Any]:
        """Mark the report complete, write it and return it."""
        self.complete = True
        self.save()
        return self.to_json()


def environment(commit: str | None) -> dict[str, Any]:
    """
    Record the device beside what every report of the project records.

    Args:
        commit: The commit, where the checkout is not a git one; None asks git.

    Raises:
        UnusableError: The commit is neither given nor known to git, or it is not one.
    """
    identity = device.query(device.IDENTITY) or {}
    record = report.environment(
        commit_given=commit,
        device={
            "gpu": identity.get("name"),
            "driver": None if not identity else str(identity["driver_version"]),
            "gpu_memory_mib": identity.get("memory.total"),
            "clocks": device.query(device.STATE) or {},
        },
    )
    if record["commit"] == "unknown":
        raise UnusableError("this is not a git checkout; name the commit with --commit")
    return record


def read_part(path: Path, kind: str) -> dict[str, Any]:
    """
    Read a report that is to become a part of another one.

    Args:
        path: The file.
        kind: Its kind, as the command that makes it is called.

    Raises:
        UnusableError: It is no report of this kind, or nothing can be derived from it.
    """
    try:
        part = read_json(path)
    except UnusableError as error:
        raise UnusableError(f"--merge {error}") from None
    found = part.get("kind") if isinstance(part, dict) and part.get("schema") == SCHEMA else None
    again = f"make one with qeffect runtime {kind}"
    if found != kind:
        raise UnusableError(
            f"--merge {path}: expected a report of kind {kind!r}, found {found!r}; {again}"
        )
    for name, types in _PARTS.items():
        if not isinstance(part.get(name), types):
            raise UnusableError(
                f"--merge {path}: expected a whole report, found none of {name}; {again}"
            )
    try:
        LINES[kind]({**part, "derived": DERIVE[kind](part["raw"])})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnusableError(
            f"--merge {path}: expected measurements in raw, found some from which nothing follows "
            f"({type(error).__name__}: {error}); {again}"
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
    Require that what reports say of themselves is the same.

    Args:
        parts: Files, and what has to agree, by name.

    Raises:
        UnusableError: Something differs from the first one's.
    """
    (whence, first), *others = parts
    for path, own in others:
        for name in sorted(own.keys() | first.keys()):
            if own.get(name) != first.get(name):
                raise UnusableError(
                    f"--merge {path}: {name} is {own.get(name)!r}, in {whence} it is "
                    f"{first.get(name)!r}; merge parts of one configuration, made in one place"
                )
