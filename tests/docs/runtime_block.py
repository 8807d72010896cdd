"""
The README's block about the runtime, from the reports under ``gpu_runtime/reports``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qeffect.report import package
from tests.docs.blocks import KERNEL_REPORTS, RUNTIME_REPORTS, load, markdown

#: Columns of the step table that the README shows.
SHOWN = (
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
PICTURES = ("step_time", "memory", "resources")


def reports(kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the checked-in reports of a kind."""
    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if data.get("kind") == kind:
            yield data


def machine_of(report: Mapping[str, Any]) -> str:
    """Say in a line what a runtime report was measured on; the commit is in the list of reports."""
    e = report["environment"]
    return (
        f"{e['gpu']}, driver {e['driver']}, torch {package(e, 'torch')}, Transformer Engine "
        f"{package(e, 'transformer-engine')}"
    )


def ratio(value: Any) -> str:
    """Spell a ratio, or a median of ratios."""
    if isinstance(value, Mapping):
        value = value.get("median")
    return "-" if value is None else f"{value:.2f}x"


def over(value: Mapping[str, Any] | None) -> str:
    """Spell a ratio over a bound, with the column that is the bound."""
    if value is None:
        return "-"
    return f"{value['ratio'] if 'ratio' in value else value['median']:.2f}x `{value['of']}`"


def milliseconds(value: float | None) -> str:
    """Spell a time, or a dash where nothing measured it."""
    return "-" if value is None else f"{value:.2f}"


def _compared(derived: Mapping[str, Any], version: str) -> str:
    """State apart what rests on native, the controls, the other reference and the requirements."""
    ours, again = derived["native_against_ours"], derived["native_again"]
    eager, required = derived["eager_against_ours"], derived["requirements"]
    bits = [
        name
        for name in derived["categories"]
        if name not in ("addresses", "retained work", "growth")
    ]
    text = (
        f"**Bit for bit, Transformer Engine {version}.** {ours['compared']:,} values of "
        f"{ours['runs']} comparisons "
        f"({', '.join(bits)}), native full backward against ours (split eager, split captured, and "
        f"captured with faults injected while graphs are live): {ours['mismatched']} mismatches. "
        f"Beside them, native against native again, the control: {again['compared']:,} values of "
        f"{again['runs']} comparisons, {again['mismatched']} mismatches. Where the library cannot "
        f"form the same sum, split eager is the reference: {eager['compared']:,} values of "
        f"{eager['runs']} comparisons, {eager['mismatched']} mismatches."
    )
    if required["compared"]:
        text += (
            " What a guarded run must not do (move what graphs bake in, keep work past a step, "
            f"grow) was counted {required['compared']:,} times, and {required['mismatched']} of "
            "these counts are not zero."
        )
    if derived["faults"]:
        named = ", ".join(f"`{clause}` {n}" for clause, n in sorted(derived["faults"].items()))
        return text + f" Faults injected into those runs, by the clause that refused each: {named}."
    return text + " Which faults were injected is not in this report."


def _correctness() -> list[str]:
    lines = [
        _compared(
            report["derived"],
            f"{package(report['environment'], 'transformer-engine')}, commit "
            f"`{report['environment']['commit'][:12]}`",
        )
        for report in reports("compare")
    ]
    for report in reports("streams"):
        found = report["derived"]["handoffs"]
        one, two = found["one-way"], found["two-way"]
        lines.append(
            f"**Streams.** {one['stale']} of {one['checks']} one-way checks read stale data, "
            f"{two['stale']} of {two['checks']} two-way ones, in {one['processes']} fresh "
            "processes each."
        )
    for report in reports("pools"):
        said = []
        for order in report["derived"]["orders"]:
            shared, ours = (order["disciplines"][d] for d in ("shared", "private"))
            said.append(
                f"{order['order']}: {shared['mismatched']} of {shared['compared']} tensors differ "
                f"with one shared pool (refused by the kernel at `{shared['refused']['action']}`, "
                f"replayed without asking it), {ours['mismatched']} with one pool a slot"
            )
        lines.append(f"**Capture memory.** {'; '.join(said)}.")
    lines += [_probed(report["derived"]) for report in reports("probes")]
    return lines


def _typed(argv: Sequence[str]) -> list[str]:
    """Arguments of a command, but for the commit, which stands in a column of its own."""
    return [
        a for before, a in zip(("", *argv), argv, strict=False) if "--commit" not in (before, a)
    ]


def _probed(derived: Mapping[str, Any]) -> str:
    """What the library does where this runtime takes a different way."""
    said = "; ".join(f"{probe['what']}: {probe['found']}" for probe in derived["probes"])
    return f"**The library, looked at.** {said}."


def _cells() -> Iterator[Mapping[str, Any]]:
    """Yield each cell once, from the report with most of its columns."""
    found: dict[str, Mapping[str, Any]] = {}
    for report in reports("bench"):
        for cell in report["derived"]["cells"]:
            known = found.get(cell["cell"])
            if known is None or len(known["columns"]) < len(cell["columns"]):
                found[cell["cell"]] = cell
    yield from found.values()


def _latest() -> Iterator[Mapping[str, Any]]:
    """Yield each cell once, from the last report that measured its guards."""
    dated = sorted(reports("bench"), key=lambda report: str(report["environment"]["date"]))
    found = {
        cell["cell"]: cell
        for report in dated
        for cell in report["derived"]["cells"]
        if cell["guards"] is not None
    }
    yield from found.values()


def _speed() -> list[str]:
    rows = []
    machines = dict.fromkeys(machine_of(report) for report in reports("bench"))
    for cell in _cells():
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
        "cell", "column", "ms", "faster than native", "than TE's graphs", "over whole-step graph",
        "over floor", "over own kernels", "GB above native", "even at step",
    )  # fmt: skip
    return [
        f"One device, {'; '.join(machines)}. Cells are hidden-sequence-microbatches. Native and "
        "TE's graphs are the fastest column of each. A floor is the least kernel time of the "
        "library's columns that form the same sum, a whole-step graph is of the same sum too; both "
        "are named, and `copied` and `per_microbatch`, which no library column sums like, have "
        'neither. "Even at step" is the step at which a column has caught up with native, its '
        "construction, warm-up and capture included; - where it never does.",
        markdown(header, rows),
    ]


def _host() -> list[str]:
    """What a guarded action costs the host, beside what the kernel alone costs."""
    rows = []
    for cell in _latest():
        guards = cell["guards"]
        if guards is not None:
            each = guards["host_us_of_a_guard"]
            rows.append(
                (
                    cell["cell"],
                    f"{guards['host_ms_on']['median']:.2f} ms",
                    f"{guards['host_ms_off']['median']:.2f} ms",
                    guards["actions"],
                    f"{each['median']:.1f} µs ({each['min']:.1f} to {each['max']:.1f})",
                )
            )
    lines = []
    if rows:
        kernel = load(KERNEL_REPORTS / "bench.json")["guarded_action_us_by_action"]
        header = (
            "cell", "host time of a step, guarded", "unguarded", "guarded actions",
            "difference each",
        )  # fmt: skip
        lines += [
            "What guarding costs the host, `ours_accumulate` with guards and without, in the last "
            "report of each cell (a median difference within its range is noise); of an action the "
            f"kernel's own part is {min(kernel.values()):.1f} to {max(kernel.values()):.1f} µs "
            "(on the machine of the kernel's figures), the rest is the runtime around it:",
            markdown(header, rows),
        ]
    for cell in _latest():
        lines += [*_parts(cell), *_counted(cell)]
    for report in reports("host"):
        each = report["derived"]["host_us_of_a_guard"]
        lines.append(
            f"Measured by itself, in the cell {report['derived']['cell']}: {each['median']:.1f} µs "
            f"of host time a guarded action ({each['min']:.1f} to {each['max']:.1f})."
        )
    return lines


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    """Say where the host's time over the bare replays of an action goes."""
    host = cell.get("host", {}).get("ours_accumulate", {})
    if "parts_us" in host:
        parts = sorted(host["parts_us"].items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {us:.1f}" for name, us in parts)
        whole = host["of_an_action_us"]
        yield (
            f"A guarded action of {cell['cell']} takes the host {whole['median']:.1f} µs more than "
            f"its bare replay (goal {whole['goal']:.0f}; timed part by part: {said})."
        )


def _counted(cell: Mapping[str, Any]) -> Iterator[str]:
    """Say what counting on the device costs a step."""
    counts = cell.get("device_counts")
    if counts is not None:
        over = counts["step_on_over_off"]
        yield (
            f"With `device_counts=True` a step of {cell['cell']} takes {over['median']:.3f} of "
            f"what it takes without ({over['min']:.3f} to {over['max']:.3f}; goal 1.015)."
        )


def _behind() -> list[str]:
    """Where a captured column is behind native, and what of that its copies are."""
    rows = []
    for cell in _cells():
        for name in SHOWN:
            column = cell["columns"].get(name)
            if column is None or not name.startswith("ours"):
                continue
            gap = column["behind_native"]
            kernels, theirs = (
                milliseconds(cell["columns"][which]["kernel_ms"])
                for which in (name, cell["fastest_native"])
            )
            if gap["step_ms"] > 0 and gap["copies_ms"] is not None and name != "ours_eager":
                rows.append(
                    (
                        cell["cell"],
                        f"`{name}`",
                        milliseconds(gap["step_ms"]),
                        milliseconds(gap["copies_ms"]),
                        milliseconds(gap["unexplained_ms"]),
                        f"{kernels} ({theirs})",
                    )
                )
    if not rows:
        return []
    header = (
        "cell", "column", "ms behind native", "of that, copies between buffers", "not explained",
        "own kernels, ms (native's)",
    )  # fmt: skip
    return [markdown(header, rows)]


def _goals() -> list[str]:
    # A goal that two reports measured counts once, as the later one found it.
    found = sorted(
        (report for kind in ("bench", "sweep") for report in reports(kind)),
        key=lambda report: str(report["environment"]["date"]),
    )
    latest = {
        (goal["goal"], goal["cell"], goal["column"]): goal
        for report in found
        for goal in report["derived"]["targets"]
    }
    goals = [*latest.values()]
    missed = [goal for goal in goals if not goal["met"]]
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
    lines = [f"{len(goals) - len(missed)} of {len(goals)} goals are met; the others:"]
    if rows:
        lines.append(markdown(("goal", "cell", "column", "wanted", "measured"), rows))
    return lines


def _made() -> list[str]:
    """Every report with the commit that it was made at."""
    rows = []
    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if "environment" in data:
            e = data["environment"]
            rows.append(
                (
                    f"[{path.name}](gpu_runtime/reports/{path.name})",
                    f"`{' '.join(_typed(e['argv']))}`",
                    f"`{e['commit'][:12]}`",
                    e["date"],
                )
            )
    header = ("report", "made by `qeffect runtime`", "commit", "at")
    return ["The reports behind this section:", markdown(header, rows)]


def runtime() -> str:
    """Return the block."""
    parts = [*_correctness(), *_speed(), *_host(), *_behind(), *_goals()]
    for name in PICTURES:
        path = RUNTIME_REPORTS / f"{name}.svg"
        if path.exists():
            parts.append(f"![{name.replace('_', ' ')}](gpu_runtime/reports/{path.name})")
    return "\n\n".join([*parts, *_made()])
