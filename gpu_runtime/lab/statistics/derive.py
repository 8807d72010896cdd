"""
What follows from a report's raw numbers: medians, ratios, floors, break-even, memory above native.

Nothing here measures, so a reader can compute it again from the report, and a test does. Ratios are
taken round by round between columns that ran in the same round, then their median is given: drift
of the clocks cancels.

A ratio that speaks of a bound names its reference. A floor is the least kernel time of the
library's own columns that form the same sum: no column of this runtime sets it, and columns that
keep every microbatch's gradient apart (`copied`, `per_microbatch`) have none, because no library
column forms that sum. They are held against their own kernels, which says what launching costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..runner.tracing import device_copies, matrix_copies
from .complete_step import derive_tables
from .curves import derive_curves
from .goals import judge_cells, judge_sweep
from .host import derive_host
from .peers import derive_peers
from .restarts import derive_restarts
from .scale import derive_scale
from .training import derive_train

Raw = Mapping[str, Any]
_DIGITS = 4

LIBRARY = ("native", "te_graphs", "whole_step")
"""Families of columns that are the library's, not this runtime's."""

REQUIREMENTS = ("addresses", "retained work", "growth")
"""Categories of a comparison in which a guarded run is held against zero, not against native."""

APART = ("copied", "per_microbatch")
"""Destinations that keep every microbatch's gradient, and sum them at the end of the step."""


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


def summed_like(column: Raw) -> str | None:
    """The library's rule that a column sums gradients by, kernel for kernel; None for no rule."""
    return None if column["options"].get("destination") in APART else str(column["rule"])


def floors(columns: Mapping[str, Raw]) -> dict[str, dict[str, Any]]:
    """For each rule, the least sum of kernel times of a library's column, and whose it is."""
    found: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        ms = kernel_ms(column)
        if column["family"] not in LIBRARY:
            continue
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
        rule = summed_like(column)
        ms = statistics.median(step_ms(column))
        kernels = kernel_ms(column)
        entry: dict[str, Any] = {
            "step_ms": spread(step_ms(column)),
            "host_ms": spread(host_ms(column)),
            "kernel_ms": _rounded(kernels),
            "over_own_kernels": None if kernels is None else _rounded(ms / kernels),
            "over_floor": _over_floor(ms, None if rule is None else floor.get(rule)),
            "beyond_floor": (
                None
                if rule is None or rule not in floor
                else beyond_floor(column, columns[floor[rule]["column"]])
            ),
            "over_whole_step": _over_whole_step(columns, name, whole, rule),
            "native_over_this": _ratio(columns, native, name),
            "te_graphs_over_this": _ratio(columns, te, name),
            **construction(column),
            "first_step_s": _rounded(column["first_step_s"]),
            "break_even_steps": None if native is None else break_even(column, columns[native]),
            "peak_bytes": memory_bytes(column),
            "above_native_bytes": None if native is None else above(column, columns[native]),
            "growth_bytes": growth_bytes(column),
        }
        if column["trace"] is not None and "unit_bytes" in column["facts"]:
            entry["matrix_copies"] = _copies(column, raw["cell"])
        if native is not None:
            entry["behind_native"] = behind(column, columns[native])
        found["columns"][name] = entry
    found["copied_over_per_microbatch"] = (
        paired(columns["ours_copied"], columns["ours_per_microbatch"])
        if {"ours_copied", "ours_per_microbatch"} <= columns.keys()
        else None
    )
    found["guards"] = derive_guards(columns)
    # Reports from before the device counted have no such column.
    for name in ("device_counts", "late_counts"):
        if {"ours_accumulate", f"ours_{name}"} <= columns.keys():
            counted, plain = columns[f"ours_{name}"], columns["ours_accumulate"]
            found[name] = {
                "step_on_over_off": paired(counted, plain),
                "host_ms_on": spread(host_ms(counted)),
                "host_ms_off": spread(host_ms(plain)),
            }
    # Reports from before actions were timed one by one have no such numbers.
    if host := derive_host(columns):
        found["host"] = host
    return found


def construction(column: Raw) -> dict[str, float | None]:
    """
    What making a column costs before its first step, and what of it is warm-up and capture.

    Construction is everything that this column alone needs: for this runtime slots, destinations,
    the contract, compiled sums, warm-up and capture. The other two are host times of its parts,
    which only this runtime's captured columns know.
    """
    facts = column["facts"]
    return {
        "construction_s": _rounded(column["warm_s"]),
        "warmup_s": _rounded(facts.get("warmup_s")),
        "capture_s": _rounded(facts.get("capture_s")),
    }


def behind(column: Raw, native: Raw) -> dict[str, float | None]:
    """
    How far a column's step is behind native's, and what of that its copies between buffers are.

    Device-to-device copies are the profiler's, as is the time of kernels; both are taken at the
    load of the profiled steps, not of the timed ones.
    """
    gap = statistics.median(step_ms(column)) - statistics.median(step_ms(native))
    if column["trace"] is None or native["trace"] is None:
        return {"step_ms": _rounded(gap), "copies_ms": None, "unexplained_ms": None}
    copies = device_copies(column["trace"]) - device_copies(native["trace"])
    return {
        "step_ms": _rounded(gap),
        "copies_ms": _rounded(copies),
        "unexplained_ms": _rounded(gap - copies),
    }


def beyond_floor(column: Raw, floor: Raw) -> dict[str, float | None]:
    """
    How far a column's step is beyond its floor, and what that is made of, in milliseconds.

    Its own kernels beyond the floor's, of which some are copies between buffers, and what the step
    takes beyond its own kernels. Kernels were profiled at another load than steps were timed at, so
    the same kernels can differ; on two streams they overlap.

    Args:
        column: The column.
        floor: The library's column whose kernel time is the floor.
    """
    ms, least = statistics.median(step_ms(column)), kernel_ms(floor)
    kernels = kernel_ms(column)
    assert least is not None, "a floor has kernel times"
    found: dict[str, float | None] = {"step_ms": _rounded(ms - least)}
    if kernels is None:
        return {**found, "kernels_ms": None, "copies_ms": None, "beyond_kernels_ms": None}
    return {
        **found,
        "kernels_ms": _rounded(kernels - least),
        "copies_ms": _rounded(device_copies(column["trace"]) - device_copies(floor["trace"])),
        "beyond_kernels_ms": _rounded(ms - kernels),
    }


def derive_guards(columns: Mapping[str, Raw]) -> dict[str, Any] | None:
    """What asking the kernel costs: the same captured step with guards on and off."""
    if not {"ours_accumulate", "ours_unguarded"} <= columns.keys():
        return None
    on, off = columns["ours_accumulate"], columns["ours_unguarded"]
    actions = on["facts"]["guarded_actions"]
    pairs = zip(host_ms(on), host_ms(off), strict=False)
    return {
        "step_on_over_off": paired(on, off),
        "host_ms_on": spread(host_ms(on)),
        "host_ms_off": spread(host_ms(off)),
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


def _over_floor(ms: float, floor: Raw | None) -> dict[str, Any] | None:
    if floor is None:
        return None
    return {"ratio": _rounded(ms / floor["kernel_ms"]), "of": floor["column"]}


def _over_whole_step(
    columns: Mapping[str, Raw], name: str, whole: Mapping[str, str], rule: str | None
) -> dict[str, Any] | None:
    reference = None if rule is None else whole.get(rule)
    if reference is None:
        return None
    return {**paired(columns[name], columns[reference]), "of": reference}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def derive_bench(raw: Raw) -> dict[str, Any]:
    """Every cell of a step-table report, with the goals beside it."""
    cells = [derive_cell(cell) for cell in raw["cells"]]
    return {"cells": cells, "targets": judge_cells(cells)}


def derive_sweep(raw: Raw) -> dict[str, Any]:
    """Resources against the number of microbatches, for each provisioning."""
    points = []
    for cell in raw["cells"]:
        for name, column in usable(cell["columns"]).items():
            facts = column["facts"]
            points.append(
                {
                    "provisioning": name,
                    "microbatches": cell["cell"]["microbatches"],
                    "peak_live_tapes": rank_peak(cell["order"]),
                    "sum_of_stage_peaks": sum(cell["peak_live_tapes"].values()),
                    "slots": facts["slots"],
                    "graphs": facts["graphs"],
                    "arena_bytes": facts["arena_bytes"],
                    **construction(column),
                    "peak_bytes": memory_bytes(column),
                    "step_ms": spread(step_ms(column)),
                }
            )
    return {"points": points, "targets": judge_sweep(points)}


def rank_peak(order: str) -> int:
    """
    The most tapes that are live at once in a rank, all stages together, from F to dW.

    Slots belong to a stage, so a rank needs the sum of its stages' peaks, which can be more.

    >>> rank_peak("0F0 0I0 0W0 1F0 1I0 1W0")
    1
    """
    live = peak = 0
    for action in order.split():
        live += ("F" in action) - ("W" in action)
        peak = max(peak, live)
    return peak


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
    """
    Totals of bit comparisons, by category and by what was compared with what.

    `native_against_ours` is what the evidence rests on. `native_again` is the control: the library
    against itself in another process. `eager_against_ours` is where the library cannot form the
    sum, so that split eager is the reference. `requirements` are counts of a guarded run that must
    be zero and have no counterpart on the native side.
    """
    categories: dict[str, dict[str, int]] = {}
    by_reference: dict[str, dict[str, int]] = {
        name: {"runs": 0, "compared": 0, "mismatched": 0}
        for name in ("native_against_ours", "native_again", "eager_against_ours")
    }
    requirements = {"compared": 0, "mismatched": 0}
    for run in raw["runs"]:
        own = by_reference[_compared_as(run)]
        own["runs"] += 1
        for entry in run["categories"]:
            for total in (
                categories.setdefault(entry["category"], {"compared": 0, "mismatched": 0}),
                requirements if entry["category"] in REQUIREMENTS else own,
            ):
                total["compared"] += entry["compared"]
                total["mismatched"] += entry["mismatched"]
    return {
        "runs": len(raw["runs"]),
        "compared": sum(t["compared"] for t in categories.values()),
        "mismatched": sum(t["mismatched"] for t in categories.values()),
        **by_reference,
        "requirements": requirements,
        "faults": _sum_of({f["clause"]: 1} for run in raw["runs"] for f in run.get("injected", ())),
        "categories": categories,
    }


def _compared_as(run: Raw) -> str:
    if run["candidate"] == "native-again":
        return "native_again"
    return "native_against_ours" if run["reference"].startswith("native") else "eager_against_ours"


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


def derive_probes(raw: Raw) -> dict[str, Any]:
    """What each probe found, in a sentence: nothing is judged."""
    probes = []
    for run in raw["attention"]:
        attention = "fused attention" if run["fused_attention"] else "NVTE_FUSED_ATTN=0"
        found = "ran" if run["error"] is None else f"failed, {run['error']}"
        if run.get("invalid_writes") is not None:
            where = ", ".join(run["kernels"])
            sizes = " and ".join(map(str, run["write_bytes"]))
            found += f"; {run['invalid_writes']} invalid writes"
            found += f" of {sizes} bytes in {where}" if run["invalid_writes"] else ""
        what = f"sequences of {run['sequence']} tokens, {attention}, {run['how']}"
        probes.append({"what": what, "found": found})
    lines = list(raw["pairing"]["lines"].values())
    version = raw["pairing"]["version"]
    if None in lines:
        found = "the library is not installed or binds otherwise"
    else:
        found = (
            f"that of its chunk's most recent dgrad (Transformer Engine {version}, "
            f"pytorch/graph.py, lines {', '.join(map(str, sorted(lines)))})"
        )
    probes.append({"what": "the graph of a dW in the library's own graphs", "found": found})
    if (looked := raw["addresses"]) is not None:
        found = looked["error"] or (
            f"{looked['median_us']:.1f} µs for {looked['addresses']} addresses of a stage"
        )
        probes.append({"what": "a look at every baked address", "found": found})
    # Reports from before interleaved stages were looked at have none.
    for side in raw.get("interleaved", ()):
        found = side["error"] or f"{side['different']} of {side['compared']} values differ"
        if side["first"] is not None:
            found += f", first {side['first']}"
        if side["not_finite"] is not None:
            found += f"; not finite from {side['not_finite']} on"
        probes.append({"what": f"interleaved stages, {side['name']}", "found": found})
    return {"probes": probes}


DERIVE: dict[str, Callable[[Raw], dict[str, Any]]] = {
    "bench": derive_bench,
    "sweep": derive_sweep,
    "streams": derive_streams,
    "compare": derive_compare,
    "pools": derive_pools,
    "probes": derive_probes,
    "scale": derive_scale,
    "tables": derive_tables,
    "peers": derive_peers,
    "train": derive_train,
    "restarts": derive_restarts,
    "curves": derive_curves,
}
"""What computes the derived part of each kind of report."""
