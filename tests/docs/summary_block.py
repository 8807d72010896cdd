"""
The short part of the runtime's page: a table for each kind of result.

Later sections of the page have these results in full. If a report is missing, or lacks the compared
part, its row is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.reports import cells
from qeffect.gpu_runtime.lab.statistics.evidence import REQUIREMENTS
from qeffect.gpu_runtime.lab.statistics.scale import BOUND_GOALS
from qeffect.report import package
from tests.docs.blocks import markdown
from tests.docs.device_block import latest_goals
from tests.docs.reading import (
    dated,
    files,
    machine_of,
    milliseconds,
    ratio,
    reports,
    stale_reads,
)
from tests.docs.remarks import bound, remark
from tests.docs.scale_block import over_bound, ranks_of

Report = Mapping[str, Any]
Found = Sequence[tuple[str, Report]]


def _link(name: str) -> str:
    return f"[{name}]({name})"


def short() -> str:
    """The runtime's main results, a table each."""
    parts = [
        *compared(),
        *complete(dated("scale")),
        *one_device([*reports("bench")]),
        *peers(dated("peers")),
        *curves(dated("curves")),
        *met(),
    ]
    return "\n\n".join(parts)


def compared_rows() -> list[tuple[str, Row]]:
    """The name of each report that compared bits, with its row."""
    return [
        (name, row)
        for kind, read in COMPARED.items()
        for name, report in files(kind)
        if (row := read(report)) is not None
    ]


def compared() -> Iterator[str]:
    """A row for each report that compared bits, and the stale reads after a one-way handoff."""
    rows = [(_link(name), *row) for name, row in compared_rows()]
    if rows:
        both = "".join(
            " In a handoff between two CUDA streams, each stream must wait for the other "
            "(two-way). If only one stream waits (one-way), reads may be stale: "
            f"{stale_reads(report)}."
            for report in reports("streams")
        )
        yield (
            "**Bit for bit.** Each row is one report, which compared raw bits without "
            "tolerance. *Scaling state* (amax histories, scales, FP8 weight caches and their "
            f"versions) is counted in a separate column.{both}"
        )
        yield markdown(
            (
                "report",
                "compared with",
                "compared",
                "differ",
                "scaling state: differ",
                "further results",
            ),
            rows,
        )


Row = tuple[str, str, str, str, str]
#: Categories that are counted separately: they have most of the values.
SCALING = ("amax histories", "scales", "caches", "versions")


def _apart(categories: Iterable[tuple[str, int, int]]) -> tuple[str, str, str]:
    """
    How many values were compared, how many differ, and likewise of scaling state.

    Args:
        categories: A category of values, how many were compared and how many differ.
    """
    counts = Counter[str]()
    for category, compared, different in categories:
        kind = "state" if category in SCALING else "values"
        counts[kind] += compared
        counts[f"{kind} differ"] += different
    return (
        f"{counts['values']:,} values",
        f"{counts['values differ']:,}",
        f"{counts['state differ']:,} of {counts['state']:,}",
    )


def _native(report: Report) -> Row | None:
    derived = report["derived"]
    values = [
        (entry["category"], entry["compared"], entry["mismatched"])
        for run in report["raw"]["runs"]
        if run["candidate"] != "native-again"
        for entry in run["categories"]
        if entry["category"] not in REQUIREMENTS
    ]
    required, faults = derived["requirements"], sum(derived["faults"].values())
    beside = f"{required['mismatched']:,} of {required['compared']:,} counts of forbidden events"
    version = package(report["environment"], "transformer-engine")
    return (
        f"native full backward, or eager split backward; Transformer Engine {version}",
        *_apart(values),
        f"{faults:,} faults refused; {beside}" if faults else beside,
    )


def _pipeline(report: Report) -> Row | None:
    rows = report["derived"]["compared"]
    if not rows:
        return None
    launched = [row for row in report["derived"]["timed"] if "final_values" in row]
    different, values = (
        sum(row[f"final_{k}"] for row in launched) for k in ("different", "values")
    )
    return (
        f"torch's own pipeline over {ranks_of(report)}",
        *_apart(
            (category, *counts)
            for row in report["raw"]["compared"]
            for category, counts in row["categories"].items()
        ),
        f"one launch: {different:,} of {values:,} tensors differ from replays" if launched else "-",
    )


def _tables(report: Report) -> Row | None:
    rows = [row for row in report["derived"]["rows"] if row["compared_with"] is not None]
    if not rows:
        return None
    return (
        "six steps of the same language model: native, with copied gradients, or as replays",
        f"{sum(row['values'] for row in rows):,} tensors",
        f"{sum(row['different'] for row in rows):,}",
        "-",
        "-",
    )


def _models(report: Report) -> Row | None:
    rows = [row for row in report["derived"]["rows"] if row["compared"]]
    if not rows:
        return None
    return (
        f"torch's own pipeline over {ranks_of(report)}: whole decoders, after three steps",
        f"{sum(row['compared'] for row in rows):,} tensors",
        f"{sum(row['different'] for row in rows):,}",
        "-",
        "-",
    )


def _trained(report: Report) -> Row | None:
    runs = report["derived"]["runs"]
    if not runs:
        return None
    losses, steps = (sum(run[key] for run in runs) for key in ("losses_differ", "steps"))
    return (
        "native training, after the last step",
        f"{sum(run['compared'] for run in runs):,} tensors",
        f"{sum(run['differ'] for run in runs):,}",
        "-",
        f"{losses:,} of {steps:,} losses differ",
    )


def _curves(report: Report) -> Row | None:
    rows = report["derived"]["same_order"]
    if not rows:
        return None
    known = [row for row in rows if row["state_differs"] is not None]
    tensors, wrong = (sum(r["tensors"] for r in known), sum(r["state_differs"] for r in known))
    beside = f"the {tensors:,} tensors after the last step " + (
        f"differ in {wrong} of {len(known)} runs" if wrong else "are the same"
    )
    return (
        "native training: every loss and held-out loss",
        f"{sum(row['steps'] + row['held_out'] for row in rows):,} losses",
        f"{sum(row['losses_differ'] + row['held_out_differ'] for row in rows):,}",
        "-",
        beside if known else "-",
    )


def _restarts(report: Report) -> Row | None:
    derived, asked = report["derived"], report["configuration"]
    under = ", ".join(asked["schedules"])
    return (
        f"a run without a stop ({under}{'' if asked['captured'] else ', eager'})",
        f"{derived['compared']:,} tensors",
        f"{derived['differ']:,}",
        "-",
        f"loaded under {derived['remapped']} other mappings" if derived["remapped"] else "-",
    )


def _kills(report: Report) -> Row | None:
    derived, asked = report["derived"], report["configuration"]
    losses, differ = (
        derived[f"losses{end}"] + derived[f"held_out{end}"] for end in ("", "_differ")
    )
    return (
        f"an undisturbed run, after {derived['kills']} kills ({asked['device']}, {asked['mode']})",
        f"{derived['tensors']:,} tensors",
        f"{derived['tensors_differ']:,}",
        "-",
        f"{differ:,} of {losses:,} losses differ",
    )


def _second_runs(report: Report) -> Row | None:
    derived, asked = report["derived"], report["configuration"]
    return (
        f"an undisturbed run, after a flip in one of a step's two runs ({asked['device']}, "
        f"{asked['ranks']} rank{'s' * (asked['ranks'] != 1)})",
        f"{derived['flips']:,} flips",
        f"{derived['wrong']:,}",
        "-",
        f"{derived['stopped']:,} were stopped, {derived['harmless']:,} changed nothing",
    )


COMPARED: Mapping[str, Callable[[Report], Row | None]] = {
    "compare": _native,
    "scale": _pipeline,
    "tables": _tables,
    "models": _models,
    "train": _trained,
    "curves": _curves,
    "restarts": _restarts,
    "kills": _kills,
    "second_runs": _second_runs,
}
"""By kind of report: what was compared, how much, how much differs, and what else was found."""


def whole(found: Iterable[tuple[str, Report]]) -> dict[int, tuple[str, Report]]:
    """
    Map a number of ranks to its last complete report that timed a step, or else to its last one.

    Args:
        found: Reports of kind `scale` with the names of their files, in the order of their making.
    """
    usable = [pair for pair in found if pair[1]["derived"]["timed"]]
    ordered = sorted(usable, key=lambda pair: bool(pair[1].get("complete", True)))
    chosen = {report["configuration"]["pp"]: (name, report) for name, report in ordered}
    return dict(sorted(chosen.items()))


def complete(found: Iterable[tuple[str, Report]]) -> Iterator[str]:
    """The time of a complete step: native, with guarded replays, and as one launch."""
    chosen = whole(found)
    if not chosen:
        return
    timed: dict[tuple[str, str, str, int], Mapping[str, Any]] = {}
    native: dict[tuple[str, int], Mapping[str, Any]] = {}
    for pp, (_, report) in chosen.items():
        for row in report["derived"]["timed"]:
            if row["side"] == "native":
                native[row["cell"], pp] = row
            else:
                timed[row["cell"], row["schedule"], row["side"], pp] = row
    rows = [
        (
            cell,
            schedule,
            *(
                said
                for pp, source in chosen.items()
                for said in (
                    _timed(native.get((cell, pp))),
                    _timed(timed.get((cell, schedule, "guarded", pp)), bound(*source)),
                    _launch(timed.get((cell, schedule, "one launch", pp)), bound(*source)),
                )
            ),
        )
        for cell, schedule in dict.fromkeys(place[:2] for place in timed)
    ]
    names = ", ".join(_link(name) for name, _ in chosen.values())
    machines = "; ".join(dict.fromkeys(machine_of(report) for _, report in chosen.values()))
    said = "".join(
        f" Caveats on {name}:{remark(name, report)}"
        for name, report in chosen.values()
        if remark(name, report)
    )
    wanted = ", ".join(f"{cell} {goal:.2f}x" for cell, goal in BOUND_GOALS.items())
    yield (
        "**A complete step** over PP ranks, with messages and the optimizer's update, in ms "
        f"({names}; {machines}). In brackets: native's time divided by this time. Native is "
        "torch's Interleaved 1F1B. The *bound* is the length of the schedule's critical path, "
        "computed from the time that each graph takes alone. A bold ratio misses its goal (at "
        f"most {wanted}).{said}"
    )
    sides = ((f"PP={pp}: native", "replays", "one launch, over its bound") for pp in chosen)
    yield markdown(("cell", "schedule", *(name for three in sides for name in three)), rows)


def _launch(row: Mapping[str, Any] | None, sign: str) -> str:
    if row is None:
        return "-"
    over = over_bound(row).partition(" ")[0]
    return _timed(row, sign) + ("" if over == "-" else f", {over}")


def _timed(row: Mapping[str, Any] | None, sign: str = "") -> str:
    if row is None:
        return "-"
    ms, faster = row["step_ms"]["median"], row["native_over_this"]
    return milliseconds(ms) + ("" if faster is None else f" ({sign}{ratio(faster)})")


def one_device(found: Sequence[Report]) -> Iterator[str]:
    """One row per cell: our step beside native, the library's own graphs, and the floor."""
    rows = []
    for cell, _ in cells(found):
        columns, ours = cell["columns"], cell["columns"].get("ours_accumulate")
        if ours is None:
            continue
        best = (columns.get(cell[name], {}) for name in ("fastest_native", "fastest_te_graphs"))
        floor, above = ours["over_floor"], ours["above_native_bytes"]
        rows.append(
            (
                cell["cell"],
                *(milliseconds(column.get("step_ms", {}).get("median")) for column in best),
                milliseconds(ours["step_ms"]["median"]),
                ratio(ours["native_over_this"]),
                ratio(ours["te_graphs_over_this"]),
                "-" if floor is None else ratio(floor["ratio"]),
                "-" if above is None else f"{above['largest'] / 1e9:+.2f}",
            )
        )
    if not rows:
        return
    machines = "; ".join(dict.fromkeys(machine_of(report) for report in found))
    yield (
        f"**A step on one device**, in ms ({machines}). A *column* of the full table is one way "
        "to run the step. *Ours* is the column `ours_accumulate`. *Native* is the fastest "
        "native column; *TE's graphs* is the fastest column with Transformer Engine's own "
        "graphs. A ratio of two columns is computed in each round; the table has the median of "
        "these ratios. The *floor* is the time that the CUDA kernels of the same arithmetic "
        "take."
    )
    header = (
        "cell", "native", "TE's graphs", "ours", "native / ours", "TE's graphs / ours",
        "over the floor", "GB above native",
    )  # fmt: skip
    yield markdown(header, rows)


GROUPED = (
    " Rows with *groups* compute the weight gradients of all microbatches as one matrix product, "
    "with FP8 scales that are updated once per step."
)


def peers(found: Found) -> Iterator[str]:
    """Our steps beside torch's own pipeline and Megatron's modes; one column per cell."""
    rows = [row for _, report in found for row in report["derived"]["rows"]]
    if not rows:
        return
    named = dict.fromkeys(row["cell"] for row in rows)
    by_side: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        group = "" if row["group"] is None else ", groups"
        side = row["main_grad"], row["side"] + group, row["schedule"]
        by_side.setdefault(side, {})[row["cell"]] = row
    said = "".join(
        f" Caveats on {name}:{remark(name, report)}"
        for name, report in found
        if remark(name, report)
    )
    yield (
        f"**Peers** ({', '.join(_link(name) for name, _ in found)}): the time of a step in ms. "
        "Every side trains the same language model over two ranks, from the same initial bits. In "
        "brackets: native's time divided by this time. The word *close* after the brackets means "
        "that the gradients are close to the gradients of the same framework without graphs. "
        "Without this word, the gradients have the same bits."
        f"{GROUPED * any(row['group'] is not None for row in rows)}{said}"
    )
    yield markdown(
        ("main_grad", "side", "schedule", *named),
        [(*side, *(_peer(of.get(cell)) for cell in named)) for side, of in by_side.items()],
    )


def _peer(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["error"] is not None:
        return "failed"
    verdict = "" if row["verdict"] == "same bits" else f", {row['verdict']}"
    return _timed(row) + verdict


def longest(found: Found) -> Iterator[tuple[str, Report]]:
    """Yield the report of loss curves with the longest run; nothing if no report has a run."""
    usable = [pair for pair in found if pair[1]["derived"]["runs"]]
    if usable:
        yield max(usable, key=lambda p: max(run["steps"] for run in p[1]["derived"]["runs"]))


def curves(found: Found) -> Iterator[str]:
    """The longest training run in one line: losses, other schedules, and time to a loss."""
    for name, report in longest(found):
        yield _curve(name, report)


def _curve(name: str, report: Report) -> str:
    derived, asked = report["derived"], report["configuration"]
    said = []
    for row in derived["same_order"]:
        said.append(
            f"{row['losses_differ']:,} of {row['steps']:,} losses of `{row['run']}` differ from "
            "native's"
        )
    for row in derived["non_inferiority"]:
        if row["ratio"] is not None:
            said.append(
                f"{row['schedule']}'s held-out perplexity is {row['ratio']:.4f} times "
                f"{row['against']}'s over {len(row['seeds'])} seeds"
            )
    for row in derived["to_loss"]:
        for level in row["levels"][-1:]:
            said.append(
                f"`{row['run']}` reaches a loss of {level['loss']:g} after {level['seconds']:.1f} "
                f"s, native after {level['native_seconds']:.1f} s (without set-up)"
            )
    parameters = report["raw"]["runs"][0]["parameters"]
    steps = max(run["steps"] for run in derived["runs"])
    return (
        f"**Training** ({_link(name)}; {parameters / 1e6:.0f} M parameters, "
        f"PP={asked['parallel']['pp']}, {steps:,} steps; a run is named side:schedule:seed:head): "
        f"{'; '.join(said)}."
    )


def goals_of_reports() -> dict[str, list[Mapping[str, Any]]]:
    """Every goal: the goals of one device in one list, the goals of other reports by file."""
    found = {"one device": latest_goals()}
    for kind in ("scale", "tables", "peers"):
        for name, report in files(kind):
            found[name] = [*report["derived"]["targets"]]
    return {where: goals for where, goals in found.items() if goals}


def met() -> Iterator[str]:
    """How many goals are met and missed, by report."""
    found = goals_of_reports()
    if not found:
        return
    every = [goal for goals in found.values() for goal in goals]
    each = ", ".join(
        f"{place} {sum(goal['met'] for goal in goals)} of {len(goals)}"
        for place, goals in found.items()
    )
    yield (
        f"**Goals.** {sum(goal['met'] for goal in every)} of {len(every)} goals are met: {each}. "
        "Each section below lists its missed goals, with the known reasons."
    )
