"""
``qeffect runtime report tables``: measure the paper's tables once (a trial), or merge several
trials into one report.

A trial starts all ranks twice: to measure, and to profile. The report is rewritten after every row,
so that an interrupted run leaves its finished rows. Merging starts no ranks. Like the paper's
model, the language model has one layer per stage, with token embedding and head over 32,768 tokens;
the model `layers` omits embedding and head.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.plan import plan

from ...backends.protocol import BackendError
from ...ranks.membership import Member, all_gather, join
from ...ranks.processes import mute_unless_speaker
from ...runtime import mode_on
from ...step.memory.numerical_state import same_bits
from ..reports.report import ALIKE, Report, environment, read_part, require_alike, require_place
from ..runner.processes import first_line
from ..runner.profiles import SIDE_ERRORS, add_profiles
from ..runner.rank_process import Findings
from ..runner.rank_rows import RankRun, measure_rows
from ..runner.timing import RoundPlan
from ..sides.pipelines import backend_on, isolation
from ..sides.side import RankSide
from ..sides.table_rows import CELLS, PARTS, REFERENCES, TableRow, table_rows
from ..statistics.paper import LARGE, SMALL
from .options import add_rank_options, rank_starts, require_rounds

__all__ = ["add_tables_arguments", "merge_trials", "run_tables"]

References = dict[tuple[str, str], dict[str, Tensor]]
"""
Copies of the final tensors, by schedule and side; later rows are compared with these copies.
"""


def add_tables_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tables`."""
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default 2)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help="parts of the report to measure (default: the first three). steps: step times of "
        "the language model. attribution: separate effects of graphs and of gradient "
        "memory. resources: slots and memory by number of microbatches. weak: layers "
        "without embedding and head, one per stage, over different numbers of ranks. "
        "mapping: one model of four layers over different numbers of ranks",
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=CELLS,
        metavar="CELL",
        help=f"cells to measure: layer size and number of microbatches (default {SMALL} {LARGE})",
    )
    parser.add_argument(
        "--microbatches",
        nargs="+",
        type=int,
        metavar="M",
        help="numbers of microbatches to try in the part resources (default 2 to 32)",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="F",
        help="reports of trials to merge, in this order",
    )
    add_rank_options(parser, rounds=3, given=True)


_DEFAULTS: Mapping[str, Any] = {
    "pp": 2,
    "parts": PARTS[:3],
    "cells": (SMALL, LARGE),
    "microbatches": (2, 4, 8, 16, 32),
    "rounds": 3,
    "steps": 10,
    "native_steps": 3,
    "device": "cuda",
}


def run_tables(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Measure one trial, or merge several trials.

    Raises:
        UnusableError: The ranks cannot run the trial, or a report cannot be merged.
    """
    if args.merge is not None:
        options = [f"--{name.replace('_', '-')}" for name in (*_DEFAULTS, "no_profile", "commit")]
        refuse_unused(args, options, "--merge only merges reports")
        require_place(args.out)
        return _outcome(merge_trials(args.merge, args.out))
    if args.parts is not None and "resources" not in args.parts:
        refuse_unused(
            args, ["--microbatches"], "only the part resources varies the number of microbatches"
        )
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    require_rounds(args, *args.microbatches)
    try:
        finished = _trial(args, progress)
    except (BackendError, ScheduleError, UnusableError) as error:
        mute_unless_speaker(failed=True)
        raise UnusableError(str(error)) from error
    outcome = _outcome(finished)
    mute_unless_speaker(failed=outcome.exit != 0)
    return outcome


def _outcome(report: Report) -> Outcome:
    derived = report.to_json()["derived"]
    different = any(row.get("different") for row in derived["rows"])
    verdict = "refused" if different or derived["errors"] else "accepted"
    return Outcome(verdict, {"derived": derived}, report.lines())


def merge_trials(paths: Sequence[Path], out: Path | None) -> Report:
    """
    Merge several trials into one report.

    Args:
        paths: Reports of `tables`, in the order of the trials.
        out: File of the merged report; None keeps the report in memory.

    Returns:
        The merged report. The merged report has the environment of the first trial, and is complete
        if every trial is complete.

    Raises:
        UnusableError: A file is not a report of `tables`; the trials differ in device, commit or
            versions; or a trial is named twice.
    """
    found = [read_part(path, "tables") for path in paths]
    require_alike([(path, _facts(part)) for path, part in zip(paths, found, strict=True)])
    trials: list[Any] = []
    for path, part in zip(paths, found, strict=True):
        for trial in part["raw"]["trials"]:
            if trial in trials:
                raise UnusableError(
                    f"--merge {path}: the trial of {trial['date']} is given twice; name each "
                    "report once"
                )
            trials.append(trial)
    first = found[0]
    configuration = {
        **first["configuration"],
        "merged": [report["configuration"] for report in found],
    }
    report = Report("tables", out, first["environment"], configuration, {"trials": trials})
    report.complete = all(one["complete"] for one in found)
    report.save()
    return report


def _facts(part: Mapping[str, Any]) -> dict[str, Any]:
    """
    The fields that must be equal in all merged trials. Ranks, parts of the report, cells
    (workloads) and hosts may differ.
    """
    place, asked = part["environment"], part["configuration"]
    return {
        **{name: place.get(name) for name in ALIKE},
        **{name: asked.get(name) for name in ("device", "backend")},
    }


def _trial(args: argparse.Namespace, progress: Progress) -> Report:
    rows = table_rows(
        args.parts,
        args.cells,
        args.pp,
        microbatches=args.microbatches,
        mode=mode_on(args.device),
    )
    for row in rows:
        row.job().table()  # refuses before anything is measured
    configuration = {name: _plain(getattr(args, name)) for name in _DEFAULTS}
    configuration["backend"] = backend_on(args.device)
    place = environment(args.commit, args.out)
    trial: dict[str, Any] = {"pp": args.pp, "rows": [], "date": place["date"]}
    with rank_starts(args, progress) as (starts, shown):
        own = args.out if starts.speaks else None
        report = Report("tables", own, place, configuration, {"trials": [trial]})

        def take(row: dict[str, Any]) -> None:
            trial["rows"].append(row)
            report.save()

        starts.start(_measure, args, rows, take=take, note=shown).require()
        good = [pair for pair in zip(rows, trial["rows"], strict=True) if not pair[1]["error"]]
        if good and not args.no_profile:
            meet = partial(join, args.device)
            add_profiles(starts, meet, good, save=report.save, note=shown.note).require()
    report.finish()
    return report


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _measure(args: argparse.Namespace, rows: Sequence[TableRow], findings: Findings) -> None:
    """Measure every row (a cell under one schedule, run by one side); each rank calls this
    function."""
    member = join(args.device)
    with isolation(member):
        # One-time costs of a process count for no side.
        TableRow(args.cells[0], "layers", 2, "il", "native", args.pp).make(member).step()
    references: References = {}
    at: tuple[Any, ...] | None = None

    def measure(row: TableRow) -> dict[str, Any]:
        nonlocal at
        # Keep references as long as a later row may be compared with them.
        if at != (row.cell, row.model, row.vpp):
            references.clear()
            at = row.cell, row.model, row.vpp
        return measure_row(member, args, row, references, rows)

    measure_rows(member, rows, findings, measure)


def measure_row(
    member: Member,
    args: argparse.Namespace,
    row: TableRow,
    references: References,
    rows: Sequence[TableRow],
) -> dict[str, Any]:
    """
    Measure one row: a cell (workload) under one schedule, run by one side. If a side fails, its
    error is recorded and the other sides are still measured.
    """
    job = row.job()
    try:
        found = _measure_side(member, args, row, references, rows)
    except SIDE_ERRORS as error:
        return {**row.name, "error": first_line(error)}
    tokens = row.microbatches * job.config.sequence * job.config.batch
    return {**row.name, "error": None, "tokens": tokens, **found}


def _measure_side(
    member: Member,
    args: argparse.Namespace,
    row: TableRow,
    references: References,
    rows: Sequence[TableRow],
) -> dict[str, Any]:
    before, reserved = _used(member), _reserved(member)
    run = RankRun.of(member, row.make)
    side = run.side
    built, reserved = _used(member) - before, _reserved(member) - reserved
    began = time.perf_counter()
    run.settle(side.first_steps)
    member.synchronize()
    first = time.perf_counter() - began
    run.settle(row.settling_steps)
    member.synchronize()
    peak, stood = _peak(member) - before, _used(member)
    compared = _compare(member, row, side, references, rows)
    facts = side.facts()
    eager = row.side in ("native", "eager")
    steps = RoundPlan(args.rounds, args.native_steps if eager else args.steps, settles=eager)
    found = run.time(steps, facts)
    held = references.get((row.schedule, row.side), {}).values()
    kept = sum(tensor.numel() * tensor.element_size() for tensor in held if tensor.is_cuda)
    memory = {
        "built": built,
        "reserved": reserved,
        "allocated_peak": peak,
        # Clones kept for later rows do not count.
        "grown": _used(member) - stood - kept,
        "device": _driver(member),
    }
    found["memory"] = all_gather(member, memory)
    found["first_step_s"] = max(all_gather(member, first))
    found["copies"] = []
    found["compared"] = compared
    found["planned"] = [
        {"peak_live": rank.peak_live, "peak_deferred": rank.peak_deferred, "delayed": rank.delayed}
        for rank in plan(row.job().table()).ranks
    ]
    side.close()
    return found


def _compare(
    member: Member,
    row: TableRow,
    side: RankSide,
    references: References,
    rows: Sequence[TableRow],
) -> dict[str, Any] | None:
    """
    Count the tensors of this side (a way to run a step) that differ from its reference side; keep
    this side's tensors for later rows.
    """
    base = REFERENCES.get(row.side)
    theirs = references.get((row.schedule, base)) if base is not None else None
    found = None
    needed = any(
        attrs.evolve(row, side=other.side) == other and REFERENCES.get(other.side) == row.side
        for other in rows
    )
    if theirs is None and not needed:
        return None
    left = side.state()
    if theirs is not None:
        odd = [
            name
            for name in theirs.keys() | left.keys()
            if name not in theirs or name not in left or not _alike(theirs[name], left[name])
        ]
        ranks = all_gather(member, (len(theirs), len(odd), sorted(odd)[:2]))
        found = {
            "with": base,
            "values": sum(rank[0] for rank in ranks),
            "different": sum(rank[1] for rank in ranks),
            "first": [name for rank in ranks for name in rank[2]],
        }
    if needed:
        references[row.schedule, row.side] = {
            name: tensor.detach().clone() for name, tensor in left.items()
        }
    return found


def _alike(a: Tensor, b: Tensor) -> bool:
    """
    Whether two tensors have the same raw bits. One tensor may be on the host and the other on the
    device, because sides keep their step counts in different memory.
    """
    return same_bits(a.to(b.device), b)


def _used(member: Member) -> int:
    return torch.cuda.memory_allocated(member.device) if member.device.type == "cuda" else 0


def _reserved(member: Member) -> int:
    return torch.cuda.memory_reserved(member.device) if member.device.type == "cuda" else 0


def _peak(member: Member) -> int:
    return torch.cuda.max_memory_allocated(member.device) if member.device.type == "cuda" else 0


def _driver(member: Member) -> int:
    """Bytes of device memory that all processes together use, as the driver reports."""
    if member.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(member.device)
    return int(total - free)
