"""
What follows from a report's raw numbers: medians, ratios, floors, break-even, memory above native.

Nothing here measures, so a reader can compute it again from the report, and a test does. Ratios are
taken round by round between columns that ran in the same round, then their median is given: drift
of the clocks cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.measure.host import derive_host
from qeffect.gpu_runtime.measure.tracing import matrix_copies

Raw = Mapping[str, Any]
_DIGITS = 4


def spread(values: Sequence[float]) -> dict[str, float]:
    """
    Median, extremes, and the distance of these as a fraction of the median.

    >>> spread([1.0, 2.0, 4.0])
    {'median': 2.0, 'min': 1.0, 'max': 4.0, 'spread': 1.5}
    """
    median = statistics.median(values)
    return {
        "median": round(median, _DIGITS),
        "min": round(min(values), _DIGITS),
        "max": round(max(values), _DIGITS),
        "spread": round((max(values) - min(values)) / median, _DIGITS),
    }


def spread_around_zero(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of differences, which have no meaningful relative spread."""
    return {
        "median": round(statistics.median(values), _DIGITS),
        "min": round(min(values), _DIGITS),
        "max": round(max(values), _DIGITS),
    }


def step_ms(column: Raw) -> list[float]:
    """Milliseconds of a step, for each round."""
    return [1e3 * turn["wall_s"] / turn["steps"] for turn in column["rounds"]]


def host_ms(column: Raw) -> list[float]:
    """Milliseconds that the host takes to enqueue one step on an idle device, for each round."""
    return [1e3 * statistics.median(turn["host_s"]) for turn in column["rounds"]]


def usable(columns: Mapping[str, Raw]) -> dict[str, Raw]:
    """Columns that ran without failing."""
    return {name: c for name, c in columns.items() if not c["error"] and c["rounds"]}


def fastest(columns: Mapping[str, Raw], family: str) -> str | None:
    """The column of a family with the least median step."""
    own = {
        name: statistics.median(step_ms(c)) for name, c in columns.items() if c["family"] == family
    }
    return min(own, key=own.__getitem__) if own else None


def kernel_ms(column: Raw) -> float | None:
    """Sum of kernel, copy and fill times of one step."""
    trace = column["trace"]
    return None if trace is None else float(trace["device_us"]) / trace["steps"] / 1e3


def floors(columns: Mapping[str, Raw]) -> dict[str, dict[str, Any]]:
    """For each rule of summation, the least sum of kernel times of any column, and whose it is."""
    found: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        ms = kernel_ms(column)
        if ms is not None and (
            column["rule"] not in found or ms < found[column["rule"]]["kernel_ms"]
        ):
            found[column["rule"]] = {"kernel_ms": ms, "column": name}
    for floor in found.values():
        floor["kernel_ms"] = round(floor["kernel_ms"], _DIGITS)
    return found


def paired(top: Raw, bottom: Raw) -> dict[str, float]:
    """The ratio of two columns' step times, round by round."""
    pairs = zip(step_ms(top), step_ms(bottom), strict=False)
    return spread([a / b for a, b in pairs])


def break_even(column: Raw, native: Raw) -> int | None:
    """
    The step at which a column has caught up with native, set-up and first step included.

    None when it never does.
    """
    ours, theirs = (statistics.median(step_ms(c)) for c in (column, native))
    if ours >= theirs:
        return None
    behind = 1e3 * sum(column[key] - native[key] for key in ("warm_s", "first_step_s"))
    return 1 if behind <= 0 else 1 + math.ceil(behind / (theirs - ours))


def memory_bytes(column: Raw) -> dict[str, int] | None:
    """
    Peaks as the allocator and the driver saw them.

    The driver's is what the device held more than before this column was built. Between two looks
    it can have been higher only by memory that the allocator has given back since, which is added.
    """
    memory = column["memory"]
    if memory is None or memory["allocated_peak"] is None:
        return None
    given_back = memory["reserved_peak"] - memory["reserved"]
    driver = memory["device_after"] - memory["device_before"] + given_back
    if memory["device_polled_rise"] is not None:
        driver = max(driver, memory["device_polled_rise"])
    return {
        "allocated": memory["allocated_peak"],
        "reserved": memory["reserved_peak"],
        "driver": driver,
    }


def above(column: Raw, native: Raw) -> dict[str, int] | None:
    """Peak memory above native's, by who says so, and the largest of these."""
    own, base = memory_bytes(column), memory_bytes(native)
    if own is None or base is None:
        return None
    found = {key: own[key] - base[key] for key in own}
    return {**found, "largest": max(found.values())}


def growth_bytes(column: Raw) -> dict[str, int] | None:
    """How much more is allocated and reserved after many steps than after a few."""
    growth = column["growth"]
    if growth is None or growth["allocated_after"] is None:
        return None
    return {
        "steps": growth["steps"],
        "allocated": growth["allocated_after"] - growth["allocated_before"],
        "reserved": growth["reserved_after"] - growth["reserved_before"],
    }


def derive_cell(raw: Raw) -> dict[str, Any]:
    """Everything that follows from one cell."""
    columns = usable(raw["columns"])
    native, te = fastest(columns, "native"), fastest(columns, "te_graphs")
    whole = {c["rule"]: name for name, c in columns.items() if c["family"] == "whole_step"}
    floor = floors(columns)
    found: dict[str, Any] = {
        "cell": raw["cell"]["name"],
        "fastest_native": native,
        "fastest_te_graphs": te,
        "floors": floor,
        "columns": {},
    }
    for name, column in columns.items():
        rule = column["rule"]
        ms = statistics.median(step_ms(column))
        entry: dict[str, Any] = {
            "step_ms": spread(step_ms(column)),
            "host_ms": spread(host_ms(column)),
            "kernel_ms": _rounded(kernel_ms(column)),
            "over_floor": _rounded(ms / floor[rule]["kernel_ms"]) if rule in floor else None,
            "over_whole_step": _ratio(columns, name, whole.get(rule)),
            "native_over_this": _ratio(columns, native, name),
            "te_graphs_over_this": _ratio(columns, te, name),
            "setup_s": _rounded(column["warm_s"]),
            "first_step_s": _rounded(column["first_step_s"]),
            "break_even_steps": None if native is None else break_even(column, columns[native]),
            "peak_bytes": memory_bytes(column),
            "above_native_bytes": None if native is None else above(column, columns[native]),
            "growth_bytes": growth_bytes(column),
        }
        if column["trace"] is not None and "unit_bytes" in column["facts"]:
            entry["matrix_copies"] = _copies(column, raw["cell"])
        found["columns"][name] = entry
    found["copied_over_per_microbatch"] = (
        paired(columns["ours_copied"], columns["ours_per_microbatch"])
        if {"ours_copied", "ours_per_microbatch"} <= columns.keys()
        else None
    )
    found["guards"] = derive_guards(columns)
    # Reports from before actions were timed one by one have no such numbers.
    if host := derive_host(columns):
        found["host"] = host
    return found


def derive_guards(columns: Mapping[str, Raw]) -> dict[str, Any] | None:
    """What asking the kernel costs: the same captured step with guards on and off."""
    if not {"ours_accumulate", "ours_unguarded"} <= columns.keys():
        return None
    on, off = columns["ours_accumulate"], columns["ours_unguarded"]
    actions = on["facts"]["guarded_actions"]
    pairs = zip(host_ms(on), host_ms(off), strict=False)
    return {
        "step_on_over_off": paired(on, off),
        "actions": actions,
        "host_us_of_a_guard": spread_around_zero([1e3 * (a - b) / actions for a, b in pairs]),
    }


def _copies(column: Raw, cell: Raw) -> dict[str, Any]:
    sizes = column["facts"]["unit_bytes"]
    found = matrix_copies(column["trace"], sizes)
    # An activation of the same size would be counted as a gradient.
    activation = 2 * cell["sequence"] * cell["hidden"]
    return {**found, "ambiguous": activation in sizes}


def _ratio(columns: Mapping[str, Raw], top: str | None, bottom: str | None) -> Any:
    if top is None or bottom is None:
        return None
    return paired(columns[top], columns[bottom])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def derive_bench(raw: Raw) -> dict[str, Any]:
    """Every cell of a step-table report, with the goals beside it."""
    from qeffect.gpu_runtime.measure.targets import judge_cells

    cells = [derive_cell(cell) for cell in raw["cells"]]
    return {"cells": cells, "targets": judge_cells(cells)}


def derive_sweep(raw: Raw) -> dict[str, Any]:
    """Resources against the number of microbatches, for each provisioning."""
    from qeffect.gpu_runtime.measure.targets import judge_sweep

    points = []
    for cell in raw["cells"]:
        for name, column in usable(cell["columns"]).items():
            facts = column["facts"]
            points.append(
                {
                    "provisioning": name,
                    "microbatches": cell["cell"]["microbatches"],
                    "peak_live_tapes": sum(cell["peak_live_tapes"].values()),
                    "slots": facts["slots"],
                    "graphs": facts["graphs"],
                    "arena_bytes": facts["arena_bytes"],
                    "capture_s": _rounded(column["warm_s"]),
                    "peak_bytes": memory_bytes(column),
                    "step_ms": spread(step_ms(column)),
                }
            )
    return {"points": points, "targets": judge_sweep(points)}


def derive_streams(raw: Raw) -> dict[str, Any]:
    """Stale reads by handoff, over all processes."""
    found: dict[str, Any] = {}
    for handoff in dict.fromkeys(run["handoff"] for run in raw["runs"]):
        runs = [run for run in raw["runs"] if run["handoff"] == handoff]
        found[handoff] = {
            "processes": len(runs),
            "checks": sum(run["checks"] for run in runs),
            "stale": sum(run["stale"] for run in runs),
            "stale_by_kind": _sum_of(run["stale_by_kind"] for run in runs),
            "vacuous": sum(run["vacuous"] for run in runs),
        }
    return {"handoffs": found}


def _sum_of(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for key, value in count.items():
            total[key] = total.get(key, 0) + value
    return total


def derive_compare(raw: Raw) -> dict[str, Any]:
    """Totals of bit comparisons, by category."""
    categories: dict[str, dict[str, int]] = {}
    for run in raw["runs"]:
        for entry in run["categories"]:
            total = categories.setdefault(entry["category"], {"compared": 0, "mismatched": 0})
            total["compared"] += entry["compared"]
            total["mismatched"] += entry["mismatched"]
    return {
        "runs": len(raw["runs"]),
        "compared": sum(t["compared"] for t in categories.values()),
        "mismatched": sum(t["mismatched"] for t in categories.values()),
        "categories": categories,
    }


def derive_pools(raw: Raw) -> dict[str, Any]:
    """What each discipline of capture memory did in each order, and what must not be."""
    orders = []
    problems: list[str] = []
    for order in dict.fromkeys(run["order"] for run in raw["runs"]):
        runs = {run["discipline"]: run for run in raw["runs"] if run["order"] == order}
        totals = {name: _pool_totals(run) for name, run in runs.items()}
        orders.append({"order": order, "disciplines": totals})
        for name in ("native-again", "private", "private-unguarded", "shared"):
            if name not in runs:
                problems.append(f"{order}: {name} was not run")
            elif runs[name]["error"]:
                problems.append(f"{order}: {name} failed: {runs[name]['error']}")
            else:
                problems += (f"{order}: {p}" for p in _pool_problems(name, totals[name]))
    return {"orders": orders, "problems": problems}


def _pool_totals(run: Raw) -> dict[str, Any]:
    return {
        "refused": run["refused"],
        "compared": sum(c["compared"] for c in run["categories"]),
        "mismatched": sum(c["mismatched"] for c in run["categories"]),
        "nonfinite": run["nonfinite"],
        "by_category": {c["category"]: c["mismatched"] for c in run["categories"]},
        "first": [f"{c['category']}: {label}" for c in run["categories"] for label in c["first"]],
    }


def _pool_problems(name: str, total: Raw) -> Iterable[str]:
    refused = None if total["refused"] is None else total["refused"]["clause"]
    if not total["compared"]:
        yield f"{name} compared nothing"
    elif name == "shared":
        if refused != "capture.out-of-order":
            yield f"the kernel did not refuse a shared pool out of capture order ({refused})"
        if not total["mismatched"]:
            yield "a shared pool did no harm, so the comparison shows nothing"
    else:
        if refused is not None:
            yield f"{name} was refused by {refused}"
        if total["mismatched"]:
            yield f"{name} differs from native in {total['mismatched']} values"


DERIVE: dict[str, Callable[[Raw], dict[str, Any]]] = {
    "bench": derive_bench,
    "sweep": derive_sweep,
    "streams": derive_streams,
    "compare": derive_compare,
    "pools": derive_pools,
}
"""What computes the derived part of each kind of report."""
