"""
The runtime's page about a step on one device: times, what is over the floor, the host's part, and
which goals are missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.reports import cells
from qeffect.gpu_runtime.lab.statistics.host import REST
from tests.docs.blocks import KERNEL_REPORTS, load, markdown
from tests.docs.reading import dated, machine_of, milliseconds, ratio, reports

#: Columns of the step table that the README shows.
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
    """Spell a ratio over a bound, with the column that is the bound."""
    if value is None:
        return "-"
    return f"{value['ratio'] if 'ratio' in value else value['median']:.2f}x `{value['of']}`"


def steps() -> list[str]:
    """What a step takes in every cell and column, over its floor, and behind native."""
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
        "cell", "column", "median ms", "faster than native, paired", "than TE's graphs, paired",
        "over whole-step graph, paired", "over floor", "over own kernels", "GB above native",
        "even at step",
    )  # fmt: skip
    return [
        f"One device, {'; '.join(machines)}. Cells are hidden-sequence-microbatches. Native and "
        "TE's graphs are the column of each with the least median, whose ratio to itself is "
        "1.00x. A ratio of two columns is paired: the median of the ratios of each round, which is "
        "not the ratio of their medians and can put two columns in another order. A floor is the "
        "least kernel time of the "
        "library's columns that form the same sum, a whole-step graph is of the same sum too; both "
        "are named, and `copied` and `per_microbatch`, which no library column sums like, have "
        'neither. "Even at step" is the step at which a column has caught up with native, its '
        "construction, warm-up and capture included; - where it never does, or is native.",
        markdown(header, rows),
    ]


def host() -> list[str]:
    """What a guarded action costs the host, beside what the kernel alone costs."""
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
            "cell", "report", "host time of a step, guarded", "unguarded", "guarded actions",
            "difference each", "an action over its bare replay",
        )  # fmt: skip
        lines += [
            "What guarding costs the host: `ours_accumulate` with guards and without, a row a "
            "report, as the median and the range of the rounds' differences; one whose range "
            "includes zero is noise. The last column is of other steps, in which each action was "
            "timed by itself, against the replay of its graph alone: the handoff and the copies "
            "are in it, which the unguarded column makes too. A check with its commit takes "
            f"{min(kernel.values()):.1f} to {max(kernel.values()):.1f} µs of it (by the kernel's "
            "figures, on their machine).",
            markdown(header, sorted(rows, key=lambda row: row[0])),
        ]
    for name, report in dated("bench"):
        for cell in report["derived"]["cells"]:
            lines += [*_parts(cell, name), *_counted(cell, report["derived"]["targets"])]
    for report in reports("host"):
        lines.append(
            f"Measured by itself, in the cell {report['derived']['cell']}: "
            f"{_range(report['derived']['host_us_of_a_guard'])} of host time a guarded action."
        )
    return lines


def _range(us: Mapping[str, float]) -> str:
    """Spell microseconds with their range."""
    return f"{us['median']:.1f} µs ({us['min']:.1f} to {us['max']:.1f})"


def _guards(guards: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Host time with guards and without, and the difference, which may be noise."""
    each = guards["host_us_of_a_guard"]
    return (
        f"{guards['host_ms_on']['median']:.2f} ms",
        f"{guards['host_ms_off']['median']:.2f} ms",
        str(guards["actions"]),
        _range(each) + (", noise" if each["min"] <= 0 <= each["max"] else ""),
    )


def _over_bare(cell: Mapping[str, Any]) -> Mapping[str, float] | None:
    """What an action of a cell takes the host over its bare replay, where it was timed."""
    found: Mapping[str, float] | None = (
        cell.get("host", {}).get("ours_accumulate", {}).get("of_an_action_us")
    )
    return found


def _parts(cell: Mapping[str, Any], name: str) -> Iterator[str]:
    """Where the host's time over the bare replay of an action goes: a row a part, with the sum."""
    whole = _over_bare(cell)
    if whole is None or "parts_us" not in cell["host"]["ours_accumulate"]:
        return
    parts = dict(cell["host"]["ours_accumulate"]["parts_us"])
    rest = parts.pop(REST)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    goal, median = whole["goal"], f"{whole['median']:.1f}"
    rows = [
        *((part, f"{us:.1f}") for part, us in ordered),
        ("rest: the median of whole steps over the medians above together", f"{rest:.1f}"),
        (
            f"together (goal {goal:.0f})",
            f"**{median}**" if whole["median"] > goal else median,
        ),
    ]
    alone = parts["copies"] + parts["addresses"]
    said = (
        f"The copies, which the unguarded runtime makes too, and the look at addresses take "
        f"{alone:.1f} µs, where the goal for all is {goal:.0f}:"
    )
    if not parts["copies"]:
        said = (
            "That report's timer did not see the copies, which the unguarded runtime makes too: "
            "they stand under its own code. It does again, and was not run again:"
        )
    yield (
        f"A guarded action of {cell['cell']} part by part, beyond its bare replay ({name}; medians "
        f"of single calls). {said}"
    )
    yield markdown(("part", "µs of host time"), rows)


def _counted(cell: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what counting on the device costs a step."""
    for name, goal, said in (
        ("device_counts", "step counted by", "`device_counts=True`"),
        ("late_counts", "step counted and", "`late_counts=True` as well"),
    ):
        counts = cell.get(name)
        if counts is not None:
            over = counts["step_on_over_off"]
            goals = [f"; goal {t['value']}" for t in targets if t["goal"].startswith(goal)]
            yield (
                f"With {said} a step of {cell['cell']} takes {over['median']:.3f} of what it "
                f"takes without ({over['min']:.3f} to {over['max']:.3f}{''.join(goals)})."
            )


#: Columns whose distance from the floor is split: one graph of the native step, and ours.
SPLIT = ("whole_main_grad", "ours_accumulate", "ours_two_streams")


def _beyond_floor() -> list[str]:
    """What a step takes beyond its floor: further kernels, and what no kernel explains."""
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
        "copies between buffers among them", "beyond its own kernels",
    )  # fmt: skip
    return [
        "What a step takes over its floor. Kernels were profiled at another load than steps were "
        "timed at; the last column is explained by no record, and on two streams kernels overlap:",
        markdown(header, rows),
    ]


def _behind() -> list[str]:
    """Which captured columns of ours are behind native, and what of that their copies are."""
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
        return ["No captured column of ours is behind native in any of these cells."]
    header = (
        "cell", "column", "ms behind native", "of that, copies between buffers", "not explained",
    )  # fmt: skip
    return ["Behind native:", markdown(header, rows)]


def latest_goals() -> list[Mapping[str, Any]]:
    """Every goal of one device, once: where two reports measured it, as the later one found it."""
    latest = {
        (goal["goal"], goal["cell"], goal["column"]): goal
        for _, report in dated("bench", "sweep")
        for goal in report["derived"]["targets"]
    }
    return [*latest.values()]


def goals() -> list[str]:
    """How many goals are met, and a table of the others."""
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
    lines = [f"{len(found) - len(missed)} of {len(found)} goals are met; the others:"]
    if rows:
        lines.append(markdown(("goal", "cell", "column", "wanted", "measured"), rows))
    return lines
