"""
Reports: figures derived from raw numbers, the schema, every checked-in report, and the pictures.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab import reports
from qeffect.gpu_runtime.lab.commands import plots
from qeffect.gpu_runtime.lab.commands import streams as streamcheck
from qeffect.gpu_runtime.lab.reports.report import SCHEMA, environment
from qeffect.gpu_runtime.lab.reports.text import bench_lines, stream_lines, sweep_lines
from qeffect.gpu_runtime.lab.sides.cells import CELLS
from qeffect.gpu_runtime.lab.sides.columns import SPECS
from qeffect.gpu_runtime.lab.statistics.derive import (
    DERIVE,
    break_even,
    derive_cell,
    excess_over_floor,
    gap_behind,
    memory_bytes,
    paired_ratio,
    rank_peak,
)
from qeffect.gpu_runtime.lab.statistics.goals import GOALS, judge_cells
from qeffect.gpu_runtime.lab.statistics.scale import derive_scale
from qeffect.gpu_runtime.lab.statistics.summary import spread
from qeffect.report import package

from ..docs.remarks import CUT
from . import report_samples as samples

SAMPLES: dict[str, Callable[[], dict[str, Any]]] = {
    "bench": samples.bench_report,
    "sweep": samples.sweep_report,
    "streams": samples.streams_report,
    "compare": samples.compare_report,
    "pools": samples.pools_report,
    "probes": samples.probes_report,
    "scale": samples.scale_report,
    "tables": samples.tables_report,
    "peers": samples.peers_report,
    "models": samples.models_report,
    "groups": samples.groups_report,
    "train": samples.train_report,
    "restarts": samples.restarts_report,
    "kills": samples.kills_report,
    "modes": samples.modes_report,
    "scales": samples.scales_report,
    "second_runs": samples.second_runs_report,
    "curves": samples.curves_report,
}


def check(report: dict[str, Any], name: str = "") -> None:
    """What every checked-in report must pass; one of a name that was cut short may lack its end."""
    jsonschema.Draft202012Validator(reports.schema()).validate(report)
    recomputed = json.loads(json.dumps(DERIVE[report["kind"]](report["raw"])))
    assert recomputed == report["derived"], (
        "derived figures differ from those recomputed from the raw figures"
    )
    cut = (name, report["environment"]["commit"][:12]) in CUT
    assert report["complete"] or cut, "expected a complete report, found one that was cut off"
    assert not report["configuration"].get("quick"), (
        "expected a measurement, found a report of a quick run"
    )


def change_a_number(derived: Any) -> bool:
    """Change the first count, or finding, of a derived part; whether there was one."""
    places = derived.items() if isinstance(derived, dict) else enumerate(derived)
    for place, value in places:
        if isinstance(value, (dict, list)):
            if change_a_number(value):
                return True
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            derived[place] += 1
            return True
        elif place == "found":
            derived[place] += "1"
            return True
    return False


def test_a_training_run_beside_native() -> None:
    """Speed is the ratio of both sides' seconds; a loss that is another is counted."""
    same, alone = samples.train_report()["derived"]["runs"]
    other, _ = samples.train_report(differ=1)["derived"]["runs"]

    assert 3.0 == same["native_over_this"]
    assert (0, 1) == (same["losses_differ"], other["losses_differ"])
    assert 384 == same["tokens_per_s"]
    assert alone["losses_differ"] is alone["native_over_this"] is alone["differ"] is None
    assert math.isclose(alone["perplexity"], math.exp(3.25), rel_tol=1e-6)


class TestSchema:
    def test_the_schema_is_one(self) -> None:
        """It is valid JSON schema, and carries the name that reports carry."""
        jsonschema.Draft202012Validator.check_schema(reports.schema())
        assert SCHEMA == reports.schema()["$id"]

    @pytest.mark.parametrize("kind", sorted(SAMPLES))
    def test_a_report_of_every_kind_passes(self, kind: str) -> None:
        """Every kind that can be derived has a schema."""
        assert sorted(SAMPLES) == sorted(DERIVE)
        check(json.loads(json.dumps(SAMPLES[kind]())))

    @pytest.mark.parametrize("kind", sorted(SAMPLES))
    @pytest.mark.parametrize(
        "missing", ["environment", "raw", "derived", "configuration", "complete"]
    )
    def test_no_part_may_be_missing(self, kind: str, missing: str) -> None:
        """Removing a part is refused by the schema."""
        report = SAMPLES[kind]()
        del report[missing]
        with pytest.raises(jsonschema.ValidationError):
            check(report)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("commit", "main"), ("date", "today"), ("argv", ["--out=/a/b"]), ("packages", {})],
    )
    def test_an_environment_that_cannot_be_reproduced_is_refused(
        self, key: str, value: Any
    ) -> None:
        """The commit is a commit, the date a date, and no folder of a machine is in it."""
        report = samples.bench_report()
        report["environment"] = {**report["environment"], key: value}
        with pytest.raises(jsonschema.ValidationError):
            check(report)

    def test_a_raw_number_of_another_name_is_refused(self) -> None:
        """Raw records hold what the harness writes and nothing that a hand adds."""
        report = samples.bench_report()
        report["raw"]["cells"][0]["columns"]["native_grad"]["note"] = "fast"
        with pytest.raises(jsonschema.ValidationError):
            check(report)

    def test_a_hand_written_ratio_is_found(self) -> None:
        """One derived digit that does not follow from the raw numbers fails the check."""
        report = samples.bench_report()
        entry = report["derived"]["cells"][0]["columns"]["ours_accumulate"]
        entry["native_over_this"]["median"] += 0.01
        with pytest.raises(AssertionError, match="derived figures differ"):
            check(report)

    def test_an_unfinished_or_quick_run_is_no_evidence(self) -> None:
        """Neither may be checked in."""
        for part, key, value in (("complete", None, False), ("configuration", "quick", True)):
            report = samples.bench_report()
            if key is None:
                report[part] = value
            else:
                report[part][key] = value
            with pytest.raises(AssertionError):
                check(report)


class TestCheckedIn:
    def test_every_checked_in_report_is_valid_and_recomputes(self) -> None:
        """No report, in no subfolder, holds a number that a reader could not compute again."""
        found = reports.paths()
        for path in found:
            check(json.loads(path.read_text(encoding="utf-8")), path.name)
        assert [*found, reports.SCHEMA_PATH] == [
            *(p for p in sorted(reports.FOLDER.rglob("*.json")) if p != reports.SCHEMA_PATH),
            reports.SCHEMA_PATH,
        ]

    @pytest.mark.parametrize("kind", sorted(SAMPLES))
    def test_a_wrong_derived_number_of_any_kind_is_found(self, kind: str, tmp_path: Path) -> None:
        """In a folder of reports, a derived number of any kind that was changed by hand fails."""
        report = json.loads(json.dumps(SAMPLES[kind]()))
        path = tmp_path / "found.json"
        path.write_text(json.dumps(report))
        (found,) = reports.paths(tmp_path)
        check(json.loads(found.read_text()))

        assert change_a_number(report["derived"])
        path.write_text(json.dumps(report))

        with pytest.raises(AssertionError, match="derived figures differ"):
            check(json.loads(found.read_text()))

    @pytest.mark.parametrize("installed", ["2.18.0", "2.20.2", None])
    def test_the_library_that_is_installed_is_recorded(
        self, installed: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A report records the version of Transformer Engine under which it ran, or that the
        library is not installed."""

        def version(package: str) -> str:
            if package.replace("_", "-") != "transformer-engine":
                return "2.11.0"
            if installed is None:
                raise PackageNotFoundError(package)
            return installed

        monkeypatch.setattr("qeffect.report.version", version)

        assert installed == package(environment("1" * 40), "transformer-engine")

    def test_the_environment_of_this_machine_fits_the_schema(self) -> None:
        """What a report would say of the machine that runs this test."""
        report = samples.bench_report()
        report["environment"] = environment("1" * 40)
        check(json.loads(json.dumps(report)))

    def test_the_environment_of_an_older_report_fits_the_schema(self) -> None:
        """Reports that name torch beside the other entries stay readable."""
        report = samples.bench_report()
        held = dict(report["environment"])
        del held["packages"], held["cores"], held["load_1min"]
        held |= {"cpus": 1, "torch": "2.11.0", "transformer_engine": None}
        report["environment"] = held
        check(report)
        assert ("2.11.0", None) == (package(held, "torch"), package(held, "transformer-engine"))


class TestDerived:
    def test_ratios_are_paired_by_round(self) -> None:
        """A drift that both columns share cancels; medians of each alone would not show it."""
        slow = samples.column(ms=[10.0, 20.0, 40.0])
        fast = samples.column(ms=[5.0, 10.0, 20.0])
        assert {"median": 2.0, "min": 2.0, "max": 2.0, "spread": 0.0} == paired_ratio(slow, fast)

    def test_spread_is_the_range_over_the_median(self) -> None:
        """Not a standard deviation: five rounds are too few for one."""
        assert 0.2 == spread([1.0, 1.1, 0.9])["spread"]

    def test_a_floor_is_the_least_kernel_time_of_its_own_rule(self) -> None:
        """A column that sums gradients in another way sets no floor for this one, nor do ours."""
        derived = derive_cell(
            samples.cell_record(
                CELLS[0],
                {
                    "native_grad": samples.column(kernel_ms=5.0),
                    "whole_grad": samples.column("whole_step", kernel_ms=4.5, ms=[5.0]),
                    "ours": samples.column("ours_captured", "main_grad", kernel_ms=3.0, ms=[3.3]),
                },
            )
        )
        assert {"kernel_ms": 4.5, "column": "whole_grad"} == derived["floors"]["grad"]
        assert {"ratio": 1.1111, "of": "whole_grad"} == derived["columns"]["whole_grad"][
            "over_floor"
        ]
        assert derived["columns"]["ours"]["over_floor"] is None
        assert 1.1 == derived["columns"]["ours"]["over_own_kernels"]
        assert derived["columns"]["ours"]["over_whole_step"] is None

    def test_the_faster_native_is_the_reference(self) -> None:
        """Speedups are over the best that users have, not over the slower of two."""
        derived = samples.bench_report()["derived"]["cells"][0]
        assert "native_main_grad" == derived["fastest_native"]
        assert "te_graphs_model" == derived["fastest_te_graphs"]
        assert (
            pytest.approx(36.0 / 4.1, abs=1e-3)
            == derived["columns"]["ours_accumulate"]["native_over_this"]["median"]
        )

    def test_a_failed_column_is_in_no_ratio(self) -> None:
        """It is in the raw part with its error, and sets neither reference nor floor."""
        columns = samples.bench_columns(CELLS[0])
        columns["native_main_grad"]["error"] = "out of memory"
        derived = derive_cell(samples.cell_record(CELLS[0], columns))
        assert "native_main_grad" not in derived["columns"]
        assert "native_grad" == derived["fastest_native"]

    def test_break_even_counts_set_up_and_first_step(self) -> None:
        """0.5 s behind at 25 ms a step is made up by 20 steps after the first."""
        native = samples.column(ms=[30.0], first_s=0.1)
        ours = samples.column("ours_captured", ms=[5.0], warm_s=0.4, first_s=0.2)
        assert 21 == break_even(ours, native)
        assert 1 == break_even(samples.column(ms=[5.0], first_s=0.1), native)

    def test_a_column_that_is_slower_never_breaks_even(self) -> None:
        """It has no number, and its goal is missed rather than left out."""
        columns = samples.bench_columns(CELLS[0])
        columns["ours_accumulate"]["rounds"] = samples.column(ms=[99.0])["rounds"]
        derived = derive_cell(samples.cell_record(CELLS[0], columns))
        assert derived["columns"]["ours_accumulate"]["break_even_steps"] is None
        (judged,) = [
            goal
            for goal in judge_cells([derived])
            if goal["goal"].startswith("break-even") and goal["column"] == "ours_accumulate"
        ]
        assert judged["measured"] is None
        assert not judged["met"]

    def test_memory_is_the_largest_of_three_figures(self) -> None:
        """What the allocator gave back between two looks at the driver is added to the driver's."""
        found = memory_bytes(samples.column(peak=1000))
        assert {"allocated": 1000, "reserved": 1300, "driver": 2200} == found
        column = samples.column(peak=1000)
        column["memory"]["device_polled_rise"] = 9999
        polled = memory_bytes(column)
        assert polled is not None
        assert 9999 == polled["driver"]

    def test_memory_above_native_is_judged_by_its_largest_figure(self) -> None:
        """Here the driver's: it saw half a gigabyte that the allocator did not."""
        columns = samples.bench_columns(CELLS[0])
        columns["native_main_grad"]["memory"] = samples.column(peak=10**9)["memory"]
        ours = columns["ours_accumulate"]["memory"] = samples.column(peak=2 * 10**9)["memory"]
        ours["device_after"] += 5 * 10**8
        derived = derive_cell(samples.cell_record(CELLS[0], columns))
        above = derived["columns"]["ours_accumulate"]["above_native_bytes"]
        assert (10**9, 10**9, 15 * 10**8) == tuple(
            above[key] for key in ("allocated", "reserved", "driver")
        )
        assert 15 * 10**8 == above["largest"]
        (judged,) = [
            goal
            for goal in judge_cells([derived])
            if (goal["goal"].split(",")[0], goal["column"])
            == ("peak memory above native", "ours_accumulate")
        ]
        assert (1.5, False) == (judged["measured"], judged["met"])

    def test_matrix_copies_are_counted_for_each_step(self) -> None:
        """64 over two profiled steps are 32 a step, and none elsewhere."""
        columns = samples.bench_report()["derived"]["cells"][0]["columns"]
        assert 32 == columns["ours_copied"]["matrix_copies"]["per_step"]
        assert 0 == columns["ours_accumulate"]["matrix_copies"]["per_step"]
        assert not columns["ours_copied"]["matrix_copies"]["ambiguous"]

    def test_an_activation_of_a_gradients_size_is_called_ambiguous(self) -> None:
        """In the third cell a hidden state has the bytes of a square matrix."""
        third = samples.bench_report()["derived"]["cells"][2]
        assert third["columns"]["ours_copied"]["matrix_copies"]["ambiguous"]

    def test_device_counts_cost_the_ratio_of_the_same_step(self) -> None:
        """The price is the time of the step with device counts over the time of the same step
        without them, in one run."""
        report = samples.bench_report()
        counts = report["derived"]["cells"][0]["device_counts"]

        assert pytest.approx(4.141 / 4.1, abs=1e-4) == counts["step_on_over_off"]["median"]
        goals = [t for t in report["derived"]["targets"] if "counted" in t["goal"]]
        assert [(True, 1.015)] * 2 == [(goal["met"], goal["value"]) for goal in goals]
        late = report["derived"]["cells"][0]["late_counts"]
        assert pytest.approx(4.11 / 4.1, abs=1e-4) == late["step_on_over_off"]["median"]

    def test_guards_cost_the_difference_of_the_same_step(self) -> None:
        """Host time comes from single steps on an idle device, divided by the actions."""
        guards = samples.bench_report()["derived"]["cells"][0]["guards"]
        assert pytest.approx(4.1 / 4.08, abs=1e-4) == guards["step_on_over_off"]["median"]
        expected = 1e3 * (4.1 - 4.08) / 2 / 26
        assert pytest.approx(expected, abs=1e-3) == guards["host_us_of_a_guard"]["median"]

    def test_a_rise_where_live_tapes_are_flat_misses_its_goal(self) -> None:
        """4 and 8 microbatches have the same live tapes, so nothing may grow between them."""
        assert all(goal["met"] for goal in samples.sweep_report()["derived"]["targets"])
        targets = samples.sweep_report(arena_rise=1)["derived"]["targets"]
        assert ["live slots: rise of arena_bytes"] == [t["goal"] for t in targets if not t["met"]]

    def test_stale_reads_add_up_over_processes(self) -> None:
        """Three processes of 200 checks each."""
        handoffs = samples.streams_report()["derived"]["handoffs"]
        assert (3, 600, 600) == tuple(
            handoffs["one-way"][key] for key in ("processes", "checks", "stale")
        )
        assert 0 == handoffs["two-way"]["stale"]
        assert {"output": 600, "cache": 300} == handoffs["one-way"]["stale_by_kind"]

    def test_comparisons_add_up_by_category(self) -> None:
        """One mismatch in one category of one run is one mismatch."""
        derived = samples.compare_report()["derived"]
        assert (62, 1) == (derived["compared"], derived["mismatched"])
        assert {"compared": 40, "mismatched": 1} == derived["categories"]["outputs"]

    def test_controls_and_other_references_are_counted_apart(self) -> None:
        """What rests on native, the library against itself, split eager, and requirements."""
        derived = samples.compare_report()["derived"]
        assert {"runs": 2, "compared": 30, "mismatched": 1} == derived["native_against_ours"]
        assert {"runs": 1, "compared": 15, "mismatched": 0} == derived["native_again"]
        assert {"runs": 1, "compared": 15, "mismatched": 0} == derived["eager_against_ours"]
        assert {"compared": 2, "mismatched": 0} == derived["requirements"]
        assert {"ownership.stale-reference": 1, "arena.spoiled": 2} == derived["faults"]

    def test_a_ratio_over_a_bound_names_its_reference(self) -> None:
        """Each is of a library's column that forms the same sum, and of none where none does."""
        for cell in samples.bench_report()["derived"]["cells"]:
            for name, column in cell["columns"].items():
                apart = name in ("ours_copied", "ours_per_microbatch")
                for ratio in ("over_floor", "over_whole_step"):
                    assert (column[ratio] is None) is apart
                    assert apart or not column[ratio]["of"].startswith("ours")
            assert {"floor", "whole"} <= {
                *("floor" for c in cell["columns"].values() if c["over_floor"]),
                *("whole" for c in cell["columns"].values() if c["over_whole_step"]),
            }

    def test_tapes_live_at_once_are_fewer_than_the_stages_peaks_together(self) -> None:
        """Stages that peak at different times; slots are the sum, the rank's peak is less."""
        assert 1 == rank_peak("0F0 0I0 0W0 1F0 1I0 1W0")
        assert 3 == rank_peak("0F0 1F0 1F1 1I0 1W0 0I0 0W0 1I1 1W1")
        for point in samples.sweep_report()["derived"]["points"]:
            assert point["peak_live_tapes"] <= point["sum_of_stage_peaks"]

    def test_construction_is_not_capture(self) -> None:
        """Capture is a part of construction, and unknown to a column that captures nothing."""
        point = samples.sweep_report()["derived"]["points"][0]
        assert point["capture_s"] < point["construction_s"]
        native = samples.bench_report()["derived"]["cells"][0]["columns"]["native_grad"]
        assert native["capture_s"] is None

    def test_a_gap_to_native_is_split_into_copies_and_the_unexplained(self) -> None:
        """2 ms behind, of which 0.32 ms are copies, leaves 1.68 ms that nothing explains."""
        copies = [{"name": "Memcpy DtoD", "bytes": 8, "count": 2, "us": 640.0}]
        ours, native = samples.column(ms=[12.0]), samples.column(ms=[10.0])
        ours["trace"]["copies"] = copies
        assert {"step_ms": 2.0, "copies_ms": 0.32, "unexplained_ms": 1.68} == gap_behind(
            ours, native
        )

    def test_a_step_over_its_floor_is_split(self) -> None:
        """4 ms over: 1.5 of further kernels, of which 0.32 are copies, and 2.5 of no kernel."""
        ours, floor = samples.column(ms=[12.0], kernel_ms=9.5), samples.column(kernel_ms=8.0)
        ours["trace"]["copies"] = [{"name": "Memcpy DtoD", "bytes": 8, "count": 2, "us": 640.0}]
        split = excess_over_floor(ours, floor)
        assert (4.0, 1.5, 0.32, 2.5) == tuple(
            split[key] for key in ("step_ms", "kernels_ms", "copies_ms", "beyond_kernels_ms")
        )
        assert {4.0, None} == {*excess_over_floor({**ours, "trace": None}, floor).values()}

    def test_columns_without_a_floor_have_no_distance_from_it(self) -> None:
        """Those that no library column sums like; the floor's own column is at none in kernels."""
        for cell in samples.bench_report()["derived"]["cells"]:
            for entry in cell["columns"].values():
                assert (entry["over_floor"] is None) is (entry["beyond_floor"] is None)
            for floor in cell["floors"].values():
                assert 0 == cell["columns"][floor["column"]]["beyond_floor"]["kernels_ms"]

    def test_a_cell_of_two_reports_is_the_wider_ones(self) -> None:
        """A later report of a few columns takes none of the first one's away."""
        wide, narrow = samples.bench_report(), samples.bench_report()
        raw = narrow["raw"]["cells"][0]["columns"]
        narrow["raw"]["cells"][0]["columns"] = {name: raw[name] for name in list(raw)[:3]}
        narrow["derived"] = DERIVE["bench"](narrow["raw"])
        for found in ([wide, narrow], [narrow, wide]):
            taken = {d["cell"]: (d, r) for d, r in reports.cells(found)}
            assert [cell.name for cell in CELLS] == sorted(
                taken, key=[cell.name for cell in CELLS].index
            )
            derived, record = taken[CELLS[0].name]
            assert wide["derived"]["cells"][0] == derived
            assert wide["raw"]["cells"][0] == record


class TestProbes:
    def test_what_was_found_is_said(self) -> None:
        """A failure, writes out of bounds, the lines that bind a dW, the cost of a look."""
        found = [p["found"] for p in samples.probes_report()["derived"]["probes"]]
        assert "failed, illegal access" == found[0]
        assert "ran; 3 invalid writes of 16 bytes in bprop" == found[1]
        assert "ran" == found[2]
        assert "most recent dgrad (Transformer Engine 2.18.0, pytorch/graph.py" in found[3]
        assert "lines 5, 7)" in found[3]
        assert "9.5 µs for 40 addresses of a stage" == found[4]
        assert "0 of 9 values differ" == found[5]
        assert "3 of 9 values differ, first a; not finite from b on" == found[6]
        assert "RuntimeError: died" == found[7]

    def test_a_pairing_that_is_not_found_is_not_said(self) -> None:
        """Where one statement is missing, nothing is claimed."""
        found = samples.probes_report(line=None)["derived"]["probes"][3]["found"]
        assert "most recent" not in found


class TestScale:
    def test_ratios_are_to_the_native_side_and_to_the_bound(self) -> None:
        """Of the same cell; a side without a bound has no ratio to one."""
        native, guarded = samples.scale_report()["derived"]["timed"]
        assert (None, None) == (native["native_over_this"], native["over_bound"])
        assert 10.0 == guarded["native_over_this"]
        assert (1.25, 0.03) == (guarded["over_bound"], guarded["message_ms"])
        assert (4.5, 1.1111) == (guarded["in_order_bound_ms"], guarded["over_in_order"])
        assert "over_in_order" not in native
        assert (4, 0) == (guarded["final_values"], guarded["final_different"])
        assert 300 == guarded["above_native_bytes"]
        assert {"median": 0.27, "min": 0.25, "max": 0.29} == guarded["host_ahead_ms"]

    def test_a_steps_time_is_split_into_its_row_and_what_is_beside_it(self) -> None:
        """The four parts are the profiled step; the longest row is the busiest rank's."""
        _, launched = samples.scale_report()["derived"]["timed"]
        first, second = launched["split"]
        assert (4.0, 1.25) == (launched["longest_row_ms"], launched["over_longest_row"])
        assert {"kernels": 0.1, "between": 0.3, "awaited": 0.7} == {
            part: first[part] for part in ("kernels", "between", "awaited")
        }
        for rank in (first, second):
            parts = sum(rank[part] for part in ("row", "kernels", "between", "awaited"))
            assert pytest.approx(rank["step"]) == parts

    def test_goals_are_of_every_schedule_and_of_the_number_of_ranks(self) -> None:
        """One launch and replays of the small cell over two ranks; another cell has no goals."""
        assert samples.scale_report()["derived"]["targets"] == []
        raw = samples.scale_report()["raw"]
        _, whole = raw["timed"]
        whole |= {"host_ms": [0.2], "step_ms": [5.0], "peak_bytes": [1000, 900 + 2 * 10**8]}
        raw["timed"].append({**whole, "side": "guarded", "step_ms": [6.0]})
        for row in raw["timed"]:
            row["cell"] = "h2048-s256-m4"
        found = derive_scale(raw)["targets"]
        assert [(one["goal"], one["column"], one["measured"], one["met"]) for one in found] == [
            ("native / this", "one launch, il", 10.0, False),
            ("over its bound", "one launch, il", 1.25, False),
            ("host time, ms", "one launch, il", 0.27, True),
            ("replays over one launch", "guarded, il", 1.2, False),
            ("GB above native", "guarded, il", 0.2, True),
        ]

    def test_a_report_without_a_host_ahead_is_judged_by_its_single_steps(self) -> None:
        """As older reports are, whose steps were all timed behind a wait of all ranks."""
        raw = samples.scale_report()["raw"]
        _, whole = raw["timed"]
        whole |= {"host_ms": [0.4], "cell": "h2048-s256-m4"}
        del whole["host_ahead_ms"]
        (found,) = [t for t in derive_scale(raw)["targets"] if t["goal"] == "host time, ms"]
        assert (0.4, False) == (found["measured"], found["met"])

    def test_the_busiest_rank_is_the_one_with_most_kernels_and_copies(self) -> None:
        """Messages do not count: their kernels run while they wait for the other rank."""
        native, guarded = samples.scale_report()["derived"]["timed"]
        assert (4.0, 1.25) == (guarded["busiest_ms"], guarded["over_busiest"])
        assert "busiest_ms" not in native

    def test_what_differs_is_summed_over_the_categories(self) -> None:
        """One tensor in one category is enough to say that they differ."""
        (row,) = samples.scale_report(differ=1)["derived"]["compared"]
        assert (12, 1) == (row["values"], row["different"])


class TestPools:
    def test_private_pools_right_and_a_shared_one_refused_and_wrong(self) -> None:
        """That is the finding; nothing else is without a problem."""
        derived = samples.pools_report()["derived"]
        assert [] == derived["problems"]
        (order,) = derived["orders"]
        assert (15, 3, 3) == tuple(
            order["disciplines"]["shared"][key] for key in ("compared", "mismatched", "nonfinite")
        )

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"private": 1}, "private differs from native in 1 values"),
            ({"shared": 0}, "corrupted nothing, so the comparison proves nothing"),
            ({"clause": None}, "the kernel did not refuse a shared pool"),
            ({"clause": "order.token"}, "the kernel did not refuse a shared pool"),
        ],
    )
    def test_each_other_outcome_is_a_problem(self, options: dict[str, Any], said: str) -> None:
        """A difference of ours, a harmless shared pool, or one that the kernel allows."""
        (problem,) = samples.pools_report(**options)["derived"]["problems"]
        assert said in problem

    @pytest.mark.parametrize("name", ["native-again", "private", "private-unguarded", "shared"])
    def test_what_was_not_run_is_no_success(self, name: str) -> None:
        """A run that is missing, failed or compared nothing is a problem."""
        raw = samples.pools_report()["raw"]
        left = {"runs": [run for run in raw["runs"] if run["discipline"] != name]}
        assert [f"chosen: {name} was not run"] == DERIVE["pools"](left)["problems"]
        for change, said in (({"error": "it died"}, "failed: it died"), ({"categories": []}, "no")):
            runs = [{**r, **change} if r["discipline"] == name else r for r in raw["runs"]]
            (problem,) = DERIVE["pools"]({"runs": runs})["problems"]
            assert said in problem


class TestGoals:
    def test_goals_speak_of_cells_and_columns_that_exist(self) -> None:
        """A renamed cell or column would silently leave its goals unmeasured."""
        cells, columns = {cell.name for cell in CELLS}, {spec.name for spec in SPECS}
        for goal in GOALS:
            assert set(goal.cells) <= cells
            assert set(goal.columns) <= columns

    def test_a_full_report_measures_every_goal(self) -> None:
        """None is left out when every column ran."""
        targets = samples.bench_report()["derived"]["targets"]
        wanted = {(g.name, cell, c) for g in GOALS for cell in g.cells for c in g.columns}
        assert wanted == {(t["goal"], t["cell"], t["column"]) for t in targets}

    @pytest.mark.parametrize(("ms", "met"), [(3.9, True), (9.9, False)])
    def test_a_goal_is_met_or_missed_by_its_number(self, ms: float, met: bool) -> None:
        """The same goal, two numbers."""
        columns = samples.bench_columns(CELLS[0])
        columns["ours_accumulate"]["rounds"] = samples.column(ms=[ms])["rounds"]
        derived = derive_cell(samples.cell_record(CELLS[0], columns))
        (judged,) = [
            t
            for t in judge_cells([derived])
            if t["goal"] == "step over the floor" and t["column"] == "ours_accumulate"
        ]
        assert met is judged["met"]

    @pytest.mark.parametrize(("us", "met"), [(11.0, True), (13.0, False)])
    def test_the_hosts_time_of_an_action_is_a_goal(self, us: float, met: bool) -> None:
        """Over the bare replay, of the first cell; it is judged by the median of whole steps."""
        columns = samples.bench_columns(CELLS[0])
        columns["ours_accumulate"]["host_actions"] = samples.host_actions(us)
        derived = derive_cell(samples.cell_record(CELLS[0], columns))
        (judged,) = [t for t in judge_cells([derived]) if t["goal"].startswith("host time")]
        assert (us, 12.0, met) == (judged["measured"], judged["value"], judged["met"])

    def test_what_was_not_timed_is_not_judged(self) -> None:
        """Reports from before actions were timed one by one neither meet nor miss it."""
        columns = samples.bench_columns(CELLS[0])
        del columns["ours_accumulate"]["host_actions"]
        derived = derive_cell(samples.cell_record(CELLS[0], columns))
        assert not [t for t in judge_cells([derived]) if t["goal"].startswith("host time")]


class TestTables:
    def test_missed_goals_are_printed_with_what_was_measured(self) -> None:
        """A missed goal is never only a count."""
        report = samples.bench_report()
        missed = [t for t in report["derived"]["targets"] if not t["met"]]
        lines = bench_lines(report)
        assert missed
        for target in missed:
            assert any(
                target["goal"] in line and target["cell"] in line and target["column"] in line
                for line in lines
            )

    def test_failed_columns_are_printed(self) -> None:
        """With their error."""
        report = samples.bench_report()
        raw = copy.deepcopy(report["raw"])
        raw["cells"][0]["columns"]["ours_copied"]["error"] = "ValueError: no"
        lines = bench_lines({"raw": raw, "derived": DERIVE["bench"](raw)})
        assert "ours_copied: FAILED, ValueError: no" in lines

    def test_every_point_and_handoff_has_a_line(self) -> None:
        """Six points of the sweep, two handoffs."""
        sweep = "\n".join(sweep_lines(samples.sweep_report()))
        assert [3, 3] == [sweep.count(f"\n{name} ") for name in ("live", "per_microbatch")]
        streams = stream_lines(samples.streams_report())
        assert any("one-way" in line and "600" in line for line in streams)


class TestStreams:
    def test_a_stale_read_behind_both_halves_is_a_violation(self) -> None:
        """And so is a check that could not have seen one; a stale one-way read is the finding."""
        fine, stale, vacuous = (
            streamcheck.problems(samples.streams_report(**options)["derived"]["handoffs"])
            for options in ({}, {"stale": 1}, {"vacuous": 1})
        )
        assert [] == fine
        assert 1 == len(stale)
        assert 1 == len(vacuous)

    def test_the_producer_changes_every_buffer_every_time(self) -> None:
        """Otherwise a stale read could look fresh; 200 steps in a row."""
        import torch

        from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

        producer = streamcheck.Producer(torch.device("cpu"), 32, 3)
        for number in range(200):
            before = {kind: tensor.clone() for kind, tensor in producer.state.items()}
            producer.token.fill_(float(number + 1))
            producer.run()
            for kind in streamcheck.KINDS:
                assert not same_bits(before[kind], producer.state[kind]), (number, kind)
                assert producer.state[kind].float().isfinite().all()

    def test_everything_that_the_producer_writes_depends_on_its_products(self) -> None:
        """A buffer that did not would be written early, and a one-way read of it would be right."""
        import torch

        from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

        device = torch.device("cpu")
        long, short = streamcheck.Producer(device, 32, 3), streamcheck.Producer(device, 32, 2)
        for producer in (long, short):
            producer.run()
        for kind in streamcheck.KINDS:
            assert not same_bits(long.state[kind], short.state[kind]), kind

    def test_without_a_device_the_check_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One line, and exit code 2."""
        assert 2 == main(["runtime", "report", "streams"])
        assert "no CUDA device" in capsys.readouterr().err
        assert 2 == main(["runtime", "report", "streams", "--checks", "0"])
        assert "must be at least 1" in capsys.readouterr().err


class TestPictures:
    def folder(self, tmp_path: Path, *made: dict[str, Any]) -> Path:
        """A folder of reports."""
        for number, report in enumerate(made):
            (tmp_path / f"{number}.json").write_text(json.dumps(report))
        return tmp_path

    @pytest.mark.nightly
    def test_three_pictures_come_from_step_and_sweep_reports(self, tmp_path: Path) -> None:
        """And the same reports give the same bytes."""
        folder = self.folder(tmp_path, samples.bench_report(), samples.sweep_report())
        drawn = plots.draw(folder, tmp_path / "a")
        assert ["memory", "resources", "step_time"] == sorted(path.stem for path in drawn)
        for path in drawn:
            again = tmp_path / "b" / path.name
            if not again.exists():
                plots.draw(folder, tmp_path / "b")
            assert path.read_bytes() == again.read_bytes()
            assert b"<svg" in path.read_bytes()

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("[]", "x.json: expected a report, found JSON without its derived part"),
            ("{", "x.json: expected JSON, found a mistake at line 1, column 2"),
            ("[" * 100_000, "x.json: expected JSON, found a deeply nested value"),
            ("9" * 5000, "x.json: expected JSON, found an integer of thousands of digits"),
            ("[NaN]", "x.json: expected JSON, found NaN, which is not a JSON number"),
            ('{"kind": 1, "kind": 2}', "x.json: expected JSON, found 'kind' twice in one object"),
            ('{"kind": "sweep", "derived": []}', "x.json: expected a report"),
            ('{"kind": "sweep", "derived": {"points": [{}]}}', "found one that cannot (KeyError"),
            ('{"kind": "curves", "derived": {"runs": [1]}}', "found one that cannot (KeyError"),
            ("\udcff", "x.json: expected JSON, found a byte that is not UTF-8, at byte 0"),
        ],
    )
    def test_a_folder_with_what_is_no_report(
        self, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One line that names the file or the folder, and no picture."""
        (tmp_path / "x.json").write_text(text, errors="surrogateescape")
        out = tmp_path / "out"
        assert 2 == main(
            ["runtime", "report", "plots", "--reports", str(tmp_path), "--out", str(out)]
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
        assert not out.exists()

    def test_a_place_for_pictures_that_is_a_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is that place, and not the reports, which is named."""
        folder = self.folder(tmp_path, samples.sweep_report())
        words = ["--reports", str(folder), "--out", str(folder / "0.json")]
        assert 2 == main(["runtime", "report", "plots", *words])
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--out {folder / '0.json'}: File exists; name a folder" in line

    @pytest.mark.ci
    def test_a_number_of_the_report_moves_the_picture(self, tmp_path: Path) -> None:
        """Pictures are drawn from the report and from nothing else."""
        bytes_of = []
        for ms in (4.1, 5.1):
            report = samples.bench_report()
            report["derived"]["cells"][0]["columns"]["ours_accumulate"]["step_ms"]["median"] = ms
            folder = self.folder(tmp_path, report)
            (path,) = [p for p in plots.draw(folder, tmp_path / "out") if p.stem == "step_time"]
            bytes_of.append(path.read_bytes())
        assert bytes_of[0] != bytes_of[1]

    def test_a_legend_lies_below_every_line(self) -> None:
        """No panel has one of its own, and the figure's ends under all panels."""
        made = samples.bench_report(), samples.sweep_report()
        drawn = [plots.step_time(made[:1]), plots.memory(made[:1]), plots.resources(made[1:])]
        for figure in drawn:
            figure.canvas.draw()
            (legend,) = figure.legends
            top = legend.get_window_extent().y1
            for axis in figure.axes:
                assert axis.get_legend() is None
                assert top <= axis.get_tightbbox().y0

    def test_the_three_figures_of_memory_hide_none_of_each_other(self) -> None:
        """Each has its own height in a row, also where two are the same number."""
        figure = plots.memory([samples.bench_report()])
        heights = [{line.get_ydata()[0] for line in axis.lines} for axis in figure.axes]
        rows = [len(axis.patches) for axis in figure.axes]
        assert rows
        assert all(len(own) >= 3 * count for own, count in zip(heights, rows, strict=True))

    def test_a_picture_names_what_it_is_of(self) -> None:
        """The native that memory is above, and the shape of the sweep."""
        (cell, *_) = plots.memory([samples.bench_report()]).axes
        assert "above the faster native" in cell.get_xlabel()
        title = plots.resources([samples.sweep_report()]).get_suptitle()
        for word in ("hidden 2048", "sequence 256", "rank ", "PP ", "Schedule"):
            assert word in title

    def test_slots_and_live_tapes_do_not_coincide(self) -> None:
        """Where stages peak at different times, the two lines of the first panel are apart."""
        first = plots.resources([samples.sweep_report()]).axes[0]
        lines = [tuple(line.get_ydata()) for line in first.lines]
        assert "slots" == first.get_title()
        assert 3 == len(set(lines))

    def test_missing_columns_and_figures_leave_gaps(self, tmp_path: Path) -> None:
        """A report of a CPU has neither kernel times nor memory; a failed column has nothing."""
        report = samples.bench_report()
        raw = report["raw"]
        for column in raw["cells"][0]["columns"].values():
            column["trace"] = None
            column["memory"] = None
        raw["cells"][1]["columns"]["ours_copied"]["error"] = "failed"
        report["derived"] = DERIVE["bench"](raw)
        drawn = plots.draw(self.folder(tmp_path, report), tmp_path / "out")
        assert {"step_time", "memory"} == {path.stem for path in drawn}

    def test_nothing_to_draw_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It says how to make a report."""
        out = tmp_path / "out"
        assert 2 == main(
            ["runtime", "report", "plots", "--reports", str(tmp_path), "--out", str(out)]
        )
        assert "make one with qeffect runtime report bench" in capsys.readouterr().err

    def test_an_old_name_works_and_names_the_new_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One line before the error; other ranks than the first say nothing."""
        assert 2 == main(["runtime", "plots", "--reports", str(tmp_path), "--out", str(tmp_path)])
        first, _ = capsys.readouterr().err.splitlines()
        assert "runtime plots is now runtime report plots" in first
        assert not (tmp_path / "out").exists()
