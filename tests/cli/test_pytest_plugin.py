"""The pytest plugin as another project uses it: in a separate process, with warnings as errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STRICT = """
[pytest]
addopts = --strict-config --strict-markers -p no:cacheprovider
filterwarnings = error
xfail_strict = true
"""
TESTS = """
from qeffect import StageConfig, TapeKey
from qeffect.schedule.megatron import megatron_schedule

GOOD = ["0F0", "0F1", "0B0", "0B1"]


def test_rows(check_schedule):
    assert check_schedule(GOOD).verdict == "accepted"


def test_file(check_schedule):
    check_schedule("ours.csv")


def test_refused_file(check_schedule, tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0F1,0B0,0B1,0B1")
    check_schedule(tmp_path / "bad.csv")


def test_wanted_refusal(check_schedule):
    table = megatron_schedule(pp=2, vpp=2, microbatches=4, messages="batched")
    assert check_schedule(table, refused="schedule.message-order").rank == 1


def test_missing_refusal(check_schedule):
    check_schedule(GOOD, refused="schedule.message-order")


def test_other_refusal(check_schedule):
    check_schedule([*GOOD, "0B1"], refused="schedule.message-order")


def test_no_clause(check_schedule):
    check_schedule(GOOD, refused="schedule.mesage-order")


def test_wrong_entry(check_schedule):
    check_schedule([["0F0", "oops"]])


def test_wrong_option(check_schedule):
    check_schedule(GOOD, pairing="none")


def stage():
    return [StageConfig(0, microbatches=1, slots=1)]


def test_contract(guarded_contract):
    contract = guarded_contract(stage())
    with contract.refresh(0):
        pass


def test_contract_left_open(guarded_contract):
    contract = guarded_contract(stage(), omit=("version",))
    contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))


def test_contract_refuses(guarded_contract):
    contract = guarded_contract(stage())
    contract.check_forward(TapeKey(epoch=0, stage=0, microbatch=0))


def test_nothing():
    pass
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a project's suite with the plugin, and with no other that happens to be installed."""
    (folder / "pytest.ini").write_text(STRICT, "utf-8")
    (folder / "ours.csv").write_text("0F0,0B0\n", "utf-8")
    (folder / "test_ours.py").write_text(TESTS, "utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "qeffect.pytest_plugin", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a run of the project printed, and the report that it wrote."""
    folder = tmp_path_factory.mktemp("project")
    done = run(folder, "-rA", "-vv", "--qeffect-report", "report.json")
    assert 1 == done.returncode, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "report.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("rows", "PASSED"),
        ("file", "PASSED"),
        ("refused_file", "FAILED"),
        ("wanted_refusal", "PASSED"),
        ("missing_refusal", "FAILED"),
        ("other_refusal", "FAILED"),
        ("no_clause", "FAILED"),
        ("wrong_entry", "FAILED"),
        ("wrong_option", "FAILED"),
        ("contract", "PASSED"),
        ("contract_left_open", "ERROR"),
        ("contract_refuses", "FAILED"),
        ("nothing", "PASSED"),
    ],
)
def test_outcomes(ran: tuple[str, dict[str, Any]], test: str, outcome: str) -> None:
    """A test fails where the checker refuses, where it accepts what it should refuse, and open."""
    lines = ran[0].splitlines()

    assert any(line.split(" - ")[0] == f"{outcome} test_ours.py::test_{test}" for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        "bad.csv: rank 0, step 4 (0B1): schedule.duplicate-action: 0I1 occurs again",
        "expected: 0I1 once",
        ">0B1<",
        "expected a refusal by schedule.message-order, but the schedule was accepted",
        "test_other_refusal: expected a refusal by schedule.message-order",
        "is not a clause; did you mean schedule.message-order?",
        "check_schedule: rank 0, step 1: entry 'oops' is not an action",
        "check_schedule: unknown pairing",
        "neither committed nor aborted: contract 0: F of stage 0, microbatch 0",
        "version.stale-cache in check_forward",
        '"transition":"check_forward"',
        "qeffect: 6 schedules and 3 contracts checked; ",
    ],
)
def test_a_failure_says_what_and_where(ran: tuple[str, dict[str, Any]], words: str) -> None:
    """The clause, the place of the entry, expected and found; the events of a contract."""
    assert words in ran[0]


def test_the_report_has_every_check(ran: tuple[str, dict[str, Any]]) -> None:
    """What was refused, where, and whether the test wanted it; each contract's end."""
    _, report = ran
    schedules = {one["test"].partition("::test_")[2]: one for one in report["schedules"]}
    contracts = {one["test"].partition("::test_")[2]: one for one in report["contracts"]}

    assert {"qeffect", "schedules", "contracts"} == set(report)
    assert {
        "rows",
        "file",
        "refused_file",
        "wanted_refusal",
        "missing_refusal",
        "other_refusal",
    } == (set(schedules))
    refused = schedules["refused_file"]
    assert ("refused", "schedule.duplicate-action", 0, 4, "0B1", None) == tuple(
        refused[name] for name in ("verdict", "clause", "rank", "step", "action", "expected")
    )
    assert "schedule.message-order" == schedules["wanted_refusal"]["expected"]
    assert {"contract": [], "contract_left_open": ["F of stage 0, microbatch 0"]} == {
        name: contracts[name]["open"] for name in ("contract", "contract_left_open")
    }
    assert contracts["contract"]["events"] > 0


def test_nothing_is_loaded_and_written_unless_asked(tmp_path: Path) -> None:
    """Without the option and the fixtures the plugin adds no line, no file and no checker."""
    probe = "import sys\ndef test_it(): assert 'qeffect.schedule' not in sys.modules\n"
    (tmp_path / "test_probe.py").write_text(probe, "utf-8")
    done = run(tmp_path, "-q", "test_probe.py")

    assert 0 == done.returncode, done.stdout
    assert "qeffect" not in done.stdout
    assert {"pytest.ini", "ours.csv"} == {
        path.name for path in tmp_path.iterdir() if path.suffix not in ("", ".py")
    }


def test_workers_send_what_they_found(tmp_path: Path) -> None:
    """With pytest-xdist one report has the checks of all workers."""
    options = ("-p", "xdist.plugin", "-n", "2", "--qeffect-report", str(tmp_path / "report.json"))
    done = run(tmp_path, *options, "-k", "rows or wanted or test_contract")
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))

    assert "qeffect: 2 schedules and 3 contracts checked" in done.stdout
    assert (2, 3) == (len(report["schedules"]), len(report["contracts"]))


def test_a_report_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    """Before any test runs, in one line."""
    done = run(tmp_path, "--qeffect-report", "absent/report.json")

    assert 4 == done.returncode
    assert "there is no folder" in done.stderr
    assert "--qeffect-report" in done.stderr
    assert "passed" not in done.stdout


def test_help_has_the_option(tmp_path: Path) -> None:
    """In plain words, under a heading of its own."""
    done = run(tmp_path, "--help")

    assert "schedules and contracts" in done.stdout
    assert "--qeffect-report=FILE" in done.stdout.replace(" FILE", "=FILE")


def test_pytest_finds_the_plugin() -> None:
    """The entry point names the module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    assert {"qeffect": "qeffect.pytest_plugin"} == project["entry-points"]["pytest11"]
