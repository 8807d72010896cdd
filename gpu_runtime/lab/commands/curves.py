"""
``qeffect runtime report curves``: loss curves of guarded and native runs, in one report.

A run is named SIDE:SCHEDULE:SEED, such as ``guarded:zbv:0``, or SIDE:SCHEDULE:SEED:HEAD. A side is
native, guarded (replays of graphs), or launched (guarded, with each step as one launch). All runs
of a report share a configuration. The seed is added to the seeds of the parameters and of the text
order. Runs with equal seeds therefore begin with the same bits and read the same windows of text.
The same processes build and train one run after another. Each run is written to the report as soon
as it ends. `qeffect.gpu_runtime.lab.statistics.curves` derives the figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.refusals import Refused
from qeffect.report import UnusableError, program

from ...ranks.consent import StoppedError
from ...ranks.membership import all_gather
from ...ranks.processes import join_ranks, report_once, stopped_outcome
from ...training.command import require_processes
from ...training.config import Checkpointing
from ...training.config_file import read
from ...training.job_assembly import TIMES, backend_of, measure_cut, open_job
from ..reports.report import (
    ALIKE,
    Report,
    add_report_options,
    environment,
    read_part,
    require_alike,
    require_place,
)
from ..runner.training_run import RunControl, RunName, train_run

__all__ = ["add_curves_arguments", "merge_reports", "run_curves"]

#: Fields of the environment that must be equal in all parts of one report.
_ALIKE = (*ALIKE, "cpu", "cores")
#: Fields of the environment that are recorded per part.
_EACH = ("program", "argv", "date", "load_1min")
#: Fields of the configuration in which parts of one report may differ.
_OWN = ("runs", "limit_s", "parts")


def add_curves_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `curves`."""
    parser.add_argument(
        "config", type=Path, nargs="?", help="TOML file of a training run with held-out text"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="SIDE:SCHEDULE:SEED[:HEAD]",
        help="runs to train, in this order, such as native:il:0 guarded:zbv:0",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps per run (default: the file's)"
    )
    parser.add_argument(
        "--held-out-steps",
        type=int,
        metavar="N",
        help="held-out text per evaluation: as many windows (sequences of tokens) as N training "
        "steps read (default: the file's)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="S",
        help="time limit in seconds; after the limit, the current run ends at its next log line or "
        "evaluation, no other run starts, and the report is incomplete (default: no limit)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: the file's)")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="F", help="reports to merge into one"
    )
    add_report_options(parser, required=True)


def run_curves(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train run after run, or merge reports; the outcome is `refused` if a native and a guarded run of
    the same schedule, seed and head differ.

    Raises:
        UnusableError: These processes cannot train the runs, or the reports cannot be merged.
    """
    require_place(args.out)
    if args.merge is None:
        return report_once(lambda: _run(args, progress))
    others = ["--runs", "--steps", "--held-out-steps", "--limit-s", "--device", "--commit"]
    refuse_unused(args, others, "--merge starts no runs")
    if args.config is not None:
        raise UnusableError(f"{args.config} given, but --merge starts no runs; leave the file out")
    report = merge_reports(args.merge)
    report.path = args.out
    report.save()
    what = f"{len(args.merge)} reports in one"
    return _outcome(
        report,
        what + "; NOT complete: one of the merged reports is incomplete" * (not report.complete),
    )


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    began = time.monotonic()
    names = _names(args)
    for name in ("steps", "held_out_steps", "limit_s"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise UnusableError(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    configs = [named.of_file(args.config, args.device, args.steps) for named in names]
    heads = [config.model.head for config in configs]
    whole = [attrs.evolve(named, head=head) for named, head in zip(names, heads, strict=True)]
    if twice := next((named for n, named in enumerate(whole) if named in whole[:n]), None):
        raise UnusableError(f"--runs: expected each run once, found {twice} twice")
    data = [open_job(config) for config in configs]  # before any rank waits for another
    first, (job, held_out) = configs[0], data[0]
    if held_out is None:
        raise UnusableError(
            f"{args.config}: [data] held_out: expected a file, because runs are compared by "
            "held-out text, found none"
        )
    where = environment(args.commit, args.out)
    require_processes(first, job, f"curves {args.config} --runs ...")
    windows = first.run.evaluate_windows
    if args.held_out_steps is not None:
        windows = args.held_out_steps * job.windows_a_step
    windows = min(windows, held_out.tokens.windows(held_out.sequence))
    member = join_ranks(first.run.device, first.waits(), deterministic=True)
    if member.rank:
        progress = Progress(enabled=False)
    times: dict[str, Any] = {}
    cut = []
    for config, own in zip(configs, data, strict=True):
        # Measured once for each head: runs of one report are of one cut.
        head = config.model.head
        cut.append(measure_cut(member, config, own, times=times.get(head)))
        found = cut[-1][0].parallel
        if found.cut == "measured":
            times[head] = {name: getattr(found, name) for name in TIMES}
    configs, data = [config for config, _ in cut], [own for _, own in cut]
    assert job.loader is not None
    base = read(args.config, run={"device": args.device, "steps": args.steps})
    asked = {
        **attrs.evolve(base, checkpoint=Checkpointing()).record(),
        "backend": backend_of(first),
        "windows": windows,
        "text": {"train": job.loader.tokens.facts(), "held_out": held_out.tokens.facts()},
        "runs": [str(named) for named in names],
        "limit_s": args.limit_s,
    }
    if times:
        asked["times"] = times
    rows: list[dict[str, Any]] = []
    path = args.out if member.rank == 0 else None
    report = Report("curves", path, where, asked, {"runs": rows})

    def over() -> bool:
        return args.limit_s is not None and time.monotonic() - began > args.limit_s

    control = RunControl(windows=windows, over=over, note=progress.note)
    left, short = [], []
    try:
        for named, config, own in zip(names, configs, data, strict=True):
            if any(all_gather(member, over())):
                left.append(str(named))
                continue
            rows.append(train_run(member, named, config, own, control))
            if len(rows[-1]["losses"]) < config.run.steps:
                short.append(str(named))
            report.save()
    except StoppedError as stopped:
        return stopped_outcome(stopped.cause, f"{named} of {args.config.name}")
    except Refused as refused:
        facts = {"clause": refused.clause, "rank": member.rank, "step": None, "action": None}
        return Outcome("refused", facts, [f"{named} of {args.config.name}", str(refused)])
    if not rows:
        raise UnusableError(
            f"--limit-s {args.limit_s:g}: no run could begin in this time; give a higher limit"
        )
    count = f"{len(rows)} run{'s' * (len(rows) > 1)}"
    what = f"{args.config.name}: {count}, {backend_of(first)} on {first.run.device}"
    for said, cut_short in (("did not end", short), ("did not begin", left)):
        if cut_short:
            what += f"; {said} within --limit-s {args.limit_s:g}: {', '.join(cut_short)}"
    if not short and not left:
        report.finish()
        return _outcome(report, what)
    report.save()
    return _outcome(report, f"{what}; the report is NOT complete")


def _names(args: argparse.Namespace) -> list[RunName]:
    if args.config is None or not args.runs:
        raise UnusableError(
            "expected a training file and --runs, or --merge; for example: torchrun "
            "--nproc-per-node 2 -m qeffect runtime report curves h200.toml --runs native:il:0 "
            "guarded:il:0 --out curves.json"
        )
    return [RunName.of(text) for text in args.runs]


def _outcome(report: Report, what: str) -> Outcome:
    derived = report.to_json()["derived"]
    same = not any(
        row["losses_differ"] or row["held_out_differ"] or row["state_differs"]
        for row in derived["same_order"]
    )
    return Outcome("accepted" if same else "refused", derived, [what, *report.lines()])


def merge_reports(paths: Sequence[Path]) -> Report:
    """
    Merge the runs of several reports into one report, which is complete if every part is complete.

    A report contains only runs that ended.

    Raises:
        UnusableError: A file is not a report of this kind; the parts differ in commit, machine,
            versions or configuration; or two parts have a run with the same name.
    """
    parts = [read_part(path, "curves") for path in paths]
    first = parts[0]
    require_alike([(path, _facts(part)) for path, part in zip(paths, parts, strict=True)])
    runs: list[Any] = []
    seen: dict[Any, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        for row in part["raw"]["runs"]:
            key = (row["side"], row["schedule"], row["seed"], row["head"])
            if key in seen:
                raise UnusableError(
                    f"--merge {path}: the run {':'.join(map(str, key))} is in {seen[key]} too; "
                    "leave one of them out"
                )
            seen[key] = path
            runs.append(row)
    if not runs:
        raise UnusableError(
            f"--merge: expected reports with runs, found no run in {', '.join(map(str, paths))}"
        )
    asked = {name: value for name, value in first["configuration"].items() if name not in _OWN}
    asked["parts"] = [
        {
            **{
                name: part["environment"].get(name) for name in _EACH if name in part["environment"]
            },
            "runs": len(part["raw"]["runs"]),
        }
        for part in parts
    ]
    typed = {
        "program": program(),
        "argv": ["runtime", "report", "curves", "--merge", *(path.name for path in paths)],
    }
    report = Report("curves", None, {**first["environment"], **typed}, asked, {"runs": runs})
    report.complete = all(part["complete"] for part in parts)
    return report


def _facts(part: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that must be equal in all merged reports, by name."""
    found = {name: part["environment"].get(name) for name in _ALIKE}
    for name, value in part["configuration"].items():
        if isinstance(value, dict):
            found.update({f"[{name}] {field}": one for field, one in value.items()})
        elif name not in _OWN:
            found[name] = value
    return found
