"""
The README's block about the runtime, from the reports under ``gpu_runtime/reports``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qeffect.report import package
from tests.docs.blocks import RUNTIME_REPORTS, load, markdown

#: Columns of the step table that the README shows.
SHOWN = (
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


def environment_of(report: Mapping[str, Any]) -> str:
    """Say in a line what a runtime report was measured on."""
    e = report["environment"]
    return (
        f"{e['gpu']}, driver {e['driver']}, torch {package(e, 'torch')}, Transformer Engine "
        f"{package(e, 'transformer-engine')}, commit `{e['commit'][:12]}`"
        + " with changes"
        * ("+" in e["commit"])
    )


def ratio(value: Any) -> str:
    """Spell a ratio, or a median of ratios."""
    if isinstance(value, Mapping):
        value = value.get("median")
    return "-" if value is None else f"{value:.2f}x"


def _correctness() -> list[str]:
    lines = []
    for report in reports("compare"):
        total = report["derived"]
        lines.append(
            f"**Bit for bit.** {total['compared']:,} values of {total['runs']} comparisons "
            f"(outputs, input gradients, every gradient, parameters, AdamW state, amax histories, "
            f"scales, caches, versions), native full backward against split eager, split captured "
            f"and captured with faults injected while graphs are live: "
            f"{total['mismatched']} mismatches. Where the library cannot form the same sum, split "
            f"eager is the reference; the report says which."
        )
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
    return lines


def _speed() -> list[str]:
    rows = []
    where = ""
    for report in reports("bench"):
        where = environment_of(report)
        for cell in report["derived"]["cells"]:
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
                        ratio(column["over_whole_step"]),
                        ratio(column["over_floor"]),
                        "-" if above is None else f"{above['largest'] / 1e9:+.2f}",
                        column["break_even_steps"] or "-",
                    )
                )
    header = (
        "cell", "column", "ms", "faster than native", "than TE's graphs", "over whole-step graph",
        "over floor", "GB above native", "even at step",
    )  # fmt: skip
    return [f"One device, {where}. Cells are hidden-sequence-microbatches.", markdown(header, rows)]


def _goals() -> list[str]:
    goals = [
        goal
        for kind in ("bench", "sweep")
        for report in reports(kind)
        for goal in report["derived"]["targets"]
    ]
    missed = [goal for goal in goals if not goal["met"]]
    rows = [
        (g["goal"], g["cell"], f"`{g['column']}`", f"{g['bound']} {g['value']}", g["measured"])
        for g in missed
    ]
    lines = [f"{len(goals) - len(missed)} of {len(goals)} goals are met; the others:"]
    if rows:
        lines.append(markdown(("goal", "cell", "column", "wanted", "measured"), rows))
    return lines


def runtime() -> str:
    """Return the block."""
    parts = [*_correctness(), *_speed(), *_goals()]
    for name in PICTURES:
        path = RUNTIME_REPORTS / f"{name}.svg"
        if path.exists():
            parts.append(f"![{name.replace('_', ' ')}](gpu_runtime/reports/{path.name})")
    return "\n\n".join(parts)
