"""
Derived figures of the checked-in reports, computed a second time by other code.

Each figure follows from the raw numbers by the standard library's statistics and arithmetic. The
tests import no code of the laboratory, so a wrong formula there is not repeated here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "gpu_runtime" / "lab" / "reports"
STEP_TABLES = ("step", "step_counts", "step_long")
SCALES = ("scale", "scale_four", "scale_hosts")
TABLES = ("tables", "tables_four")
RESTARTS = ("restarts", "restarts_eager", "restarts_il", "restarts_replicas")
COMPARES = ("compare", "compare_now", "compare_te_2_20")
#: One-sided 95 % quantiles of Student's t, as printed tables give them, by degrees of freedom.
STUDENT = {1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318}


@cache
def report(name: str) -> dict[str, Any]:
    """A checked-in report."""
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return read


def near(shown: float | None, exact: float, digits: int = 4) -> bool:
    """Whether a number was rounded from another one."""
    return shown is not None and abs(shown - exact) <= 0.501 * 10**-digits


def of_kind(*names: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The derived and the raw part of some reports."""
    for name in names:
        yield report(name)["derived"], report(name)["raw"]


def cells() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The derived and the raw part of each cell of the step tables."""
    for derived, raw in of_kind(*STEP_TABLES):
        yield from zip(derived["cells"], raw["cells"], strict=True)


def milliseconds(column: dict[str, Any]) -> list[float]:
    """Milliseconds per step, by round."""
    return [turn["wall_s"] * 1000 / turn["steps"] for turn in column["rounds"]]


def kernels(column: dict[str, Any]) -> float:
    """Milliseconds of kernels, copies and fills per step."""
    return float(column["trace"]["device_us"] / column["trace"]["steps"] / 1000)


def whole(checked: Iterable[bool]) -> int:
    """How many checks were made, all of them passed."""
    found = list(checked)
    assert all(found)
    return len(found)


class TestStepTables:
    """`step.json`, `step_counts.json` and `step_long.json`."""

    def test_steps_are_medians_of_rounds(self) -> None:
        """With the fastest and the slowest round, and their distance over the median."""
        checks = []
        for derived, raw in cells():
            for name, entry in derived["columns"].items():
                ms = sorted(milliseconds(raw["columns"][name]))
                shown = entry["step_ms"]
                checks += [near(shown["median"], median(ms)), near(shown["min"], ms[0])]
                checks += [near(shown["max"], ms[-1])]
                checks += [near(shown["spread"], (ms[-1] - ms[0]) / median(ms))]
        assert whole(checks) > 80

    def test_speedups_are_medians_of_ratios_by_round(self) -> None:
        """Over the native column and over the library's graphs with the least median."""
        checks = []
        for derived, raw in cells():
            columns = {n: c for n, c in raw["columns"].items() if n in derived["columns"]}
            for family in ("native", "te_graphs"):
                own = [n for n, c in columns.items() if c["family"] == family]
                if not own:
                    continue
                best = min(own, key=lambda n: median(milliseconds(columns[n])))
                assert best == derived[f"fastest_{family}"]
                for name, column in columns.items():
                    pairs = zip(milliseconds(columns[best]), milliseconds(column), strict=True)
                    ratios = [theirs / ours for theirs, ours in pairs]
                    checks.append(
                        near(
                            derived["columns"][name][f"{family}_over_this"]["median"],
                            median(ratios),
                        )
                    )
        assert whole(checks) > 30

    def test_floors_are_the_least_kernels_of_the_librarys_columns(self) -> None:
        """By the rule of the sum; a step over its floor, and over its own kernels."""
        checks = []
        for derived, raw in cells():
            for rule, floor in derived["floors"].items():
                least = min(
                    kernels(c)
                    for c in raw["columns"].values()
                    if c["rule"] == rule and not c["family"].startswith("ours") and c["trace"]
                )
                checks += [near(floor["kernel_ms"], least)]
                checks += [near(kernels(raw["columns"][floor["column"]]), least, 9)]
            for name, entry in derived["columns"].items():
                column = raw["columns"][name]
                if not column["trace"]:
                    continue
                ms = median(milliseconds(column))
                checks += [near(entry["over_own_kernels"], ms / kernels(column))]
                if entry["over_floor"] is not None:
                    floor_ms = derived["floors"][column["rule"]]["kernel_ms"]
                    checks += [near(entry["over_floor"]["ratio"], ms / floor_ms)]
        assert whole(checks) > 30

    def test_the_break_even_step_is_the_first_that_is_not_behind(self) -> None:
        """Counted out, step by step, instead of divided."""
        count = 0
        for derived, raw in cells():
            native = raw["columns"][derived["fastest_native"]]
            for name, entry in derived["columns"].items():
                column = raw["columns"][name]
                begun = 1000 * (column["warm_s"] + column["first_step_s"])
                theirs = 1000 * (native["warm_s"] + native["first_step_s"])
                own_ms, native_ms = median(milliseconds(column)), median(milliseconds(native))
                if own_ms >= native_ms:
                    assert entry["break_even_steps"] is None
                    continue
                steps = 1
                while begun > theirs:
                    begun, theirs, steps = begun + own_ms, theirs + native_ms, steps + 1
                assert entry["break_even_steps"] == steps
                count += 1
        assert count > 15

    def test_memory_above_native_is_the_largest_of_three_differences(self) -> None:
        """Of the allocator's tensors, what it reserved, and what the driver says."""
        count = 0
        for derived, raw in cells():
            native = raw["columns"][derived["fastest_native"]]["memory"]
            for name, entry in derived["columns"].items():
                own = raw["columns"][name]["memory"]
                if entry["above_native_bytes"] is None:
                    continue
                driver = []
                for memory in (own, native):
                    rise = memory["device_after"] - memory["device_before"]
                    rise += memory["reserved_peak"] - memory["reserved"]
                    driver.append(max(rise, memory["device_polled_rise"] or rise))
                most = max(
                    own["allocated_peak"] - native["allocated_peak"],
                    own["reserved_peak"] - native["reserved_peak"],
                    driver[0] - driver[1],
                )
                assert entry["above_native_bytes"]["largest"] == most
                count += 1
        assert count > 15

    def test_a_guards_host_time_is_the_difference_by_action(self) -> None:
        """Of the medians of each round, guards on and off."""
        count = 0
        for derived, raw in cells():
            if derived["guards"] is None:
                continue
            on, off = (raw["columns"][f"ours_{n}"] for n in ("accumulate", "unguarded"))
            actions = on["facts"]["guarded_actions"]
            us = [
                1e6 * (median(a["host_s"]) - median(b["host_s"])) / actions
                for a, b in zip(on["rounds"], off["rounds"], strict=True)
            ]
            assert near(derived["guards"]["host_us_of_a_guard"]["median"], median(us))
            ratios = [a / b for a, b in zip(milliseconds(on), milliseconds(off), strict=True)]
            assert near(derived["guards"]["step_on_over_off"]["median"], median(ratios))
            count += 1
        assert count

    def test_an_action_over_its_bare_replay(self) -> None:
        """The median over steps of the time that is not the replay's, by action."""
        count = 0
        for derived, raw in cells():
            for name, shown in derived.get("host", {}).items():
                times = raw["columns"][name]["host_actions"]
                steps = times["steps"]
                over = []
                for n in range(steps):
                    spent = 0
                    for key, sign in (("guarded_ns", 1), ("bare_ns", -1)):
                        for ns in times[key].values():
                            each = len(ns) // steps
                            spent += sign * sum(ns[n * each : (n + 1) * each])
                    over.append(spent / times["actions"] / 1000)
                assert near(shown["of_an_action_us"]["median"], median(over), 3)
                count += 1
        assert count

    def test_goals(self) -> None:
        """Each is met exactly where the number is on the right side."""
        count = 0
        for name in (*STEP_TABLES, "sweep", *SCALES, *TABLES, "peers"):
            for goal in report(name)["derived"]["targets"]:
                below = goal["measured"] is not None and goal["measured"] <= goal["value"]
                above = goal["measured"] is not None and goal["measured"] >= goal["value"]
                assert goal["met"] is (below if goal["bound"] == "at most" else above)
                count += 1
        assert count > 60

    def test_numbers_of_goals_stand_in_the_tables(self) -> None:
        """Speedups and floors of the step table's goals are those of its columns."""
        (derived, _) = next(of_kind("step"))
        by_name = {cell["cell"]: cell["columns"] for cell in derived["cells"]}
        read = {
            "speedup over native": lambda e: e["native_over_this"]["median"],
            "speedup over TE's own graphs": lambda e: e["te_graphs_over_this"]["median"],
            "step over the floor": lambda e: e["over_floor"]["ratio"],
            "step over one graph of the native step": lambda e: e["over_whole_step"]["median"],
            "peak memory above native, GB": lambda e: round(
                e["above_native_bytes"]["largest"] / 10**9, 4
            ),
        }
        judged = [goal for goal in derived["targets"] if goal["goal"] in read]
        assert whole(
            goal["measured"] == read[goal["goal"]](by_name[goal["cell"]][goal["column"]])
            for goal in judged
        )


class TestSweep:
    """`sweep.json`."""

    def test_live_tapes_are_counted_along_the_order(self) -> None:
        """From each F to its dW."""
        derived, raw = next(of_kind("sweep"))
        peaks = {}
        for cell in raw["cells"]:
            moves = [{"F": 1, "W": -1}.get(step.strip("0123456789"), 0)
                     for step in cell["order"].split()]  # fmt: skip
            peaks[cell["cell"]["microbatches"]] = max(accumulate(moves))
        points = derived["points"]
        assert whole(p["peak_live_tapes"] == peaks[p["microbatches"]] for p in points) >= 5


@pytest.mark.parametrize(("name", "rows"), [("models_one_gpu_megatron", 6), ("models_one_gpu", 6)])
class TestModels:
    """`models_one_gpu_megatron.json` and `models_one_gpu.json`."""

    def test_kinds_and_megatron(self, name: str, rows: int) -> None:
        """Kinds add up to all device time; the rival is the row with Megatron's name."""
        checks = []
        [(derived, raw)] = of_kind(name)
        theirs = {row["cell"]: median(row["step_ms"])
                  for row in raw["rows"] if row["side"].startswith("megatron")}  # fmt: skip
        for shown, row in zip(derived["rows"], raw["rows"], strict=True):
            [names], [busy] = row["work_ms"], row["busy_ms"]
            parts = ("sdpa", "fusion::", "fused_attn")
            attention = sum(ms for one, ms in names.items() if any(part in one for part in parts))
            # Parts were rounded one by one before they were added up.
            checks += [near(sum(shown["kinds"].values()), sum(names.values()), 2)]
            checks += [near(sum(names.values()), busy["kernels"] + busy["copies"], 1)]
            checks += [near(shown["kinds"]["attention"], attention, 2)]
            over = theirs[row["cell"]] / median(row["step_ms"])
            checks += [near(shown["megatron_over_this"], over)]
        assert whole(checks) == 4 * rows


def test_fp32_gradients_beside_megatron() -> None:
    """`models_one_gpu_fp32.json`: ratios of medians, and no tensor that could be compared."""
    [(derived, raw)] = of_kind("models_one_gpu_fp32")
    native, ours, theirs = (median(row["step_ms"]) for row in raw["rows"])
    shown = derived["rows"][1]
    assert near(shown["native_over_this"], native / ours)
    assert near(shown["megatron_over_this"], theirs / ours)
    assert [0] * 3 == [row["compared"] for row in derived["rows"]]


@pytest.mark.parametrize("name", SCALES)
class TestScale:
    """`scale*.json`."""

    def test_ratios_are_of_medians(self, name: str) -> None:
        """Native over a side, a side over its bound and over the busiest rank's kernels."""
        checks = []
        derived, raw = next(of_kind(name))
        native = {row["cell"]: row for row in raw["timed"] if row["side"] == "native"}
        for shown, row in zip(derived["timed"], raw["timed"], strict=True):
            ms = median(row["step_ms"])
            checks += [near(shown["step_ms"]["median"], ms)]
            checks += [near(shown["step_ms"]["max"], max(row["step_ms"]))]
            if row["side"] != "native":
                base = native[row["cell"]]
                checks += [near(shown["native_over_this"], median(base["step_ms"]) / ms)]
                above = [a - b for a, b in zip(row["peak_bytes"], base["peak_bytes"], strict=True)]
                checks += [shown["above_native_bytes"] == max(above)]
            if row.get("bound_ms"):
                checks += [near(shown["over_bound"], ms / row["bound_ms"])]
            if row.get("busy_ms"):
                busiest = max(rank["kernels"] + rank["copies"] for rank in row["busy_ms"])
                checks += [near(shown["over_busiest"], ms / busiest)]
        assert whole(checks) > 5 or not raw["timed"]

    def test_totals_of_what_was_compared(self, name: str) -> None:
        """Added up over the categories."""
        derived, raw = next(of_kind(name))
        for shown, row in zip(derived["compared"], raw["compared"], strict=True):
            both = [sum(part) for part in zip(*row["categories"].values(), strict=True)]
            assert [shown["values"], shown["different"]] == both


@pytest.mark.parametrize("name", TABLES)
class TestTables:
    """`tables*.json`."""

    def test_rows_are_medians_over_trials(self, name: str) -> None:
        """Ratios are taken within a trial."""
        derived, raw = next(of_kind(name))
        checks = []
        for shown in derived["rows"]:
            key = [shown[k] for k in ("cell", "model", "pp", "vpp", "schedule", "side")]
            steps, ratios, even = [], [], []
            for trial in raw["trials"]:
                good = [row for row in trial["rows"] if row["error"] is None]
                for row in good:
                    if [row[k] for k in ("cell", "model", "pp", "vpp", "schedule", "side")] != key:
                        continue
                    own = median(row["step_ms"])
                    steps.append(own)
                    alike = (row["cell"], row["model"], row["pp"], "native")
                    for base in good:
                        found = (base["cell"], base["model"], base["pp"], base["side"])
                        if found != alike or base is row:
                            continue
                        theirs = median(base["step_ms"])
                        ratios.append(theirs / own)
                        behind = row["construction_s"] + row["first_step_s"]
                        behind -= base["construction_s"] + base["first_step_s"]
                        if own < theirs:
                            even.append(max(1.0, 1 + 1000 * behind / (theirs - own)))
            checks += [
                shown["trials"] == len(steps),
                near(shown["step_ms"]["median"], median(steps)),
            ]
            if ratios:
                checks += [near(shown["native_over_this"], median(ratios))]
                checks += [shown["never_even"] == len(ratios) - len(even)]
                if len(even) == len(ratios):
                    checks += [near(shown["break_even_steps"], median(even), 2)]
        assert whole(checks) > 15

    def test_scaling_is_a_ratio_of_medians(self, name: str) -> None:
        """Two ranks over four; of one model, over twice as many ranks."""
        derived, _ = next(of_kind(name))
        assert all(near(row["rate"], row["pp2_ms"] / row["pp4_ms"]) for row in derived["weak"])
        for row in derived["mapping"]:
            assert near(row["speedup"], row["pp2_ms"] / row["pp4_ms"])
            assert near(row["efficiency"], row["pp2_ms"] / row["pp4_ms"] / 2)


class TestPeers:
    """`peers.json`."""

    def test_speeds_beside_native_and_megatron(self) -> None:
        """The best graph mode is the fastest whose gradients are close to right."""
        derived, raw = next(of_kind("peers"))
        checks = []
        names = ("cell", "side", "schedule", "main_grad", "group")
        rows = {tuple(row[name] for name in names): row for row in derived["rows"]}
        for row in raw["rows"]:
            if row["error"] is not None:
                continue
            shown = rows[tuple(row[name] for name in names)]
            ms = median(row["step_ms"])
            cell = [r for r in raw["rows"] if r["cell"] == row["cell"] and r["error"] is None]
            own = [r for r in cell if r["main_grad"] == row["main_grad"]]
            (native,) = (median(r["step_ms"]) for r in cell if r["side"] == "native")
            eager = [median(r["step_ms"]) for r in own if r["side"] == "megatron none"]
            checks += [near(shown["native_over_this"], native / ms)]
            if eager:
                checks += [near(shown["megatron_eager_over_this"], eager[0] / ms)]
            else:
                assert shown["megatron_eager_over_this"] is None
            right = [
                median(r["step_ms"])
                for r in own
                if r["side"].startswith("megatron ") and r["side"] != "megatron none"
                if all(g["not_finite"] == 0 and g["relative"] <= 0.25 for g in r["gradients"])
            ]
            checks += [near(shown["best_graphs_over_this"], min(right) / ms)]
        assert whole(checks) > 20


class TestTraining:
    """`train.json`, `curves.json` and `curves_short.json`."""

    def test_perplexities_and_rates(self) -> None:
        """The exponential of the last held-out loss; tokens over seconds."""
        derived, raw = next(of_kind("train"))
        for shown, run in zip(derived["runs"], raw["runs"], strict=True):
            steps, seconds = len(run["losses"]), run["seconds"]
            assert near(shown["perplexity"], math.exp(run["held_out"][-1][1]), 6)
            assert near(shown["last_loss"], fmean(run["losses"][-(steps // 20) :]), 6)
            assert shown["tokens_per_s"] == round(steps * run["tokens_a_step"] / seconds)
            assert near(shown["native_over_this"], run["native_seconds"] / seconds, 6)

    @pytest.mark.parametrize("name", ["curves", "curves_short"])
    def test_runs_of_curves(self, name: str) -> None:
        """Both ends of the loss, and the median of the blocks' steps."""
        derived, raw = next(of_kind(name))
        for shown, run in zip(derived["runs"], raw["runs"], strict=True):
            assert near(shown["first_ten"], sum(run["losses"][:10]) / 10, 6)
            assert near(shown["last_ten"], sum(run["losses"][-10:]) / 10, 6)
            assert near(shown["perplexity"], math.exp(run["held_out"][-1][1]), 6)
            each, at, since = [], 0, 0.0
            for steps, seconds in run["clock"]:
                each.append(1000 * (seconds - since) / (steps - at))
                at, since = steps, seconds
            assert near(shown["step_ms"], median(each), 6)
            assert shown["tokens_per_s"] == round(1000 * run["tokens_a_step"] / median(each))

    @pytest.mark.parametrize("name", ["curves", "curves_short"])
    def test_schedules_over_seeds(self, name: str) -> None:
        """The ratio of geometric means, and the end of its one-sided interval."""
        derived, raw = next(of_kind(name))
        for shown in derived["non_inferiority"]:
            apart = []
            for seed in shown["seeds"]:
                both = [
                    dict(map(tuple, run["held_out"]))[shown["step"]]
                    for schedule in (shown["schedule"], shown["against"])
                    for run in raw["runs"]
                    if (run["side"], run["head"], run["seed"], run["schedule"])
                    == (shown["side"], shown["head"], seed, schedule)
                ]
                apart.append(both[0] - both[1])
            assert near(shown["ratio"], math.exp(fmean(apart)), 6)
            assert shown["within"] is (math.exp(fmean(apart)) <= shown["margin"])
            if len(apart) > 1:
                n = len(apart)
                end = fmean(apart) + STUDENT[n - 1] * stdev(apart) / math.sqrt(n)
                assert shown["upper"] == pytest.approx(math.exp(end), rel=1e-5)

    @pytest.mark.parametrize("name", ["curves", "curves_short"])
    def test_times_to_a_loss(self, name: str) -> None:
        """The time to a loss ends at the first step after which the mean of ten losses is at most
        this loss; seconds between two recorded times are interpolated."""
        derived, raw = next(of_kind(name))
        named = {":".join(map(str, (r["side"], r["schedule"], r["seed"], r["head"]))): r
                 for r in raw["runs"]}  # fmt: skip

        def reached(run: dict[str, Any], level: float) -> float:
            losses = run["losses"]
            step = next(
                n for n in range(10, len(losses) + 1) if sum(losses[n - 10 : n]) / 10 <= level
            )
            at, since = 0, 0.0
            for steps, seconds in run["clock"]:
                if step <= steps:
                    return float(since + (seconds - since) * (step - at) / (steps - at))
                at, since = steps, seconds
            raise AssertionError

        count = 0
        for shown in derived["to_loss"]:
            ours, theirs = named[shown["run"]], named[shown["native"]]
            for row in shown["levels"]:
                own, native = reached(ours, row["loss"]), reached(theirs, row["loss"])
                built = (theirs["build_s"] + native) / (ours["build_s"] + own)
                assert near(row["seconds"], own, 6)
                assert near(row["native_over_this"], native / own, 6)
                assert near(row["with_building"], built, 6)
                count += 1
        assert count


class TestTotals:
    """Reports whose derived figures are sums."""

    @pytest.mark.parametrize("name", COMPARES)
    def test_of_compared_bits(self, name: str) -> None:
        """Over all runs, and of guarded runs against native ones."""
        derived, raw = next(of_kind(name))
        every = [(run, entry) for run in raw["runs"] for entry in run["categories"]]
        assert derived["compared"] == sum(entry["compared"] for _, entry in every)
        assert derived["mismatched"] == sum(entry["mismatched"] for _, entry in every)
        zero = {"addresses", "retained work", "growth"}
        against = [
            entry["compared"]
            for run, entry in every
            if run["reference"].startswith("native") and run["candidate"] != "native-again"
            if entry["category"] not in zero
        ]
        assert derived["native_against_ours"]["compared"] == sum(against)
        assert sum(derived["faults"].values()) == sum(
            len(r.get("injected", ())) for r in raw["runs"]
        )

    def test_of_stale_reads(self) -> None:
        """By handoff."""
        derived, raw = next(of_kind("streams"))
        for name, shown in derived["handoffs"].items():
            runs = [run for run in raw["runs"] if run["handoff"] == name]
            assert shown["stale"] == sum(run["stale"] for run in runs)
            assert shown["checks"] == sum(run["checks"] for run in runs)
            assert shown["stale_by_kind"]["cache"] == sum(r["stale_by_kind"]["cache"] for r in runs)

    def test_of_shared_pools(self) -> None:
        """By order and discipline."""
        derived, raw = next(of_kind("pools"))
        for order in derived["orders"]:
            for run in raw["runs"]:
                if run["order"] == order["order"]:
                    shown = order["disciplines"][run["discipline"]]
                    differ = [category["mismatched"] for category in run["categories"]]
                    assert shown["mismatched"] == sum(differ)

    @pytest.mark.parametrize("name", RESTARTS)
    def test_of_restarts(self, name: str) -> None:
        """Values compared; the share of a checkpoint that is FP8 scaling state."""
        derived, raw = next(of_kind(name))
        assert derived["compared"] == sum(row["compared"] for row in raw["rows"])
        assert derived["differ"] == sum(row["differ"] for row in raw["rows"])
        for shown in derived["bytes"]:
            sizes = next(
                r["bytes"] for r in raw["rows"] if r["saved_under"] == shown["saved_under"]
            )
            parts = sum(size for part, size in sizes.items() if part != "total")
            assert sizes["total"] >= parts  # the files have headers
            assert near(shown["share"], sizes["numerical"] / sizes["total"], 8)


def require_kills(derived: dict[str, Any], raw: dict[str, Any]) -> None:
    """Require that the figures of a report of kills follow from its kills and runs."""
    kills, runs = raw["kills"], raw["runs"]
    places: dict[str, int] = {}
    for kill in kills:
        place = kill["place"].partition(",")[0]
        place = f"launcher, in: {place}" if kill["launcher"] else place
        places[place] = places.get(place, 0) + 1
    assert derived["kills"] == len(kills) == sum(places.values())
    assert derived["places"] == places
    assert derived["runs"] == len(runs) == len({kill["run"] for kill in kills})
    for what in ("tensors", "losses", "held_out"):
        assert {derived[what]} == {run[what] for run in runs}
        assert derived[f"{what}_differ"] == sum(len(run[f"{what}_differ"]) for run in runs)
    assert derived["compared"] == sum(run["compared"] for run in runs)
    assert derived["longest_end_s"] == sorted(kill["end_s"] for kill in kills)[-1]


def require_probes(derived: dict[str, Any], raw: dict[str, Any]) -> None:
    """Require that every sentence of a report of probes has the numbers that were found."""
    said = {probe["what"]: probe["found"] for probe in derived["probes"]}
    assert len(said) == len(derived["probes"])
    for probe in raw["attention"]:
        fused = "fused attention" if probe["fused_attention"] else "NVTE_FUSED_ATTN=0"
        found = said.pop(f"sequences of {probe['sequence']} tokens, {fused}, {probe['how']}")
        end, _, more = found.partition("; ")
        assert end == (f"failed, {probe['error']}" if probe["error"] else "ran")
        assert more == (f"{probe['invalid_writes']} invalid writes" if more else "")
        assert bool(more) is ("invalid_writes" in probe)
    lines = sorted(raw["pairing"]["lines"].values())
    found = said.pop("the graph of a dW in the library's own graphs")
    assert [raw["pairing"]["version"], *map(str, lines)] == re.findall(r"[\d.]*\d", found)
    if raw["addresses"] is not None:
        found = said.pop("a look at every baked address")
        us, count = re.findall(r"[\d.]*\d", found)
        assert near(float(us), raw["addresses"]["median_us"], 1)
        assert int(count) == raw["addresses"]["addresses"]
    for side in raw.get("interleaved", ()):
        found = said.pop(f"interleaved stages, {side['name']}")
        assert side["error"] is None
        differ, _, rest = found.partition(" values differ")
        assert differ == f"{side['different']} of {side['compared']}"
        first, _, broken = rest.partition("; not finite from ")
        assert first.removeprefix(", first ") == (side["first"] or "")
        assert broken.removesuffix(" on") == (side["not_finite"] or "")
        assert bool(side["different"]) is bool(side["first"])
    assert not said


def changed(figure: Any) -> Any:
    """Return another figure, as an error in its formula would give."""
    if isinstance(figure, dict):
        (name, number), *_ = figure.items()
        return {**figure, name: number + 1}
    return figure + 1


class TestKills:
    """`kills.json`, `kills_gpu.json` and `kills_launched.json`."""

    @pytest.mark.parametrize("name", ["kills", "kills_gpu", "kills_launched"])
    def test_figures(self, name: str) -> None:
        """Kills by place, runs, what was compared and what differs, the longest end."""
        derived, raw = next(of_kind(name))
        require_kills(derived, raw)
        assert derived["kills"] == report(name)["configuration"]["kills"]
        assert derived["losses"] == report(name)["configuration"]["steps"]

    def test_a_wrong_figure_is_seen(self) -> None:
        """Each one: none is left unchecked."""
        derived, raw = next(of_kind("kills"))
        for name, figure in derived.items():
            with pytest.raises(AssertionError):
                require_kills({**derived, name: changed(figure)}, raw)


class TestProbes:
    """`probes.json` and `interleaved.json`."""

    @pytest.mark.parametrize("name", ["probes", "interleaved"])
    def test_figures(self, name: str) -> None:
        """Every number and every error of a sentence."""
        derived, raw = next(of_kind(name))
        require_probes(derived, raw)

    @pytest.mark.parametrize("name", ["probes", "interleaved"])
    def test_a_wrong_figure_is_seen(self, name: str) -> None:
        """Each digit of each sentence, and a sentence that is missing."""
        derived, raw = next(of_kind(name))
        probes = derived["probes"]
        for place, probe in enumerate(probes):
            rest = [*probes[:place], *probes[place + 1 :]]
            with pytest.raises((AssertionError, KeyError)):
                require_probes({"probes": rest}, raw)
            for digit in re.finditer(r"\d", probe["found"]):
                wrong = str((int(digit[0]) + 1) % 10)
                found = probe["found"][: digit.start()] + wrong + probe["found"][digit.end() :]
                with pytest.raises(AssertionError):
                    require_probes({"probes": [*rest, {**probe, "found": found}]}, raw)
