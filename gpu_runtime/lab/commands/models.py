"""
``qeffect runtime report models``: measure TFLOP/s of whole decoders over the ranks of a pipeline.

The native rows run torch's Interleaved 1F1B with full backwards. The model is cut into stages by
the measured times of a layer, the embedding and the head. These times are measured before the first
row of each cell (model, sequence length and microbatches). Modes of Megatron-core (``--megatron``)
train the same models with the same cut, and each mode runs in its own processes. The report is
written after every row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError

from ...backends.heads import HEADS
from ...backends.norms import CUDNN_NORMS
from ...backends.protocol import BackendError
from ...ranks.membership import Member, all_gather, join, launcher_ranks
from ...ranks.processes import mute_unless_speaker
from ..comparisons.ranks import tensor_digests
from ..reports.report import Report, environment
from ..runner.processes import first_line
from ..runner.profiles import SIDE_ERRORS, add_profiles
from ..runner.rank_process import Findings
from ..runner.rank_rows import RankRun, measure_rows
from ..runner.starts import RankStarts
from ..runner.timing import RoundPlan
from ..sides import megatron
from ..sides.language import MAIN_GRADS, PP
from ..sides.model_rows import CELLS, SCHEDULES, ModelRow, measured_cut, model_rows
from ..sides.pipelines import backend_on
from ..statistics.peers import EAGER
from .options import (
    add_rank_options,
    rank_starts,
    require_limit,
    require_megatron,
    require_rounds,
)

__all__ = ["add_models_arguments", "run_models"]

LIMIT_S = 240.0


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `models`."""
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="pipeline ranks (default 2)")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=list(CELLS[:1]),
        choices=CELLS,
        metavar="CELL",
        help=f"models to measure, from {', '.join(CELLS)} (default {CELLS[0]})",
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=list(SCHEDULES),
        choices=SCHEDULES,
        metavar="NAME",
        help=f"schedules to measure, from {', '.join(SCHEDULES)} (default: all); bits are compared "
        "only under il",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="also measure N replicas, whose gradients are reduced within the step, on N times "
        "the ranks (default 1: no replicas)",
    )
    parser.add_argument(
        "--main-grad",
        choices=tuple(MAIN_GRADS),
        default="bf16",
        help="data type of accumulated gradients; fp32 also selects fp32 master weights. Native "
        "always accumulates in bf16, so its bits are compared with bf16 only (default bf16)",
    )
    parser.add_argument(
        "--head",
        choices=HEADS,
        default="bf16",
        help="type of the model's head in the runs of this runtime and of native: bf16 "
        "(default), te (Transformer Engine's FP8) or torchao (TorchAO's FP8); Megatron's "
        "head is always bf16",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="also measure this runtime with every stage recomputing its activations in dI",
    )
    parser.add_argument(
        "--no-native",
        action="store_true",
        help="do not measure native; the report then has no speed relative to native, and compares "
        "no bits",
    )
    parser.add_argument(
        "--norms",
        choices=("library", "cudnn"),
        default="library",
        help="kernels of Transformer Engine's norms in all runs (this runtime, native, "
        "Megatron). library: Transformer Engine's own kernels (default). cudnn: cuDNN's "
        "kernels. The environment variables NVTE_NORM_FWD_USE_CUDNN and "
        "NVTE_NORM_BWD_USE_CUDNN have no effect",
    )
    parser.add_argument(
        "--megatron",
        nargs="+",
        default=[],
        choices=megatron.GRAPH_MODES,
        metavar="MODE",
        help="modes of Megatron-core to measure on the same models, from "
        f"{', '.join(megatron.GRAPH_MODES)}; the mode none runs without graphs (default: do not "
        "measure Megatron-core)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"time limit in seconds for each start of Megatron-core's ranks (default {LIMIT_S:g})",
    )
    add_rank_options(parser, rounds=3)


def run_models(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Measure every model; the outcome is `refused` if a row (one model under one schedule) failed or
    a bit differs.

    Raises:
        UnusableError: The ranks cannot run the models.
    """
    require_rounds(args)
    if args.norms == "cudnn" and args.device == "cpu":
        raise UnusableError("--norms cudnn needs --device cuda, found --device cpu; leave it out")
    _require_megatron(args)
    _require_replicas(args)
    _require_size(args)
    rows = model_rows(
        args.cells,
        args.schedules,
        args.pp,
        device=args.device,
        main_grad=args.main_grad,
        head=args.head,
        recompute=args.recompute,
        native=not args.no_native,
    )
    try:
        for row in rows:  # refuses before anything is measured
            try:
                row.job().table()
            except ValueError as error:
                raise UnusableError(f"{row.cell} over --pp {args.pp} ranks: {error}") from error
        report = _run(args, rows, progress)
    except (BackendError, ScheduleError, UnusableError) as error:
        mute_unless_speaker(failed=True)
        raise UnusableError(str(error)) from error
    derived = report.to_json()["derived"]
    bad = derived["errors"] or any(row["different"] for row in derived["rows"])
    outcome = Outcome("refused" if bad else "accepted", {"derived": derived}, report.lines())
    mute_unless_speaker(failed=outcome.exit != 0)
    return outcome


def _require_size(args: argparse.Namespace) -> None:
    """
    Refuse the CPU-only model `tiny` on a GPU, where its capture as one graph fails with an
    allocator error.

    Raises:
        UnusableError: The options select the model `tiny` on a GPU.
    """
    if args.device == "cuda" and (tiny := [cell for cell in args.cells if cell.startswith("tiny")]):
        raise UnusableError(
            f"--cells {tiny[0]} is only for a CPU, found --device cuda; add --device cpu, or take "
            "another cell"
        )


def _require_megatron(args: argparse.Namespace) -> None:
    """
    Refuse options with which Megatron's modes cannot run.

    Raises:
        UnusableError: Megatron-core or a GPU is missing, or an option has a wrong value.
    """
    require_limit(args)
    if args.megatron and args.pp > PP:
        raise UnusableError(f"--megatron needs --pp {PP} or --pp 1, found --pp {args.pp}")
    require_megatron(args.megatron, args.device, "--megatron", "leave out --megatron")


def _require_replicas(args: argparse.Namespace) -> None:
    """
    Refuse replicas that this process cannot start.

    Raises:
        UnusableError: `--replicas` is below 1, torchrun started this process, or GPUs are missing.
    """
    if args.replicas < 1:
        raise UnusableError(f"--replicas must be at least 1, found {args.replicas}")
    if args.replicas == 1:
        return
    if launcher_ranks()[1] is not None:
        raise UnusableError("--replicas starts its own ranks: start the command without torchrun")
    ranks = args.pp * args.replicas
    if args.device == "cuda" and torch.cuda.device_count() < ranks:
        raise UnusableError(
            f"--pp {args.pp} with --replicas {args.replicas} needs {ranks} GPUs, found "
            f"{torch.cuda.device_count()}"
        )


def _run(args: argparse.Namespace, rows: Sequence[ModelRow], progress: Progress) -> Report:
    configuration = {
        "pp": args.pp,
        "replicas": args.replicas,
        "cells": args.cells,
        "schedules": args.schedules,
        "main_grad": args.main_grad,
        "head": args.head,
        "recompute": args.recompute,
        "norms": args.norms,
        "device": args.device,
        "backend": backend_on(args.device),
        "rounds": args.rounds,
        "steps": args.steps,
        "native_steps": args.native_steps,
    }
    if args.megatron:
        configuration["megatron"] = {
            "version": megatron.VERSION,
            "modes": args.megatron,
            **megatron.options(rows[0].job()),
        }
    _choose_norms(args.norms)
    raw: dict[str, Any] = {"rows": []}
    place = environment(args.commit, args.out)
    with rank_starts(args, progress) as (starts, shown):
        own = args.out if starts.speaks else None
        report = Report("models", own, place, configuration, raw)

        def take(found: dict[str, Any]) -> None:
            raw["rows"].append(found)
            report.save()

        starts.start(_measure, args, rows, take=take, note=shown).require()
        good = [
            (attrs.evolve(row, cut=tuple(found["cut"])), found)
            for row, found in zip(rows, raw["rows"], strict=True)
            if found["error"] is None
        ]
        if good and not args.no_profile:
            meet = partial(join, args.device)
            add_profiles(starts, meet, good, save=report.save, note=shown.note).require()
        if args.replicas > 1:
            several = [
                (attrs.evolve(row, replicas=args.replicas), found)
                for row, found in good
                if row.side != "native"
            ]
            folder = starts.folder / "replicas"
            folder.mkdir()
            all_ranks = RankStarts(args.pp * args.replicas, folder)
            all_ranks.start(_measure_replicas, args, several, take=take, note=shown).require()
        for mode in args.megatron:
            for cell in args.cells:
                row = megatron.MegatronModelRow(
                    cell, f"megatron {mode}", "il", args.pp, main_grad=args.main_grad
                )
                found = _measure_megatron(args, starts, row, raw["rows"], shown)
                take(found)
                if found["error"] is None and not args.no_profile:
                    row = attrs.evolve(row, cut=tuple(found["cut"]))
                    meet = partial(megatron.meet, mode, args.pp)
                    # Megatron's side has what a profile without copies needs.
                    asked: list[tuple[Any, dict[str, Any]]] = [(row, found)]
                    add_profiles(
                        starts, meet, asked, save=report.save, note=shown.note, limit=args.limit
                    )
    report.finish()
    return report


def _choose_norms(norms: str) -> None:
    """
    Set or remove the environment variables of the norms' kernels, whatever the caller has set; the
    ranks inherit them.
    """
    for name in CUDNN_NORMS:
        os.environ.pop(name, None)
        if norms == "cudnn":
            os.environ[name] = "1"


def _measure_megatron(
    args: argparse.Namespace,
    starts: RankStarts,
    row: megatron.MegatronModelRow,
    measured: Sequence[dict[str, Any]],
    progress: Progress,
) -> dict[str, Any]:
    """
    Measure a mode of Megatron-core in its own processes, with the cut into stages that our rows
    use.
    """
    ours = next((one for one in measured if one["cell"] == row.cell and one["error"] is None), None)
    if ours is None:
        return {**row.name, "error": "not run, because no row of ours measured the cut into stages"}
    row = attrs.evolve(row, cut=tuple(ours["cut"]))
    eager = row.side == EAGER
    plan = RoundPlan(args.rounds, args.native_steps if eager else args.steps, settles=eager)
    found: list[dict[str, Any]] = []
    body = megatron.measure_models
    start = starts.start(body, row, plan, limit=args.limit, take=found.append, note=progress.note)
    if start.exits.error is not None:
        return {**row.name, "error": start.exits.error}
    parts = {key: ours[key] for key in ("shape", "cut", "parts_ms")}
    return {**row.name, "error": None, **parts, "compared": [0, 0], "first": [], **found[0]}


def _measure_replicas(
    args: argparse.Namespace,
    rows: Sequence[tuple[ModelRow, dict[str, Any]]],
    findings: Findings,
) -> None:
    """
    Measure every row (one model under one schedule) with its replicas; each rank calls this
    function. The model's shape, its cut into stages and the times of its parts come from the
    measurement with one replica.
    """
    member = join(args.device)
    alone = dict(rows)

    def measure(row: ModelRow) -> dict[str, Any]:
        try:
            found, _ = _measure_row(member, args, row, {})
        except SIDE_ERRORS as error:
            return {**row.name, "error": first_line(error)}
        parts = {key: alone[row][key] for key in ("shape", "cut", "parts_ms")}
        return {**row.name, "error": None, **parts, **found}

    measure_rows(member, [row for row, _ in rows], findings, measure)


def _measure(args: argparse.Namespace, rows: Sequence[ModelRow], findings: Findings) -> None:
    """Measure every row (one model under one schedule); each rank calls this function."""
    member = join(args.device)
    cell = ""
    parts: dict[str, Any] = {}
    native: dict[str, str] = {}

    def measure(row: ModelRow) -> dict[str, Any]:
        nonlocal cell, parts, native
        try:
            if row.cell != cell:
                cell, parts, native = row.cell, {}, {}
                times, cut = measured_cut(member, row)
                parts = {"cut": cut, "parts_ms": attrs.asdict(times)}
            if not parts:
                raise RuntimeError("the times of the model's parts could not be measured")
            found, left = _measure_row(member, args, attrs.evolve(row, cut=parts["cut"]), native)
        except SIDE_ERRORS as error:
            return {**row.name, "error": first_line(error)}
        if row.side == "native":
            native = left
        return {**row.name, "error": None, "shape": _shape(row), **parts, **found}

    measure_rows(member, rows, findings, measure)


def _shape(row: ModelRow) -> dict[str, int]:
    sequence = row.job().config.sequence
    return {**attrs.asdict(row.shape), "sequence": sequence, "microbatches": row.microbatches}


def _measure_row(
    member: Member, args: argparse.Namespace, row: ModelRow, native: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure one row (one model under one schedule), with digests of this rank's state after its
    first steps."""
    run = RankRun.of(member, row.make)
    side = run.side
    run.settle(row.settling_steps)
    side.drain()
    loss = None
    if row.side == "native":
        loss = sum(map(sum, all_gather(member, side.losses_of(0))))
    member.synchronize()
    # Interleaved 1F1B has native's order; under the others scales move in another order.
    left = tensor_digests(side.stages, side.optimizer) if row.schedule == "il" else {}
    kept = native if row.side != "native" and left and row.main_grad == "bf16" else {}
    either = kept.keys() | left.keys() if kept else set()
    odd = sorted(name for name in either if left.get(name) != kept.get(name))
    ranks = all_gather(member, (len(kept), len(odd), odd[:2]))
    eager = row.side == "native"
    steps = RoundPlan(args.rounds, args.native_steps if eager else args.steps, settles=eager)
    found = run.time(steps, side.facts())
    found["loss"] = loss
    found["compared"] = [sum(rank[n] for rank in ranks) for n in (0, 1)]
    found["first"] = [name for rank in ranks for name in rank[2]]
    side.close()
    return found, left
