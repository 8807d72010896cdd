"""The paper's tables from trials: every derived number, compared with a number computed by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from qeffect.gpu_runtime.lab.reports.text import table_lines
from qeffect.gpu_runtime.lab.statistics import paper
from qeffect.gpu_runtime.lab.statistics.complete_step import (
    break_even_steps,
    derive_tables,
)

from . import report_samples as samples


@pytest.fixture(scope="module")
def derived() -> dict[str, Any]:
    """The derived part of the sample: four trials of two ranks, one of four."""
    found: dict[str, Any] = samples.tables_report()["derived"]
    return found


def row(derived: dict[str, Any], side: str, schedule: str = "il", **more: Any) -> dict[str, Any]:
    """The one row of a side of the language model over two ranks."""
    wanted = {"side": side, "schedule": schedule, "model": "language", "pp": 2,
              "microbatches": 8, **more}  # fmt: skip
    (found,) = (r for r in derived["rows"] if all(r[k] == v for k, v in wanted.items()))
    return dict(found)


def test_a_trial_is_the_median_of_its_rounds_and_ratios_are_within_a_trial(
    derived: dict[str, Any],
) -> None:
    """Trials of 100, 102, 104 and 106 ms beside 10 each: the median of four ratios."""
    native, own = row(derived, "native"), row(derived, "replays")
    assert native["step_ms"] == {"median": 103.0, "min": 100.0, "max": 106.0}
    assert own["native_over_this"] == 10.3
    assert (own["trials"], native["native_over_this"]) == (4, None)
    assert own["tokens_per_s"] == 204_800


def test_both_sets_of_trials_are_kept_apart(derived: dict[str, Any]) -> None:
    """The first three are the initial set, the fourth is the replication."""
    initial, again = (r for r in derived["complete"] if r["schedule"] == "il")
    assert (initial["set"], initial["native_ms"], initial["speedup"]) == ("initial", 102.0, 10.2)
    assert (again["set"], again["native_ms"], again["speedup"]) == ("replication", 106.0, 10.6)
    assert initial["paper_ms"] == 47.329
    assert (initial["paper_speedup"], again["paper_speedup"]) == (1.895, 1.884)
    assert again["paper_break_even_steps"] == 38.53
    assert initial["break_even_steps"] == pytest.approx(1 + 750 / 92, abs=0.01)
    assert again["break_even_steps"] == pytest.approx(1 + 750 / 96, abs=0.01)


def test_a_speedup_of_a_set_is_the_median_of_its_trials_ratios() -> None:
    """Natives of 100, 102 and 104 over 10, 51 and 10: 10, 2 and 10.4, and not 102 over 10."""
    raw = copy.deepcopy(samples.tables_report()["raw"])
    raw["trials"][1]["rows"][3]["step_ms"] = [51.0]
    first = next(r for r in derive_tables(raw)["complete"] if r["schedule"] == "il")
    assert (first["native_ms"], first["ms"], first["speedup"]) == (102.0, 10.0, 10.0)


def test_a_row_that_failed_in_the_initial_set_takes_none_of_the_replication() -> None:
    """Without the third trial's row, the initial set has two and the replication its own."""
    raw = copy.deepcopy(samples.tables_report()["raw"])
    for trial, ms in zip(raw["trials"], (10.0, 10.0, None, 30.0), strict=False):
        trial["rows"][3]["step_ms"] = [ms]
        if ms is None:
            trial["rows"][3]["error"] = "BackendError: no"
    initial, again = (r for r in derive_tables(raw)["complete"] if r["schedule"] == "il")
    assert (initial["ms"], again["ms"]) == (10.0, 30.0)


def test_a_side_whose_tensors_differ_meets_no_goal() -> None:
    """It is the fastest, and the goal is measured of the next."""
    found = samples.tables_report(differ=1)["derived"]["targets"]
    measured = {t["goal"]: (t["column"], t["measured"]) for t in found if t["cell"] == paper.LARGE}
    assert measured["native / this"] == ("replays, zbv", 8.24)


def test_break_even_counts_set_up_and_the_first_step(derived: dict[str, Any]) -> None:
    """750 ms behind after the first step, 90 ms won at each later one."""
    native, own = samples.table_row("native", 100.0), samples.table_row("replays", 10.0)
    assert break_even_steps(own, native) == pytest.approx(1 + 750 / 90, abs=0.01)
    assert break_even_steps({**own, "construction_s": 0.0}, native) == 1.0
    assert break_even_steps(samples.table_row("replays", 100.0), native) is None
    steps = sorted(1 + 750 / (90 + n) for n in (0, 2, 4, 6))
    assert row(derived, "replays")["break_even_steps"] == pytest.approx(
        (steps[1] + steps[2]) / 2, abs=0.01
    )


def test_one_trial_that_never_breaks_even_leaves_no_number() -> None:
    """A median over those that do would say that all do."""
    raw = copy.deepcopy(samples.tables_report()["raw"])
    slow = raw["trials"][0]["rows"][3]
    assert slow["side"] == "replays"
    slow["step_ms"] = [500.0]
    found = row(derive_tables(raw), "replays")
    assert (found["break_even_steps"], found["never_even"]) == (None, 1)


def test_memory_above_native_is_that_of_the_rank_where_it_is_most(derived: dict[str, Any]) -> None:
    """700 bytes on rank 0, 900 on rank 1."""
    assert row(derived, "replays")["above_native_bytes"] == 900
    assert row(derived, "native")["above_native_bytes"] is None
    assert row(derived, "replays")["capture_s"] == 0.75


def test_capture_costs_what_is_held_beyond_eager_calls_of_the_same_trial() -> None:
    """90 bytes on rank 0; without eager calls nothing is said."""
    rows = [samples.table_row("eager", 50.0), samples.table_row("replays", 10.0)]
    trial = {"pp": 2, "date": "2026-11-22T08:00:00Z", "rows": rows}
    found = derive_tables({"trials": [trial]})
    assert [r["captured_bytes"] for r in found["rows"]] == [None, 90]
    alone = derive_tables({"trials": [{**trial, "rows": rows[1:]}]})
    assert alone["rows"][0]["captured_bytes"] is None


def test_the_attribution_names_the_papers_five_and_ours(derived: dict[str, Any]) -> None:
    """Copied over direct is within our own runs; eager was not measured and has no line."""
    found = {r["configuration"]: r for r in derived["attribution"]}
    assert list(found) == ["native", "copied", "direct", "accumulate", "zbv"]
    assert found["direct"]["copied_over_this"] == 1.25
    assert (found["copied"]["copies"], found["direct"]["copies"]) == (72, 0)
    assert (found["copied"]["paper_copies"], found["direct"]["paper_copies"]) == (96, 0)
    assert round(found["direct"]["paper_native_over_this"], 3) == 1.977
    assert found["accumulate"]["paper_ms"] is None


def test_resources_are_of_zbv_by_microbatches(derived: dict[str, Any]) -> None:
    """Two and eight microbatches, the first beside a time of the paper."""
    two, eight = derived["resources"]
    assert (two["microbatches"], eight["microbatches"]) == (2, 8)
    assert two["tokens_per_s"] == 102_400
    assert two["paper"]["ms"] == 35.124
    assert (eight["delayed"], eight["paper"]["delayed"]) == ([0, 3], 9)


def test_weak_scaling_is_the_rate_that_a_rank_keeps(derived: dict[str, Any]) -> None:
    """The fastest of either number of ranks, and every side that both have."""
    rates = {(r["cell"], r["side"]): r["rate"] for r in derived["weak"]}
    assert rates == {
        (paper.LARGE, "replays, il"): 0.96,
        (paper.LARGE, "fastest"): 0.88,
        (paper.SMALL, "replays, il"): 0.8,
        (paper.SMALL, "fastest"): 0.8,
    }


def test_a_mapping_is_efficient_where_twice_the_ranks_take_half_the_time(
    derived: dict[str, Any],
) -> None:
    """10 ms over two ranks, 6.25 over four under 1F1B, 5 at best."""
    same, best = derived["mapping"]
    assert (same["speedup"], same["efficiency"]) == (1.6, 0.8)
    assert (best["pp4"], best["efficiency"], best["paper_efficiency"]) == (
        "replays, izb",
        1.0,
        0.6849,
    )


def test_the_papers_mapping_is_of_the_language_model_alone() -> None:
    """Layers alone are beside none of its numbers."""
    raw = copy.deepcopy(samples.tables_report()["raw"])
    row = samples.table_row("replays", 6.0, model="layers", pp=4, vpp=1, schedule="1f1b")
    raw["trials"][-1]["rows"].append(row)
    found = derive_tables(raw)
    theirs = {r["model"]: r["paper_efficiency"] for r in found["mapping"]}
    assert theirs == {"language": 0.6849, "layers": None}
    assert sum("(paper: 0.6849)" in line for line in table_lines(found)) == 2


def test_goals_say_what_was_measured_where_they_were_missed(derived: dict[str, Any]) -> None:
    """Each goal that has a measurement, and no other."""
    found = {(t["goal"], t["cell"]): (t["measured"], t["met"]) for t in derived["targets"]}
    assert found == {
        ("native / this", paper.LARGE): (10.3, True),
        ("over the busiest rank's kernels", paper.LARGE): (2.0, False),
        ("rate of four ranks over two", paper.SMALL): (0.8, False),
        ("rate of four ranks over two", paper.LARGE): (0.88, False),
        ("efficiency of four ranks", paper.LARGE): (1.0, True),
    }
    text = "\n".join(table_lines(derived))
    assert "goals: 2 of 5 met" in text
    assert "FAILED: h4096-s256-m8, one launch, il: BackendError: no" in text


def test_what_differs_is_summed_over_the_trials() -> None:
    """One tensor in each of four trials."""
    own = row(samples.tables_report(differ=1)["derived"], "replays")
    assert (own["compared_with"], own["values"], own["different"]) == ("native", 160, 4)


def test_the_papers_numbers_agree_with_the_ratios_that_it_prints() -> None:
    """Its tables against its own text."""
    five = paper.ATTRIBUTION
    assert round(five["copied"] / five["direct"], 3) == 1.132
    assert round(five["native"] / five["copied"], 3) == 1.747
    assert round(paper.MAPPING["pp2_ms"] / paper.MAPPING["pp4_ms"], 3) == 1.370
    assert paper.MAPPING["efficiency"] == pytest.approx(paper.MAPPING["speedup"] / 2, abs=1e-3)
    graphs = [int(paper.RESOURCES[m]["graphs"]) for m in (2, 4, 8, 16)]
    assert graphs == [3 * m * 2 for m in (2, 4, 8, 16)]
    for cell, sets in paper.SPEEDUP.items():
        for kind, speeds in sets.items():
            times = paper.COMPLETE[cell][kind]
            for schedule, speed in speeds.items():  # of medians 2.774, of ratios 2.792
                assert times["native"] / times[schedule] == pytest.approx(speed, rel=8e-3)
