"""
``qeffect runtime report peers``: compare our pipeline with torch's own pipeline and Megatron-core.

All three frameworks run the same language model with one layer per stage and a bf16 head, from the
same initial bits, over two ranks with two stages each. Each mode (a way to run the steps) is
measured in its own processes under a time limit, and is then profiled in other processes. A mode
that hangs or dies therefore loses only its own rows. Only Megatron's modes need Megatron-core
(``pip install --no-deps megatron-core==0.19.2``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qeffect import cli
from qeffect.cli.command import Outcome, Progress

from ...ranks.membership import Member, all_gather, join
from ...step.optimizer import Gradients
from ..comparisons.gradients import compare_gradients, distance_sums, save_gradients
from ..reports.report import Report, UnusableError, environment, require_place
from ..runner.device import require_device
from ..runner.profiles import add_profiles
from ..runner.rank_process import Findings
from ..runner.rank_rows import RankRun, measure_rows
from ..runner.starts import RankStart, RankStarts
from ..sides import megatron
from ..sides.language import LAYERS, MAIN_GRADS, PP, DrawnLanguage, PeerRow, PeerSettings
from ..sides.pipelines import GuardedSide
from ..statistics.paper import LARGE, SMALL
from ..statistics.peers import EAGER, combine_distances, has_owed_bits
from .options import add_rank_options, require_limit, require_megatron, require_rounds

__all__ = ["add_peers_arguments", "measure_ours", "rows_of", "run_peers"]

LIMIT_S = 90.0
OURS = "ours"
CELLS = (SMALL, LARGE, "h4096-s1024-m8")
MODES = (OURS, *megatron.GRAPH_MODES)


def measure_ours(device: str, rows: Sequence[PeerRow], folder: Path, findings: Findings) -> None:
    """
    Measure our rows: native training, guarded replays, and one launch per step. A row of the report
    is one cell (workload) under one schedule and one mode; each rank calls this function.

    Args:
        device: `cuda` or `cpu`.
        rows: Rows to measure. A row of one launch per step follows the row of replays with which it
            is compared.
        folder: Folder in which native's gradients are saved for later processes.
        findings: Receives the times and digests of each row once the row is measured.
    """
    member = join(device)
    state: dict[str, Tensor] = {}

    def measure(row: PeerRow) -> dict[str, Any]:
        nonlocal state
        if row.side == "native":
            found = _measure_native(member, row, folder)
        elif row.main_grad != "bf16" or row.group is not None:
            found = _measure_far(member, row, folder)
        elif row.side == "replays":
            state.clear()
            found, state = _measure_replays(member, row, folder)
        else:
            found = _measure_launches(member, row, state)
        return {"rows": found}

    measure_rows(member, rows, findings, measure)


def _by_model(job: DrawnLanguage, gradients: Gradients) -> dict[str, Tensor]:
    """Clones of a rank's gradients, by the model's parameter names."""
    return {
        job.name_of(stage, name): gradient.detach().clone()
        for stage, named in gradients.items()
        for name, gradient in named.items()
    }


def _measure_native(member: Member, row: PeerRow, folder: Path) -> dict[str, Any]:
    job, seen = row.job(), list[dict[str, Tensor]]()
    wanted = [False]

    def look(gradients: Gradients) -> None:
        if wanted[0]:
            seen.append(_by_model(job, gradients))

    run = RankRun.of(member, lambda member: row.make(member, look))
    run.settle(row.settling_steps - 1)
    wanted[0] = True
    run.settle(row.settling_steps)
    wanted[0] = False
    member.synchronize()
    (own,) = seen
    save_gradients(folder, row.cell, "native", member.rank, own)
    gradients = compare_gradients(member, folder, row.cell, ["native"], own)
    own.clear()
    losses = all_gather(member, run.side.losses_of(row.settling_steps - 1))
    found = run.time(row.settings.rounds_of("eager"))
    return row.measured(gradients, sum(map(sum, losses)), found)


def _measure_replays(
    member: Member, row: PeerRow, folder: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Measure guarded replays, or eager calls on a CPU, and copy the resulting tensors."""
    run = RankRun.of(member, row.make)
    side = run.side
    assert isinstance(side, GuardedSide)
    run.settle(row.settling_steps - 1)
    against = _against_native(member, row, side, folder)
    state = {name: tensor.detach().clone() for name, tensor in side.state().items()}
    found = run.time(row.settings.rounds_of(side.mode))
    side.close()
    return row.measured(against, None, found), state


def _measure_launches(member: Member, row: PeerRow, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """
    Measure one launch per step and compare the resulting tensors with those of replays. The
    compared tensors include AdamW's moments, in which a difference of gradients shows.
    """
    run = RankRun.of(member, row.make)
    side = run.side
    run.settle(row.settling_steps)
    sums = distance_sums(side.state(), state)
    against = [{"with": "replays", **combine_distances(all_gather(member, sums))}]
    found = run.time(row.settings.rounds_of("replays"))
    side.drain()
    side.close()
    return row.measured(against, None, found)


def _against_native(
    member: Member, row: PeerRow, side: GuardedSide, folder: Path
) -> list[dict[str, Any]]:
    """Take one guarded step and compare its gradients with native's."""
    worker = side.worker
    with worker.stepping():
        gradients = worker.pipeline.step(worker.optimizer)
    worker.runtime.handoff.synchronize()
    own = _by_model(row.job(), gradients)
    return compare_gradients(member, folder, row.cell, ["native"], own)


def _measure_far(member: Member, row: PeerRow, folder: Path) -> dict[str, Any]:
    """
    Measure a row (a cell under one schedule and mode) that native training cannot match bit for
    bit: a row with fp32 gradients, or with weight gradients computed in groups.

    The first steps are guarded actions, and the gradients of the last of these steps are compared
    with native's. Each timed step is one launch if the row's side is `one launch`.
    """
    run = RankRun.of(member, row.make)
    side = run.side
    assert isinstance(side, GuardedSide)
    for _ in range(row.settling_steps - 1):
        side.worker.step()
    against = _against_native(member, row, side, folder)
    found = run.time(row.settings.rounds_of(side.mode))
    side.drain()
    side.close()
    return row.measured(against, None, found)


def _runs(modes: Sequence[str], settings: PeerSettings) -> list[tuple[str, list[PeerRow]]]:
    """
    For each start of the ranks: the mode (a way to run steps) and the rows that this start
    measures.

    Megatron makes local and full-iteration graphs only once in a process, so each row with such
    graphs gets its own processes.
    """
    runs: list[tuple[str, list[PeerRow]]] = []
    for mode in modes:
        rows = rows_of(mode, settings.cells, settings)
        if mode in ("local", "full_iteration"):
            runs += [(mode, [row]) for row in rows]
        else:
            runs.append((mode, rows))
    return runs


def add_peers_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report peers`."""
    parser.add_argument(
        "--cells",
        nargs="+",
        default=list(CELLS),
        metavar="CELL",
        help=f"cells to measure: layer size and number of microbatches (default {' '.join(CELLS)})",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        choices=MODES,
        metavar="MODE",
        help=f"modes to measure, from {', '.join(MODES)}; all except ours are Megatron-core's, and "
        "none is Megatron-core without graphs (default: all)",
    )
    parser.add_argument(
        "--main-grads",
        nargs="+",
        default=list(MAIN_GRADS),
        choices=MAIN_GRADS,
        metavar="TYPE",
        help=f"types of accumulated weight gradients, from {', '.join(MAIN_GRADS)}; with fp32, "
        "master weights are fp32 too; native runs only with bf16 (default: all)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"time limit in seconds for each of the two starts of a mode (default {LIMIT_S:g}); "
        "the mode ours has four times this limit",
    )
    add_rank_options(parser, rounds=3)


def _settings(args: argparse.Namespace) -> PeerSettings:
    for cell in args.cells:
        layers, _, microbatches = cell.rpartition("-m")
        if layers not in LAYERS or not microbatches.isdecimal() or not int(microbatches):
            raise UnusableError(
                f"--cells: expected LAYERS-mN, such as {SMALL}, with LAYERS one of "
                f"{', '.join(LAYERS)} and N the number of microbatches, found {cell!r}"
            )
    require_rounds(args)
    require_limit(args)
    return PeerSettings(
        cells=args.cells,
        main_grads=args.main_grads,
        rounds=args.rounds,
        steps=args.steps,
        native_steps=args.native_steps,
        device=args.device,
        profile=not args.no_profile,
    )


def _require(args: argparse.Namespace) -> None:
    """
    Refuse options that cannot run on this machine, before any process is started.

    Raises:
        UnusableError: Megatron-core, a GPU or Transformer Engine is missing.
    """
    theirs = [mode for mode in args.modes if mode != OURS]
    require_megatron(theirs, args.device, "--modes", "give --modes ours")
    if args.device == "cuda":
        require_device("--device cpu --modes ours runs without a GPU")
        if torch.cuda.device_count() < PP:
            raise UnusableError(
                f"expected {PP} GPUs, one per rank, found {torch.cuda.device_count()}"
            )


def run_peers(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run every mode in its own processes, and write the report.

    The outcome is `refused` in three cases: the bits of a guarded row (a cell under one schedule)
    differ from the bits of its reference; the gradients of a guarded row under another schedule are
    far from native's; or no guarded row was measured.

    Raises:
        UnusableError: This machine cannot run the modes.
    """
    settings = _settings(args)
    require_place(args.out)
    _require(args)
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    raw: dict[str, Any] = {"rows": [], "refusals": {}, "processes": []}
    configuration = {
        **settings.configuration(),
        "modes": args.modes,
        "limit": args.limit,
        "megatron": {
            "version": megatron.VERSION,
            **megatron.options(settings.job(args.cells[0], "il")),
        },
    }
    report = Report("peers", args.out, environment(args.commit, args.out), configuration, raw)
    with tempfile.TemporaryDirectory(prefix="qeffect-peers-") as folder:
        starts = RankStarts(PP, Path(folder))
        for mode, rows in _runs(args.modes, settings):
            said = dict.fromkeys(f"{row.cell} {row.main_grad}" for row in rows)
            progress.note(f"Measuring: {mode}: {', '.join(said)}")
            limit = args.limit * (4 if mode == OURS else 1)
            _run_mode(starts, mode, rows, limit, report, progress)
            report.save()
    derived = report.finish()["derived"]
    own = [row for row in derived["rows"] if row["side"] in ("native", "replays", "one launch")]
    right = own and all(map(has_owed_bits, own))
    return Outcome("accepted" if right else "refused", {"derived": derived}, report.lines())


def _run_mode(
    starts: RankStarts,
    mode: str,
    rows: Sequence[PeerRow],
    limit: float,
    report: Report,
    progress: Progress,
) -> None:
    """
    Measure the rows (cells under each schedule) of one mode, then profile the measured rows; if the
    measurement or the profile fails, the error is recorded.
    """
    raw, settings = report.raw, rows[0].settings
    done: list[dict[str, Any]] = []

    def take(found: dict[str, Any]) -> None:
        ((kind, value),) = found.items()
        if kind == "refusals":
            raw["refusals"].update(value)
        else:
            done.append(value)
            raw["rows"].append(value)
        report.save()

    meet = partial(join, settings.device) if mode == OURS else partial(megatron.meet, mode)
    body = partial(measure_ours, settings.device) if mode == OURS else megatron.measure_modes
    start = starts.start(body, rows, starts.folder, limit=limit, take=take, note=progress)
    raw["processes"].append(_processes(mode, rows, start))
    if start.exits.error is not None:
        # The first that is missing failed; what would have followed it was not run.
        missing = rows[len(done) : len(done) + 1]
        raw["rows"] += [{**row.name, "error": start.exits.error} for row in missing]
    measured = list(zip(rows, done, strict=False))
    if measured and settings.profile:
        again = add_profiles(
            starts, meet, measured, save=report.save, note=progress.note, limit=limit
        )
        raw["processes"].append(_processes(f"{mode}, under the profiler", rows, again))


def _processes(mode: str, rows: Sequence[PeerRow], start: RankStart) -> dict[str, Any]:
    ended = start.exits
    return {
        "mode": mode,
        "cells": list(dict.fromkeys(row.cell for row in rows)),
        "codes": ended.codes,
        "seconds": round(ended.seconds, 2),
        "words": ended.words if ended.error is not None else [],
    }


def rows_of(mode: str, cells: Sequence[str], settings: PeerSettings) -> list[PeerRow]:
    """The rows of a mode (each a cell under one schedule), in the order in which they are
    measured."""
    if mode != OURS:
        side = EAGER if mode == "none" else f"megatron {mode}"
        return [
            megatron.MegatronRow(cell, side, "il", settings, main_grad)
            for cell in cells
            for main_grad in settings.main_grads
        ]
    return [row for cell in cells for row in _our_rows(cell, settings)]


def _our_rows(cell: str, settings: PeerSettings) -> list[PeerRow]:
    """
    The rows of mode `ours` for one cell (a workload: layer dimensions and number of microbatches).

    The native row comes first, because the gradients of all later rows are compared with its
    gradients. For each data type of gradients, rows follow under both schedules: first with scales
    that move at every action, then with the weight gradients of all microbatches computed as one
    product.
    """
    fast = "one launch" if settings.device == "cuda" else "replays"
    whole = int(cell.rpartition("-m")[2])
    rows = [PeerRow(cell, "native", "il", settings)]
    for main_grad in settings.main_grads:
        sides = dict.fromkeys(["replays", fast] if main_grad == "bf16" else [fast])
        for group in (None, whole):
            rows += [
                PeerRow(cell, side, schedule, settings, main_grad, group)
                for schedule in ("il", "zbv")
                for side in (sides if group is None else (fast,))
            ]
    return rows


if __name__ == "__main__":
    raise SystemExit(cli.main(["runtime", "report", "peers", *sys.argv[1:]]))
