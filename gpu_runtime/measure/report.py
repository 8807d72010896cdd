"""
Reports: raw numbers, what follows from them, and where they were measured.

A report is written again after every part that is done, each time whole, so that a run that is
killed leaves a valid report of what it had; `complete` says whether it reached its end.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

from qeffect.gpu_runtime.measure import device
from qeffect.gpu_runtime.measure.derive import DERIVE

SCHEMA = "qeffect-runtime-report-1"
ROOT = Path(__file__).resolve().parents[2]


class UnusableError(ValueError):
    """A command cannot run as asked; the message says what to do, and nothing was measured."""


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


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """
    Write plain data so that a reader sees the old file or the new one.

    Raises:
        UnusableError: The place cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UnusableError(
            f"cannot write {path}: {error.strerror}; choose another --out"
        ) from error


def environment(argv: Sequence[str], commit: str | None) -> dict[str, Any]:
    """
    Name the device, the versions and the commit.

    Args:
        argv: The command's arguments; folders are left out of them.
        commit: The commit, where the checkout is not a git one; None asks git.

    Raises:
        UnusableError: The commit is neither given nor known to git.
    """
    identity = device.query(device.IDENTITY) or {}
    state = device.query(device.STATE) or {}
    cpu_s = _processor()
    return {
        "gpu": identity.get("name"),
        "driver": None if not identity else str(identity["driver_version"]),
        "gpu_memory_mib": identity.get("memory.total"),
        "clocks": state,
        "cpu": cpu_s,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformer_engine": _version("transformer_engine") or _version("transformer-engine"),
        "commit": commit_of(commit),
        "argv": [_without_folder(argument) for argument in argv],
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def commit_of(given: str | None) -> str:
    """
    The commit that is measured.

    Raises:
        UnusableError: Nobody knows.
    """
    if given is None:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            given = done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            raise UnusableError("this is no git checkout; name the commit with --commit") from None
    if not re.fullmatch(r"[0-9a-f]{40}", given):
        raise UnusableError(f"--commit takes 40 hexadecimal digits, not {given!r}")
    return given


def _version(package: str) -> str | None:
    # Asking the package itself would import it, and with it a device context.
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _without_folder(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if equals and "/" in value:
        return f"{name}={Path(value).name}"
    return Path(argument).name if "/" in argument else argument


def argv() -> list[str]:
    """The arguments of this process's command."""
    return sys.argv[1:]
