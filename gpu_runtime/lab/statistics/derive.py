"""
Derive the figures of the step tables: medians, ratios, floors, break-even steps, and memory above
native.

This module measures nothing. A reader can compute the figures again from a report, and a test does
so. Ratios are taken between columns of the same round, and the median over rounds is reported, so
that drift of the clocks cancels.

A *floor* is the least kernel time among the library's own columns that form the same sum; columns
of this runtime never set a floor. Columns that keep each microbatch's gradient separate (`copied`,
`per_microbatch`) have no floor, because no library column forms that sum. Such a column is compared
with its own kernel time, which shows the cost of launching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...training.figures import derive_train
from .complete_step import derive_tables
from .curves import derive_curves
from .evidence import derive_compare, derive_pools, derive_probes, derive_streams
from .goals import judge_cells, judge_sweep
from .groups import derive_groups
from .host import derive_host
from .kills import derive_kills
from .models import derive_models
from .modes import derive_modes
from .peers import derive_peers
from .restarts import derive_restarts
from .scale import derive_scale
from .scales import derive_scales
from .second_runs import derive_second_runs
from .summary import Raw, exact_median, extremes, rounded, spread
from .traces import device_copies, matrix_copies

LIBRARY = ("native", "te_graphs", "whole_step")
"""Families (kinds) of columns that run the library without this runtime."""

APART = ("copied", "per_microbatch")
"""
Gradient destinations that keep the gradient of every microbatch and sum the gradients at the end of
the step.
"""


def rounds_ms(column: Raw) -> list[float]:
    """Milliseconds of a step, for each round."""
    return [1e3 * turn["wall_s"] / turn["steps"] for turn in column["rounds"]]


def host_ms(column: Raw) -> list[float]:
    """Milliseconds that the host takes to enqueue one step on an idle device, for each round."""
    return [1e3 * exact_median(turn["host_s"]) for turn in column["rounds"]]


def usable_columns(columns: Mapping[str, Raw]) -> dict[str, Raw]:
    """Columns (ways to run a step) that did not fail."""
    return {name: c for name, c in columns.items() if not c["error"] and c["rounds"]}


def fastest_column(columns: Mapping[str, Raw], family: str) -> str | None:
    """The column (a way to run a step) of a family with the shortest median step."""
    own = {name: exact_median(rounds_ms(c)) for name, c in columns.items() if c["family"] == family}
    return min(own, key=own.__getitem__) if own else None


def kernel_ms(column: Raw) -> float | None:
    """Sum of the times of all kernels, copies and fills of one step."""
    trace = column["trace"]
    return None if trace is None else float(trace["device_us"]) / trace["steps"] / 1e3


def sum_rule(column: Raw) -> str | None:
    """
    How the library sums gradients with the same kernels as a column; None if the library cannot.
    """
    return None if column["options"].get("destination") in APART else str(column["rule"])


def floors(columns: Mapping[str, Raw]) -> dict[str, dict[str, Any]]:
    """
    For each rule (a way to sum gradients), the least total kernel time of a library column, and the
    name of this column.
    """
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
        floor["kernel_ms"] = rounded(floor["kernel_ms"])
    return found


def paired_ratio(top: Raw, bottom: Raw) -> dict[str, float]:
    """The ratio of the step times of two columns (ways to run a step), round by round."""
    pairs = zip(rounds_ms(top), rounds_ms(bottom), strict=False)
    return spread([a / b for a, b in pairs])


def break_even(column: Raw, native: Raw) -> int | None:
    """
    The step at which a column (a way to run a step) has caught up with native, including set-up and
    first step.

    The result is None if the column never catches up.
    """
    ours, theirs = (exact_median(rounds_ms(c)) for c in (column, native))
    if ours >= theirs:
        return None
    behind = 1e3 * sum(column[key] - native[key] for key in ("warm_s", "first_step_s"))
    return 1 if behind <= 0 else 1 + math.ceil(behind / (theirs - ours))


def memory_bytes(column: Raw) -> dict[str, int] | None:
    """
    Memory peaks according to the allocator and the driver.

    The driver's figure is the larger of two rises above the driver's reading before the column was
    built. The first is the highest rise among repeated readings. Readings can miss a short peak, so
    the second is the last reading's rise plus the memory that the allocator has returned since its
    own peak.
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


def bytes_above(column: Raw, native: Raw) -> dict[str, int] | None:
    """Peak memory minus native's in bytes, by source, and the largest of these differences."""
    own, base = memory_bytes(column), memory_bytes(native)
    if own is None or base is None:
        return None
    found = {key: own[key] - base[key] for key in own}
    return {**found, "largest": max(found.values())}


def growth_bytes(column: Raw) -> dict[str, int] | None:
    """By how much allocated and reserved memory grew between an early step and a late step."""
    growth = column["growth"]
    if growth is None or growth["allocated_after"] is None:
        return None
    return {
        "steps": growth["steps"],
        "allocated": growth["allocated_after"] - growth["allocated_before"],
        "reserved": growth["reserved_after"] - growth["reserved_before"],
    }


def derive_cell(raw: Raw) -> dict[str, Any]:
    """Derive all figures of one cell (workload)."""
    columns = usable_columns(raw["columns"])
    native, te = fastest_column(columns, "native"), fastest_column(columns, "te_graphs")
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
        rule = sum_rule(column)
        ms = exact_median(rounds_ms(column))
        kernels = kernel_ms(column)
        entry: dict[str, Any] = {
            "step_ms": spread(rounds_ms(column)),
            "host_ms": spread(host_ms(column)),
            "kernel_ms": rounded(kernels),
            "over_own_kernels": None if kernels is None else rounded(ms / kernels),
            "over_floor": _over_floor(ms, None if rule is None else floor.get(rule)),
            "beyond_floor": (
                None
                if rule is None or rule not in floor
                else excess_over_floor(column, columns[floor[rule]["column"]])
            ),
            "over_whole_step": _over_whole_step(columns, name, whole, rule),
            "native_over_this": _ratio(columns, native, name),
            "te_graphs_over_this": _ratio(columns, te, name),
            **construction(column),
            "first_step_s": rounded(column["first_step_s"]),
            "break_even_steps": None if native is None else break_even(column, columns[native]),
            "peak_bytes": memory_bytes(column),
            "above_native_bytes": None if native is None else bytes_above(column, columns[native]),
            "growth_bytes": growth_bytes(column),
        }
        if column["trace"] is not None and "unit_bytes" in column["facts"]:
            entry["matrix_copies"] = _copies(column, raw["cell"])
        if native is not None:
            entry["behind_native"] = gap_behind(column, columns[native])
        found["columns"][name] = entry
    found["copied_over_per_microbatch"] = (
        paired_ratio(columns["ours_copied"], columns["ours_per_microbatch"])
        if {"ours_copied", "ours_per_microbatch"} <= columns.keys()
        else None
    )
    found["guards"] = derive_guards(columns)
    # Older reports have no column whose steps the device counts.
    for name in ("device_counts", "late_counts"):
        if {"ours_accumulate", f"ours_{name}"} <= columns.keys():
            counted, plain = columns[f"ours_{name}"], columns["ours_accumulate"]
            found[name] = {
                "step_on_over_off": paired_ratio(counted, plain),
                "host_ms_on": spread(host_ms(counted)),
                "host_ms_off": spread(host_ms(plain)),
            }
    # Older reports did not time single actions.
    if host := derive_host(columns):
        found["host"] = host
    return found


def construction(column: Raw) -> dict[str, float | None]:
    """
    Seconds of building a column (a way to run a step) before its first step, and how many of these
    seconds are warm-up and capture.

    Construction is all work that only this column needs: for this runtime, slots, destinations, the
    contract, compiled sums, warm-up and capture. Warm-up and capture are host times, which only
    this runtime's captured columns report.
    """
    facts = column["facts"]
    return {
        "construction_s": rounded(column["warm_s"]),
        "warmup_s": rounded(facts.get("warmup_s")),
        "capture_s": rounded(facts.get("capture_s")),
    }


def gap_behind(column: Raw, native: Raw) -> dict[str, float | None]:
    """
    How much longer the step of a column (a way to run a step) takes than native's, and how much of
    the difference is due to copies between buffers.

    Copies are device-to-device copies in the profiled steps, in which the load of the device
    differs from the load in the timed steps.
    """
    gap = exact_median(rounds_ms(column)) - exact_median(rounds_ms(native))
    if column["trace"] is None or native["trace"] is None:
        return {"step_ms": rounded(gap), "copies_ms": None, "unexplained_ms": None}
    copies = device_copies(column["trace"]) - device_copies(native["trace"])
    return {
        "step_ms": rounded(gap),
        "copies_ms": rounded(copies),
        "unexplained_ms": rounded(gap - copies),
    }


def excess_over_floor(column: Raw, floor: Raw) -> dict[str, float | None]:
    """
    How much longer the step of a column (a way to run a step) takes than its floor, by cause, in
    milliseconds.

    The two causes are: kernel time beyond the floor's (partly copies between buffers), and step
    time beyond the column's own kernels. Kernels were profiled under another load than the timed
    steps, so times of the same kernels can differ. On two streams, kernels overlap.

    Args:
        column: The raw measurements of the column.
        floor: The column of Transformer Engine whose kernel time is the floor: the shortest kernel
            time with the same gradient sum.
    """
    ms, least = exact_median(rounds_ms(column)), kernel_ms(floor)
    kernels = kernel_ms(column)
    assert least is not None, "expected kernel times of the floor, found none"
    found: dict[str, float | None] = {"step_ms": rounded(ms - least)}
    if kernels is None:
        return {**found, "kernels_ms": None, "copies_ms": None, "beyond_kernels_ms": None}
    return {
        **found,
        "kernels_ms": rounded(kernels - least),
        "copies_ms": rounded(device_copies(column["trace"]) - device_copies(floor["trace"])),
        "beyond_kernels_ms": rounded(ms - kernels),
    }


def derive_guards(columns: Mapping[str, Raw]) -> dict[str, Any] | None:
    """The cost of the guards, from the same captured step once with and once without guards."""
    if not {"ours_accumulate", "ours_unguarded"} <= columns.keys():
        return None
    on, off = columns["ours_accumulate"], columns["ours_unguarded"]
    actions = on["facts"]["guarded_actions"]
    pairs = zip(host_ms(on), host_ms(off), strict=False)
    return {
        "step_on_over_off": paired_ratio(on, off),
        "host_ms_on": spread(host_ms(on)),
        "host_ms_off": spread(host_ms(off)),
        "actions": actions,
        "host_us_of_a_guard": extremes([1e3 * (a - b) / actions for a, b in pairs]),
    }


def _copies(column: Raw, cell: Raw) -> dict[str, Any]:
    sizes = column["facts"]["unit_bytes"]
    found = matrix_copies(column["trace"], sizes)
    # A copy of an activation of this size would count as a copy of a gradient.
    activation = 2 * cell["sequence"] * cell["hidden"]
    return {**found, "ambiguous": activation in sizes}


def _ratio(columns: Mapping[str, Raw], top: str | None, bottom: str | None) -> Any:
    if top is None or bottom is None:
        return None
    return paired_ratio(columns[top], columns[bottom])


def _over_floor(ms: float, floor: Raw | None) -> dict[str, Any] | None:
    if floor is None:
        return None
    return {"ratio": rounded(ms / floor["kernel_ms"]), "of": floor["column"]}


def _over_whole_step(
    columns: Mapping[str, Raw], name: str, whole: Mapping[str, str], rule: str | None
) -> dict[str, Any] | None:
    reference = None if rule is None else whole.get(rule)
    if reference is None:
        return None
    return {**paired_ratio(columns[name], columns[reference]), "of": reference}


def derive_bench(raw: Raw) -> dict[str, Any]:
    """Derive every cell of a step-table report, with its goals."""
    cells = [derive_cell(cell) for cell in raw["cells"]]
    return {"cells": cells, "targets": judge_cells(cells)}


def derive_sweep(raw: Raw) -> dict[str, Any]:
    """Resources by number of microbatches, for each way to provision slots."""
    points = []
    for cell in raw["cells"]:
        for name, column in usable_columns(cell["columns"]).items():
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
                    "step_ms": spread(rounds_ms(column)),
                }
            )
    return {"points": points, "targets": judge_sweep(points)}


def rank_peak(order: str) -> int:
    """
    The largest number of tapes (saved data of one forward each) live at once in a rank, over all
    stages; a tape is live from F to dW.

    Slots belong to stages, so a rank needs as many slots as the sum of its stages' peaks, which can
    be larger.

    >>> rank_peak("0F0 0I0 0W0 1F0 1I0 1W0")
    1
    """
    live = peak = 0
    for action in order.split():
        live += ("F" in action) - ("W" in action)
        peak = max(peak, live)
    return peak


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
    "models": derive_models,
    "groups": derive_groups,
    "train": derive_train,
    "restarts": derive_restarts,
    "kills": derive_kills,
    "modes": derive_modes,
    "scales": derive_scales,
    "second_runs": derive_second_runs,
    "curves": derive_curves,
}
"""For each kind of report, the function that computes the derived part."""
