"""
`qeffect runtime tables`: a trial over two ranks on a CPU, its requirements, and the merging of
trials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.sides.table_rows import TableRow, table_rows
from qeffect.gpu_runtime.lab.statistics.complete_step import derive_tables
from qeffect.gpu_runtime.lab.statistics.paper import LARGE, SMALL
from qeffect.gpu_runtime.training.language_model import LanguageJob
from qeffect.schedule.plan import plan
from qeffect.schedule.torch_tables import torch_schedule
from tests.ranks import table_bodies
from tests.ranks.ranks import launch

#: Every weight gradient of each rank that does not directly follow its own dI, by microbatches.
DELAYED: Mapping[str, Mapping[int, list[int]]] = {
    "ScheduleInterleaved1F1B": {m: [0, 0] for m in (2, 4, 8, 16, 32)},
    "ScheduleInterleavedZeroBubble": {m: [0, 2 * m] for m in (2, 4, 8, 16, 32)},
    "ScheduleZBVZeroBubble": {2: [0, 0], 4: [0, 3], 8: [0, 3], 16: [0, 3], 32: [0, 3]},
}


@pytest.mark.parametrize("schedule", sorted(DELAYED))
def test_wgrads_that_torchs_tables_delay(schedule: str) -> None:
    """What the report counts, of every schedule and number of microbatches that it measures."""
    found = {
        m: [r.delayed for r in plan(torch_schedule(schedule, pp=2, vpp=2, microbatches=m)).ranks]
        for m in DELAYED[schedule]
    }
    assert found == DELAYED[schedule]


def test_a_row_is_asked_for_once_however_many_parts_have_it() -> None:
    """Native comes first in its cell; a copied row comes before the row compared with it."""
    rows = table_rows(("steps", "attribution", "resources", "mapping"), (SMALL, LARGE), 2)
    assert len(rows) == len(set(rows)) == 5 + 8 + 4 + 4
    sides = [row.side for row in rows if row.cell == LARGE and row.schedule == "il"]
    assert sides[:4] == ["native", "eager", "copied", "per_microbatch"]
    assert {row.cell for row in rows if row.cell not in (SMALL, LARGE)} == {
        f"h4096-s256-m{m}" for m in (2, 4, 16, 32)
    }


def test_four_ranks_have_one_stage_each_of_the_same_four_layers() -> None:
    """The mapping over two ranks has two; both have one layer a stage, and the language model."""
    cuts = {}
    for pp in (2, 4):
        rows = table_rows(("mapping",), (LARGE,), pp)
        for row in rows:
            job = row.job()
            assert job.num_stages == 4
            assert job.table().num_ranks == pp
            if isinstance(job, LanguageJob):
                assert (job.cut, job.vocabulary) == ((1, 1, 1, 1), 32768)
        cuts[pp] = {(row.vpp, row.schedule) for row in rows}
    assert cuts == {2: {(2, "il"), (2, "zbv")}, 4: {(1, "1f1b"), (1, "izb")}}


def test_weak_scaling_has_no_ends_of_a_language_model() -> None:
    """One layer a stage, and twice the stages over twice the ranks."""
    rows = table_rows(("weak",), (SMALL, LARGE), 4)
    assert {row.model for row in rows} == {"layers"}
    assert {row.job().num_stages for row in rows} == {8}
    assert TableRow(SMALL, "layers", 2, "il", "replays", 4) in rows


@pytest.mark.nightly
def test_two_ranks_measure_one_trial_and_its_bits_agree(tmp_path: Path) -> None:
    """Every row of a small trial, over gloo: a valid report whose derived part follows."""
    out = tmp_path / "trial.json"
    argv = [
        *("--device", "cpu", "--cells", "tiny-m4", "--parts", "attribution", "resources"),
        *("--microbatches", "2", "--rounds", "1", "--steps", "1", "--native-steps", "1"),
        *("--out", str(out), "--commit", "0" * 40),
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", table_bodies.tables_command, argv)
    assert said.codes == [0, 0]
    assert [said.words[rank][0] for rank in range(2)] == [0, 0], said.words
    report = json.loads(out.read_text())
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    assert report["complete"]
    derived = json.loads(json.dumps(derive_tables(report["raw"])))
    assert derived == report["derived"]
    rows = {(r["side"], r["cell"]): r for r in derived["rows"]}
    assert [side for side, _ in rows] == ["native", "eager", "copied", "per_microbatch", "replays"]
    for side, base in (("eager", "native"), ("per_microbatch", "copied")):
        found = rows[side, "tiny-m4"]
        assert (found["compared_with"], found["different"]) == (base, 0)
        assert found["values"] > 200
    assert rows["replays", "tiny-m2"]["handoffs"] == [rows["replays", "tiny-m2"]["handoffs"][0]] * 2
    assert derived["errors"] == []


@pytest.mark.ci
def test_a_side_that_fails_has_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    """A stage that cannot be built on one rank is said by both, in the row of its side."""
    said = launch(2, tmp_path, table_bodies.one_fails)
    assert said.codes == [0, 0]
    for rank in range(2):
        rows = said.words[rank]
        assert [row["error"] is None for row in rows] == [True, False, True]
        assert "rank 1 cannot build its stages: not today" in rows[1]["error"]


def test_what_is_counted_of_replays_follows_from_the_schedule(tmp_path: Path) -> None:
    """A refresh a stage, F, dI and dW of each microbatch; F, dI and dW graphs of the slots."""
    said = launch(2, tmp_path, table_bodies.captured_facts)
    assert said.codes == [0, 0]
    table = torch_schedule("ScheduleZBVZeroBubble", pp=2, vpp=2, microbatches=4, comms=True)
    for rank, planned in enumerate(plan(table).ranks):
        facts = said.words[rank]
        assert facts["replays"] == 2 + 3 * 2 * 4
        assert facts["handoffs"] >= 2  # on a CPU both halves of every action are counted
        assert sum(facts["slots"]) == facts["sum of slots"] >= planned.slots
        assert facts["graphs"] == 2 + 2 * facts["sum of slots"] + facts["variants"]
        assert facts["arena_bytes"] > 0
        assert min(facts["capture_s"], facts["warmup_s"]) > 0


class TestMerge:
    """Reports of trials become one."""

    @staticmethod
    def trials(folder: Path) -> list[str]:
        """Two reports of a trial each."""
        from tests.runtime import report_samples as samples

        whole = samples.tables_report()
        paths = []
        for n, trial in enumerate(whole["raw"]["trials"][1:3]):
            report = {**whole, "raw": {"trials": [trial]}}
            paths.append(folder / f"{n}.json")
            paths[-1].write_text(json.dumps(report))
        return [str(path) for path in paths]

    def test_two_trials_are_one_report_of_two(self, tmp_path: Path) -> None:
        """Medians over both; no rank is started."""
        out = tmp_path / "both.json"
        argv = ["runtime", "report", "tables", "--merge", *self.trials(tmp_path), "--out", str(out)]
        assert main(argv) == 0
        report: dict[str, Any] = json.loads(out.read_text())
        jsonschema.Draft202012Validator(reports.schema()).validate(report)
        assert (report["complete"], report["derived"]["trials"]) == (True, 2)
        native = next(r for r in report["derived"]["rows"] if r["side"] == "native")
        assert native["step_ms"] == {"median": 103.0, "min": 102.0, "max": 104.0}

    def test_one_that_was_ended_early_leaves_the_whole_incomplete(self, tmp_path: Path) -> None:
        """What it measured counts all the same."""
        first, second = self.trials(tmp_path)
        report = json.loads(Path(second).read_text())
        Path(second).write_text(json.dumps({**report, "complete": False}))
        out = tmp_path / "both.json"
        assert (
            main(["runtime", "report", "tables", "--merge", first, second, "--out", str(out)]) == 0
        )
        assert not json.loads(out.read_text())["complete"]

    def test_what_cannot_be_merged_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Another kind, device or commit, twice the same, half a report, options that measure."""
        first, second = self.trials(tmp_path)
        other = tmp_path / "other.json"
        report = json.loads(Path(first).read_text())
        other.write_text(json.dumps({**report, "kind": "scale"}))
        place = {**report["environment"], "gpu": "another"}
        Path(second).write_text(json.dumps({**report, "environment": place}))
        later, hollow, torn = (tmp_path / f"{name}.json" for name in ("later", "hollow", "torn"))
        place = {**report["environment"], "commit": "1" * 40}
        later.write_text(json.dumps({**report, "environment": place}))
        hollow.write_text(json.dumps({"schema": report["schema"], "kind": "tables"}))
        torn.write_text(json.dumps({**report, "raw": {"trials": [{"rows": [{}]}]}}))
        cases = [
            ([str(other)], "expected a report of kind 'tables', found 'scale'"),
            ([first, second], "gpu is 'another'"),
            ([first, str(later)], "commit is '111"),
            ([first, first], "the trial of 2026-11-22T08:00:00Z is given twice"),
            ([str(hollow)], "found one without environment"),
            ([str(torn)], "found incomplete measurements (KeyError: 'error')"),
            ([str(tmp_path / "none.json")], "No such file"),
            ([first, "--steps", "3"], "--merge only merges reports"),
            ([first, "--commit", "1" * 40], "--merge only merges reports"),
            ([first, "--out", str(tmp_path / "none" / "o.json")], "there is no folder"),
        ]
        for argv, words in cases:
            assert main(["runtime", "report", "tables", "--merge", *argv]) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert words in line
