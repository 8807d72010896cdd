"""
The blocks of the runtime's page, from the reports beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.commands.plots import swept
from qeffect.gpu_runtime.lab.statistics.evidence import REQUIREMENTS
from qeffect.gpu_runtime.training.config import TABLES, read
from qeffect.report import package
from tests.docs import device_block, scale_block, tables_block
from tests.docs.blocks import ROOT, RUNTIME_REPORTS, load, markdown
from tests.docs.curves_block import curves
from tests.docs.reading import files, machine_of, ratio, reports

#: Files of training runs that are checked in.
EXAMPLES = ROOT / "gpu_runtime" / "training" / "examples"


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
                f"[{name}]({name})",
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


def correctness() -> str:
    """Comparisons of bits, the handoff between streams, and graphs that share memory."""
    compared = [*files("compare")]
    lines = [*_bits(compared)] if compared else []
    for report in reports("streams"):
        lines.append(f"**Streams.** {stale(report)}.")
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
    return "\n\n".join([*lines, *_restarts()])


def _restarts() -> list[str]:
    """Runs that stopped, compared with the one that did not."""
    rows = [
        (
            f"[{name}]({name})",
            ", ".join(report["configuration"]["schedules"]),
            "graphs" if report["configuration"]["captured"] else "eager",
            report["configuration"].get("dp", 1),
            report["derived"]["resumed"],
            report["derived"]["remapped"],
            f"{report['derived']['differ']:,} of {report['derived']['compared']:,}",
        )
        for name, report in files("restarts")
    ]
    if not rows:
        return []
    header = (
        "report", "saved under", "actions", "replicas", "gone on with", "loaded under another",
        "tensors that differ",
    )  # fmt: skip
    return [
        "**Stops.** Runs that were saved and went on in fresh processes, compared with the one "
        "that did not stop; and what other mappings loaded, with what was saved:",
        markdown(header, rows),
    ]


def stale(report: Mapping[str, Any]) -> str:
    """What one half of the handoff between streams leaves open, and what both do."""
    found = report["derived"]["handoffs"]
    one, two = found["one-way"], found["two-way"]
    return (
        f"{one['stale']} of {one['checks']} one-way checks read stale data, "
        f"{two['stale']} of {two['checks']} two-way ones, in {one['processes']} fresh "
        "processes each"
    )


def library() -> str:
    """What the library does by itself, as probes found it."""
    lines: list[str] = []
    for name, report in files("probes"):
        lines.append(f"{name}: {_probed(report['derived'])}.")
        lines += _interleaved(report["raw"].get("interleaved", ()))
    return "\n\n".join(lines)


def _probed(derived: Mapping[str, Any]) -> str:
    """What the library does where this runtime takes a different way."""
    return "; ".join(
        f"{probe['what']}: {probe['found']}"
        for probe in derived["probes"]
        if not probe["what"].startswith("interleaved")
    )


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
                    f"{run['schedule']}, PP={raw['pp']}, DP={raw['dp']}"
                    + (", one launch a step" if raw.get("launches") else ""),
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
    """What each picture shows, in words, in the order of the page."""
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
    if not points:
        return "Resources against microbatches."
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


#: Reports that commands of their own make.
_MADE_BY = {
    "restarts": "python -m qeffect.gpu_runtime.lab.commands.restarts",
    "peers": "python -m qeffect.gpu_runtime.lab.commands.peers",
}


def _typed(report: Mapping[str, Any]) -> str:
    """The command line of a report, but for the commit, which stands in a column of its own."""
    environment = report["environment"]
    argv = environment["argv"]
    words = [
        shlex.quote(a)
        for before, a in zip(("", *argv), argv, strict=False)
        if "--commit" not in (before, a)
    ]
    program = " ".join(environment.get("program", ()))
    if not program and (program := _MADE_BY.get(report["kind"], "")) == "":
        program = "qeffect" if words[:1] == ["runtime"] else "qeffect runtime"
    return " ".join([program, *words])


def listed() -> str:
    """Every report with the commit that it was made at."""
    rows = []
    for path in sorted(RUNTIME_REPORTS.glob("*.json")):
        data = load(path)
        if "environment" in data:
            e = data["environment"]
            rows.append(
                (
                    f"[{path.name}]({path.name})",
                    f"`{_typed(data)}`{_with(data)}",
                    f"`{e['commit'][:12]}`",
                    e["date"],
                )
            )
    return markdown(("report", "made by", "commit", "at"), rows)


def _with(report: Mapping[str, Any]) -> str:
    """Which checked-in file a training run is of, or of how many trials a report was merged."""
    if report["kind"] == "tables" and "merged" in report["configuration"]:
        return f", the first of {len(report['configuration']['merged'])} trials that were merged"
    name = example_of(report)
    folder = "../../training/examples"
    return "" if name is None else f" with [{name}]({folder}/{name})"


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


def learning() -> str:
    """Training runs and loss curves."""
    lines = _training()
    for name, report in files("curves"):
        lines += curves(name, report, machine_of(report))
    return "\n\n".join(lines)


def pictures() -> str:
    """Each picture that is there, below what it shows."""
    lines = []
    for name, caption in _captions().items():
        path = RUNTIME_REPORTS / f"{name}.svg"
        if path.exists():
            lines += [caption, f"![{name.replace('_', ' ')}]({path.name})"]
    return "\n\n".join(lines)


#: The blocks of the runtime's page.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "bits": correctness,
    "library": library,
    "device": lambda: "\n\n".join(device_block.steps()),
    "host": lambda: "\n\n".join(device_block.host()),
    "goals": lambda: "\n\n".join(device_block.goals()),
    "pipelines": lambda: "\n\n".join(scale_block.pipelines(files("scale"))),
    "tables": lambda: "\n\n".join(tables_block.tables(files("tables"), machine_of)),
    "peers": lambda: "\n\n".join(tables_block.peers(files("peers"), machine_of)),
    "learning": learning,
    "pictures": pictures,
    "reports": listed,
}
