"""
The blocks of the runtime's page, from the reports beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qeffect.gpu_runtime.lab.commands.plots import sweep_names
from qeffect.gpu_runtime.lab.statistics.evidence import REQUIREMENTS
from qeffect.gpu_runtime.lab.statistics.scales import LAST
from qeffect.gpu_runtime.training.config import TABLES
from qeffect.gpu_runtime.training.config_file import current, read
from qeffect.report import package
from tests.docs import device_block, groups_block, scale_block, summary_block, tables_block
from tests.docs.blocks import ROOT, RUNTIME_REPORTS, load, markdown
from tests.docs.curves_block import curves
from tests.docs.history import age
from tests.docs.reading import files, machine_of, ratio, reports, stale_reads

#: Files of training runs that are checked in.
EXAMPLES = ROOT / "gpu_runtime" / "training" / "examples"


#: Each comparison: its key in a report's derived part, and its name in the table.
REFERENCES = {
    "native_against_ours": "ours",
    "native_again": "control",
    "eager_against_ours": "split eager",
}


def _bits(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """
    One table for all comparisons of bits, one row per report, with the meaning of its columns.

    Native, the control, the other reference and the requirements have columns of their own.

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
        "**Bit for bit**, one row per report. A value that differs in any bit is a mismatch. "
        f"The compared values are: {', '.join(bits)}. *Ours* compares native full backward with "
        "three sides of this runtime, which split each backward into dI and dW: eager, "
        "captured, and captured with faults injected while graphs are live. *Control* compares "
        "native with a second native run. *Split eager* compares with eager steps of separate "
        "dI and dW, for orders of actions in which native cannot add the gradients. *Forbidden "
        "events* are events whose count must be zero in a guarded run (a moved address, work "
        "kept past a step, grown memory); the column says how many of these counts are not "
        "zero. *Faults* were injected into runs of *ours*; the contract refused each fault."
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
        "mismatches", "forbidden events", "faults refused",
    )  # fmt: skip
    yield markdown(header, rows)
    counted = [report["derived"]["faults"] for _, report in found]
    clauses = sorted({clause for faults in counted for clause in faults})
    said = "; ".join(
        f"`{clause}` {', '.join(str(faults.get(clause, 0)) for faults in counted)}"
        for clause in clauses
    )
    if clauses:
        yield f"Faults by refusing clause, in the order of the rows: {said}."


def correctness() -> str:
    """Comparisons of bits, handoffs between streams, graphs that share memory, and restarts."""
    compared = [*files("compare")]
    lines = [*_bits(compared)] if compared else []
    for report in reports("streams"):
        lines.append(f"**Streams.** {stale_reads(report)}.")
    for report in reports("pools"):
        said = []
        for order in report["derived"]["orders"]:
            shared, ours = (order["disciplines"][d] for d in ("shared", "private"))
            said.append(
                f"*{order['order']}*: {shared['mismatched']} of {shared['compared']} tensors "
                f"differ with one shared pool, {ours['mismatched']} with one pool per slot "
                f"(the contract would refuse `{shared['refused']['action']}`)"
            )
        lines.append(
            "**Capture memory.** Graphs that share a memory pool corrupt each other's memory if "
            "the order of their replays differs from the order of their capture. If the stages "
            "declare the shared pool, the contract refuses such an order of replays. In this "
            f"report the replays ran without this check: {'; '.join(said)}."
        )
    return "\n\n".join([*lines, *_restarts(), *_kills(), *_second_runs()])


def _kills() -> list[str]:
    """Runs that were killed, compared with an undisturbed run."""
    rows = [
        (
            f"[{name}]({name})",
            f"{report['configuration']['device']}, {report['configuration']['mode']}",
            "; ".join(f"{place} {count}" for place, count in report["derived"]["places"].items()),
            *(
                f"{report['derived'][f'{what}_differ']:,} of {report['derived'][what]:,}"
                for what in ("tensors", "losses", "held_out")
            ),
            f"{report['derived']['longest_end_s']:.1f}",
        )
        for name, report in files("kills")
    ]
    if not rows:
        return []
    header = (
        "report", "device, mode", "kills by place", "tensors that differ", "losses",
        "held-out losses", "longest end, s",
    )  # fmt: skip
    return [
        "**Kills.** In each start of a run, SIGKILL ended a rank at the place that the table "
        "names. At a place that begins with *launcher, in*, SIGKILL ended torchrun's agent "
        "while a rank was at this place. The next start resumed the run. Every tensor of the "
        "last checkpoint and every loss was compared with an undisturbed run. The last column "
        "is the longest time from a kill to the end of all processes:",
        markdown(header, rows),
    ]


def _second_runs() -> list[str]:
    """Flips in steps that run twice, and the price of such steps."""
    found = files("second_runs")
    rows = [
        (f"[{name}]({name})", key, *(f"{ends.get(end, 0)}" for end in ("stopped", "harmless")))
        for name, report in found
        for key, ends in report["derived"]["ends"].items()
    ]
    prices = [
        (f"[{name}]({name})", one["mode"], f"{one['what']}, {what}", f"{ratio:.4f}")
        for name, report in found
        for one in report["derived"]["prices"]
        for what, ratio in one["ratio"].items()
    ]
    if not prices:
        return []
    wrong = sum(report["derived"]["wrong"] for _, report in found)
    return [
        "**Steps that run twice.** In one of a step's two runs, a bit of a rank's memory was "
        "flipped. A flip is *stopped* if the comparison of the two runs stopped the step, and "
        f"*harmless* if the step ended with the bits of an undisturbed step. {wrong} flips were "
        "neither stopped nor harmless:",
        markdown(("report", "flip", "stopped", "harmless"), rows),
        "This table has the cost of three checks: steps that run twice (*replay_every*), "
        "digests of gradients, and looks (searches of all weights, moments and scales for "
        "values that are not finite). A ratio is the time per step with the check, divided by "
        "the time without the check:",
        markdown(("report", "mode", "what", "ratio"), prices),
    ]


def _restarts() -> list[str]:
    """Runs that stopped and resumed, compared with a run without a stop."""
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
        "report", "saved under", "actions", "replicas", "resumed", "loaded by other mappings",
        "tensors that differ",
    )  # fmt: skip
    return [
        "**Stops.** Each run saved a checkpoint and resumed from it in fresh processes. The "
        "resumed run was compared with a run without a stop. The checkpoint was also loaded "
        "under other *mappings* (schedule, ranks, stages per rank), and the loaded state was "
        "compared with the saved state:",
        markdown(header, rows),
    ]


def library() -> str:
    """What Transformer Engine itself does, by the reports of probes."""
    lines: list[str] = []
    probed = [row for name, report in files("probes") for row in _probed(name, report["derived"])]
    if probed:
        lines += [
            "**Probes.** Each row tests one property of Transformer Engine on the machine of "
            "the report. NVIDIA's compute-sanitizer counted the *invalid writes*:",
            markdown(("report", "probe", "found"), probed),
        ]
    for _, report in files("probes"):
        lines += _interleaved(report["raw"].get("interleaved", ()))
    return "\n\n".join(lines)


PROBES: Mapping[str, str] = {
    "the graph of a dW in the library's own graphs": "work that the library's own graphs give a dW",
    "a look at every baked address": "time of one check of all addresses in a stage's graphs",
}
"""Names of probes on the page, by their names in a report; other names stay."""


def _probed(name: str, derived: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The findings of the probes, without those about interleaved stages."""
    for probe in derived["probes"]:
        if not probe["what"].startswith("interleaved"):
            yield name, PROBES.get(probe["what"], probe["what"]), probe["found"]


def _interleaved(sides: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Results of the library's own graphs for interleaved stages, used rightly and wrongly."""
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
        "**Interleaved stages under the library's own graphs.** In two public reports "
        "(NVIDIA/Megatron-LM#5966, NVIDIA-NeMo/Megatron-Bridge#2096), a rank with several "
        "stages (chunks) under `make_graphed_callables` gets a loss of NaN; the cause was not "
        "published. Each row below is one way to use `make_graphed_callables` on rank 0 of two, "
        "with two chunks. The results of each use are compared bit by bit with native eager. "
        "*The row's order* is the order of this rank's actions in the schedule. *Breaks* names "
        "the relation of the contract (such as ownership) that a wrong use breaks:"
    )
    yield markdown(
        ("use", "breaks", "values that differ", "first difference", "first non-finite value"),
        rows,
    )


def _training() -> list[str]:
    """Training runs: what was compared, the speed, and the losses."""
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
                    + (", one launch per step" if raw.get("launches") else ""),
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
        "tensors that differ after the last step", "tokens per second", "native / this", "loss",
        "held-out loss",
    )  # fmt: skip
    return [
        "**Training** on the sources of Python's standard library. A guarded and captured run "
        "is compared with a native run under torch's own pipeline; both runs start from the "
        "same bits. The two runs were timed one after the other, not alternately:",
        markdown(header, rows),
    ]


def _captions() -> dict[str, str]:
    """The caption of each picture, in the order of the page."""
    return {
        "step_time": "Step times and their floors, on a logarithmic axis.",
        "memory": "Peak memory of each column minus the peak memory of the faster native column.",
        "resources": _resources(),
        "loss": "Loss against steps, and against seconds of training on a logarithmic axis.",
    }


def _resources() -> str:
    """The caption of the sweep over microbatches."""
    found = [*reports("sweep")]
    points = [point for report in found for point in report["derived"]["points"]]
    if not points:
        return "Resources by number of microbatches."
    last = max(point["microbatches"] for point in points)
    live, each = (
        next(p for p in points if (p["provisioning"], p["microbatches"]) == (name, last))
        for name in ("live", "per_microbatch")
    )
    return (
        f"Resources by number of microbatches M ({'; '.join(sweep_names(found))}). At M={last}, "
        f"one slot per live tape needs {live['slots']} slots and {live['graphs']} graphs; one "
        f"slot per microbatch needs {each['slots']} slots and {each['graphs']} graphs. (A *tape* "
        "is the work that a microbatch keeps between F and dW; it is live during this time.) A "
        "stage needs as many slots as its peak number of live tapes; the whole rank has at most "
        f"{live['peak_live_tapes']} live tapes. The dashed lines are the capture time, which is "
        "part of construction."
    )


#: The commands of reports whose command lines are without one.
_MADE_BY = {
    "restarts": "qeffect runtime report restarts",
    "peers": "qeffect runtime report peers",
}


def _typed(report: Mapping[str, Any]) -> str:
    """The command line of a report without the commit, which has a column of its own."""
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
    """Every report with its command line, its commit, the number of later commits, and its date."""
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
                    age(e["commit"]),
                    e["date"],
                )
            )
    return markdown(("report", "command", "commit", "later commits to its code", "date"), rows)


def _with(report: Mapping[str, Any]) -> str:
    """The checked-in configuration file of a training run, or the number of merged trials."""
    if report["kind"] == "tables" and "merged" in report["configuration"]:
        return f", the first of {len(report['configuration']['merged'])} merged trials"
    name = example_of(report)
    folder = "../../training/examples"
    return "" if name is None else f" with [{name}]({folder}/{name})"


def example_of(report: Mapping[str, Any]) -> str | None:
    """Name the checked-in file with the configuration of a training run, if there is one."""
    asked = report["configuration"]
    if "optimizer" not in asked:
        return None
    asked = current(asked)
    tables = [name for name in TABLES if name != "checkpoint"]
    for path in sorted(EXAMPLES.glob("*.toml")):
        options = {name: asked["run"][name] for name in ("steps", "device")}
        made = read(path, run=options).record()
        # An older report lacks the fields that were added later.
        if all({f: made[t].get(f) for f in asked.get(t, {})} == asked.get(t, {}) for t in tables):
            return path.name
    return None


def learning() -> str:
    """Training runs and loss curves."""
    lines = _training()
    for name, report in files("curves"):
        lines += curves(name, report, machine_of(report))
    return "\n\n".join([*lines, *_scales()])


def _scales() -> Iterator[str]:
    """How FP8 scales that move (are updated) once per step change the loss."""
    for name, report in files("scales"):
        derived, asked = report["derived"], report["configuration"]
        found = {(run["scales"], run["seed"]): run for run in derived["runs"]}
        yield (
            f"**Scales that move once a step** ([{name}]({name}); {asked['run']['device']}, "
            f"{asked['model']['layers']} layers of width {asked['model']['hidden']}). With "
            "*action*, the default, scales move (are updated) at every F and dI; with *epoch* "
            f"scales move once per step. *Loss* is the mean training loss of the last {LAST} "
            "steps; *held out* is the held-out loss at the end. The mean difference, epoch "
            f"minus action, over {len(derived['differences'])} seeds is "
            f"{derived['mean_difference']:+.4f} in loss and "
            f"{derived['mean_held_out_difference']:+.4f} in held-out loss."
        )
        rows = [
            (
                str(pair["seed"]),
                str(found["action", pair["seed"]]["steps"]),
                *(
                    f"{found[scales, pair['seed']][what]:.4f}"
                    for what in ("loss", "held_out")
                    for scales in ("action", "epoch")
                ),
            )
            for pair in derived["differences"]
        ]
        header = (
            "seed", "steps", "loss: action", "loss: epoch", "held out: action", "held out: epoch",
        )  # fmt: skip
        yield markdown(header, rows)


def pictures() -> str:
    """Each picture below its caption."""
    lines = []
    for name, caption in _captions().items():
        path = RUNTIME_REPORTS / f"{name}.svg"
        if path.exists():
            lines += [caption, f"![{name.replace('_', ' ')}]({path.name})"]
    return "\n\n".join(lines)


#: The blocks of the runtime's page.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "short": summary_block.short,
    "bits": correctness,
    "library": library,
    "device": lambda: "\n\n".join(device_block.steps()),
    "host": lambda: "\n\n".join(device_block.host()),
    "goals": lambda: "\n\n".join(device_block.goals()),
    "pipelines": lambda: "\n\n".join(scale_block.pipelines(files("scale"))),
    "tables": lambda: "\n\n".join(tables_block.tables(files("tables"), machine_of)),
    "peers": lambda: "\n\n".join(tables_block.peers(files("peers"), machine_of)),
    "models": lambda: "\n\n".join(tables_block.models(files("models"), machine_of)),
    "groups": lambda: "\n\n".join(groups_block.groups(files("groups"), machine_of)),
    "learning": learning,
    "pictures": pictures,
    "reports": listed,
}
