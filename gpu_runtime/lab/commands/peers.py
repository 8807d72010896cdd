"""
``qeffect runtime report peers``: ours, torch's own pipeline and Megatron-core beside each other.

One language model, one layer a stage, over two ranks with two stages each; every side starts from
the same bits. Each mode runs in processes of its own under a time limit, so that a mode that hangs
or dies loses only its own rows. The report is written again after each mode. Only Megatron's modes
need Megatron-core (``pip install --no-deps megatron-core==0.19.2``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect import cli
from qeffect.cli.command import Outcome, Progress
from qeffect.report import write_json

from ...ranks.membership import Member, all_gather, join
from ...runtime import mode_on
from ...step.optimizer import Gradients
from ..comparisons.gradients import compare_gradients, distance_sums, save_gradients
from ..reports.report import (
    Report,
    UnusableError,
    add_report_options,
    environment,
    require_place,
)
from ..runner.device import require_device
from ..runner.ranks import run_ranks
from ..runner.timing import time_side
from ..sides.language import LAYERS, PP, DrawnLanguage, PeerSettings, motionless, peer_row
from ..sides.pipelines import (
    LaunchSide,
    NativeSide,
    ReplaySide,
    backend_on,
    build_side,
    isolated,
)
from ..statistics.paper import LARGE, SMALL
from ..statistics.peers import EAGER, combined, owed

__all__ = ["add_peers_arguments", "main", "ours", "run_peers"]

LIMIT_S = 90.0
MEGATRON = "megatron-core==0.19.2"
OURS = "ours"


# Ours and torch's


def ours(
    member: Member, asked: PeerSettings, folder: Path, done: Callable[[dict[str, Any]], None]
) -> None:
    """
    Native, replays and one launch of every cell.

    Args:
        member: This rank.
        asked: What to measure.
        folder: Where native's gradients are kept for the processes that follow.
        done: Takes each row when it is measured.
    """
    for cell in asked.cells:
        with isolated(member):
            done(_native(member, asked, folder, cell))
        for schedule in ("il", "zbv"):
            with isolated(member):
                row, state = _replays(member, asked, folder, cell, schedule)
                done(row)
            if asked.device == "cuda":
                with isolated(member):
                    done(_one_launch(member, asked, cell, schedule, state))
            del state


def _by_model(job: DrawnLanguage, gradients: Gradients) -> dict[str, Tensor]:
    """Clones of a rank's gradients, by the model's names."""
    return {
        job.name_of(stage, name): gradient.detach().clone()
        for stage, named in gradients.items()
        for name, gradient in named.items()
    }


def _native(member: Member, asked: PeerSettings, folder: Path, cell: str) -> dict[str, Any]:
    job = asked.job(cell, "il")
    seen: list[dict[str, Tensor]] = []
    wanted = [False]

    def look(gradients: Gradients) -> None:
        if wanted[0]:
            seen.append(_by_model(job, gradients))

    side, made = build_side(
        member,
        lambda: NativeSide(member, job, backend_on(asked.device), optimizer=motionless, look=look),
    )
    for _ in range(asked.settled - 1):
        side.step()
    wanted[0] = True
    side.step()
    wanted[0] = False
    member.synchronize()
    (own,) = seen
    save_gradients(folder, cell, "native", member.rank, own)
    gradients = compare_gradients(member, folder, cell, ["native"], own)
    own.clear()
    losses = all_gather(member, side.pipeline.losses[-1])
    found = time_side(
        member, side.step, asked.rounds_of(graphs=False), construction_s=made, facts={}
    )
    return peer_row(cell, "native", "il", gradients, sum(map(sum, losses)), found)


def _replays(
    member: Member, asked: PeerSettings, folder: Path, cell: str, schedule: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    job = asked.job(cell, schedule)
    mode, backend = mode_on(asked.device), backend_on(asked.device)
    side, made = build_side(
        member, lambda: ReplaySide(member, job, backend, mode, optimizer=motionless)
    )
    worker = side.worker
    for _ in range(asked.settled - 1):
        worker.step()
    with worker.stepping():
        gradients = worker.pipeline.step(worker.optimizer)
    worker.runtime.handoff.synchronize()
    own = _by_model(job, gradients)
    against = compare_gradients(member, folder, cell, ["native"], own)
    own.clear()
    state = {name: tensor.detach().clone() for name, tensor in side.state().items()}
    plan = asked.rounds_of(graphs=asked.device == "cuda")
    found = time_side(member, worker.step, plan, construction_s=made, facts={})
    worker.close()
    return peer_row(cell, "replays", schedule, against, None, found), state


def _one_launch(
    member: Member, asked: PeerSettings, cell: str, schedule: str, state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Of one launch what it leaves is compared: AdamW's moments are those of its gradients."""
    job = asked.job(cell, schedule)
    side, made = build_side(
        member, lambda: LaunchSide(member, job, backend_on(asked.device), optimizer=motionless)
    )
    for _ in range(asked.settled):
        side.step()
    sums = distance_sums(side.state(), state)
    against = [{"with": "replays", **combined(all_gather(member, sums))}]
    plan = asked.rounds_of(graphs=True)
    found = time_side(member, side.step, plan, construction_s=made, facts={})
    side.whole.leave()
    side.close()
    return peer_row(cell, "one launch", schedule, against, None, found)


# The run


def _runs(modes: Sequence[str], cells: Sequence[str]) -> list[tuple[str, list[str]]]:
    """
    Mode and cells of each start of all ranks.

    Megatron's local and full-iteration graphs are made once in a process, so each cell has one of
    its own.
    """
    runs: list[tuple[str, list[str]]] = []
    for mode in modes:
        if mode in ("local", "full_iteration"):
            runs += [(mode, [cell]) for cell in cells]
        else:
            runs.append((mode, list(cells)))
    return runs


MODES = (OURS, "none", "transformer_engine", "local", "full_iteration")


def add_peers_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report peers`."""
    parser.add_argument(
        "--cells",
        nargs="+",
        default=[SMALL, LARGE],
        metavar="CELL",
        help=f"layers and microbatches (default {SMALL} {LARGE})",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        choices=MODES,
        metavar="MODE",
        help=f"some of {', '.join(MODES)} (default all; all but ours are Megatron-core's)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"time limit per mode in seconds, doubled for ours (default {LIMIT_S:g})",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="rounds per side (default 3)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        metavar="N",
        help="steps per round for modes that replay graphs (default 10)",
    )
    parser.add_argument(
        "--native-steps",
        type=int,
        default=3,
        metavar="N",
        help="steps per round for modes without graphs (default 3)",
    )
    parser.add_argument("--no-profile", action="store_true", help="run no steps under the profiler")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="device (default cuda)"
    )
    add_report_options(parser)


def _asked(args: argparse.Namespace) -> PeerSettings:
    for cell in args.cells:
        layers, _, microbatches = cell.rpartition("-m")
        if layers not in LAYERS or not microbatches.isdecimal() or not int(microbatches):
            raise UnusableError(
                f"--cells: expected one of {', '.join(LAYERS)} and microbatches, as in {SMALL}; "
                f"found {cell!r}"
            )
    if min(args.rounds, args.steps, args.native_steps) < 1 or args.limit <= 0:
        raise UnusableError("--rounds, --steps, --native-steps and --limit must be positive")
    return PeerSettings(
        cells=args.cells,
        rounds=args.rounds,
        steps=args.steps,
        native_steps=args.native_steps,
        device=args.device,
        profile=not args.no_profile,
    )


def _require(args: argparse.Namespace) -> None:
    """
    Refuse what cannot run here, before anything is started.

    Raises:
        UnusableError: Megatron-core, a GPU or Transformer Engine is missing.
    """
    theirs = [mode for mode in args.modes if mode != OURS]
    if theirs and args.device == "cpu":
        raise UnusableError(f"--modes {theirs[0]} needs --device cuda; on a CPU take --modes ours")
    if theirs and importlib.util.find_spec("megatron") is None:
        raise UnusableError(
            f"--modes {theirs[0]} needs Megatron-core, which is not installed: pip install "
            f"--no-deps {MEGATRON}; or take --modes ours"
        )
    if args.device == "cuda":
        require_device("--device cpu --modes ours runs without one")
        if torch.cuda.device_count() < PP:
            raise UnusableError(
                f"{PP} GPUs are needed, one a rank; found {torch.cuda.device_count()}"
            )


def run_peers(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run every mode in processes of its own, and report.

    Refused where a guarded row differs from the bits of its reference, where its gradients are far
    from native's under another schedule, or where no guarded row was measured.

    Raises:
        UnusableError: Nothing can be run here.
    """
    asked = _asked(args)
    require_place(args.out)
    _require(args)
    raw: dict[str, Any] = {"rows": [], "refusals": {}, "processes": []}
    configuration = {**attrs.asdict(asked), "modes": args.modes, "limit": args.limit}
    report = Report("peers", args.out, environment(args.commit, args.out), configuration, raw)
    with tempfile.TemporaryDirectory(prefix="qeffect-peers-") as folder:
        for mode, cells in _runs(args.modes, asked.cells):
            progress.note(f"Measuring. {mode}: {', '.join(cells)}")
            _start(args, mode, cells, Path(folder), raw)
            report.save()
    derived = report.finish()["derived"]
    own = [row for row in derived["rows"] if row["side"] in ("native", "replays", "one launch")]
    right = own and all(map(owed, own))
    return Outcome("accepted" if right else "refused", {"derived": derived}, report.lines())


def main(argv: Sequence[str]) -> int:
    """Measure one mode as one rank, where the words begin with `--mode`; else run the command."""
    if argv[:1] != ["--mode"]:
        return cli.main(["runtime", "report", "peers", *argv])
    parser = argparse.ArgumentParser()
    add_peers_arguments(parser)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args(argv)
    _child(args, _asked(args))
    return 0


def _start(
    args: argparse.Namespace, mode: str, cells: Sequence[str], folder: Path, raw: dict[str, Any]
) -> None:
    """Run one mode, and take up the rows that it has written, however it ended."""
    result = folder / "rows.json"
    result.unlink(missing_ok=True)
    numbers = ["--rounds", args.rounds, "--steps", args.steps, "--native-steps", args.native_steps]
    command = [sys.executable, "-m", "qeffect.gpu_runtime.lab.commands.peers", "--mode", mode]
    command += ["--cells", *cells, "--folder", str(folder), "--device", args.device]
    command += [str(word) for word in numbers] + ["--no-profile"] * args.no_profile
    limit = args.limit * (2 if mode == OURS else 1)
    ended = run_ranks(command, PP, limit, folder, "words")
    found: dict[str, Any] = {"rows": [], "refusals": {}}
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
    raw["rows"] += found["rows"]
    raw["refusals"].update(found["refusals"])
    if ended.error is not None:
        seen = {(row["cell"], row["side"], row["schedule"]) for row in found["rows"]}
        missing = [row for row in _wanted(mode, cells, args.device) if row not in seen]
        # The first that is missing failed; what would have followed it was not run.
        raw["rows"] += [_failed(*row, ended.error) for row in missing[:1]]
    raw["processes"].append(
        {
            "mode": mode,
            "cells": list(cells),
            "codes": ended.codes,
            "seconds": round(ended.seconds, 2),
            "words": ended.words if ended.error is not None else [],
        }
    )


def _wanted(mode: str, cells: Sequence[str], device: str) -> list[tuple[str, str, str]]:
    """Cell, side and schedule of each row of a mode, in the order in which they are measured."""
    if mode != OURS:
        side = EAGER if mode == "none" else f"megatron {mode}"
        return [(cell, side, "il") for cell in cells]
    sides = ("replays", "one launch") if device == "cuda" else ("replays",)
    return [
        row
        for cell in cells
        for row in [
            (cell, "native", "il"),
            *((cell, side, schedule) for schedule in ("il", "zbv") for side in sides),
        ]
    ]


def _failed(cell: str, side: str, schedule: str, error: str) -> dict[str, Any]:
    return {"cell": cell, "side": side, "schedule": schedule, "error": error}


def _child(args: argparse.Namespace, asked: PeerSettings) -> None:
    """One rank of one mode; ends the process, since groups make an orderly end hang."""
    code = 1
    try:
        _measure(args, asked)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _measure(args: argparse.Namespace, asked: PeerSettings) -> None:
    """Every row of a mode; rank 0 writes them down one by one."""
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    found: dict[str, Any] = {"rows": [], "refusals": {}}
    rank = int(os.environ["RANK"])

    def done(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        save()

    def save() -> None:
        if rank == 0:
            write_json(args.folder / "rows.json", found)

    if args.mode == OURS:
        ours(join(args.device), asked, args.folder, done)
    else:
        from ..sides import megatron

        if args.mode == "none":
            found["refusals"].update(megatron.delayed())
            save()
        megatron.measure(args.mode, asked, args.folder, done)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
