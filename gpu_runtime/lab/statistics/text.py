"""
Short tables of a report, ratios first, as a command prints them last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .host import HOST_HEADER, host_rows

Report = Mapping[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """
    Columns of text, the first to the left and the others to the right.

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
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _median(entry: Mapping[str, float] | None, digits: int = 2) -> str:
    return "-" if entry is None else number(entry["median"], digits)


def bench_lines(report: Report) -> list[str]:
    """Step, memory and set-up of each cell, then goals."""
    lines: list[str] = []
    header = (
        "column",
        "native/this",
        "TE graphs/this",
        "/floor",
        "/own kernels",
        "/whole",
        "ms",
        "spread",
        "kernels ms",
        "host ms",
        "construction s",
        "even at",
        "GB above",
        "copies",
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
        lines += ["", f"{cell['cell']}   native is {cell['fastest_native']}"]
        lines += table(header, rows)
        lines += [
            f"{name}: FAILED, {column['error']}"
            for name, column in raw["columns"].items()
            if column["error"]
        ]
        if cell["copied_over_per_microbatch"] is not None:
            lines.append(
                f"copied / per_microbatch  {_median(cell['copied_over_per_microbatch'], 3)}"
            )
        if (guards := cell["guards"]) is not None:
            lines.append(
                f"guards on / off  {_median(guards['step_on_over_off'], 4)},"
                f" {_median(guards['host_us_of_a_guard'])} us of host time an action"
            )
        for name in ("device_counts", "late_counts"):
            if counts := cell.get(name):
                title = name.replace("_", " ")
                lines.append(f"{title} on / off  {_median(counts['step_on_over_off'], 4)}")
        if host := cell.get("host"):
            lines += ["", *table(HOST_HEADER, host_rows(host))]
    return lines + target_lines(report["derived"]["targets"])


def sweep_lines(report: Report) -> list[str]:
    """Resources against microbatches."""
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
        "provisioning", "M", "live at once", "stage peaks", "graphs", "arena GB", "construction s",
        "warm-up s", "capture s", "peak GB", "ms",
    )  # fmt: skip
    return ["", *table(header, rows), *target_lines(report["derived"]["targets"])]


def target_lines(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many goals were met, and each that was missed with what was measured."""
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
        lines += table(("missed", "cell", "column", "wanted", "measured"), rows)
    return lines


def stream_lines(report: Report) -> list[str]:
    """Stale reads by handoff."""
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
    return ["", *table(("handoff", "processes", "checks", "stale", "by kind"), rows)]
