"""
The tables of each kind of report that a command prints last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..statistics.modes import changed
from ..statistics.scales import LAST
from ..statistics.summary import Raw

__all__ = ["LINES", "table"]

Report = Mapping[str, Any]
_SET = ("cell", "schedule", "dtype")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """
    Lines of text with aligned columns: the first column aligned left, all other columns aligned
    right.

    >>> table(("a", "b"), [("x", "10")])
    ['a   b', 'x  10']
    """
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _median(entry: Mapping[str, float] | None, digits: int = 2) -> str:
    return "-" if entry is None else number(entry["median"], digits)


def bench_lines(report: Report) -> list[str]:
    """Tables of step time, memory and set-up for each cell, then the goals."""
    lines: list[str] = []
    header = (
        "column",
        "native/this",
        "TE graphs/this",
        "this/floor",
        "this/own kernels",
        "this/one graph",
        "ms per step",
        "spread",
        "kernel ms",
        "host ms",
        "construction s",
        "break-even step",
        "GB above native",
        "copies per step",
    )
    for cell, raw in zip(report["derived"]["cells"], report["raw"]["cells"], strict=True):
        rows = []
        for name, entry in cell["columns"].items():
            memory = entry["above_native_bytes"]
            copies = entry.get("matrix_copies")
            rows.append(
                (
                    name,
                    _median(entry["native_over_this"]),
                    _median(entry["te_graphs_over_this"]),
                    "-" if entry["over_floor"] is None else number(entry["over_floor"]["ratio"], 3),
                    number(entry["over_own_kernels"], 3),
                    _median(entry["over_whole_step"], 3),
                    _median(entry["step_ms"], 3),
                    f"{100 * entry['step_ms']['spread']:.1f}%",
                    number(entry["kernel_ms"], 3),
                    _median(entry["host_ms"], 3),
                    number(entry["construction_s"]),
                    number(entry["break_even_steps"], 0),
                    "-" if memory is None else number(memory["largest"] / 1e9, 3),
                    "-" if copies is None else number(copies["per_step"], 0),
                )
            )
        lines += ["", f"{cell['cell']}   fastest native column: {cell['fastest_native']}"]
        lines += table(header, rows)
        lines += [
            f"{name}: FAILED, {column['error']}"
            for name, column in raw["columns"].items()
            if column["error"]
        ]
        if cell["copied_over_per_microbatch"] is not None:
            lines.append(
                "step time of column copied divided by step time of column per_microbatch: "
                f"{_median(cell['copied_over_per_microbatch'], 3)}"
            )
        if (guards := cell["guards"]) is not None:
            lines.append(
                "step time with guards divided by step time without: "
                f"{_median(guards['step_on_over_off'], 4)}; guards take "
                f"{_median(guards['host_us_of_a_guard'])} us of host time per action"
            )
        for name in ("device_counts", "late_counts"):
            if counts := cell.get(name):
                title = name.replace("_", " ")
                ratio = _median(counts["step_on_over_off"], 4)
                lines.append(f"step time with {title} divided by step time without: {ratio}")
        if host := cell.get("host"):
            lines += ["", *table(HOST_HEADER, host_rows(host))]
    return lines + target_lines(report["derived"]["targets"])


def sweep_lines(report: Report) -> list[str]:
    """A table of resources by number of microbatches, then goals."""
    rows = [
        (
            p["provisioning"],
            str(p["microbatches"]),
            str(p["peak_live_tapes"]),
            str(p["sum_of_stage_peaks"]),
            str(p["graphs"]),
            number(p["arena_bytes"] / 1e9, 3),
            number(p["construction_s"], 3),
            number(p["warmup_s"], 3),
            number(p["capture_s"], 3),
            "-" if p["peak_bytes"] is None else number(max(p["peak_bytes"].values()) / 1e9, 3),
            _median(p["step_ms"], 3),
        )
        for p in sorted(
            report["derived"]["points"], key=lambda p: (p["provisioning"], p["microbatches"])
        )
    ]
    header = (
        "provisioning", "microbatches", "peak live tapes", "sum of stage peaks", "graphs",
        "arena GB", "construction s", "warm-up s", "capture s", "peak GB", "ms per step",
    )  # fmt: skip
    return ["", *table(header, rows), *target_lines(report["derived"]["targets"])]


def target_lines(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """The number of goals met, and each missed goal with its measurement."""
    if not targets:
        return []
    missed = [t for t in targets if not t["met"]]
    lines = ["", f"goals: {len(targets) - len(missed)} of {len(targets)} met"]
    if missed:
        rows = [
            (
                t["goal"],
                t["cell"],
                t["column"],
                f"{t['bound']} {t['value']:g}",
                "never" if t["measured"] is None else f"{t['measured']:g}",
            )
            for t in missed
        ]
        lines += table(("missed goal", "cell", "column", "wanted", "measured"), rows)
    return lines


def stream_lines(report: Report) -> list[str]:
    """A table of stale reads by kind of handoff."""
    rows = [
        (
            handoff,
            str(entry["processes"]),
            str(entry["checks"]),
            str(entry["stale"]),
            ", ".join(f"{kind} {count}" for kind, count in entry["stale_by_kind"].items()),
        )
        for handoff, entry in report["derived"]["handoffs"].items()
    ]
    return [
        "",
        *table(("handoff", "processes", "checks", "stale reads", "stale reads by kind"), rows),
    ]


def host_rows(host: Mapping[str, Raw]) -> list[tuple[str, ...]]:
    """The table of host times: a row for each kind of call in each column (a way to run a step),
    and a row for the mean action."""
    rows: list[tuple[str, ...]] = []
    for name, column in host.items():
        for kind, entry in column["kinds"].items():
            bare = entry["bare_us"]
            rows.append(
                (
                    f"{name} {kind}",
                    f"{entry['calls']:g}",
                    f"{entry['us']['median']:.2f}",
                    f"{entry['us']['middle_half']:.2f}",
                    "-" if bare is None else f"{bare['median']:.2f}",
                    "-" if bare is None else f"{entry['over_bare_us']:.2f}",
                )
            )
        if (copy := column["copy_us"]) is not None:
            rows.append(
                (f"{name} copy", "", f"{copy['median']:.2f}", f"{copy['middle_half']:.2f}", "", "")
            )
        if (over := column["of_an_action_us"]) is not None:
            rows.append(
                (
                    f"{name}, mean action above its bare replay (goal {over['goal']:g} us)",
                    "",
                    "",
                    f"{over['middle_half']:.2f}",
                    "",
                    f"{over['median']:.2f}",
                )
            )
        for part, us in column.get("parts_us", {}).items():
            rows.append((f"{name}, part of this: {part}", "", "", "", "", f"{us:.2f}"))
    return rows


HOST_HEADER = (
    "host time",
    "calls per step",
    "us",
    "us, interquartile range",
    "bare replay us",
    "us above bare replay",
)


def table_lines(derived: Raw) -> list[str]:
    """A line for every row of the report (one cell under one schedule, run by one side), then the
    goals."""
    rows = [
        (
            row["cell"],
            row["model"],
            f"{row['pp']}x{row['vpp']}",
            row["schedule"],
            row["side"],
            number(row["step_ms"]["median"]),
            number(row["native_over_this"]),
            number(row["over_busiest"]),
            number(row["break_even_steps"], 1),
            gigabytes(row["above_native_bytes"]),
            number(row["capture_s"]),
            number(row["copies"], 0),
            "-" if row["compared_with"] is None else f"{row['different']} of {row['values']}",
        )
        for row in derived["rows"]
    ]
    header = (
        "cell", "model", "PPxVPP", "schedule", "side", "ms per step", "native/this", "this/kernels",
        "break-even step", "GB above native", "capture s", "copies per step", "tensors differ",
    )  # fmt: skip
    lines = ["", *table(header, rows)]
    for row in derived["mapping"]:
        theirs = row["paper_efficiency"]
        lines.append(
            f"mapping, {row['model']}, {row['side']}: {row['pp2_ms']:.2f} ms on 2 ranks, "
            f"{row['pp4_ms']:.2f} ms on 4, efficiency {row['efficiency']:.3f}"
            + (f" (paper: {theirs})" if theirs else "")
        )
    for row in derived["weak"]:
        lines.append(
            f"weak scaling, {row['cell']}, {row['side']}: rate per rank over 4 ranks divided by "
            f"rate per rank over 2: {row['rate']:.3f}"
        )
    lines += [f"FAILED: {error['cell']}, {error['side']}, {error['schedule']}: {error['error']}"
              for error in derived["errors"]]  # fmt: skip
    return lines + target_lines(derived["targets"])


def model_lines(report: Report) -> list[str]:
    """A line for every row of the report (one model under one schedule), then the sides that
    failed."""
    derived = report["derived"]
    main_grad = report["configuration"].get("main_grad", "bf16")

    def side(row: Raw) -> str:
        """
        The side's name, and whether it recomputes. The gradient type is added, except for bf16 and
        for the native side.
        """
        named = main_grad != "bf16" and row["side"] != "native"
        again = ", recomputed" if row.get("recompute") else ""
        return f"{row['side']}{again}{f', {main_grad} gradients' if named else ''}"

    rows = [
        (
            row["cell"],
            row["schedule"],
            side(row),
            number(row["step_ms"]["median"]),
            number(row["tflops"]["median"], 1),
            "-" if row["share"] is None else f"{row['share']:.1%}",
            number(row["native_over_this"]),
            number(row["megatron_over_this"]),
            str(row["replicas"]),
            number(row["one_replica_over_this"], 3),
            "-" if row["idle"] is None else f"{row['idle']:.1%}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            "-".join(map(str, row["cut"])),
            f"{row['different']} of {row['compared']}" if row["compared"] else "-",
        )
        for row in derived["rows"]
    ]
    header = (
        "cell", "schedule", "side", "ms per step", "TFLOP/s per GPU", "share of FP8 peak",
        "native/this", "Megatron/this", "replicas", "one replica/this", "idle", "peak GB",
        "layers per stage", "tensors differ",
    )  # fmt: skip
    failed = [f"FAILED: {error['cell']}, {side(error)}, {error['schedule']}: {error['error']}"
              for error in derived["errors"]]  # fmt: skip
    return ["", *table(header, rows), *failed]


def product_lines(products: Sequence[Raw]) -> list[str]:
    """
    A table of one layer's weight gradients: one product for each microbatch, and one product for
    all microbatches.
    """
    header = (
        *("cell", "dtype", "products", "separate products ms", "join and one product ms"),
        *("one/separate", "distance from fp64, one/separate", "matrices with equal bits"),
    )
    rows = [
        (
            one["cell"],
            one["dtype"],
            str(one["microbatches"]),
            number(one["each_ms"], 3),
            number(one["joined_ms"], 3),
            number(one["over_each"], 3),
            number(one["apart_over_each"], 4),
            f"{one['same_bits']} of {one['of']}",
        )
        for one in products
    ]
    return ["", *table(header, rows)] if rows else []


def group_lines(derived: Raw) -> list[str]:
    """Lines for every row of the report (one cell, schedule and group size), the best group of each
    set, the digests, failed rows and goals."""
    sets = {tuple(one[name] for name in _SET): one for one in derived["sets"]}
    rows = []
    for row in derived["rows"]:
        today = row["scales"] == "action"
        over = sets[tuple(row[name] for name in _SET)]["over_today"]
        rows.append(
            (
                *(row[name] for name in _SET),
                "today" if today else f"group {row['group']}",
                *(number(row["step_ms"][name], 3) for name in ("median", "min", "max")),
                "-" if today else number(over.get(str(row["group"])), 3),
                f"{row['peak_bytes'] / 1e9:.2f}",
                " ".join(map(str, row["slots"].values())),
            )
        )
    header = (
        *_SET, "dW", "ms per step", "min", "max", "this/today", "peak GB", "slots by stage",
    )  # fmt: skip
    lines = [*product_lines(derived["products"]), "", *table(header, rows), ""]
    for one in derived["sets"]:
        if (best := one["best"]) is not None:
            lines.append(
                f"{', '.join(one[name] for name in _SET)}: best group {best['group']}, "
                f"{number(best['over_today'], 3)} of the step time with default scales and no "
                "groups"
            )
    compared = [one for one in derived["digests"] if one["alike"] is not None]
    if compared:
        same = sum(one["alike"] for one in compared)
        lines.append(f"{same} of {len(compared)} digests are equal under every schedule")
    lines += [
        f"DIFFERENT digests: {one['cell']}, {one['dtype']}, group {one['group']}: "
        f"{' and '.join(one['schedules'])}"
        for one in compared
        if not one["alike"]
    ]
    lines += [
        f"FAILED: {', '.join(error[name] for name in _SET)}, FP8 scales updated per "
        f"{error['scales']}, group {error['group']}: {error['error']}"
        for error in derived["errors"]
    ]
    return lines + target_lines(derived["targets"])


def gigabytes(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value / 1e9:+.2f}"


def peer_lines(derived: Raw) -> list[str]:
    """A line for every side (a framework in one mode), then the modes that work, and goals."""
    rows = []
    for row in derived["rows"]:
        if row["error"] is not None:
            rows.append((*_peer_name(row), "-", "-", "-", "-", "-", "failed"))
            continue
        rows.append(
            (
                *_peer_name(row),
                number(row["step_ms"]["median"]),
                number(row["native_over_this"]),
                number(row["best_graphs_over_this"]),
                number(row["over_busiest"]),
                number(row["from_native"], 4),
                row["verdict"],
            )
        )
    header = (
        "cell", "side", "schedule", "main_grad", "group", "ms per step", "native/this",
        "Megatron's best graphs/this",
        "this/kernels", "distance from native", "gradients",
    )  # fmt: skip
    lines = ["", *table(header, rows)]
    lines += [f"{row['path']}: {row['observed']}" for row in derived["capability"]]
    return lines + target_lines(derived["targets"])


def _peer_name(row: Raw) -> tuple[str, ...]:
    group = "-" if row["group"] is None else str(row["group"])
    return row["cell"], row["side"], row["schedule"], row["main_grad"], group


def curve_lines(derived: Raw) -> list[str]:
    """
    Lines for each run; for each native and guarded run with the same schedule, seed and head; for
    each schedule compared with the base schedule; and for the times to reach a loss.
    """
    lines = []
    for run in derived["runs"]:
        said = "" if run["finite"] else ", NOT FINITE"
        lines.append(
            f"  {run['run']:24} {run['steps']:6} steps, {run['step_ms']:.2f} ms each, loss "
            f"{_spelled(run['first_ten'])} to {_spelled(run['last_ten'])}, held-out loss "
            f"{_spelled(run['held_out_loss'])}{said}"
        )
    for row in derived["same_order"]:
        state = {None: "not compared", False: "the same", True: "NOT the same"}
        lines.append(
            f"  {row['run']} and {row['native']}: {row['losses_differ']} of {row['steps']} losses "
            f"differ, {row['held_out_differ']} of {row['held_out']} held-out losses; tensors at "
            f"the end: {state[row['state_differs']]}"
        )
    for row in derived["non_inferiority"]:
        lines.append(
            f"  {row['side']}, head {row['head']}, {row['schedule']} against {row['against']}, "
            f"seeds {row['seeds']}, step {row['step']}: ratio of perplexities "
            f"{_spelled(row['ratio'])}, at most {_spelled(row['upper'])} with 95 % confidence; "
            f"margin {row['margin']}"
        )
    for row in derived["to_loss"]:
        last = row["levels"][-1]
        lines.append(
            f"  {row['run']} reaches loss {last['loss']} in {last['seconds']:.1f} s, "
            f"{row['native']} in {last['native_seconds']:.1f} s: {last['native_over_this']:.2f} "
            f"times as long as {row['run']}"
        )
    return lines


def _spelled(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def scale_lines(derived: Raw) -> list[str]:
    lines = [
        f"{row['name']}, {row['schedule']}, {row['steps']} steps: {row['different']} of "
        f"{row['values']} values differ from torch's own pipeline"
        for row in derived["compared"]
    ]
    for row in derived["timed"]:
        over = (
            ""
            if row["native_over_this"] is None
            else f", {row['native_over_this']:.1f}x native's speed"
        )
        if "final_different" in row:
            over += f", {row['final_different']} of {row['final_values']} tensors differ"
        bound = "" if row["over_bound"] is None else f", {row['over_bound']:.2f}x its bound"
        lines.append(
            f"{row['cell']}, {row['side']}, {row['schedule']}: {row['step_ms']['median']:.2f} "
            f"ms per step, {row['single_ms']['median']:.2f} ms for a single step, "
            f"{row['host_ms']['median']:.2f} ms of host time{over}{bound}"
        )
    return lines + target_lines(derived["targets"])


def pool_lines(report: Mapping[str, Any]) -> Sequence[str]:
    """A row per order of actions and pool discipline, then the problems."""
    rows = []
    for entry in report["derived"]["orders"]:
        for name, total in entry["disciplines"].items():
            refused = total["refused"]
            rows.append(
                (
                    entry["order"],
                    name,
                    "-" if refused is None else f"{refused['clause']} at {refused['action']}",
                    str(total["compared"]),
                    str(total["mismatched"]),
                    str(total["nonfinite"]),
                )
            )
    header = ("order", "discipline", "refused", "compared", "mismatched", "non-finite")
    lines = table(header, rows)
    for entry in report["derived"]["orders"]:
        for name, total in entry["disciplines"].items():
            lines += [
                f"{entry['order']}, {name}: first difference: {f}" for f in total["first"][:1]
            ]
    return [*lines, *(f"PROBLEM: {problem}" for problem in report["derived"]["problems"])]


def compare_lines(report: Mapping[str, Any]) -> list[str]:
    derived = report["derived"]
    rows = [
        (name, str(total["compared"]), str(total["mismatched"]))
        for name, total in derived["categories"].items()
    ]
    lines = table(("category", "compared", "mismatched"), rows)
    lines += [f"failed: {f['case']} {f['side']}: {f['error']}" for f in report["raw"]["failures"]]
    lines.append(
        f"{derived['compared']} values of {derived['runs']} comparisons, "
        f"{derived['mismatched']} mismatched."
    )
    return lines


def probe_lines(derived: Raw) -> list[str]:
    """The result of each probe."""
    return [f"{probe['what']}: {probe['found']}" for probe in derived["probes"]]


def restart_lines(report: Report) -> list[str]:
    """A row for each resumed or remapped run."""
    rows = [
        (
            row["saved_under"],
            row["how"],
            row["loaded_under"],
            str(row["compared"]),
            str(row["differ"]),
        )
        for row in report["raw"]["rows"]
    ]
    differ, compared = report["derived"]["differ"], report["derived"]["compared"]
    lines = table(("saved under", "how", "resumed under", "compared", "differ"), rows)
    return [*lines, f"{differ} of {compared} values differ"]


def kill_lines(report: Report) -> list[str]:
    """A row for each kill, and what differs at the end."""
    rows = [
        (
            row["place"],
            f"launcher, with rank {row['rank']}" if row["launcher"] else f"rank {row['rank']}",
            f"{row['end_s']:.1f}",
            row["cause"] or "-",
        )
        for row in report["raw"]["kills"]
    ]
    found = report["derived"]
    lines = table(("killed during", "process", "s until all ended", "reported cause"), rows)
    differ = (
        f"{found[f'{name}_differ']:,} of {found[name]:,} {what} differ"
        for name, what in (
            ("tensors", "tensors"),
            ("losses", "losses"),
            ("held_out", "held-out losses"),
        )
    )
    return [*lines, f"After {found['kills']} kills: {', '.join(differ)}"]


def scales_lines(derived: Mapping[str, Any]) -> list[str]:
    """
    A row for each run, and the difference in loss between scales that move once per step and scales
    that move at every action.
    """
    rows = [
        (
            run["scales"],
            str(run["seed"]),
            str(run["steps"]),
            _loss(run["loss"]),
            _loss(run["held_out"]),
        )
        for run in derived["runs"]
    ]
    header = ("scales updated per", "seed", "steps", f"loss, last {LAST} steps", "held-out loss")
    return [
        *table(header, rows),
        f"per epoch minus per action, mean over {len(derived['differences'])} seeds: loss "
        f"{_signed(derived['mean_difference'])}, held-out loss "
        f"{_signed(derived['mean_held_out_difference'])}",
    ]


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.4f}"


def second_run_lines(report: Report) -> list[str]:
    """
    A row for each kind of bit flip, a row for each measured cost, and the number of flips that
    ended wrongly.
    """
    found = report["derived"]
    names = ("stopped", "harmless")
    rows = [
        (
            key,
            *(f"{ends.get(name, 0)}" for name in names),
            f"{sum(ends.values()) - sum(ends.get(name, 0) for name in names)}",
        )
        for key, ends in found["ends"].items()
    ]
    prices = [
        (
            one["mode"],
            name if one["what"] == name else f"{one['what']}, {name}",
            f"{one['ms']['off']:.3f}",
            f"{one['ms'][name]:.3f}",
            f"{ratio:.4f}",
        )
        for one in found["prices"]
        for name, ratio in one["ratio"].items()
    ]
    return [
        *table(("flip", "stopped", "harmless", "other ends"), rows),
        *table(("mode", "check", "off, ms per step", "on, ms per step", "on / off"), prices),
        f"Of {found['flips']} flips, {found['stopped']} were stopped, {found['harmless']} changed "
        f"nothing, {found['wrong']} ended wrongly",
    ]


def mode_lines(report: Report) -> list[str]:
    """A line for each row that ran, and the number of rows with each result."""
    derived, asked = report["derived"], report["configuration"]
    rows = [
        (
            row["end"],
            ", ".join(row["clauses"]) or row.get("said", "-")[:60],
            ", ".join(what for what, _ in row["differs"]) or "-",
            changed(row["row"], asked["factors"]),
        )
        for row in derived["rows"]
    ]
    counts = ", ".join(f"{count} {end}" for end, count in derived["ends"].items())
    return [
        *table(("result", "clauses or error", "what differs", "mode"), rows),
        f"{asked['framework']}: {counts}; {derived['pairs_that_ran']} of {derived['pairs']} pairs "
        "of values ran to the end",
    ]


LINES: Mapping[str, Callable[[Report], Sequence[str]]] = {
    "bench": bench_lines,
    "sweep": sweep_lines,
    "streams": stream_lines,
    "compare": compare_lines,
    "pools": pool_lines,
    "probes": lambda report: probe_lines(report["derived"]),
    "scale": lambda report: scale_lines(report["derived"]),
    "tables": lambda report: table_lines(report["derived"]),
    "peers": lambda report: peer_lines(report["derived"]),
    "models": model_lines,
    "groups": lambda report: group_lines(report["derived"]),
    "restarts": restart_lines,
    "kills": kill_lines,
    "modes": mode_lines,
    "scales": lambda report: scales_lines(report["derived"]),
    "second_runs": second_run_lines,
    "curves": lambda report: curve_lines(report["derived"]),
}
"""The tables that a command prints last, by kind of report."""
