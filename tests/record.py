"""
A dated record of a run of the suite, which ``pytest --record FILE`` writes when the run ends.

A record says what ran (profile, marker expression, arguments), where (hardware, versions, commit)
and how it ended (counts, seconds, exit status). Checked-in records are in ``tests/records``.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests import profiles

__all__ = ["COUNTED", "PACKAGES", "RECORDS", "Recorder"]

ROOT = Path(__file__).resolve().parents[1]

RECORDS = Path(__file__).resolve().parent / "records"
"""Folder of the checked-in records."""

PACKAGES = (
    *("attrs", "numpy", "torch", "torchao", "transformer-engine", "z3-solver", "cvc5"),
    *("hypothesis", "pytest", "pytest-xdist"),
)
"""Packages whose versions a record lists, if they are installed."""

COUNTED = ("passed", "failed", "skipped", "xfailed", "xpassed", "errors")
"""The counts of a record."""


def _commit() -> str | None:
    """The commit, with ``+`` if tracked files differ from it; None outside a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except OSError:
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Recorder:
    """
    Counts how tests end, and writes the record.

    Args:
        file: Where the record is written.
        config: The run's configuration.
    """

    def __init__(self, file: Path, config: pytest.Config) -> None:
        self.file, self.config = file, config
        self.counts: Counter[str] = Counter()
        self.began, self.clock = datetime.now(UTC), time.monotonic()
        self.commit = config.getoption("commit") or _commit()
        self.broken_off = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of one test."""
        if report.when == "call":
            expected = hasattr(report, "wasxfail")
            if report.skipped:
                self.counts["xfailed" if expected else "skipped"] += 1
            elif report.passed:
                self.counts["xpassed" if expected else "passed"] += 1
            else:
                self.counts["failed"] += 1
        elif report.failed:
            self.counts["errors"] += 1
        elif report.skipped:
            self.counts["skipped"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that could not be collected."""
        if report.failed:
            self.counts["errors"] += 1
        elif report.skipped:
            self.counts["skipped"] += 1

    def break_off(self, *_: object) -> None:
        """End the run as Ctrl-C does, and ignore later signals, which would cut this end off."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.broken_off = True
        raise KeyboardInterrupt

    def record(self, status: int) -> dict[str, Any]:
        """Return the record of a run that ended with an exit status."""
        return {
            "date": self.began.strftime("%Y-%m-%d"),
            "began": self.began.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.clock, 1),
            "commit": self.commit,
            "profile": profiles.PROFILE,
            "markers": self.config.getoption("markexpr"),
            "arguments": [str(word) for word in self.config.args],
            "hardware": {
                "processor": _processor(),
                "cores": os.cpu_count(),
                "machine": platform.machine(),
                "gpus": _gpus(),
            },
            "versions": _versions(),
            "counts": {name: self.counts[name] for name in COUNTED},
            "exit_status": int(pytest.ExitCode.INTERRUPTED if self.broken_off else status),
        }

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the record."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record(exitstatus), indent=2) + "\n"
        self.file.write_text(text, encoding="utf-8")
