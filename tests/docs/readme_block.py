"""
The blocks of the first README: the fault table, and one sentence for each page of figures.

The kernel's page and the runtime's page have these figures in full. If a report is missing or
incomplete, its sentence is left out.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.reports import cells
from tests.docs.bench_block import ACTIONS, MICROSECONDS, conditions, figures
from tests.docs.blocks import KERNEL_PAGE, KERNEL_REPORTS, ROOT, RUNTIME_PAGE, load
from tests.docs.found_block import found
from tests.docs.kernel_block import failures_counts, faults
from tests.docs.reading import dated, files, ratio, reports
from tests.docs.remarks import bound, in_short
from tests.docs.summary_block import compared_rows, goals_of_reports, longest, whole

Report = Mapping[str, Any]
KERNEL = KERNEL_PAGE.relative_to(ROOT).as_posix()
RUNTIME = RUNTIME_PAGE.relative_to(ROOT).as_posix()
WIDTH = 160
"""Columns of a paragraph of the README, if its words and links allow it."""


def wrapped(text: str, indent: str = "") -> str:
    """
    A paragraph or an item of a list, in lines; no link is broken.

    Args:
        text: The text, in one line.
        indent: Before every line but the first.
    """
    links = re.sub(r"\[[^]]*\]\([^)]*\)", lambda link: link[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        links, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def failures() -> str:
    """How many public failures are refused."""
    counted = failures_counts()
    return wrapped(
        f"**Public failures** (`qeffect failures`). Users reported {counted['failures']} failures. "
        f"The contract refuses {counted['refused']} and misses {counted['not_caught']}; "
        f"{counted['unexplained']} have no published cause. Of the {counted['refused']}, "
        f"{counted['given_a_report']} are refused only if the runtime makes an optional report; "
        f"for {counted['refused_by_guess']} we guessed the cause. "
        f"[By relation]({KERNEL}#public-failures)."
    )


def proofs() -> str:
    """How many obligations are proved, and how many mutants are killed."""
    data = load(KERNEL_REPORTS / "proofs.json")
    mutants = data["mutant_report"]
    return wrapped(
        f"{data['unsat']:,} of {data['obligations']:,} *obligations* (formulas to prove) are "
        f"proved, {data['unknown']} unknown. A *mutant* is the code without one guard clause, "
        f"operand or state update. A mutant is *killed* if a call then goes wrong: "
        f"{mutants['killed']} of {mutants['mutants']} are killed. "
        f"Commit: `{data['environment']['commit'][:7]}`. "
        f"[What is proved]({KERNEL}#what-is-proved)."
    )


def bench() -> str:
    """What a guarded action costs, and how many goals of the kernel are missed."""
    data, proved = load(KERNEL_REPORTS / "bench.json"), load(KERNEL_REPORTS / "proofs.json")
    took = data["guarded_action_us_by_action"]
    each = ", ".join(f"{MICROSECONDS.format(took[action])} for {action}" for action in ACTIONS)
    goals = [row for row in figures(data, proved) if row.goal is not None]
    under = ", with a caveat" if conditions(data, proved) else ""
    return wrapped(
        f"**Cost of the guards.** A check with its commit takes {each}. "
        f"Of {len(goals)} *goals* (each a target for one figure), "
        f"{sum(row.misses for row in goals)} are missed. "
        f"Measured at commit `{data['environment']['commit'][:7]}`; the proofs ran at "
        f"`{proved['environment']['commit'][:7]}`. "
        f"[What guards cost{under}]({KERNEL}#what-guards-cost)."
    )


def runtime() -> str:
    """The runtime's main results, a sentence each."""
    parts = (
        *(same_bits(), over_ranks(), one_device(), models(), grouped(), peers(), training()),
        met(),
    )
    return "\n".join(wrapped(f"- {said}", "  ") for part in parts for said in part)


SCALING = "values of scaling state"


def same_bits() -> Iterator[str]:
    """How many values, tensors and losses of all reports differ from those of other runs."""
    compared, differ = Counter[str](), Counter[str]()
    rows = [row for row in compared_rows() if not row[1][1].endswith(" flips")]
    for _, (_, much, wrong, state, _) in rows:
        count, unit = much.split()
        compared[unit] += int(count.replace(",", ""))
        differ[unit] += int(wrong.replace(",", ""))
        if state != "-":
            few, many = (int(number.replace(",", "")) for number in state.split(" of "))
            compared[SCALING] += many
            differ[SCALING] += few
    if rows:
        said = ", ".join(f"{compared[u]:,} {u}" for u in compared)
        if any(differ.values()):
            said = ", ".join(f"{differ[u]:,} of {compared[u]:,} {u}" for u in compared) + " differ"
        else:
            said = f"no bit differs in {said}"
        yield (
            f"*Bits*, compared with native or with an undisturbed run: {said}. "
            f"[{len(rows)} reports]({RUNTIME}#in-short)."
        )


def over_ranks() -> Iterator[str]:
    """How much faster one launch is than native over each number of ranks."""
    for pp, (name, report) in whole(dated("scale")).items():
        rows = [row for row in report["derived"]["timed"] if row["side"] == "one launch"]
        if rows:
            faster, over = ([row[k] for row in rows] for k in ("native_over_this", "over_bound"))
            sign = bound(name, report)
            yield (
                f"*{pp} ranks*: speed {sign}{span(faster)}, step time {span(over)} the bound. "
                f"[{name}{in_short(name, report)}]({RUNTIME}#{anchor(name, pp)})."
            )


def one_device() -> Iterator[str]:
    """How our step compares with native, and with the library's whole step as one graph."""
    ours = [
        column
        for cell, _ in cells([*reports("bench")])
        if (column := cell["columns"].get("ours_accumulate")) is not None
    ]
    if ours:
        faster, slower = (
            span([column[key]["median"] for column in ours])
            for key in ("native_over_this", "over_whole_step")
        )
        yield (
            f"*One device*: speed {faster}, step time {slower} the library's whole-step graph. "
            f"[Table]({RUNTIME}#a-step-on-one-device)."
        )


def models() -> Iterator[str]:
    """TFLOP/s of the fastest guarded row of each whole model, beside the time of Megatron."""
    best: dict[str, tuple[float, float]] = {}
    for _, report in files("models"):
        asked = report["configuration"]
        usual = asked["pp"] == 2 and asked.get("main_grad", "bf16") == "bf16"
        for row in report["derived"]["rows"]:
            over = row["megatron_over_this"]
            if usual and row["side"] == "one launch" and over is not None:
                own = row["tflops"]["median"], over
                best[row["cell"]] = max(own, best.get(row["cell"], own))
    if best:
        # Every cell has as many microbatches as the others.
        (microbatches,) = {cell.rpartition("-m")[2] for cell in best}
        said = ", ".join(
            f"{cell.rpartition('-m')[0]}: {rate:.0f} ({over:.2f}x)"
            for cell, (rate, over) in sorted(best.items())
        )
        table = f"[Table]({RUNTIME}#whole-models)"
        yield (
            f"*Models* with {microbatches} microbatches, named by parameters and sequence length. "
            f"TFLOP/s (speed relative to Megatron): {said}. {table}."
        )


def grouped() -> Iterator[str]:
    """The step time with the best group size over the step time without groups."""
    sets = [one for _, report in files("groups") for one in report["derived"]["sets"]]
    best = [one["best"]["over_today"] for one in sets if one["best"] is not None]
    if best:
        yield (
            f"*Grouped dW*: a step takes {span(best)} the time of a step without groups. "
            f"[Table]({RUNTIME}#grouped-dw)."
        )


def peers() -> Iterator[str]:
    """How much faster the best schedule is than Megatron's best graphs, over all cells."""
    best: dict[tuple[str, bool], dict[str, float]] = {}
    for _, report in files("peers"):
        for row in report["derived"]["rows"]:
            over = None if row["error"] else row["best_graphs_over_this"]
            if row["side"] == "one launch" and over is not None:
                cells = best.setdefault((row["main_grad"], row["group"] is not None), {})
                cells[row["cell"]] = max(over, cells.get(row["cell"], over))
    said = [
        f"{main_grad}{' with grouped dW' * grouped} {span([*cells.values()])}"
        for (main_grad, grouped), cells in best.items()
    ]
    if said:
        yield (
            "*Peers*, speed relative to Megatron-core's fastest graphs, by gradient type: "
            f"{', '.join(said)}. [Tables]({RUNTIME}#peers)."
        )


def training() -> Iterator[str]:
    """The longest training run: how many losses differ from native, and the time to a loss."""
    for name, report in longest(dated("curves")):
        derived = report["derived"]
        same, to_loss = derived["same_order"][:1], derived["to_loss"][:1]
        said = [
            f"{row['losses_differ']:,} of {row['steps']:,} losses differ from native's"
            for row in same
        ]
        said += [
            f"loss {level['loss']:g} reached after {level['seconds']:.1f} s (native: "
            f"{level['native_seconds']:.1f} s)"
            for row in to_loss
            for level in row["levels"][-1:]
        ]
        if said:
            yield f"*Training*: {'; '.join(said)}. [{name}]({RUNTIME}#training)."


def met() -> Iterator[str]:
    """How many goals of the runtime are met and missed."""
    goals = [goal for goals in goals_of_reports().values() for goal in goals]
    if goals:
        missed = sum(not goal["met"] for goal in goals)
        yield (
            f"*Goals*: {len(goals) - missed} of {len(goals)} are met and {missed} are missed. "
            f"[Each miss]({RUNTIME}) is listed with the known reasons."
        )


def span(found: Sequence[float]) -> str:
    """Two ratios as text, or one if both texts are equal."""
    least, most = ratio(min(found)), ratio(max(found))
    return least if least == most else f"{least} to {most}"


def anchor(name: str, pp: int) -> str:
    """The link anchor of a scale report's heading on the runtime's page."""
    heading = f"{name}: {pp} rank{'s' * (pp != 1)}"
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


#: The blocks of the first README.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "found": found,
    "faults": faults,
    "failures": failures,
    "proofs": proofs,
    "bench": bench,
    "runtime": runtime,
}
