"""
``qeffect runtime report restarts``: stop training, resume it from a checkpoint, and compare every
bit.

The command runs several parts, each with new ranks in processes of their own, and compares the
results of the parts. The first part trains from the beginning and saves a checkpoint midway. The
second part resumes from that checkpoint and must end with the same bits as the first part. The
third part loads the checkpoint into another mapping of layers to ranks and takes one step. For
comparison, another pipeline takes the same step after its state was copied by hand from a file that
torch made from the checkpoint. With `--one-launch` the first two parts run each step as one launch,
and a fourth part resumes with guarded replays and must end with the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from qeffect import cli
from qeffect.cli.command import Outcome, Progress, refuse_unused

from ...backends.determinism import DETERMINISTIC
from ...backends.layers import LayerConfig
from ...ranks.job import Job
from ...ranks.membership import join
from ...runtime import Mode
from ...training.checkpoint import Checkpoints, sizes
from ..reports.report import (
    Report,
    UnusableError,
    add_report_options,
    environment,
    require_place,
)
from ..runner.rank_process import Findings
from ..runner.starts import RankStarts
from ..sides.pipelines import backend_on
from ..sides.restart import (
    SAVED_AT,
    UNTIL,
    Trial,
    differing_names,
    first_run,
    remapped_run,
    resumed_run,
)

__all__ = ["add_restarts_arguments", "remapped_row", "resumed_row", "run_restarts"]

Part = Callable[..., dict[str, Any]]
"""A part of a trial: a function of member, trial and folder that returns the rank's results."""

LAYERS = 4
"""Number of layers of the model, the same under every mapping."""


def _mode(args: argparse.Namespace) -> Mode:
    """How steps run, as the options request: `eager`, `replays` or `one launch`."""
    if args.one_launch:
        return "one launch"
    return "eager" if args.device == "cpu" or args.eager else "replays"


def _trial(
    args: argparse.Namespace, schedule: str, pp: int, vpp: int | None, mode: Mode, layers: int
) -> Trial:
    hidden, ffn, heads, sequence = (
        (64, 128, 2, 32)
        if args.device == "cpu"
        else (args.hidden or 1024, 4 * (args.hidden or 1024), 8, 512)
    )
    job = Job(
        schedule=schedule,
        pp=pp,
        vpp=vpp,
        dp=args.dp,
        microbatches=4,
        layers=layers,
        history=args.history,
        rule="accumulate",
        config=LayerConfig(hidden, ffn, heads, sequence),
    )
    return Trial(job=job, device=args.device, mode=mode, masters=args.masters)


def add_restarts_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report restarts`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)"
    )
    parser.add_argument(
        "--eager", action="store_true", help="run without CUDA graphs (only with cuda)"
    )
    parser.add_argument(
        "--one-launch", action="store_true", help="run each step as one CUDA graph (only with cuda)"
    )
    parser.add_argument(
        "--masters", action="store_true", help="use float32 gradients and master weights"
    )
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="save checkpoints asynchronously, while the next steps run",
    )
    parser.add_argument(
        "--hidden", type=int, metavar="N", help="layer width on cuda (default 1024)"
    )
    parser.add_argument(
        "--history", type=int, default=16, metavar="N", help="length of amax histories (default 16)"
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["il", "zbv"],
        metavar="NAME",
        help="schedules under which to save (default il zbv)",
    )
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="replicas (default 1)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="number of training runs that run at the same time (default 1)",
    )
    parser.add_argument(
        "--same",
        action="store_true",
        help="resume only under the saved schedule and number of ranks, not under other mappings",
    )
    add_report_options(parser)


def _rank_part(
    part: Part, trial: Trial, folder: str, options: Mapping[str, Any], findings: Findings
) -> None:
    """Run one part of the trial (the first run, or a run that resumes from its checkpoint) on one
    rank."""
    member = join(trial.device, trial.limits)
    if trial.device == "cpu":
        torch.set_num_threads(1)
    findings.add(part(member, trial, folder, **options))


def _run_part(part: Part, trial: Trial, folder: Path, **options: Any) -> list[Any]:
    """
    Run one part of the trial, such as a resumed run, with a fresh process per rank; return each
    rank's results.

    Raises:
        UnusableError: A rank failed.
    """
    place = Path(tempfile.mkdtemp(prefix=f"{part.__name__}-", dir=folder.parent))
    usual = {name: value for name, value in DETERMINISTIC.items() if name not in os.environ}
    ranks = RankStarts(trial.job.world, place)
    start = ranks.start(_rank_part, part, trial, str(folder), options, environ=usual)
    start.require()
    return [found for (found,) in start.rows]


def run_restarts(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train, save, resume, and compare every bit; the outcome is `refused` if a bit differs or
    if a comparison had no values.

    Raises:
        UnusableError: The machine has too few devices, or a part failed.
    """
    require_place(args.out)
    most = _most(args)
    where = environment(args.commit, args.out)
    asked = {
        "device": args.device,
        "backend": backend_on(args.device),
        "captured": _mode(args) != "eager",
        "one_launch": args.one_launch,
        "masters": args.masters,
        "asynchronous": args.asynchronous,
        "hidden": 64 if args.device == "cpu" else args.hidden or 1024,
        "history": args.history,
        "schedules": args.schedules,
        "dp": args.dp,
        "saved_at": SAVED_AT,
        "until": UNTIL,
    }
    saving = threading.Lock()
    found: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in args.schedules}
    rows: list[dict[str, Any]] = []
    report = Report("restarts", args.out, where, asked, {"rows": rows})

    def done(schedule: str, row: dict[str, Any]) -> None:
        with saving:
            found[schedule].append(row)
            rows[:] = [row for of_one in found.values() for row in of_one]
            progress.note(f"Compared: {_said(row)}")
            report.save()

    with (
        tempfile.TemporaryDirectory(prefix="qeffect-restarts-") as place,
        ThreadPoolExecutor(max_workers=args.at_once) as parts,
        ThreadPoolExecutor(max_workers=args.at_once) as schedules,
    ):

        def run_schedule(schedule: str) -> None:
            folder, mode = Path(place, schedule), _mode(args)
            trial = _trial(args, schedule, 2, None, mode, 1)
            saves = {"asynchronous": True} if args.asynchronous else {}
            whole = parts.submit(_run_part, first_run, trial, folder, **saves).result()
            weighed = sizes(Checkpoints(folder).latest() or folder)
            again = parts.submit(_run_part, resumed_run, trial, folder)
            replayed = None
            if args.one_launch:
                guarded = _trial(args, schedule, 2, None, "replays", 1)
                replayed = parts.submit(_run_part, resumed_run, guarded, folder)
            others = [] if args.same else _others(schedule, most)
            moved = [
                parts.submit(_run_part, remapped_run, _remapping(args, *other), folder)
                for other in others
            ]
            done(schedule, resumed_row(schedule, whole, again.result(), weighed))
            if replayed is not None:
                there = f"{schedule}, guarded replays"
                done(schedule, resumed_row(schedule, whole, replayed.result(), weighed, there))
            for (other, pp, vpp), ranks in zip(others, moved, strict=True):
                layers = LAYERS // (pp * vpp)
                there = f"{other}, PP={pp}, stages per rank {vpp}, layers per stage {layers}"
                done(schedule, remapped_row(schedule, there, whole, ranks.result(), weighed))

        try:
            list(schedules.map(run_schedule, found))
        finally:
            # After an error no further part begins: each part holds all GPUs for minutes.
            parts.shutdown(wait=False, cancel_futures=True)
    derived = report.finish()["derived"]
    good = all(row["differ"] == 0 and row["compared"] > 0 for row in rows)
    return Outcome("accepted" if good else "refused", {"derived": derived}, report.lines())


def _remapping(args: argparse.Namespace, schedule: str, pp: int, vpp: int) -> Trial:
    """
    A trial that maps the checkpoint's layers onto ranks in another way, and runs guarded replays or
    eager calls.
    """
    mode: Mode = "eager" if args.device == "cpu" or args.eager else "replays"
    return _trial(args, schedule, pp, vpp, mode, LAYERS // (pp * vpp))


def _said(row: Mapping[str, Any]) -> str:
    return (
        f"{row['saved_under']}, {row['how']} under {row['loaded_under']}: {row['differ']} of "
        f"{row['compared']} values differ"
    )


def _most(args: argparse.Namespace) -> int:
    """
    The largest number of ranks for which this machine has devices.

    Raises:
        UnusableError: The machine has devices for fewer than two ranks, or a count is below 1.
    """
    given = (("--dp", args.dp), ("--at-once", args.at_once), ("--hidden", args.hidden))
    for option, number in given:
        if number is not None and number < 1:
            raise UnusableError(f"{option} must be at least 1, found {number}")
    if args.one_launch and (args.device == "cpu" or args.eager):
        raise UnusableError(
            "--one-launch makes a step one CUDA graph, so it needs --device cuda without --eager; "
            "leave it out"
        )
    if args.device == "cpu":
        refuse_unused(args, ["--eager"], "a CPU has no CUDA graphs")
        refuse_unused(
            args, ["--hidden"], "on a CPU the layer width is always 64", wants="--device cuda"
        )
        return LAYERS
    found: int = torch.cuda.device_count() // args.dp
    if found < 2:
        raise UnusableError(
            f"expected {2 * args.dp} GPUs, one per rank, found {torch.cuda.device_count()}"
        )
    return found


def _others(schedule: str, most: int) -> list[tuple[str, int, int]]:
    """
    Other mappings of the layers onto at most `most` ranks; each mapping is a schedule, a number of
    ranks, and a number of stages per rank.
    """
    others = [
        ("zbv" if schedule == "il" else "il", 2, 2),
        ("1f1b", 2, 1),
        ("il", 1, 4),
        ("1f1b", 4, 1),
    ]
    return [other for other in others if other[1] <= most]


def resumed_row(
    schedule: str,
    whole: list[Any],
    again: list[Any],
    weighed: Mapping[str, int],
    there: str | None = None,
) -> dict[str, Any]:
    """
    Compare a resumed run with the run that never stopped, all ranks together.

    Args:
        schedule: The schedule of the run that never stopped.
        whole: Results of the ranks of the run that never stopped.
        again: Results of the ranks of the resumed run.
        weighed: Bytes of the checkpoint, by kind of content, such as weights or optimizer moments.
        there: Schedule and mode of the resumed run, if they differ from those of the run that
            saved.
    """
    compared, differ = 0, []
    for a, b in zip(whole, again, strict=True):
        if (b["began"], b["epoch"]) != (SAVED_AT, UNTIL):
            differ.append(f"steps {b['began']} to {b['epoch']}")
        compared += len(a["saved"][str(SAVED_AT)]) + len(a["last"])
        differ += differing_names(a["saved"][str(SAVED_AT)], b["first"])
        differ += differing_names(a["last"], b["last"])
        for step, losses in b["losses"].items():
            compared += len(losses)
            differ += [f"loss of step {step}"] * (losses != a["losses"][step])
    row = _row("resumed", schedule, there or schedule, compared, differ, again, weighed)
    return {**row, "launches": [ranks[0]["launches"] for ranks in (whole, again)]}


def remapped_row(
    schedule: str, there: str, whole: list[Any], moved: list[Any], weighed: Mapping[str, int]
) -> dict[str, Any]:
    """
    Compare the loaded state with the saved state, and the next step with the same step after a
    manual copy of the state.
    """
    saved = {name: bit for rank in whole for name, bit in rank["saved"][str(SAVED_AT)].items()}
    loaded = {name: bit for rank in moved for name, bit in rank["first"].items()}
    compared, differ = len(saved), differing_names(saved, loaded)
    for rank in moved:
        compared += len(rank["last"]) + sum(map(len, rank["losses"].values()))
        differ += rank["loaded otherwise"] + rank["differ"]
        differ += ["losses"] * (not rank["same losses"]) + ["no step"] * (not rank["moved"])
    return _row("remapped", schedule, there, compared, differ, moved, weighed)


def _row(
    how: str,
    saved_under: str,
    loaded_under: str,
    compared: int,
    differ: list[str],
    ranks: list[Any],
    weighed: Mapping[str, int],
) -> dict[str, Any]:
    steps = sorted(ranks[0]["losses"], key=int)
    return {
        "how": how,
        "saved_under": saved_under,
        "loaded_under": loaded_under,
        "compared": compared,
        "differ": len(differ),
        "first": differ[:3],
        "changed": list(ranks[0]["changed"]),
        "losses": [sum(sum(rank["losses"][step]) for rank in ranks) for step in steps],
        "bytes": dict(weighed),
    }


if __name__ == "__main__":
    raise SystemExit(cli.main(["runtime", "report", "restarts", *sys.argv[1:]]))
