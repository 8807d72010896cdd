"""
The runtime's page about a pipeline over ranks: bits first, then times, then goals.

Each part of a report is one function in `PARTS`, which yields nothing if a report lacks the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from qeffect.gpu_runtime.lab.statistics.scale import BOUND_GOALS
from tests.docs.blocks import markdown
from tests.docs.reading import machine_of, ratio
from tests.docs.remarks import bound, remark
from tests.docs.tables_block import goals

Report = Mapping[str, Any]


def pipelines(found: Iterable[tuple[str, Report]]) -> Iterator[str]:
    """
    A heading for each report, then its parts.

    Args:
        found: Reports of kind `scale`, with the names of their files.
    """
    for name, report in found:
        yield f"### {name}: {ranks_of(report)}"
        for part in PARTS:
            yield from part(name, report)


def ranks_of(report: Report) -> str:
    """The number of ranks of a report, in words."""
    pp = report["configuration"]["pp"]
    return f"{pp} rank{'s' * (pp != 1)}"


def compared(name: str, report: Report) -> Iterator[str]:
    """How many values differ from torch's own pipeline, by schedule."""
    rows = report["derived"]["compared"]
    if rows:
        said = "; ".join(
            f"{row['schedule']}, {row['name']}, {row['steps']} steps: {row['different']} of "
            f"{row['values']} values differ"
            for row in rows
        )
        yield (
            f"**A pipeline over {ranks_of(report)}** ({name}; {machine_of(report)}). The guarded "
            "and captured pipeline was compared with torch's own pipeline over full backwards: "
            f"{said}.{remark(name, report) * (not report['derived']['timed'])}"
        )


def timed(name: str, report: Report) -> Iterator[str]:
    """The time of a step on each side (a way to run it, such as native), its bound and its
    kernels."""
    found = report["derived"]["timed"]
    if not found:
        return
    in_order = any("over_in_order" in row for row in found)
    ahead = any("host_ahead_ms" in row for row in found)
    took = [row["message_ms"] * 1e3 for row in found if "message_ms" in row]
    messages = (
        "The bound includes for each message the time that the message takes alone "
        f"({min(took):.0f} to {max(took):.0f} µs)."
        if took
        else "The bound assumes that messages take no time."
    )
    yield (
        f"A step over {ranks_of(report)} with {report['configuration']['vpp']} stages of one "
        f"layer on each rank ({name}; {machine_of(report)}). `native` is torch's Interleaved "
        "1F1B; `guarded` replays one graph per action; `one launch` is a rank's whole step as "
        "one graph. After six steps, the tensors of `one launch` were compared with the tensors "
        "of `guarded`. A *single step* starts on an idle device; *its host time* is the time "
        f"until the host has enqueued this step. {BACK_TO_BACK * ahead}The *bound* is the length "
        "of the schedule's critical path, computed from the time that each graph takes alone. "
        f"{messages} Only the side `one launch` has a goal for its ratio to the bound; a bold "
        f"ratio misses this goal. {REPLAYED * in_order}*Kernels* is the kernel time of the "
        "busiest rank under the profiler, with copies and without messages. The sides were "
        f"timed one after the other, not alternately.{remark(name, report)}"
    )
    header = (
        "cell", "schedule", "side", "step, ms", "single step, ms", "its host time, ms",
        *["host time back to back, ms"] * ahead,
        "native / this", "over its bound", *["over the bound in order"] * in_order,
        "kernels, ms, and step / kernels", "tensors that differ from replays",
        "GB above native",
    )  # fmt: skip
    sign = bound(name, report)
    yield markdown(header, [_row(row, in_order, ahead, sign) for row in found])


BACK_TO_BACK = (
    "*Host time back to back* is the host time of launches that directly follow each other; the "
    "goal for host time applies to this time. "
)
REPLAYED = (
    "If a single graph is replayed again and again, its weights stay in the device's cache. The "
    "*bound in order* therefore uses other times: all actions of a rank were replayed in the "
    "schedule's order, without messages, and each action was timed in this sequence. "
)


def _row(row: Mapping[str, Any], in_order: bool, ahead: bool, sign: str) -> tuple[str, ...]:
    step, above = row["step_ms"], row["above_native_bytes"]
    return (
        row["cell"],
        row["schedule"],
        row["side"],
        f"{step['median']:.2f} ({step['min']:.2f} to {step['max']:.2f})",
        f"{row['single_ms']['median']:.2f}",
        f"{row['host_ms']['median']:.2f}",
        *([_ahead(row)] if ahead else []),
        "-" if row["native_over_this"] is None else sign + ratio(row["native_over_this"]),
        over_bound(row),
        *([ratio(row.get("over_in_order"))] if in_order else []),
        f"{row['busiest_ms']:.2f}, {ratio(row['over_busiest'])}" if "busiest_ms" in row else "-",
        f"{row['final_different']} of {row['final_values']}" if "final_values" in row else "-",
        "-" if above is None else f"{above / 1e9:+.2f}",
    )


def _ahead(row: Mapping[str, Any]) -> str:
    return f"{row['host_ahead_ms']['median']:.2f}" if "host_ahead_ms" in row else "-"


def over_bound(row: Mapping[str, Any]) -> str:
    """The ratio of a step to its bound; for one launch also the goal, in bold if missed."""
    measured, goal = row["over_bound"], BOUND_GOALS.get(row["cell"])
    said = ratio(measured)
    if measured is None or goal is None or row["side"] != "one launch":
        return said
    return f"{f'**{said}**' if measured > goal else said} (goal {goal:.2f}x)"


def split(name: str, report: Report) -> Iterator[str]:
    """How the time of one launch exceeds the time of the rank's own actions."""
    rows = []
    for row in report["derived"]["timed"]:
        for rank, own in enumerate(row.get("split", ())):
            rows.append(
                (
                    row["cell"],
                    row["schedule"],
                    str(rank),
                    *(f"{own[part]:.2f}" for part in ("step", "row")),
                    *(f"{own[part]:+.2f}" for part in ("kernels", "between", "awaited")),
                    f"{own['beside']:.2f}",
                )
            )
    if rows:
        yield (
            "This table shows where a step of one launch spends its time, under the profiler "
            f"({name}). *Its actions* is the time of all actions of the rank as one graph "
            "without messages. Three columns split the additional time of the step. *Kernels* "
            "has two parts: the time of kernels outside actions (the ranks' votes, the handoff "
            "between streams, the next step's data), and the slowdown of other kernels while "
            "messages occupy a part of the GPU. *Between* is the time in which nothing runs. "
            "*Awaited* is the time in which only messages run, which includes the schedule's "
            "bubble (idle time). *Beside messages* is the time in which kernels and messages "
            "run at once."
        )
        header = (
            "cell", "schedule", "rank", "step, ms", "its actions, ms", "kernels, ms", "between, ms",
            "awaited, ms", "beside messages, ms",
        )  # fmt: skip
        yield markdown(header, rows)


def missed(name: str, report: Report) -> Iterator[str]:
    """How many goals are met, and the missed ones."""
    yield from goals(report["derived"])


PARTS: tuple[Callable[[str, Report], Iterator[str]], ...] = (compared, timed, split, missed)
"""The parts of a report on the page, in this order."""
