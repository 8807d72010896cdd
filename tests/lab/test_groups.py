"""
The report of grouped weight gradients: its rows, its figures (computed a second time), and a run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.reports.text import group_lines
from qeffect.gpu_runtime.lab.sides.group_rows import CELLS, GroupRow, group_rows
from qeffect.gpu_runtime.lab.statistics.groups import derive_groups
from tests.lab import group_bodies
from tests.ranks.ranks import launch
from tests.runtime.report_samples import group_row, groups_report
from tests.training.helpers import CONFIG

#: Step time over today's that grouping must reach in the better schedule.
WANTED = {
    ("h4096-s256-m8", "bf16"): 0.85,
    ("h4096-s256-m8", "fp32"): 0.65,
    ("h2048-s256-m4", "bf16"): 0.95,
    ("h2048-s256-m4", "fp32"): 0.85,
    ("h4096-s1024-m8", "fp32"): 0.85,
}


def measured(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that did not fail."""
    return [row for row in report["raw"]["rows"] if row["error"] is None]


def ratios(report: dict[str, Any]) -> dict[tuple[str, str], dict[tuple[str, int], float]]:
    """By cell and type: the time over today's, by schedule and group."""
    today = defaultdict(list)
    for row in measured(report):
        if row["scales"] == "action":
            today[row["cell"], row["dtype"], row["schedule"]] += row["step_ms"]
    found: dict[tuple[str, str], dict[tuple[str, int], float]] = defaultdict(dict)
    for row in measured(report):
        place = row["cell"], row["dtype"], row["schedule"]
        if row["scales"] == "epoch" and place in today:
            over = median(row["step_ms"]) / median(today[place])
            found[place[:2]][row["schedule"], row["group"]] = over
    return found


@pytest.mark.parametrize(
    "report",
    [groups_report(), *reports.load(kind="groups")],
    ids=lambda one: one["environment"]["date"],
)
def test_the_figures_computed_once_more(report: dict[str, Any]) -> None:
    """Of the sample, and of every report of this kind."""
    derived, own = report["derived"], ratios(report)
    for raw, row in zip(measured(report), derived["rows"], strict=True):
        ms = sorted(raw["step_ms"])
        shown = row["step_ms"]
        assert shown == {n: round(v, 4) for n, v in zip(
            ("median", "min", "max"), (median(ms), ms[0], ms[-1]), strict=True
        )}  # fmt: skip
        assert row["peak_bytes"] == max(raw["peak_bytes"])
    for raw, one in zip(report["raw"]["products"], derived["products"], strict=True):
        took = raw["ms"]
        assert one["joined_ms"] == took["join"] + took["one"]
        assert one["over_each"] == round((took["join"] + took["one"]) / took["each"], 4)
        assert one["apart_over_each"] == round(raw["apart"]["one"] / raw["apart"]["each"], 4)
        assert (one["each_ms"], one["same_bits"]) == (took["each"], raw["same_bits"])
    for one in derived["sets"]:
        over = {
            str(group): round(value, 4)
            for (schedule, group), value in own[one["cell"], one["dtype"]].items()
            if schedule == one["schedule"]
        }
        assert one["over_today"] == over
        assert (one["best"] or {}).get("over_today") == min(over.values(), default=None)
    targets = {
        (one["cell"], dtype): one
        for one in derived["targets"]
        for dtype in ("bf16", "fp32")
        if dtype in one["goal"]
    }
    assert targets.keys() == {place for place in WANTED if own.get(place)}
    for place, target in targets.items():
        (schedule, group), best = min(own[place].items(), key=lambda pair: pair[1])
        assert (target["measured"], target["value"]) == (round(best, 4), WANTED[place])
        assert target["met"] == (round(best, 4) <= WANTED[place])
        assert target["column"] == f"{schedule}, group {group}"
    hashes = defaultdict(dict)
    for row in measured(report):
        if row["digest"] is not None:
            hashes[row["cell"], row["dtype"], row["group"]][row["schedule"]] = row["digest"]
    for one in derived["digests"]:
        said = hashes[one["cell"], one["dtype"], one["group"]]
        assert one["alike"] == (len(set(said.values())) == 1 if len(said) == 2 else None)


def test_the_sample() -> None:
    """The median of both rows of today counts; a digest that differs is named."""
    derived = groups_report()["derived"]
    il, zbv, wide = derived["sets"]
    assert il["today_ms"] == {"median": 9.5, "min": 8.0, "max": 12.0}
    assert il["today_medians"] == [11.0, 9.0]
    assert zbv["best"] == {"group": 8, "over_today": 0.8}
    assert wide["over_today"] == {"4": 0.75}
    assert [(t["measured"], t["met"]) for t in derived["targets"]] == [(0.8, True), (0.75, False)]
    assert [one["alike"] for one in derived["digests"]] == [False, True, None]
    assert derived["rows"][0]["slots"] == {"0": 4, "1": 3, "2": 2, "3": 1}
    lines = group_lines(derived)
    assert "DIFFERENT digests: h4096-s256-m8, bf16, group 1: il and zbv" in lines
    assert "1 of 2 digests are equal under every schedule" in lines
    assert any(line.endswith("group 8: no memory") for line in lines)


def test_a_set_without_today_has_no_ratio() -> None:
    """Nor a best group, nor a goal."""
    derived = derive_groups({"products": [], "rows": [group_row("il", "bf16", 8, [9.0])]})
    (own,) = derived["sets"]
    assert (own["today_ms"], own["over_today"], own["best"]) == (None, {}, None)
    assert derived["targets"] == []


def test_rows() -> None:
    """Today around every power of two; a number that does not divide a cell is left out."""
    rows = group_rows(["h2048-s256-m4"], ["zbv"], ["fp32"], [], pp=2, launches=True)
    assert [(row.side, row.group) for row in rows] == [
        *(("today", 1), ("grouped", 1), ("grouped", 2), ("grouped", 4), ("today", 1)),
    ]
    cells = ["h2048-s256-m4", "h4096-s1024-m8"]
    rows = group_rows(cells, ["il"], ["bf16"], [8, 2], pp=2, launches=True)
    assert [row.group for row in rows] == [1, 2, 1, 1, 2, 8, 1]
    job = GroupRow("h4096-s1024-m8", "zbv", "bf16", "epoch", 8).job()
    assert (job.layers, job.num_stages, job.wgrad_group, job.scales) == (1, 4, 8, "epoch")
    assert (job.config.ffn, job.config.sequence, job.microbatches) == (14336, 1024, 8)
    assert all(int(name.rpartition("-m")[2]) == cell.microbatches
               for name, cell in CELLS.items() if name != "tiny")  # fmt: skip


@pytest.mark.ci
def test_a_run_of_one_rank_of_a_cpu(tmp_path: Path) -> None:
    """Every group has one digest under both schedules; another group has another digest."""
    out = tmp_path / "groups.json"
    words = ["runtime", "report", "groups", "--device", "cpu", "--pp", "1", "--cells", "tiny"]
    words += ["--dtypes", "bf16", "--groups", "1", "4", "--rounds", "1", "--steps", "1"]
    words += ["--commit", "0" * 40, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "qeffect", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tiny, zbv, bf16, group 4: " in done.stderr
    assert "2 of 2 digests are equal under every schedule" in done.stdout
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    assert report["complete"]
    rows = report["raw"]["rows"]
    assert [(row["scales"], row["group"]) for row in rows] == 2 * [
        *(("action", 1), ("epoch", 1), ("epoch", 4), ("action", 1)),
    ]
    assert {row["mode"] for row in rows} == {"eager"}
    digests = [row["digest"] for row in rows]
    assert digests[:4] == digests[4:]
    assert len({digests[1], digests[2]} - {None}) == 2
    assert digests[0] is digests[3] is None
    assert [row["slots"] for row in report["derived"]["rows"][:3]] == [
        *({"0": 2, "1": 1}, {"0": 2, "1": 1}, {"0": 4, "1": 4}),
    ]


@pytest.mark.ci
def test_a_row_that_fails_is_recorded(tmp_path: Path) -> None:
    """With its error, and the rows behind it are measured; a cell may take no digests."""
    rows, notes = launch(1, tmp_path, group_bodies.one_fails).words[0]
    assert [row["error"] for row in rows] == [None, None, "BackendError: not today", None]
    assert rows[2].keys() == {"cell", "schedule", "dtype", "scales", "group", "error"}
    assert "tiny, il, bf16, group 4: FAILED, BackendError: not today" in notes
    assert {row["digest"] for row in rows if row["error"] is None} == {None}
    derived = derive_groups({"products": [], "rows": rows})
    assert [(one["scales"], one["group"]) for one in derived["errors"]] == [("epoch", 4)]
    assert derived["sets"][0]["over_today"].keys() == {"1"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--groups", "3"], "--groups: expected a divisor of the 4 microbatches of tiny, found 3"),
        (["--groups", "0"], "--groups: expected at least 1, found 0"),
        (["--rounds", "0"], "--rounds: expected at least 1, found 0"),
        (["--limit", "nan"], "--limit: expected at least 1, found nan"),
    ],
)
def test_options_that_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    asked = ["runtime", "report", "groups", "--device", "cpu", "--cells", "tiny", *words]
    assert main(asked) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("how", ["all", "ends"])
def test_a_comparison_with_native_refuses_groups(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group in the file is refused before anything starts: its text does not even exist."""
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.replace("[model]\n", '[model]\nscales = "epoch"\nwgrad_group = 2\n'))
    assert main(["runtime", "train", str(file), "--compare", how]) == 2
    said = capsys.readouterr().err
    assert "[model] wgrad_group: expected 1 with --compare, found 2" in said
    assert "set wgrad_group = 1" in said
