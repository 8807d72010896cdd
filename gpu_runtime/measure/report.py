"""
Reports: raw numbers, what follows from them, and where they were measured.

A report is written again after every part that is done, each time whole, so that a run that is
killed leaves a valid report of what it had; `complete` says whether it reached its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from qeffect import report
from qeffect.gpu_runtime.measure import device
from qeffect.gpu_runtime.measure.derive import DERIVE
from qeffect.report import UnusableError, write_json

__all__ = ["SCHEMA", "Report", "UnusableError", "environment"]

SCHEMA = "qeffect-runtime-report-1"


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
    """

    kind: str
    path: Path | None
    environment: Mapping[str, Any]
    configuration: Mapping[str, Any]
    raw: dict[str, Any]
    complete: bool = attrs.field(default=False, init=False)

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
