"""
``qeffect runtime demo``: run a few guarded steps and the same steps natively, and compare every
bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import attrs
import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError
from qeffect.text import counted

from ...backends.protocol import BackendError
from ...doctor import examine
from ..comparisons.cases import STEPWISE, Case, shrink
from ..reports.report import Report
from .compare import compare_cases

__all__ = ["add_demo_arguments", "run_demo"]

#: With more ranks than cores, a step would exceed the time limit.
_MOST_RANKS = 8
#: Time limit for four steps of all ranks, start included, in seconds.
_LIMIT_S = 120.0


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="optimizer steps (default 4)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="run a pipeline of this many ranks on the CPU, one process each (default: one "
        "process without a pipeline)",
    )


def run_demo(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run and compare; the outcome is `refused` if a bit differs or a side failed.

    Raises:
        UnusableError: This machine cannot run the demo.
    """
    if args.steps < 1:
        raise UnusableError(f"--steps must be at least 1, not {args.steps}")
    if args.ranks is not None:
        return _pipeline(args.ranks, args.steps)
    on_gpu = torch.cuda.is_available() and all(f.works for f in examine())
    case = _case(on_gpu, args.steps)
    backend = "Transformer Engine, captured" if on_gpu else "the reference backend, eager"
    began = time.perf_counter()
    report = Report("compare", None, {}, {}, {"runs": [], "failures": []})
    sides = ("native", "captured" if on_gpu else "eager")
    try:
        compare_cases([case], sides, "cuda" if on_gpu else "cpu", report, progress.note)
    except BackendError as error:
        raise UnusableError(str(error)) from error
    derived = report.finish()["derived"]
    failures = report.raw["failures"]
    same = not derived["mismatched"] and not failures and derived["compared"]
    lines = [
        f"{case.order().source}: {counted(args.steps, 'guarded step')} with {backend}, compared",
        "bit by bit with the same training by native full backwards in another process:",
        *(
            f"  {name:22} {total['mismatched']:4} of {total['compared']:6} differ"
            for name, total in derived["categories"].items()
        ),
        *(f"{failure['side']} failed: {failure['error']}" for failure in failures),
        f"{'The same bits' if same else 'NOT the same'}, in {time.perf_counter() - began:.0f} s.",
    ]
    data = {"backend": backend, "derived": derived, "failures": failures}
    return Outcome("accepted" if same else "refused", data, lines)


def _pipeline(ranks: int, steps: int) -> Outcome:
    """
    Compare ZB-V over a few ranks of this machine with torch's own pipeline.

    Raises:
        UnusableError: The number of ranks is out of range, or the ranks could not be run.
    """
    if not 2 <= ranks <= _MOST_RANKS:
        raise UnusableError(
            f"--ranks: expected 2 to {_MOST_RANKS}, found {ranks}; to run more ranks, use "
            "torchrun --nproc-per-node N -m qeffect runtime pipeline"
        )
    words = (
        *("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("-m", "qeffect", "runtime", "pipeline", "--pp", str(ranks), "--steps", str(steps)),
        *("--compare", "--json", "--hidden", "32", "--ffn", "64", "--sequence", "16"),
    )
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S * (1 + steps / 4),
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise UnusableError(f"{ranks} ranks did not end within {error.timeout:.0f} s") from error
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not objects:
        said = [line for line in done.stderr.splitlines() if line.startswith("qeffect: ")]
        why = said[0].removeprefix("qeffect: ") if said else f"exit code {done.returncode}"
        raise UnusableError(f"running {ranks} ranks failed: {why}")
    data = json.loads(objects[0])
    if "error" in data:
        raise UnusableError(f"running {ranks} ranks failed: {data['error']}")
    totals = data.get("categories", {})
    same = data["verdict"] == "accepted"
    lines = [
        f"ZB-V over {ranks} ranks with gloo: {counted(steps, 'guarded step')} with the reference",
        "backend, compared bit by bit with torch's own pipeline over native full backwards:",
        *(f"  {name:20} {t['differ']:4} of {t['compared']:6} differ" for name, t in totals.items()),
        *([data["cause"]["text"]] if "cause" in data else []),
        f"{'The same bits' if same else 'NOT the same'}, in {time.perf_counter() - began:.0f} s.",
    ]
    return Outcome("accepted" if same else "refused", {"ranks": ranks, "pipeline": data}, lines)


def _case(on_gpu: bool, steps: int) -> Case:
    case = next(c for c in STEPWISE if c.name == "zbv-accumulate-h4")
    return attrs.evolve(case if on_gpu else shrink(case), steps=steps)
