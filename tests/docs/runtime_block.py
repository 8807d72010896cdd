"""
The README's block about the runtime, from the reports under ``gpu_runtime/reports``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.measure.derive import REQUIREMENTS
from qeffect.gpu_runtime.measure.host import REST
from qeffect.gpu_runtime.measure.plots import swept
from qeffect.gpu_runtime.measure.scale import BOUND_GOALS
from qeffect.gpu_runtime.reports import cells
from qeffect.gpu_runtime.training.config import TABLES, read
from qeffect.report import package
from tests.docs.blocks import KERNEL_REPORTS, ROOT, RUNTIME_REPORTS, load, markdown
from tests.docs.curves_block import curves
from tests.docs.remarks import remark
from tests.docs.tables_block import goals, peers, tables

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
#: Files of training runs that are checked in.
EXAMPLES = ROOT / "gpu_runtime" / "training" / "examples"
PICTURES = ("step_time", "memory", "resources", "loss")


def files(kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the checked-in reports of a kind with the names of their files."""
    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if data.get("kind") == kind:
            yield path.name, data


def reports(kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the checked-in reports of a kind."""
    for _, data in files(kind):
        yield data


def dated(*kinds: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Reports of some kinds with the names of their files, in the order of their making."""
    found = [pair for kind in kinds for pair in files(kind)]
    return sorted(found, key=lambda pair: str(pair[1]["environment"]["date"]))


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


#: What a comparison is of: its entry in a report's derived part, and its name in the table.
REFERENCES = {
    "native_against_ours": "ours",
    "native_again": "control",
    "eager_against_ours": "split eager",
}


def _bits(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """
    One table for all comparisons of bits, a row a report, and what its columns mean.

    What rests on native, the control, the other reference and the requirements stand apart.

    Args:
        found: The reports with the names of their files.
    """
    bits = dict.fromkeys(
        name
        for _, report in found
        for name in report["derived"]["categories"]
        if name not in REQUIREMENTS
    )
    yield (
        f"**Bit for bit**, a row a report. Values ({', '.join(bits)}) are equal or are counted as "
        "a mismatch. *Ours* is native full backward against ours (split eager, split captured, and "
        "captured with faults injected while graphs are live); *control* is native against native "
        "again; *split eager* is the reference where the library cannot form the same sum. *Must "
        "not happen* is what a guarded run may not do (move what graphs bake in, keep work past a "
        "step, grow): how many counts of it are not zero. *Faults* were injected into the runs "
        "named so above, and each was refused."
    )
    rows = []
    for name, report in found:
        derived, environment = report["derived"], report["environment"]
        required, faults = derived["requirements"], derived["faults"]
        wrong = {said: derived[key]["mismatched"] for key, said in REFERENCES.items()}
        rows.append(
            (
                f"[{name}](gpu_runtime/reports/{name})",
                package(environment, "transformer-engine"),
                f"`{environment['commit'][:12]}`",
                *(f"{derived[k]['compared']:,} ({derived[k]['runs']})" for k in REFERENCES),
                ", ".join(f"{said} {n:,}" for said, n in wrong.items() if n) or 0,
                f"{required['mismatched']:,} of {required['compared']:,}",
                f"{sum(faults.values()):,}" if faults else "not in this report",
            )
        )
    header = (
        "report", "Transformer Engine", "commit",
        *(f"{said}: values (comparisons)" for said in REFERENCES.values()),
        "mismatches", "must not happen", "faults refused",
    )  # fmt: skip
    yield markdown(header, rows)
    counted = [report["derived"]["faults"] for _, report in found]
    clauses = sorted({clause for faults in counted for clause in faults})
    said = "; ".join(
        f"`{clause}` {', '.join(str(faults.get(clause, 0)) for faults in counted)}"
        for clause in clauses
    )
    if clauses:
        yield f"Faults by the clause that refused each, in the order of the rows: {said}."


def _correctness() -> list[str]:
    compared = [*files("compare")]
    lines = [*_bits(compared)] if compared else []
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
    for report in reports("probes"):
        lines.append(_probed(report["derived"]))
        lines += _interleaved(report["raw"].get("interleaved", ()))
    return lines


#: Reports that commands of their own make.
_MADE_BY = {
    "restarts": "python -m qeffect.gpu_runtime.training.restarts",
    "peers": "python -m qeffect.gpu_runtime.bench.peers",
}


def _typed(report: Mapping[str, Any]) -> str:
    """The command line of a report, but for the commit, which stands in a column of its own."""
    environment = report["environment"]
    argv = environment["argv"]
    words = [
        a for before, a in zip(("", *argv), argv, strict=False) if "--commit" not in (before, a)
    ]
    program = " ".join(environment.get("program", ()))
    if not program and (program := _MADE_BY.get(report["kind"], "")) == "":
        program = "qeffect" if words[:1] == ["runtime"] else "qeffect runtime"
    return " ".join([program, *words])


def _probed(derived: Mapping[str, Any]) -> str:
    """What the library does where this runtime takes a different way."""
    said = "; ".join(
        f"{probe['what']}: {probe['found']}"
        for probe in derived["probes"]
        if not probe["what"].startswith("interleaved")
    )
    return f"**The library, looked at.** {said}."


def _interleaved(sides: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How the library's own graphs do at interleaved stages, used rightly and not."""
    if not sides:
        return
    rows = [
        (
            side["what"],
            side["breaks"] or "-",
            side["error"] or f"{side['different']} of {side['compared']}",
            side["first"] or "-",
            side["not_finite"] or "-",
        )
        for side in sides
    ]
    yield (
        "**Interleaved stages under the library's own graphs.** Two public reports "
        "(NVIDIA/Megatron-LM#5966, NVIDIA-NeMo/Megatron-Bridge#2096) have this shape and no "
        "published cause. Rank 0 of two, two chunks, each way of using `make_graphed_callables` "
        "against native eager, bit by bit:"
    )
    yield markdown(
        ("how", "breaks", "values that differ", "first to differ", "first that is not finite"),
        rows,
    )


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


def _host() -> list[str]:
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


def _goals() -> list[str]:
    # A goal that two reports measured counts once, as the later one found it.
    latest = {
        (goal["goal"], goal["cell"], goal["column"]): goal
        for _, report in dated("bench", "sweep")
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
                    f"`{_typed(data)}`{_with(data)}",
                    f"`{e['commit'][:12]}`",
                    e["date"],
                )
            )
    return [
        "The reports behind this section; older ones do not say how many ranks torchrun started:",
        markdown(("report", "made by", "commit", "at"), rows),
    ]


def _with(report: Mapping[str, Any]) -> str:
    """Which checked-in file a training run is of, whatever it was called then."""
    name = example_of(report)
    folder = "gpu_runtime/training/examples"
    return "" if name is None else f" with [{name}]({folder}/{name})"


def _pipelines() -> list[str]:
    """A pipeline over ranks: bits first, then times."""
    parts = []
    for name, report in files("scale"):
        derived, asked = report["derived"], report["configuration"]
        ranks = f"{asked['pp']} rank{'s' if asked['pp'] > 1 else ''}"
        if derived["compared"]:
            said = "; ".join(
                f"{row['schedule']}, {row['name']}, {row['steps']} steps: {row['different']} of "
                f"{row['values']} values differ"
                for row in derived["compared"]
            )
            parts.append(
                f"**A pipeline over {ranks}** ({name}; {machine_of(report)}), guarded and "
                f"captured, against torch's own over the library's full backwards: {said}."
            )
        in_order = any("over_in_order" in row for row in derived["timed"])
        rows = [
            (
                row["cell"],
                row["schedule"],
                row["side"],
                f"{row['step_ms']['median']:.2f} ({row['step_ms']['min']:.2f} to "
                f"{row['step_ms']['max']:.2f})",
                f"{row['single_ms']['median']:.2f}",
                f"{row['host_ms']['median']:.2f}",
                ratio(row["native_over_this"]),
                _over_bound(row),
                *([ratio(row.get("over_in_order"))] if in_order else []),
                f"{row['busiest_ms']:.2f}, {ratio(row['over_busiest'])}"
                if "busiest_ms" in row
                else "-",
                f"{row['final_different']} of {row['final_values']}"
                if "final_values" in row
                else "-",
                "-"
                if row["above_native_bytes"] is None
                else f"{row['above_native_bytes'] / 1e9:+.2f}",
            )
            for row in derived["timed"]
        ]
        if rows:
            took = [row["message_ms"] * 1e3 for row in derived["timed"] if "message_ms" in row]
            messages = f"a message ({min(took):.0f} to {max(took):.0f} µs)" if took else ""
            alone = f"graphs and {messages} alone" if took else "graphs alone, messages for nothing"
            parts.append(
                f"A step over {ranks}, {asked['vpp']} stages of one layer each ({name}; "
                f"{machine_of(report)}). `native` is torch's Interleaved 1F1B; `one launch` is "
                "the whole step as one graph, compared after six steps with guarded replays. The "
                f"bound is the critical path over what each stage's {alone} take; in bold what "
                f"misses its goal. {REPLAYED * in_order}Kernels are those of the busiest rank, "
                "with copies and without messages, under the profiler. Sides did not run in "
                f"turns.{remark(name, report)}"
            )
            header = (
                "cell", "schedule", "side", "step, ms", "a single step, ms", "host, ms",
                "native / this", "over its bound", *["over the bound in order"] * in_order,
                "kernels, ms, and the step over them", "tensors that differ from replays",
                "GB above native",
            )  # fmt: skip
            parts.append(markdown(header, rows))
            parts += goals(derived)
    return parts


REPLAYED = (
    "Alone, a graph finds its weights in the cache; the bound in order takes each action's time "
    "from a rank's whole row, replayed without messages. "
)


def _over_bound(row: Mapping[str, Any]) -> str:
    """How far a side is above its bound, beside the goal of its cell."""
    measured, goal = row["over_bound"], BOUND_GOALS.get(row["cell"])
    said = ratio(measured)
    if measured is None or goal is None:
        return said
    return f"{f'**{said}**' if measured > goal else said} (goal {goal:.2f}x)"


def example_of(report: Mapping[str, Any]) -> str | None:
    """Name the checked-in file that gives the configuration of a training run, if one does."""
    asked = report["configuration"]
    if "optimizer" not in asked:
        return None
    tables = [name for name in TABLES if name != "checkpoint"]
    for path in sorted(EXAMPLES.glob("*.toml")):
        options = {name: asked["run"][name] for name in ("steps", "device")}
        made = read(path, run=options).record()
        # A report of before has no fields that came later.
        if all({f: made[t].get(f) for f in asked[t]} == asked[t] for t in tables):
            return path.name
    return None


def _training() -> list[str]:
    """Training runs: what was compared, how fast, and how far they came."""
    rows = []
    for name, report in files("train"):
        model = report["configuration"]["model"]
        for run, raw in zip(report["derived"]["runs"], report["raw"]["runs"], strict=True):
            rows.append(
                (
                    name,
                    f"{raw['parameters'] / 1e6:.0f} M, hidden {model['hidden']}, "
                    f"{model['sequence']} tokens",
                    f"{run['schedule']}, PP={raw['pp']}, DP={raw['dp']}",
                    str(run["steps"]),
                    f"{run['losses_differ']} of {run['steps']}",
                    f"{run['differ']} of {run['compared']}",
                    f"{run['tokens_per_s']:,}",
                    ratio(run["native_over_this"]),
                    f"{run['first_loss']:.2f} to {run['last_loss']:.2f}",
                    "-" if run["held_out_loss"] is None else f"{run['held_out_loss']:.2f}",
                )
            )
    if not rows:
        return []
    header = (
        "report", "model", "mapping", "steps", "losses that differ",
        "tensors that differ at the end", "tokens a second", "native / this", "loss", "held out",
    )  # fmt: skip
    return [
        "**Training** on the sources of the standard library, guarded and captured, and natively "
        "under torch's own pipeline from the same bits (not in turns):",
        markdown(header, rows),
    ]


def _captions() -> dict[str, str]:
    """What each picture shows, in words."""
    return {
        "step_time": "Step times beside the floors, on a logarithmic axis.",
        "memory": "Peak memory above the native column with the faster step.",
        "resources": _resources(),
        "loss": "Loss against steps, and against seconds of training on a logarithmic axis.",
    }


def _resources() -> str:
    """What the sweep over microbatches shows."""
    found = [*reports("sweep")]
    points = [point for report in found for point in report["derived"]["points"]]
    last = max(point["microbatches"] for point in points)
    live, each = (
        next(p for p in points if (p["provisioning"], p["microbatches"]) == (name, last))
        for name in ("live", "per_microbatch")
    )
    return (
        f"Resources against microbatches ({'; '.join(swept(found))}): with M={last}, "
        f"{live['slots']} live slots and {live['graphs']} graphs where a slot each microbatch "
        f"needs {each['slots']} and {each['graphs']}. A stage needs as many slots as it ever has "
        f"tapes at once; of the whole rank {live['peak_live_tapes']} tapes at most are live "
        "together. Capture is a part of construction, drawn dashed."
    )


def runtime() -> str:
    """Return the block."""
    parts = [*_correctness(), *_speed(), *_beyond_floor(), *_behind(), *_host(), *_goals()]
    parts += [*_pipelines(), *tables(files("tables"), machine_of)]
    parts += [*peers(files("peers"), machine_of), *_training()]
    for name, report in files("curves"):
        parts += curves(name, report, machine_of(report))
    captions = _captions()
    for name in PICTURES:
        path = RUNTIME_REPORTS / f"{name}.svg"
        if path.exists():
            picture = f"![{name.replace('_', ' ')}](gpu_runtime/reports/{path.name})"
            parts += [captions[name], picture]
    return "\n\n".join([*parts, *_made()])
