"""
The runtime's page about a step on one device: times, excess over the floor, host time, and missed
goals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.reports import cells
from qeffect.gpu_runtime.lab.statistics.host import REST
from tests.docs.blocks import KERNEL_REPORTS, load, markdown
from tests.docs.reading import dated, machine_of, milliseconds, ratio, reports

#: Columns of the step table.
SHOWN = (
    "native_grad",
    "native_main_grad",
    "te_graphs_chunks",
    "te_graphs_model",
    "te_graphs_model_main_grad",
    "whole_grad",
    "whole_main_grad",
    "ours_eager",
    "ours_copied",
    "ours_per_microbatch",
    "ours_accumulate",
    "ours_two_streams",
)


def over(value: Mapping[str, Any] | None) -> str:
    """Spell a ratio over a bound, with the column that gives the bound."""
    if value is None:
        return "-"
    return f"{value['ratio'] if 'ratio' in value else value['median']:.2f}x `{value['of']}`"


def steps() -> list[str]:
    """The time of a step in every cell (workload) and column (way to run a step), its excess over
    the floor and over native."""
    return [*_speed(), *_beyond_floor(), *_behind()] if [*reports("bench")] else []


def _speed() -> list[str]:
    rows = []
    machines = dict.fromkeys(machine_of(report) for report in reports("bench"))
    for cell, _ in cells(reports("bench")):
        for name in SHOWN:
            column = cell["columns"].get(name)
            if column is None:
                continue
            above = column["above_native_bytes"]
            rows.append(
                (
                    cell["cell"],
                    f"`{name}`",
                    f"{column['step_ms']['median']:.2f}",
                    ratio(column["native_over_this"]),
                    ratio(column["te_graphs_over_this"]),
                    over(column["over_whole_step"]),
                    over(column["over_floor"]),
                    ratio(column["over_own_kernels"]),
                    "-" if above is None else f"{above['largest'] / 1e9:+.2f}",
                    column["break_even_steps"] or "-",
                )
            )
    header = (
        "cell", "column", "median ms", "native / this, paired", "TE's graphs / this, paired",
        "over whole-step graph, paired", "over floor", "over own kernels", "GB above native",
        "break-even step",
    )  # fmt: skip
    return [
        f"One device, {'; '.join(machines)}. Each row is one *column*: one way to run a step. "
        "*Native* is the native column with the smallest "
        "median; *TE's graphs* is the column with TE's own graphs that has the smallest median. "
        "A *paired* ratio of two columns is computed in each round; the table has the median "
        "over the rounds. This median differs from the ratio of the medians, and can rank two "
        "columns in another order. The *floor* of a column is the smallest kernel time among "
        "the library's columns that add the gradients of all microbatches in the same order. A "
        "*whole-step graph* is the library's whole step as one graph, with the same order of "
        "additions. After each ratio to the floor or to a whole-step graph, the table names the "
        "library's column with which the ratio was computed. `ours_copied` and "
        "`ours_per_microbatch` have a dash under *over whole-step graph* and *over floor*, because "
        "no column of the library adds gradients in the same order as these two columns. At the "
        "*break-even step* the column's total time, with construction, warm-up and capture, falls "
        "below native's. There a dash marks native itself, or a column that never reaches this "
        "step.",
        markdown(header, rows),
    ]


def host() -> list[str]:
    """Host time of a guarded action, and how much of it the kernel's calls take."""
    rows: list[tuple[str, ...]] = []
    for name, report in dated("bench"):
        for cell in report["derived"]["cells"]:
            guards, over = cell["guards"], _over_bare(cell)
            if guards is None and over is None:
                continue
            rows.append(
                (
                    cell["cell"],
                    name,
                    *(("-",) * 4 if guards is None else _guards(guards)),
                    "-" if over is None else _range(over),
                )
            )
    lines = []
    if rows:
        kernel = load(KERNEL_REPORTS / "bench.json")["guarded_action_us_by_action"]
        header = (
            "cell", "report", "host time per step, guarded", "unguarded", "guarded actions",
            "difference per action", "an action over its bare replay",
        )  # fmt: skip
        lines += [
            "This table compares the host time of `ours_accumulate` with and without guards, "
            "one row per report. A difference is the median over the rounds, with the range in "
            "parentheses; if the range includes zero, the difference counts as noise. The last "
            "column comes from other steps, in which each action was timed alone and compared "
            "with the bare replay of its graph. This column therefore includes the copies and "
            "the handoff between streams, which a step without guards also makes. For "
            f"comparison, a check with its commit takes {min(kernel.values()):.1f} to "
            f"{max(kernel.values()):.1f} µs in `qeffect bench`, on [the machine of its "
            "report](../../../verification/reports/README.md#what-guards-cost).",
            markdown(header, sorted(rows, key=lambda row: row[0])),
        ]
    for name, report in dated("bench"):
        for cell in report["derived"]["cells"]:
            lines += [*_parts(cell, name), *_counted(cell, report["derived"]["targets"])]
    for report in reports("host"):
        lines.append(
            f"Measured alone, in the cell {report['derived']['cell']}: "
            f"{_range(report['derived']['host_us_of_a_guard'])} of host time per guarded action."
        )
    return lines


def _range(us: Mapping[str, float]) -> str:
    """Spell microseconds with their range."""
    return f"{us['median']:.1f} µs ({us['min']:.1f} to {us['max']:.1f})"


def _guards(guards: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Host time with guards and without, and the difference, marked if it is noise."""
    each = guards["host_us_of_a_guard"]
    return (
        f"{guards['host_ms_on']['median']:.2f} ms",
        f"{guards['host_ms_off']['median']:.2f} ms",
        str(guards["actions"]),
        _range(each) + (", noise" if each["min"] <= 0 <= each["max"] else ""),
    )


def _over_bare(cell: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Host time of an action beyond its bare replay, if it was measured in the cell (workload)."""
    found: Mapping[str, float] | None = (
        cell.get("host", {}).get("ours_accumulate", {}).get("of_an_action_us")
    )
    return found


def _parts(cell: Mapping[str, Any], name: str) -> Iterator[str]:
    """Host time of an action beyond its bare replay, by part, with the sum."""
    whole = _over_bare(cell)
    if whole is None or "parts_us" not in cell["host"]["ours_accumulate"]:
        return
    parts = dict(cell["host"]["ours_accumulate"]["parts_us"])
    rest = parts.pop(REST)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    goal, median = whole["goal"], f"{whole['median']:.1f}"
    rows = [
        *((part, f"{us:.1f}") for part, us in ordered),
        ("rest: median of whole steps minus the sum of the medians above", f"{rest:.1f}"),
        (
            f"sum (goal {goal:.0f})",
            f"**{median}**" if whole["median"] > goal else median,
        ),
    ]
    alone = parts["copies"] + parts["addresses"]
    said = (
        "The copies (which the unguarded runtime makes too) and the comparison of tensor "
        f"addresses together take {alone:.1f} µs; the goal for the sum of all parts is "
        f"{goal:.0f} µs:"
    )
    if not parts["copies"]:
        said = (
            "The timer of that report missed the copies, which the unguarded runtime makes too, "
            "and counted them as the runtime's own code. The timer was corrected later, but the "
            "report was not made again:"
        )
    yield (
        f"Host time of a guarded action of {cell['cell']} beyond its bare replay, by part ({name}; "
        f"medians of single calls). {said}"
    )
    yield markdown(("part", "µs of host time"), rows)


def _counted(cell: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The cost of counting on the device, per step."""
    for name, goal, said in (
        ("device_counts", "step counted by", "`counts='commit'`"),
        ("late_counts", "step counted and", "`counts='next step'`"),
    ):
        counts = cell.get(name)
        if counts is not None:
            over = counts["step_on_over_off"]
            goals = [f"; goal {t['value']}" for t in targets if t["goal"].startswith(goal)]
            yield (
                f"With {said} a step of {cell['cell']} takes {over['median']:.3f} times as long as "
                f"without counts ({over['min']:.3f} to {over['max']:.3f}{''.join(goals)})."
            )


#: Columns whose excess over the floor is split: one graph of the native step, and ours.
SPLIT = ("whole_main_grad", "ours_accumulate", "ours_two_streams")


def _beyond_floor() -> list[str]:
    """The excess of a step over its floor: more kernel time, and time that no kernel explains."""
    rows = []
    for cell, _ in cells(reports("bench")):
        for name in SPLIT:
            beyond = cell["columns"].get(name, {}).get("beyond_floor")
            if beyond is not None:
                keys = ("step_ms", "kernels_ms", "copies_ms", "beyond_kernels_ms")
                rows.append((cell["cell"], f"`{name}`", *(milliseconds(beyond[k]) for k in keys)))
    if not rows:
        return []
    header = (
        "cell", "column", "ms over the floor", "own kernels over the floor's",
        "of these, copies between buffers", "beyond its own kernels",
    )  # fmt: skip
    return [
        "This table splits the time by which a step exceeds its floor. The profiled steps ran "
        "separately from the timed steps, under another load. On two streams, kernels overlap "
        "and their times are added. The reason for the time in the last column is unknown:",
        markdown(header, rows),
    ]


def _behind() -> list[str]:
    """Our captured columns (ways to run a step) that are slower than native, and the share of
    copies in the difference."""
    rows = []
    for cell, _ in cells(reports("bench")):
        for name in SHOWN:
            column = cell["columns"].get(name)
            if column is None or not name.startswith("ours") or name == "ours_eager":
                continue
            gap = column["behind_native"]
            if gap["step_ms"] > 0:
                keys = ("step_ms", "copies_ms", "unexplained_ms")
                rows.append((cell["cell"], f"`{name}`", *(milliseconds(gap[k]) for k in keys)))
    if not rows:
        return [
            "In each cell of the first table, each of our columns with graphs is at least as fast "
            "as native."
        ]
    header = (
        "cell", "column", "ms over native", "of these, copies between buffers", "not explained",
    )  # fmt: skip
    return ["Slower than native:", markdown(header, rows)]


def latest_goals() -> list[Mapping[str, Any]]:
    """Every goal of one device once; the later report counts."""
    latest = {
        (goal["goal"], goal["cell"], goal["column"]): goal
        for _, report in dated("bench", "sweep")
        for goal in report["derived"]["targets"]
    }
    return [*latest.values()]


def goals() -> list[str]:
    """How many goals are met, and a table of the missed ones."""
    found = latest_goals()
    if not found:
        return []
    missed = [goal for goal in found if not goal["met"]]
    rows = [
        (
            g["goal"],
            g["cell"],
            f"`{g['column']}`",
            f"{g['bound']} {g['value']}",
            "never" if g["measured"] is None else g["measured"],
        )
        for g in missed
    ]
    lines = [f"{len(found) - len(missed)} of {len(found)} goals are met. Missed:"]
    if rows:
        lines.append(markdown(("goal", "cell", "column", "wanted", "measured"), rows))
    return lines
