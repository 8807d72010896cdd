"""
The blocks of the first README: the fault table, and one line for each page of figures.

Every number here stands in full on the kernel's page or the runtime's page. A report that is
missing, or that lacks a part, has no line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.reports import cells
from tests.docs.bench_block import ACTIONS, MICROSECONDS, conditions, figures
from tests.docs.blocks import KERNEL_PAGE, KERNEL_REPORTS, ROOT, RUNTIME_PAGE, load
from tests.docs.kernel_block import failures_counted, faults
from tests.docs.reading import dated, ratio, reports
from tests.docs.remarks import CUT, in_short
from tests.docs.summary_block import compared_rows, goals_of_reports, longest, whole

Report = Mapping[str, Any]
KERNEL = KERNEL_PAGE.relative_to(ROOT).as_posix()
RUNTIME = RUNTIME_PAGE.relative_to(ROOT).as_posix()


def failures() -> str:
    """How many public failures are refused."""
    return f"{failures_counted()} [By relation]({KERNEL}#failures-that-people-really-had)."


def proofs() -> str:
    """How many obligations are proved, and how many mutants are killed."""
    data = load(KERNEL_REPORTS / "proofs.json")
    mutants = data["mutant_report"]
    return (
        "An *obligation* is one formula to prove, such as: this call keeps this invariant. "
        f"{data['unsat']:,} of {data['obligations']:,} obligations are proved and "
        f"{data['unknown']} are unknown, in {data['seconds']:.1f} s. A *mutant* is the code "
        "without one guard clause, operand or state update; it is killed if something then goes "
        f"wrong. {mutants['killed']} of {mutants['mutants']} mutants are killed. Report of commit "
        f"`{data['environment']['commit'][:7]}`; guards that were added since are proved by "
        "`make check`, and not counted here. "
        f"[What is proved]({KERNEL}#what-is-proved)."
    )


def bench() -> str:
    """What a guarded action costs, and how many goals of the kernel are missed."""
    data, proved = load(KERNEL_REPORTS / "bench.json"), load(KERNEL_REPORTS / "proofs.json")
    took = data["guarded_action_us_by_action"]
    each = ", ".join(f"{MICROSECONDS.format(took[action])} for {action}" for action in ACTIONS)
    goals = [row for row in figures(data, proved) if row.goal is not None]
    under = conditions(data, proved)
    return (
        f"A check with its commit takes {each}. {sum(row.misses for row in goals)} of {len(goals)} "
        f"goals of the kernel are missed (commit `{data['environment']['commit'][:7]}`). "
        f"[What guards cost]({KERNEL}#what-guards-cost)." + f" {under}" * bool(under)
    )


def runtime() -> str:
    """The runtime's main results, a line each."""
    parts = (same_bits(), over_ranks(), one_device(), peers(), training(), met())
    return "\n".join(f"- {line}" for part in parts for line in part)


def same_bits() -> Iterator[str]:
    """How many values, tensors and losses were compared over all reports, and how many differ."""
    compared, differ = Counter[str](), Counter[str]()
    rows = compared_rows()
    for _, (_, much, wrong, _) in rows:
        count, unit = much.split()
        compared[unit] += int(count.replace(",", ""))
        differ[unit] += int(wrong.replace(",", ""))
    if rows:
        said = ", ".join(f"{differ[u]:,} of {compared[u]:,} {u}" for u in compared)
        cut = {name for name, _ in CUT} & {name for name, _ in rows}
        short = f" ({len(cut)} of them incomplete)" if cut else ""
        yield (
            f"*Bits*: in {len(rows)} reports{short}, {said} differ from native or from another "
            f"reference. [Which]({RUNTIME}#in-short)."
        )


def over_ranks() -> Iterator[str]:
    """How much faster one launch is than native over each number of ranks."""
    for pp, (name, report) in whole(dated("scale")).items():
        rows = [row for row in report["derived"]["timed"] if row["side"] == "one launch"]
        if rows:
            faster, over = ([row[k] for row in rows] for k in ("native_over_this", "over_bound"))
            yield (
                f"*{pp} ranks*, each rank's step *one launch* of a CUDA graph: {span(faster)} as "
                f"fast as native; a step takes {span(over)} the schedule's bound"
                f"{in_short(name, report)}. [{name}]({RUNTIME}#{anchor(name, pp)})."
            )


def one_device() -> Iterator[str]:
    """How much faster ours is than native and than the library's graphs, a cell each."""
    said = [
        f"{ratio(ours['native_over_this'])} and {ratio(ours['te_graphs_over_this'])} at "
        f"{cell['cell']}"
        for cell, _ in cells([*reports("bench")])
        if (ours := cell["columns"].get("ours_accumulate")) is not None
    ]
    slower = [
        ratio(ours["over_whole_step"]["median"])
        for cell, _ in cells([*reports("bench")])
        if (ours := cell["columns"].get("ours_accumulate")) is not None
    ]
    if said:
        yield (
            "*One device*, speedup over native and over Transformer Engine's own graphs: "
            f"{'; '.join(said)} (hidden size, sequence, microbatches). The library's whole step as "
            f"one graph is faster: ours takes {', '.join(slower)} its time. "
            f"[Table]({RUNTIME}#a-step-on-one-device)."
        )


def peers() -> Iterator[str]:
    """How much faster one launch is than Megatron's best graphs."""
    for name, report in dated("peers")[-1:]:
        rows = [row for row in report["derived"]["rows"] if row["side"] == "one launch"]
        found = [row["best_graphs_over_this"] for row in rows if row["error"] is None]
        if found:
            yield (
                f"*Peers*: one launch is {span(found)} as fast as Megatron-core's best graph mode"
                f"{in_short(name, report)}. [{name}]({RUNTIME}#peers)."
            )


def training() -> Iterator[str]:
    """The longest training run: the same losses, and the time to one of them."""
    for name, report in longest(dated("curves")):
        derived = report["derived"]
        same, to_loss = derived["same_order"][:1], derived["to_loss"][:1]
        said = [
            f"{row['losses_differ']:,} of {row['steps']:,} losses differ from native's"
            for row in same
        ]
        said += [
            f"training reaches a loss of {level['loss']:g} after {level['seconds']:.1f} s, native "
            f"training after {level['native_seconds']:.1f} s (without building; they ran at the "
            "same time, on other GPUs of one host)"
            for row in to_loss
            for level in row["levels"][-1:]
        ]
        if said:
            yield f"*Training* ({name}): {'; '.join(said)}. [Curves]({RUNTIME}#training)."


def met() -> Iterator[str]:
    """How many goals of the runtime are met and missed."""
    goals = [goal for goals in goals_of_reports().values() for goal in goals]
    if goals:
        missed = sum(not goal["met"] for goal in goals)
        yield (
            f"*Goals*: {len(goals) - missed} of {len(goals)} are met and {missed} are missed. "
            f"[Each miss]({RUNTIME}) is listed with what is known of its reason."
        )


def span(found: Sequence[float]) -> str:
    """Two ratios as text, or one if both texts are equal."""
    least, most = ratio(min(found)), ratio(max(found))
    return least if least == most else f"{least} to {most}"


def anchor(name: str, pp: int) -> str:
    """The anchor of a scale report's heading on the runtime's page."""
    heading = f"{name}: {pp} rank{'s' * (pp != 1)}"
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


#: The blocks of the first README.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "faults": faults,
    "failures": failures,
    "proofs": proofs,
    "bench": bench,
    "runtime": runtime,
}
