"""
The comparison of `report restarts` finds differences, and a row that compared nothing does not
pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab.commands import restarts
from qeffect.gpu_runtime.lab.commands.restarts import remapped_row, resumed_row
from qeffect.gpu_runtime.lab.sides.restart import remapped_run, resumed_run
from qeffect.report import UnusableError

BYTES = {"numerical": 1, "total": 2}


def restarts_command(*words: str) -> int:
    """Run `qeffect runtime report restarts`; return its exit code."""
    return main(["runtime", "report", "restarts", *words, "--commit", "0" * 40])


def rank(**changes: Any) -> dict[str, Any]:
    """What one rank of a part says."""
    return {
        "began": 3, "epoch": 8, "first": {"a": "x"}, "last": {"a": "y"}, "saved": {"3": {"a": "x"}},
        "losses": {"3": [1.0, 2.0]}, "changed": [], "loaded otherwise": [], "differ": [],
        "moved": 1, "same losses": True, "launches": 0, **changes,
    }  # fmt: skip


def test_a_run_that_went_on_alike_is_so() -> None:
    """Two tensors and two losses of each of two ranks."""
    row = resumed_row("il", [rank()] * 2, [rank()] * 2, BYTES)
    assert (row["compared"], row["differ"], row["losses"]) == (8, 0, [6.0])


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"first": {"a": "z"}}, "a"),
        ({"last": {"a": "z"}}, "a"),
        ({"last": {}}, "a"),
        ({"losses": {"3": [1.0, 2.5]}}, "loss of step 3"),
        ({"began": 0}, "steps 0 to 8"),
    ],
)
def test_what_differs_is_counted(changes: dict[str, Any], first: str) -> None:
    """One bit of one rank."""
    row = resumed_row("il", [rank()] * 2, [rank(), rank(**changes)], BYTES)
    assert (row["differ"], row["first"]) == (1, [first])


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"first": {"a": "z"}}, "a"),
        ({"first": {"a": "x", "b": "x"}}, "b"),
        ({"loaded otherwise": ["c"]}, "c"),
        ({"differ": ["d"]}, "d"),
        ({"same losses": False}, "losses"),
        ({"moved": 0}, "no step"),
    ],
)
def test_what_differs_under_another_mapping_is_counted(changes: dict[str, Any], first: str) -> None:
    """The count includes values that differ after the load or after the step, and a step that did
    not run."""
    good = remapped_row("il", "zbv", [rank()], [rank()], BYTES)
    assert (good["compared"], good["differ"]) == (4, 0)
    row = remapped_row("il", "zbv", [rank()], [rank(**changes)], BYTES)
    assert (row["differ"], row["first"]) == (1, [first])


def test_behind_a_part_that_failed_no_other_is_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for one that was taken up before the failure was seen."""
    begun = []

    def run_part(part: Callable[..., Any], *_rest: object, **_options: object) -> list[Any]:
        begun.append(part.__name__)
        if part is resumed_run:
            raise UnusableError("a rank failed: exit code 7")
        if part is remapped_run:
            time.sleep(0.5)
        return [rank()]

    monkeypatch.setattr(restarts, "_run_part", run_part)
    monkeypatch.setattr(restarts, "sizes", lambda _path: BYTES)
    assert restarts_command("--schedules", "il", "zbv") == 2
    assert "a rank failed: exit code 7" in capsys.readouterr().err
    assert begun[:2] == ["first_run", "resumed_run"]
    assert begun.count("remapped_run") < 4
    assert begun.count("first_run") == 1


@pytest.mark.parametrize("words", [[], ["--device", "cuda", "--eager"]])
def test_without_graphs_no_step_is_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before any part is begun."""
    assert restarts_command("--one-launch", *words) == 2
    assert "--one-launch makes a step one CUDA graph" in capsys.readouterr().err


@pytest.mark.slow(minutes=2)
def test_the_driver_runs_on_a_cpu(tmp_path: Path) -> None:
    """Under torchrun, in fresh processes of their own; the report is whole."""
    out = tmp_path / "restarts.json"
    command = [sys.executable, "-m", "qeffect", "runtime", "report", "restarts",
               "--schedules", "il",
               "--masters", "--asynchronous", "--commit", "0" * 40, "--out", str(out)]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["complete"]
    found = report["derived"]
    assert (found["resumed"], found["remapped"], found["differ"]) == (1, 4, 0)
    assert found["compared"] > 1000
