"""
``qeffect runtime report tables``: a trial of the paper's tables, and trials merged in one report.

A trial is one start of torchrun. Rank 0 rewrites the report after every row, so that a run that is
ended early leaves its rows. Merging starts no ranks. The language model has one layer a stage, with
token embedding and head over 32,768 tokens, as the paper's; the model `layers` omits both ends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
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
from ...ranks.consent import StoppedError
from ...ranks.job import Job
from ...ranks.membership import Member, all_gather, join
from ...ranks.processes import mute_unless_speaker
from ...runtime import mode_on
from ...step.memory.numerical_state import same_bits
from ..reports.report import (
    ALIKE,
    Report,
    add_report_options,
    environment,
    read_part,
    require_alike,
    require_place,
)
from ..runner.timing import RoundPlan, time_side
from ..sides.pipelines import (
    LaunchSide,
    NativeSide,
    PipelineSide,
    ReplaySide,
    backend_on,
    build_side,
    isolated,
    unit_bytes,
)
from ..sides.table_rows import BEFORE, CELLS, PARTS, REFERENCES, TableRow, table_rows
from ..statistics.paper import LARGE, SMALL

__all__ = ["add_tables_arguments", "merged", "run_tables"]


def add_tables_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tables`."""
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default 2)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=f"parts to measure: {', '.join(PARTS)} (default: the first three)",
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=CELLS,
        metavar="CELL",
        help=f"cells to measure (default {SMALL} {LARGE})",
    )
    parser.add_argument(
        "--microbatches",
        nargs="+",
        type=int,
        metavar="M",
        help="numbers of microbatches in the part resources (default 2 to 32)",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds per side (default 3)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps per round (default 10)")
    parser.add_argument(
        "--native-steps", type=int, metavar="N", help="steps per round for native (default 3)"
    )
    parser.add_argument(
        "--no-profile", action="store_true", default=None, help="no counts of kernels and copies"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default cuda)")
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="F",
        help="reports of trials to merge, in this order",
    )
    add_report_options(parser)


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
    Measure one trial, or merge several.

    Raises:
        UnusableError: The ranks cannot run it, or a report cannot be merged.
    """
    if args.merge is not None:
        options = [f"--{name.replace('_', '-')}" for name in (*_DEFAULTS, "no_profile", "commit")]
        refuse_unused(args, options, "--merge measures nothing")
        require_place(args.out)
        return _outcome(merged(args.merge, args.out))
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    numbers = (args.rounds, args.steps, args.native_steps, *args.microbatches)
    if min(numbers) < 1:
        raise UnusableError(
            "--rounds, --steps, --native-steps and --microbatches must be at least 1, found "
            f"{min(numbers)}"
        )
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    try:
        require_place(args.out)
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


def merged(paths: Sequence[Path], out: Path | None) -> Report:
    """
    One report of several trials.

    Args:
        paths: Reports of `tables`, in the order of the trials.
        out: Where it is written; None keeps it in memory.

    Returns:
        The report; complete where every trial is, and made where the first one was.

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
                    f"--merge {path}: its trial of {trial['date']} is given twice; name "
                    "each report once"
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
    """The fields in which trials must agree; ranks, parts, cells and hosts may differ."""
    place, asked = part["environment"], part["configuration"]
    return {
        **{name: place.get(name) for name in ALIKE},
        **{name: asked.get(name) for name in ("device", "backend")},
    }


def _trial(args: argparse.Namespace, progress: Progress) -> Report:
    member = join(args.device)
    if member.world != args.pp:
        raise UnusableError(
            f"{member.world} processes were started for --pp {args.pp}; start torchrun with "
            f"--nproc-per-node {args.pp}"
        )
    if member.rank:
        progress = Progress(enabled=False)
    captured = args.device == "cuda"
    rows = table_rows(
        args.parts, args.cells, args.pp, microbatches=args.microbatches, captured=captured
    )
    for row in rows:
        row.job(args.pp).table()  # refuses before anything is measured
    configuration = {name: _plain(getattr(args, name)) for name in _DEFAULTS}
    configuration["backend"] = backend_on(args.device)
    trial: dict[str, Any] = {"pp": args.pp, "rows": []}
    own = args.out if member.rank == 0 else None
    place = environment(args.commit, args.out)
    trial["date"] = place["date"]
    report = Report("tables", own, place, configuration, {"trials": [trial]})
    references: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    at: tuple[Any, ...] | None = None
    with isolated(member):
        # Costs that a process pays once count for no side.
        first = TableRow(args.cells[0], "layers", 2, "il", "native").job(args.pp)
        NativeSide(member, first, backend_on(args.device)).step()
    for row in rows:
        progress(f"{row.cell}, {row.model}, {row.schedule}, {row.side}")
        # References are kept as long as a later row may be compared with them.
        if at != (row.cell, row.model, row.vpp):
            references.clear()
            at = row.cell, row.model, row.vpp
        trial["rows"].append(_measured(member, args, row, references, rows))
        report.save()
    report.finish()
    return report


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _make(member: Member, row: TableRow, job: Job, device: str) -> PipelineSide:
    backend = backend_on(device)
    if row.side == "native":
        return NativeSide(member, job, backend)
    if row.side == "one launch":
        return LaunchSide(member, job, backend)
    mode = "eager" if row.side == "eager" else mode_on(device)
    return ReplaySide(member, job, backend, mode)


def _measured(
    member: Member,
    args: argparse.Namespace,
    row: TableRow,
    references: dict[tuple[Any, ...], dict[str, Tensor]],
    rows: Sequence[TableRow],
) -> dict[str, Any]:
    """One row; a side that fails leaves its error, and the other sides are still measured."""
    job = row.job(args.pp)
    named = {**attrs.asdict(row), "microbatches": row.microbatches, "pp": args.pp}
    tokens = row.microbatches * job.config.sequence * job.config.batch
    with isolated(member):
        try:
            found = _side(member, args, row, job, references, rows)
        except (BackendError, StoppedError, RuntimeError, ValueError) as error:
            words = str(error).strip().splitlines()
            return {**named, "error": f"{type(error).__name__}: {words[0] if words else ''}"}
    return {**named, "error": None, "tokens": tokens, **found}


def _side(
    member: Member,
    args: argparse.Namespace,
    row: TableRow,
    job: Job,
    references: dict[tuple[Any, ...], dict[str, Tensor]],
    rows: Sequence[TableRow],
) -> dict[str, Any]:
    before, reserved = _used(member), _reserved(member)
    side, construction_s = build_side(member, lambda: _make(member, row, job, args.device))
    built, reserved = _used(member) - before, _reserved(member) - reserved
    began = time.perf_counter()
    for _ in range(side.first_steps):
        side.step()
    member.synchronize()
    first = time.perf_counter() - began
    for _ in range(BEFORE - side.first_steps):
        side.step()
    member.synchronize()
    peak, stood = _peak(member) - before, _used(member)
    compared = _compared(member, row, side, references, rows)
    facts = side.facts()
    eager = row.side in ("native", "eager")
    plan_of_rounds = RoundPlan(
        args.rounds, args.native_steps if eager else args.steps, not args.no_profile
    )
    own = unit_bytes(side)
    found = time_side(
        member, side.step, plan_of_rounds, construction_s=construction_s, facts=facts, units=own
    )
    kept = sum(_bytes(tensor) for tensor in references.get(_reference_key(row), {}).values())
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
    found["compared"] = compared
    found["planned"] = [
        {"peak_live": rank.peak_live, "peak_deferred": rank.peak_deferred, "delayed": rank.delayed}
        for rank in plan(job.table()).ranks
    ]
    side.close()
    return found


def _reference_key(row: TableRow) -> tuple[Any, ...]:
    return row.schedule, row.side


def _compared(
    member: Member,
    row: TableRow,
    side: PipelineSide,
    references: dict[tuple[Any, ...], dict[str, Tensor]],
    rows: Sequence[TableRow],
) -> dict[str, Any] | None:
    """Count the tensors that differ from the reference's; keep this side's for later rows."""
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
        references[_reference_key(row)] = {
            name: tensor.detach().clone() for name, tensor in left.items()
        }
    return found


def _alike(a: Tensor, b: Tensor) -> bool:
    """Compare raw bits; one side may keep a step count on the host, another on the device."""
    return same_bits(a.to(b.device), b)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size() if tensor.is_cuda else 0


def _used(member: Member) -> int:
    return torch.cuda.memory_allocated(member.device) if member.device.type == "cuda" else 0


def _reserved(member: Member) -> int:
    return torch.cuda.memory_reserved(member.device) if member.device.type == "cuda" else 0


def _peak(member: Member) -> int:
    return torch.cuda.max_memory_allocated(member.device) if member.device.type == "cuda" else 0


def _driver(member: Member) -> int:
    """Bytes in use on the device, by all processes, as the driver reports."""
    if member.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(member.device)
    return int(total - free)
