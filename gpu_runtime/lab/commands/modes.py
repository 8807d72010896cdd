"""
``qeffect runtime report modes``: run a framework under many combinations of options, and compare
their bits and the guard's reports.

``--framework torch`` runs the schedules of `torch.distributed.pipelining`, ``--framework megatron``
runs the loops of Megatron-core, and ``--framework torchtitan`` runs TorchTitan's trainer. Each
combination of options is a row of the report. Ranks on this machine run the rows: on a CPU over
gloo, or with ``--device cuda`` on two GPUs over NCCL. TorchTitan's rows run on a CPU only. The exit
code is 1 if a row's bits differ and the guard is silent, if the guard raises a false alarm, or if
the guard changes a bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from ..comparisons.modes import FRAMEWORKS, Place, rows_of, run_rows
from ..reports.report import Report, add_report_options, environment, require_place
from ..runner.device import require_device
from ..statistics.modes import WRONG

__all__ = ["add_modes_arguments", "run_modes"]


def add_modes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `modes`."""
    parser.add_argument(
        "--framework",
        choices=sorted(FRAMEWORKS),
        default="torch",
        help="framework whose modes are run (default torch)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="F",
        help="Python interpreter that runs the ranks, with its packages (default: this "
        "interpreter)",
    )
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="FOLDER",
        help="folder of packages that the ranks import before others",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit per mode in seconds (default 60)",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="number of modes that run side by side (default 1)",
    )
    add_report_options(parser)


def run_modes(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run every combination of options, and write the report.

    Raises:
        UnusableError: The framework or a device is missing, or a number is out of range.
    """
    require_place(args.out)
    if not args.limit > 0:
        raise UnusableError(f"--limit must be above 0, found {args.limit:g}")
    if args.at_once < 1:
        raise UnusableError(f"--at-once must be at least 1, found {args.at_once}")
    if args.device == "cuda":
        if args.framework == "torchtitan":
            raise UnusableError("--framework torchtitan runs on a CPU only; leave --device out")
        library = args.framework == "megatron"
        require_device("--device cpu runs the modes that need no GPU", library=library)
        if (found := torch.cuda.device_count()) < 2:
            raise UnusableError(f"--device cuda needs two GPUs, found {found}")
    where = environment(args.commit, args.out)
    place = Place(args.python, args.packages, args.device, args.limit)
    versions = place.versions(args.framework)
    framework = FRAMEWORKS[args.framework](versions, args.device)
    asked = {
        "framework": args.framework,
        "device": args.device,
        "versions": versions,
        "limit_s": args.limit,
        "factors": {name: list(values) for name, values in framework.factors.items()},
        "numbers": list(framework.numbers),
    }
    report = Report("modes", args.out, where, asked, {"rows": []})

    def take(rows: list[dict[str, Any]]) -> None:
        report.raw["rows"][:] = rows
        report.save()

    every = rows_of(framework)
    run_rows(place, args.framework, every, progress.note, take, at_once=args.at_once)
    derived = report.finish()["derived"]
    wrong = any(derived["ends"].get(end) for end in WRONG)
    return Outcome("refused" if wrong else "accepted", {"derived": derived}, report.lines())
