"""
Reports made of chosen numbers, in memory or in a test's own folder; no number is a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from qeffect.gpu_runtime.lab.reports.report import Report
from qeffect.gpu_runtime.lab.sides.cells import CELLS, BenchCell, sweep_cell
from qeffect.gpu_runtime.lab.sides.columns import (
    COUNTED,
    LATE,
    SPECS,
    SWEEP_SPECS,
    UNGUARDED,
    Settings,
)

ENVIRONMENT = {
    "gpu": "none, chosen numbers",
    "driver": None,
    "gpu_memory_mib": None,
    "clocks": {},
    "cpu": "none",
    "cores": 1,
    "load_1min": 0.0,
    "python": "3.12.0",
    "packages": {"torch": "2.11.0", "transformer-engine": "not installed"},
    "commit": "0" * 40,
    "argv": [],
    "date": "2000-01-01T00:00:00Z",
}
STEP_MS = {
    "native_grad": 40.0,
    "native_main_grad": 36.0,
    "te_graphs_chunks": 9.0,
    "te_graphs_chunks_plain": 8.9,
    "te_graphs_layers": 8.5,
    "te_graphs_model": 8.0,
    "te_graphs_model_main_grad": 8.2,
    "whole_grad": 4.2,
    "whole_main_grad": 4.0,
    "ours_eager": 45.0,
    "ours_copied": 5.0,
    "ours_per_microbatch": 4.4,
    "ours_accumulate": 4.1,
    "ours_two_streams": 4.3,
    "ours_unguarded": 4.08,
    "ours_device_counts": 4.141,
    "ours_late_counts": 4.11,
}


def column(
    family: str = "native",
    rule: str = "grad",
    *,
    ms: Sequence[float] = (10.0, 10.0, 10.0),
    kernel_ms: float | None = 4.0,
    warm_s: float = 0.0,
    first_s: float = 0.1,
    peak: int = 10**9,
    facts: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The raw record of a column (a way to run a step) with the given step of each round."""
    trace = {"steps": 2, "device_us": 2e3 * (kernel_ms or 1.0), "device_events": 10}
    return {
        "title": "a column",
        "family": family,
        "rule": rule,
        "options": {},
        "error": None,
        "prepare_s": 3.0,
        "build_s": 0.5,
        "warm_s": warm_s,
        "first_step_s": first_s,
        "memory": {
            "allocated": peak - 100,
            "reserved": peak + 100,
            "allocated_peak": peak,
            "reserved_peak": peak + 300,
            "device_before": 5 * 10**9,
            "device_after": 5 * 10**9 + peak + 1000,
            "device_polled_rise": None,
        },
        "facts": dict(facts or {}),
        "rounds": [
            {"steps": 20, "warm_steps": 3, "wall_s": 20 * each / 1e3, "host_s": [each / 2e3]}
            for each in ms
        ],
        "growth": {
            "steps": 200,
            "allocated_before": 7,
            "allocated_after": 7,
            "reserved_before": 9,
            "reserved_after": 9,
        },
        "trace": None
        if kernel_ms is None
        else {**trace, "copies": [], "copy_kernels": [], "top": []},
        **changes,
    }


def cell_record(cell: BenchCell, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The raw record of a cell (a workload)."""
    order = cell.order()
    return {
        "cell": cell.to_json(),
        "order": " ".join(map(str, order.steps)),
        "order_source": order.source,
        "peak_live_tapes": {str(stage): peak for stage, peak in order.peaks.items()},
        "libraries_bytes": 6 * 10**8,
        "columns": dict(columns),
        "clocks": [{"round": 0, "clocks.sm": 1980.0}],
    }


def host_actions(over_us: float) -> dict[str, Any]:
    """
    Host times of one action per step: its replay takes 2 µs, and the action takes a given time
    longer.
    """
    guarded = int(1e3 * (2 + over_us))
    return {
        "steps": 3,
        "actions": 1,
        "guarded_ns": {"forward": [guarded, guarded + 1000, guarded - 1000]},
        "bare_ns": {"forward": [2000, 2000, 2000]},
        "copy_ns": [5000],
        "parts_ns": {
            "copies": {"forward": [4000] * 3},
            "addresses": {"refresh": []},
            "executor": {"forward": [3000] * 3},
        },
    }


def bench_columns(cell: BenchCell) -> dict[str, Any]:
    """Every column (a way to run a step) of the step table, with chosen numbers."""
    unit = 2 * cell.hidden * cell.hidden
    made = {}
    for spec in (*SPECS, UNGUARDED, COUNTED, LATE):
        ms = STEP_MS[spec.name] * cell.hidden / 2048
        made[spec.name] = column(
            spec.family,
            spec.rule,
            ms=[ms, 1.01 * ms, 0.99 * ms],
            kernel_ms=0.9 * (4.2 if spec.rule == "grad" else 4.0) * cell.hidden / 2048,
            warm_s=0.4,
            peak=10**9 + len(made) * 10**8,
            facts={"unit_bytes": [unit], "guarded_actions": 26}
            if spec.family.startswith("ours")
            else {},
            title=spec.title,
            options=dict(spec.options),
        )
    made["ours_accumulate"]["host_actions"] = host_actions(11.0)
    made["ours_copied"]["trace"]["copies"] = [
        {"name": "Memcpy DtoD (Device -> Device)", "bytes": unit, "count": 64, "us": 640.0}
    ]
    return made


def bench_report() -> dict[str, Any]:
    """A step-table report over all three cells."""
    return _report("bench", [cell_record(cell, bench_columns(cell)) for cell in CELLS])


def sweep_report(*, arena_rise: int = 0) -> dict[str, Any]:
    """A sweep report; the arena of live slots may rise where it should stay constant."""
    cells = []
    for count in (2, 4, 8):
        columns = {}
        for spec in SWEEP_SPECS:
            live = spec.name == "live"
            slots = 5 if live else 2 * count
            arena = 10**8 * (1 if live else count) + (arena_rise * count if live else 0)
            columns[spec.name] = column(
                spec.family,
                spec.rule,
                warm_s=0.1 * slots,
                peak=10**9 + 10**7 * slots,
                facts={
                    "slots": slots,
                    "graphs": 3 * slots + 2,
                    "arena_bytes": arena,
                    "warmup_s": 0.01,
                    "capture_s": 0.02 * slots,
                },
                title=spec.title,
                options=dict(spec.options),
            )
        cells.append(cell_record(sweep_cell(CELLS[0], count), columns))
    return _report("sweep", cells)


def streams_report(*, stale: int = 0, vacuous: int = 0) -> dict[str, Any]:
    """A stream report: one-way handoffs are always stale, two-way handoffs as given."""
    runs = [
        {
            "handoff": handoff,
            "checks": 200,
            "stale": count,
            "stale_by_kind": {"output": count, "cache": count // 2},
            "vacuous": vacuous,
            "producer_ms": 10.0,
            "host_ms": 0.1,
        }
        for handoff, count in (("one-way", 200), ("two-way", stale))
        for _ in range(3)
    ]
    report = Report("streams", None, ENVIRONMENT, {"quick": False}, {"runs": runs})
    return report.finish()


def compare_report() -> dict[str, Any]:
    """A comparison report: two runs against native, one control, one against split eager."""
    runs: list[dict[str, Any]] = [
        {
            "case": {"name": "chosen"},
            "reference": reference,
            "candidate": candidate,
            "injected": [],
            "categories": [
                {"category": "outputs", "compared": 10, "mismatched": bad, "first": []},
                {"category": "scales", "compared": 5, "mismatched": 0, "first": []},
            ],
        }
        for reference, candidate, bad in (
            ("native, grad", "native-again", 0),
            ("native, grad", "eager", 0),
            ("native, grad", "disturbed", 1),
            ("eager", "captured", 0),
        )
    ]
    runs[2]["categories"].append(
        {"category": "growth", "compared": 2, "mismatched": 0, "first": []}
    )
    runs[2]["injected"] = [
        {"fault": name, "clause": clause, "transition": "check_wgrad", "where": "0W0"}
        for name, clause in (
            ("old-reference", "ownership.stale-reference"),
            ("write-after-abort", "arena.spoiled"),
            ("write-after-abort", "arena.spoiled"),
        )
    ]
    raw = {"runs": runs, "failures": []}
    return Report("compare", None, ENVIRONMENT, {"device": "cpu"}, raw).finish()


def pools_report(
    *, private: int = 0, shared: int = 3, clause: str | None = "capture.out-of-order"
) -> dict[str, Any]:
    """A capture-memory report of one order, with the given mismatches and refusal."""
    refused = None if clause is None else {"clause": clause, "action": "0I0", "position": 3}
    runs = [
        {
            "order": "chosen",
            "cells": "0F0 0F1 0I1 0I0 0W1 0W0",
            "rule": "copied",
            "steps": 8,
            "discipline": name,
            "slots": {} if name == "native-again" else {"0": 2},
            "refused": refused if name == "shared" else None,
            "nonfinite": bad,
            "categories": [
                {"category": "outputs", "compared": 10, "mismatched": bad, "first": ["x"][:bad]},
                {"category": "parameters", "compared": 5, "mismatched": 0, "first": []},
            ],
            "error": None,
        }
        for name, bad in (
            ("native-again", 0),
            ("private", private),
            ("private-unguarded", 0),
            ("shared", shared),
        )
    ]
    return Report("pools", None, ENVIRONMENT, {"orders": []}, {"runs": runs}).finish()


def probes_report(*, line: int | None = 7) -> dict[str, Any]:
    """
    A report of the probes: an attention that fails, a pairing of graphs, a comparison of addresses.
    """
    attention = [
        {"sequence": 64, "fused_attention": True, "how": "captured", "error": "illegal access"},
        {
            "sequence": 64,
            "fused_attention": True,
            "how": "eager, compute-sanitizer",
            "error": None,
            "invalid_writes": 3,
            "write_bytes": [16],
            "kernels": ["bprop"],
        },
        {"sequence": 64, "fused_attention": False, "how": "captured", "error": None},
    ]
    pairing = {"version": "2.18.0", "sha256": "0" * 64, "lines": {"a": 5, "b": line}}
    addresses = {"error": None, "looks": 10, "addresses": 40, "median_us": 9.5, "min_us": 9.0}
    sides: list[dict[str, Any]] = [
        {"name": "native", "breaks": None, "different": 0, "first": None, "not_finite": None},
        {"name": "kept", "breaks": "arena", "different": 3, "first": "a", "not_finite": "b"},
        {"name": "gone", "breaks": None, "different": 9, "first": None, "not_finite": None},
    ]
    for side in sides:
        side |= {"what": f"{side['name']}, so", "compared": 9, "error": None}
    sides[2]["error"] = "RuntimeError: died"
    raw = {
        "attention": attention,
        "pairing": pairing,
        "addresses": addresses,
        "interleaved": sides,
    }
    return Report("probes", None, ENVIRONMENT, {"device": "cuda"}, raw).finish()


def _report(kind: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    configuration = {"quick": False, "settings": attrs.asdict(Settings())}
    return Report(kind, None, ENVIRONMENT, configuration, {"cells": cells}).finish()


def scale_report(*, differ: int = 0) -> dict[str, Any]:
    """A pipeline over two ranks: compared once, timed natively and as one launch per step."""

    def timed(side: str, ms: float, peak: int, **more: Any) -> dict[str, Any]:
        return {
            "cell": "tiny",
            "side": side,
            "schedule": "il",
            **{key: [ms, ms, ms] for key in ("step_ms", "single_ms", "host_ms")},
            "construction_s": 0.5,
            "peak_bytes": [peak, peak - 100],
            "facts": [{}, {}],
            **more,
        }

    def split(row: float) -> dict[str, Any]:
        own = {"step": row + 0.1, "busy": row, "beside": 0.0, "awaited": 0.0, "between": 0.1}
        launch = {"step": 5.2, "busy": 4.1, "beside": 1.0, "awaited": 0.7, "between": 0.4}
        return {"launch": launch, "row_ms": row, "row": own}

    raw = {
        "compared": [
            {
                "name": "tiny",
                "schedule": "il",
                "steps": 3,
                "microbatches": 4,
                "categories": {"outputs": [8, 0], "losses": [4, differ]},
                "slots": [[3, 2], [2, 2]],
            }
        ],
        "timed": [
            timed("native", 50.0, 1000),
            timed(
                "one launch",
                5.0,
                1300,
                bound_ms=4.0,
                message_ms=0.03,
                in_order={"times_ms": {"0": {"F": 0.2}}, "update_ms": [0.1], "bound_ms": 4.5},
                split=[split(4.0), split(3.8)],
                host_ahead_ms=[0.25, 0.27, 0.29],
                final=[4, 0],
                update_ms=[0.1, 0.1],
                busy_ms=[
                    {"kernels": 3.5, "copies": 0.5, "messages": 2.0},
                    {"kernels": 3.0, "copies": 0.5, "messages": 9.0},
                ],
            ),
        ],
    }
    return Report("scale", None, ENVIRONMENT, {"pp": 2}, raw).finish()


def table_row(side: str, ms: float, **more: Any) -> dict[str, Any]:
    """One result of a trial (a workload run in one way): by default the language model over two
    ranks with the large layers."""
    own = side not in ("native", "eager")
    fact = {"handoffs": 2, "replays": 52, "slots": [4, 2], "arena_bytes": 1000}
    return {
        "cell": "h4096-s256-m8",
        "microbatches": 8,
        "model": "language",
        "pp": 2,
        "vpp": 2,
        "schedule": "il",
        "side": side,
        "error": None,
        "tokens": 2048,
        **{key: [ms - 1, ms, ms + 3] for key in ("step_ms", "single_ms", "host_ms")},
        "construction_s": 1.0 if own else 0.25,
        "first_step_s": 0.5,
        "peak_bytes": [3000, 2000],
        "memory": [
            {
                "built": 500,
                "reserved": 600 + 90 * own,
                "allocated_peak": 2000 + 700 * own,
                "grown": 0,
                "device": 5000,
            },
            {
                "built": 400,
                "reserved": 600 + 80 * own,
                "allocated_peak": 1000 + 900 * own,
                "grown": 0,
                "device": 5000,
            },
        ],
        "facts": [
            {**fact, "graphs": 20, "warmup_s": 0.25, "capture_s": 0.5} if own else fact
            for _ in range(2)
        ],
        "busy_ms": [
            {"kernels": ms / 2 - 1, "copies": 1.0, "messages": 9.0},
            {"kernels": ms / 4, "copies": 0.0, "messages": 9.0},
        ],
        "copies": [
            {
                "per_step": 72.0 if side == "copied" else 0.0,
                "bytes_per_step": 7200.0 if side == "copied" else 0.0,
                "us_per_step": 1.0,
                "without_size": 0,
            }
        ]
        * 2,
        "planned": [
            {"peak_live": 6, "peak_deferred": 1, "delayed": 0},
            {"peak_live": 4, "peak_deferred": 1, "delayed": 3},
        ],
        "compared": None,
        **more,
    }


def tables_report(*, differ: int = 0) -> dict[str, Any]:
    """Four trials of two ranks and one of four; the last row of the first failed."""
    small = {"cell": "h2048-s256-m4", "microbatches": 4, "tokens": 1024}
    fewer = {"cell": "h4096-s256-m2", "microbatches": 2, "tokens": 512}

    def trial(n: int) -> dict[str, Any]:
        compared = {"with": "native", "values": 40, "different": differ, "first": []}
        rows = [
            table_row("native", 100.0 + n),
            table_row("copied", 25.0),
            table_row("per_microbatch", 20.0),
            table_row("replays", 10.0, compared=compared),
            table_row("replays", 12.5, schedule="zbv"),
            table_row("replays", 5.0, schedule="zbv", **fewer),
            table_row("replays", 12.0, model="layers"),
            table_row("one launch", 11.0, model="layers"),
            table_row("replays", 4.0, model="layers", **small),
        ]
        return {"pp": 2, "date": "2026-11-22T08:00:00Z", "rows": rows}

    four = [
        table_row("replays", 12.5, model="layers", pp=4),
        table_row("replays", 5.0, model="layers", pp=4, **small),
        table_row("replays", 6.25, pp=4, vpp=1, schedule="1f1b"),
        table_row("replays", 5.0, pp=4, vpp=1, schedule="izb"),
    ]
    trials = [trial(n) for n in (0, 2, 4, 6)]
    trials.append({"pp": 4, "date": "2026-11-22T08:00:00Z", "rows": four})
    trials[0]["rows"].append(
        {
            **{key: four[0][key] for key in ("cell", "microbatches", "model", "pp", "vpp")},
            "schedule": "il",
            "side": "one launch",
            "error": "BackendError: no",
        }
    )
    asked = {"pp": 2, "parts": ["steps"], "cells": ["h4096-s256-m8"], "rounds": 3, "steps": 10,
             "native_steps": 3}  # fmt: skip
    return Report("tables", None, ENVIRONMENT, asked, {"trials": trials}).finish()


def against(name: str, different: int, relative: float | None, odd: int = 0) -> dict[str, Any]:
    """The distance of one side's gradients from another side's."""
    return {
        "with": name,
        "compared": 30,
        "different": different,
        "not_finite": odd,
        "relative": relative,
        "cosine": None if relative is None else 1.0,
        "worst": None if relative is None else ["rank 0: head.weight", relative],
    }


def peer_row(
    side: str,
    ms: float,
    *compared: dict[str, Any],
    schedule: str = "il",
    main_grad: str = "bf16",
    group: int | None = None,
) -> dict[str, Any]:
    """One result of `report peers` (a workload run by one framework in one mode) with the large
    layers."""
    return {
        "cell": "h4096-s256-m8",
        "side": side,
        "schedule": schedule,
        "main_grad": main_grad,
        "group": group,
        "error": None,
        "gradients": list(compared),
        "loss": 10.5,
        **{key: [ms - 1, ms, ms + 2] for key in ("step_ms", "single_ms", "host_ms")},
        "construction_s": 1.0,
        "peak_bytes": [1000, 2000],
        "facts": [{}, {}],
        "busy_ms": [
            {"kernels": ms / 2, "copies": 1.0, "messages": 9.0},
            {"kernels": ms / 4, "copies": 1.0, "messages": 9.0},
        ],
    }


def peers_report() -> dict[str, Any]:
    """Ours beside Megatron, one of whose modes is fast and wrong, and one of which failed."""
    eager, graphs = "megatron none", "megatron transformer_engine"
    same = against("native", 0, 0.0)
    rows = [
        peer_row("native", 100.0, same),
        peer_row("replays", 14.0, same),
        peer_row("replays", 12.0, against("native", 28, 0.04), schedule="zbv"),
        peer_row("one launch", 10.0, against("replays", 0, 0.0)),
        peer_row(eager, 120.0, against("native", 30, 0.05)),
        peer_row(graphs, 40.0, against("native", 30, 0.05), against(eager, 0, 0.0)),
        peer_row("megatron local", 20.0, against("native", 30, 0.9), against(eager, 30, 0.9)),
        {
            **{"cell": "h4096-s256-m8", "side": "megatron full_iteration", "schedule": "il"},
            **{"main_grad": "bf16", "group": None},
            "error": "RuntimeError: no capture",
        },
        peer_row("one launch", 15.0, against("native", 30, 0.02), main_grad="fp32"),
        peer_row("one launch", 9.0, against("native", 30, 0.03), main_grad="fp32", group=8),
        peer_row(graphs, 18.0, against("native", 30, 0.05), main_grad="fp32"),
    ]
    asked = {"cells": ["h4096-s256-m8"], "modes": ["ours"], "limit": 90.0, "rounds": 3, "steps": 10,
             "native_steps": 3, "megatron": {"version": "mcore==1", "fp8": "hybrid"}}  # fmt: skip
    raw = {
        "rows": rows,
        "refusals": {"megatron delayed dW": "refused before training: no"},
        "processes": [
            {
                "mode": "ours",
                "cells": ["h4096-s256-m8"],
                "codes": [0, None],
                "seconds": 3.5,
                "words": ["said"],
            }
        ],
    }
    return Report("peers", None, ENVIRONMENT, asked, raw).finish()


def model_row(side: str, schedule: str, ms: list[float], **more: Any) -> dict[str, Any]:
    """The result of one model of 1 billion parameters over two ranks."""
    shape = {
        **{"hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "layers": 16},
        **{"vocabulary": 128_256, "sequence": 4096, "microbatches": 8},
    }
    return {
        **{"cell": "1b-s4096-m8", "side": side, "schedule": schedule, "error": None},
        **{"shape": shape, "cut": [4, 4, 4, 4], "parts_ms": {}, "peak_bytes": [5, 7]},
        **{"step_ms": ms, "single_ms": ms, "host_ms": ms, "construction_s": 1.0},
        **{"facts": [{}, {}], "compared": [0, 0], "first": [], "busy_ms": []},
        **more,
    }


def models_report() -> dict[str, Any]:
    """
    Native, one launch with native's bits, a mode of Megatron, and a row that ran out of memory.
    """
    launches = [{"capture_s": 3.0}, {"capture_s": 5.0}]
    rows = [
        model_row("native", "il", [400.0], loss=12.0),
        model_row("one launch", "il", [200.0], facts=launches, compared=[10, 0], loss=None),
        model_row("megatron full_iteration", "il", [250.0], loss=12.001),
        {"cell": "8b-s4096-m8", "side": "native", "schedule": "il", "error": "no memory"},
    ]
    asked = {"pp": 2, "cells": ["1b-s4096-m8", "8b-s4096-m8"], "schedules": ["il"],
             "device": "cuda", "backend": "transformer-engine", "rounds": 3, "steps": 10,
             "native_steps": 3}  # fmt: skip
    return Report("models", None, ENVIRONMENT, asked, {"rows": rows}).finish()


def group_row(
    schedule: str, dtype: str, group: int, ms: list[float], **more: Any
) -> dict[str, Any]:
    """The result of one group size over two ranks; group 0 is the row `today`, without groups."""
    place = {"arena_bytes": 10, "capture_s": 1.0 + group}
    facts = [
        {**place, "slots": [4, 2], "slots_of": {"0": 4, "2": 2}},
        {**place, "slots": [3, 1], "slots_of": {"1": 3, "3": 1}},
    ]
    return {
        **{"cell": "h4096-s256-m8", "schedule": schedule, "dtype": dtype, "error": None},
        **{"scales": "epoch" if group else "action", "group": group or 1, "mode": "one launch"},
        **{"step_ms": ms, "single_ms": ms, "host_ms": ms, "construction_s": 1.0, "row_s": 2.0},
        **{"peak_bytes": [5, 7], "facts": facts, "digest": str(group) * 64 if group else None},
        **more,
    }


def groups_report() -> dict[str, Any]:
    """Both schedules between rows `today`; one digest differs, and one row ran out of memory."""
    failed = {"cell": "h4096-s1024-m8", "schedule": "il", "dtype": "fp32", "scales": "epoch",
              "group": 8, "error": "no memory"}  # fmt: skip
    rows = [
        group_row("il", "bf16", 0, [10.0, 11.0, 12.0]),
        group_row("il", "bf16", 1, [10.0, 10.0, 10.0]),
        group_row("il", "bf16", 8, [9.0, 9.0, 9.5]),
        group_row("il", "bf16", 0, [8.0, 9.0, 9.0]),
        group_row("zbv", "bf16", 0, [10.0, 10.0, 10.0]),
        group_row("zbv", "bf16", 1, [9.0, 9.0, 9.0], digest="2" * 64),
        group_row("zbv", "bf16", 8, [8.0, 8.0, 8.5]),
        group_row("zbv", "bf16", 0, [10.0, 10.0, 10.0]),
        group_row("il", "fp32", 0, [20.0, 20.0, 20.0]),
        group_row("il", "fp32", 4, [15.0, 15.0, 15.0]),
        failed,
    ]
    asked = {"pp": 2, "cells": ["h4096-s256-m8", "h4096-s1024-m8"], "schedules": ["il", "zbv"],
             "dtypes": ["bf16", "fp32"], "groups": [1, 4, 8], "device": "cuda",
             "backend": "transformer-engine", "mode": "one launch", "rounds": 3,
             "steps": {"h4096-s256-m8": 15}, "digests": ["h4096-s256-m8"],
             "settling_steps": 4}  # fmt: skip
    products = [
        {
            **{"cell": "h4096-s256-m8", "dtype": dtype, "tokens": 256, "microbatches": 8},
            **{"matrices": 4, "ms": {"each": each, "join": 0.07, "one": 0.5}},
            **{"apart": {"each": 0.004, "one": 0.0016}, "same_bits": 0 if dtype == "bf16" else 4},
        }
        for dtype, each in (("bf16", 1.9), ("fp32", 3.7))
    ]
    raw = {"products": products, "rows": rows}
    return Report("groups", None, ENVIRONMENT, asked, raw).finish()


def train_report(*, differ: int = 0) -> dict[str, Any]:
    """A run with a native run beside it, and a run without."""
    alone = {
        "how": "train",
        "schedule": "il",
        "pp": 2,
        "dp": 1,
        "cut": [2, 2, 2, 2],
        "microbatches": 8,
        "captured": True,
        "launches": 2,
        "guarded_replays": "",
        "parameters": 1000,
        "tokens_a_step": 256,
        "losses": [5.0, 4.0, 3.0],
        "native_losses": None,
        "held_out": [[2, 3.5], [3, 3.25]],
        "seconds": 2.0,
        "native_seconds": None,
        "compared": None,
        "differ": None,
        "first": [],
    }
    both = {
        **alone,
        "how": "ends",
        "native_losses": [5.0, 4.0, 3.0 + differ],
        "native_seconds": 6.0,
        "compared": 100,
        "differ": differ,
    }
    tables = ("model", "parallel", "data", "optimizer", "run", "checkpoint")
    asked: dict[str, Any] = {name: {} for name in tables}
    return Report("train", None, ENVIRONMENT, asked, {"runs": [both, alone]}).finish()


def restarts_report() -> dict[str, Any]:
    """A resumed run, and a run whose stages are on other ranks."""
    weighed = {"weights": 600, "optimizer": 1200, "numerical": 20, "random": 10, "extra": 0,
               "facts": 70, "total": 2000}  # fmt: skip
    resumed = {
        "how": "resumed",
        "saved_under": "il",
        "loaded_under": "il",
        "compared": 100,
        "differ": 0,
        "first": [],
        "changed": [],
        "losses": [3.0, 2.0],
        "bytes": weighed,
    }
    launched = {**resumed, "launches": [7, 4]}
    remapped = {
        **resumed,
        "how": "remapped",
        "loaded_under": "zbv",
        "compared": 50,
        "differ": 1,
        "first": ["losses"],
        "changed": ["schedule: il -> zbv"],
    }
    asked = {"device": "cpu", "captured": False, "masters": False, "asynchronous": False,
             "hidden": 64, "history": 4}  # fmt: skip
    return Report("restarts", None, ENVIRONMENT, asked, {"rows": [launched, remapped]}).finish()


def kills_report() -> dict[str, Any]:
    """Two runs of one kill each; one tensor and one loss differ in both."""
    kill = {
        "run": 0,
        "place": "save, before its file",
        "rank": 1,
        "launcher": False,
        "asynchronous": True,
        "resumed_from": None,
        "steps": 2,
        "newest": "step-00000001",
        "code": 1,
        "end_s": 2.5,
        "cause": "Every rank stopped: rank 1, step 1, checkpoint: the process has ended",
    }
    launcher = {**kill, "run": 1, "launcher": True, "cause": None, "end_s": 0.5}
    run = {
        "tensors": 9,
        "tensors_differ": ["model.a", "model.b"],
        "losses": 7,
        "losses_differ": [3],
        "held_out": 3,
        "held_out_differ": [],
        "compared": 20,
    }
    asked = {"device": "cpu", "mode": "eager", "ranks": 2, "steps": 7, "kills": 2, "seed": 0,
             "at_once": 2}  # fmt: skip
    other = {**run, "tensors_differ": ["model.b"]}
    raw = {"kills": [kill, launcher], "runs": [run, other]}
    return Report("kills", None, ENVIRONMENT, asked, raw).finish()


def scales_report() -> dict[str, Any]:
    """Two seeds of both recipes, with losses that are easy to average."""
    runs = [
        {
            "scales": scales,
            "seed": seed,
            "losses": [9.0, *[3.0 + seed + more] * 50],
            "held_out": [[20, 4.0], [51, 3.5 + more]],
            "cut": [2],
            "parameters": 1000,
            "tokens_a_step": 64,
        }
        for seed in (0, 1)
        for scales, more in (("action", 0.0), ("epoch", 0.25 * seed))
    ]
    names = ("model", "parallel", "data", "optimizer", "run", "checkpoint", "text")
    asked: dict[str, Any] = {name: {} for name in names}
    asked.update(backend="reference", windows=8, seeds=[0, 1])
    return Report("scales", None, ENVIRONMENT, asked, {"runs": runs}).finish()


def modes_report() -> dict[str, Any]:
    """
    A reference, a row with the same bits, a row with other bits that the guard reports, and a
    refused row.
    """
    plainest = {"schedule": "GPipe", "walks": 1}

    def trained(bits: str) -> dict[str, Any]:
        return {"losses": [1.0, 0.5], "bits": {"losses": [bits] * 2, "parameters": [bits]}}

    def row(kind: str, bits: str, violations: list[Any], **other: Any) -> dict[str, Any]:
        given = {**plainest, **other}
        sides = {side: trained(bits * 12) for side in ("plain", "guarded")}
        return {"kind": kind, "row": given, "numbers": f"walks={given['walks']}", "ranks": 2,
                "seconds": 0.5, **sides, "violations": violations}  # fmt: skip

    said = ["reduction.missing", 1, 0, "the end of the step", "gradients of stage 1"]
    refused = {"kind": "probe", "row": {"schedule": "V", "walks": 1}, "numbers": "walks=1",
               "ranks": 4, "failed": "ValueError: no", "guarded": False}  # fmt: skip
    rows = [
        row("reference", "a", []),
        row("cover", "a", [], schedule="1F1B"),
        row("cover", "b", [said], schedule="ZBV"),
        refused,
    ]
    factors = {"schedule": ["GPipe", "1F1B", "ZBV", "V"], "walks": [1, 2]}
    asked = {"framework": "torch", "device": "cpu", "versions": {"torch": "2.13.0"},
             "limit_s": 60.0, "factors": factors, "numbers": ["walks"]}  # fmt: skip
    return Report("modes", None, ENVIRONMENT, asked, {"rows": rows}).finish()


def second_runs_report() -> dict[str, Any]:
    """Three flips, one of which found nothing to flip, and two prices of two rounds."""
    flip = {"steps": "guarded replays", "kind": "output", "run": 1, "rank": 0, "flipped": 1}
    stopped = {
        **flip,
        "end": "stopped",
        "cause": "rank 0, step 3, commit: two runs of the step differ",
        "updated": False,
        "undisturbed": True,
    }
    inside = {**flip, "steps": "eager steps", "kind": "product of qkv", "end": "harmless"}
    unfound = {**flip, "kind": "amax_history", "flipped": 0, "end": "harmless"}
    price = {"what": "replay_every", "mode": "one launch", "kernel_obstacle": ""}
    off = [2.0, 2.2]
    rounds = {"off": off, "every 100": [2.02, 2.2], "every 1": [4.0, 4.6]}
    digests = {
        **price,
        "what": "digests",
        "mode": "replays",
        "rounds": {"off": off, "digests": off},
    }
    asked = {"device": "cuda", "backend": "transformer-engine", "ranks": 2, "schedule": "zbv",
             "flips": 24, "inside": 16, "launched": 10, "every": 100, "rounds": 2,
             "microbatches": 4, "layers": 1, "seed": 0, "priced": [2048, 8192, 16, 512],
             "flipped": [256, 1024, 2, 128]}  # fmt: skip
    raw = {"flips": [stopped, inside, unfound], "prices": [{**price, "rounds": rounds}, digests]}
    return Report("second_runs", None, ENVIRONMENT, asked, raw).finish()


def curve_run(
    side: str = "guarded",
    schedule: str = "il",
    seed: int = 0,
    *,
    steps: int = 40,
    step_s: float = 0.1,
    fall: float = 0.1,
    held_out: Sequence[tuple[int, float | None]] = ((40, 1.25),),
    **changes: Any,
) -> dict[str, Any]:
    """
    A run whose loss falls from 5 by the same amount in each step, timed in blocks of ten steps.
    """
    ends = [*range(10, steps, 10), steps]
    return {
        "side": side,
        "schedule": schedule,
        "seed": seed,
        "head": "te",
        "captured": side != "native",
        "launches": steps - 1 if side == "launched" else 0,
        "cut": [2, 2, 2, 2],
        "parameters": 1000,
        "tokens_a_step": 256,
        "losses": [5.0 - n * fall for n in range(steps)],
        "clock": [[end, end * step_s] for end in ends],
        "held_out": [[*pair] for pair in held_out],
        "moved": 0,
        "tensors": 100,
        "state": ["a" * 64, "b" * 64],
        "build_s": 2.0,
        "evaluate_s": 0.5,
        "peak_bytes": None,
        "held_bytes": None,
        **changes,
    }


def curves_report(*runs: dict[str, Any]) -> dict[str, Any]:
    """Interleaved natively and guarded, and ZB-V beside it, over two seeds."""
    made = list(runs) or [
        curve_run("native", step_s=1.0),
        curve_run(),
        curve_run(seed=1, held_out=[(40, 1.2)]),
        curve_run(schedule="zbv", step_s=0.08, held_out=[(40, 1.26)]),
        curve_run(schedule="zbv", seed=1, held_out=[(40, 1.23)]),
    ]
    tables = ("model", "parallel", "data", "optimizer", "run", "checkpoint")
    asked: dict[str, Any] = {name: {} for name in tables}
    asked |= {"backend": "reference", "windows": 16, "text": {"train": {}, "held_out": {}}}
    asked |= {"runs": [f"{r['side']}:{r['schedule']}:{r['seed']}" for r in made], "limit_s": None}
    return Report("curves", None, ENVIRONMENT, asked, {"runs": made}).finish()
