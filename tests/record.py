"""
A dated record of a run of the suite, which ``pytest --record FILE`` writes when the run ends.

A record says what ran (profile, marker expression, arguments), where (hardware, versions, commit)
and how it ended (counts, seconds, exit status). Checked-in records are in ``tests/records``.
``--resume`` resumes a run that was cut off; the record then names every part of the run.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests import profiles
from tests.run_log import RunLog, bare_id

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

CUT_OFF = int(pytest.ExitCode.INTERRUPTED)
"""The exit status of a run that a signal or a time limit cut off."""

SAME = ("commit", "profile", "markers", "arguments")
"""What all parts of a run have in common."""


def _commit() -> str | None:
    """
    The commit, with ``+`` if tracked files other than records differ; None outside a checkout.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", ".", ":(exclude)tests/records")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
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

    The log of the run (`tests.run_log`) is written beside the record. With the log, a run that was
    cut off can be resumed: a later part skips the tests that have ended.

    Args:
        file: File of the record.
        config: The run's configuration.
        resumed: Whether the run continues an earlier run that was cut off.

    Raises:
        pytest.UsageError: The run cannot be resumed.
    """

    def __init__(self, file: Path, config: pytest.Config, *, resumed: bool = False) -> None:
        self.file, self.config = file, config
        self.began, self.clock = datetime.now(UTC), time.monotonic()
        self.commit = config.getoption("commit") or _commit()
        self.broken_off = False
        self.outcomes: defaultdict[str, list[str]] = defaultdict(list)
        log = file.with_suffix(".log.jsonl")
        self.log = self._resumable(log) if resumed else RunLog(log)
        self.before = frozenset(self.log.ended)

    def _same(self) -> dict[str, Any]:
        """What all parts of a run have in common."""
        return {
            "commit": self.commit,
            "profile": profiles.PROFILE,
            "markers": self.config.getoption("markexpr"),
            "arguments": [str(word) for word in self.config.args] + self._selection(),
        }

    def _selection(self) -> list[str]:
        """The options that deselect tests, except the marker expression."""
        option = self.config.getoption
        chosen = ["-k", option("keyword")] if option("keyword") else []
        for name in ("deselect", "ignore", "ignore_glob"):
            chosen += [f"--{name.replace('_', '-')}={word}" for word in option(name) or ()]
        return chosen

    def _resumable(self, file: Path) -> RunLog:
        """The log of the run that this part resumes."""
        try:
            log = RunLog.read(file)
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"--resume: cannot read the log of the run: {error}") from None
        last = log.parts[-1]
        if last.get("exit_status", CUT_OFF) != CUT_OFF:
            raise pytest.UsageError(f"--resume: {file} is of a run that ended by itself")
        if self.commit is None:
            raise pytest.UsageError("--resume: outside a checkout, name the commit with --commit")
        for name, here in self._same().items():
            if here != last[name] or (name == "commit" and here.endswith("+")):
                raise pytest.UsageError(
                    f"--resume: {file} has {name} {last[name]!r}, this run has {here!r}; "
                    "resume at the same commit, without changed files and with the same options"
                )
        return log

    def pytest_sessionstart(self) -> None:
        """Begin a part of the run."""
        self.log.begin(
            {
                "began": self.began.isoformat(timespec="seconds"),
                **self._same(),
                "hardware": {
                    "processor": _processor(),
                    "cores": os.cpu_count(),
                    "machine": platform.machine(),
                    "gpus": _gpus(),
                },
                "versions": _versions(),
            }
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist which tests have ended in earlier parts."""
        node.workerinput["ended"] = sorted(self.before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how one phase of one test ended."""
        found = self.outcomes[report.nodeid]
        if report.when == "call":
            expected = hasattr(report, "wasxfail")
            if report.skipped:
                found.append("xfailed" if expected else "skipped")
            elif report.passed:
                found.append("xpassed" if expected else "passed")
            else:
                found.append("failed")
        elif report.failed:
            found.append("errors")
        elif report.skipped:
            found.append("skipped")
        if report.when not in ("setup", "call"):  # a worker that crashed has one report of its own
            self._ended(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a module that could not be collected."""
        if report.failed or report.skipped:
            self.outcomes[report.nodeid] = ["errors" if report.failed else "skipped"]
            self._ended(report.nodeid)

    def _ended(self, node: str) -> None:
        self.log.test_ended(bare_id(node), self.outcomes.pop(node), time.monotonic() - self.clock)

    def break_off(self, *_: object) -> None:
        """
        End the run as Ctrl-C does, and ignore later signals, which would interrupt the end of the
        run.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.broken_off = True
        raise KeyboardInterrupt

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record. The exit status of a run whose earlier parts failed is not 0."""
        status = CUT_OFF if self.broken_off else exitstatus
        self.log.end(time.monotonic() - self.clock, int(status))
        found = record(self.log)
        _write(self.file, found)
        session.exitstatus = found["exit_status"]


def record(log: RunLog) -> dict[str, Any]:
    """The record of a run with all its parts (processes that each run the tests that are left). A
    part without an end was killed."""
    first, *later = log.parts
    counts = log.counts()
    status = log.parts[-1].get("exit_status", CUT_OFF)
    nothing_left = later and status == pytest.ExitCode.NO_TESTS_COLLECTED
    if nothing_left or status == pytest.ExitCode.OK:
        failed = counts["failed"] + counts["errors"] > 0
        status = int(pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    return {
        "date": log.parts[-1]["began"][:10],
        "began": first["began"],
        "seconds": round(sum(part["seconds"] for part in log.parts), 1),
        **{name: first[name] for name in SAME},
        "hardware": first["hardware"],
        "versions": first["versions"],
        **({"later_parts": [_part(part) for part in later]} if later else {}),
        "counts": {name: counts[name] for name in COUNTED},
        "exit_status": status,
    }


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a record has for a part after the first."""
    return {name: part[name] for name in ("began", "seconds", "hardware", "versions")}


def _write(file: Path, found: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def main(words: Sequence[str]) -> int:
    """Write the record of each log, beside the log."""
    if not words:
        print("usage: python -m tests.record LOG...", file=sys.stderr)
        return 2
    for word in words:
        file = Path(word)
        try:
            found = record(RunLog.read(file))
            _write(file.with_suffix("").with_suffix(".json"), found)
        except (OSError, ValueError) as error:
            print(f"tests.record: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
