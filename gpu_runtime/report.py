"""
Reports: raw measurements, figures that are derived from them, and a description of the machine.

A run writes the whole report again after each of its parts. A run that is killed therefore leaves a
valid report of its finished parts. `complete` says whether the run reached its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from qeffect import report
from qeffect.report import require_place, write_json

from .backends import nvidia_smi

__all__ = ["SCHEMA", "Report", "environment"]

SCHEMA = "qeffect-runtime-report-1"


@attrs.define(eq=False)
class Report:
    """
    A report that a run writes.

    Args:
        kind: Name of the command that writes the report, such as ``train``.
        path: The file to write; None keeps the report in memory.
        environment: The machine, the versions and the commit, from `environment`.
        configuration: The options of the run, as plain data.
        raw: The measurements; the run adds to them.
        derive: Computes the derived figures from the measurements.
        complete: Whether the run reached its end.

    Raises:
        UnusableError: The file cannot be written.
    """

    kind: str
    path: Path | None
    environment: Mapping[str, Any]
    configuration: Mapping[str, Any]
    raw: dict[str, Any]
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = attrs.field(kw_only=True)
    complete: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        require_place(self.path)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; derived figures are computed now."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "complete": self.complete,
            "environment": dict(self.environment),
            "configuration": dict(self.configuration),
            "derived": self.derive(self.raw),
            "raw": self.raw,
        }

    def save(self) -> None:
        """Write the report; a reader sees either the old file or the complete new file."""
        if self.path is not None:
            write_json(self.path, self.to_json())

    def finish(self) -> dict[str, Any]:
        """Mark the report complete, write it and return it."""
        self.complete = True
        self.save()
        return self.to_json()


def environment(commit: str | None, out: Path | None = None) -> dict[str, Any]:
    """
    Return the environment that every report records: the machine, the versions, the commit, and the
    device.

    Args:
        commit: The commit of the source tree, for a tree outside git; None asks git.
        out: The report's file; None if the report is not written to a file.

    Raises:
        UnusableError: The given commit is malformed, or the commit is unknown and the file is in
            one of the repository's report folders.
    """
    identity = nvidia_smi.query(nvidia_smi.IDENTITY) or {}
    return report.environment(
        commit_given=commit,
        device={
            "gpu": identity.get("name"),
            "driver": None if not identity else str(identity["driver_version"]),
            "gpu_memory_mib": identity.get("memory.total"),
            "clocks": nvidia_smi.query(nvidia_smi.STATE) or {},
        },
        out=out,
    )
