"""
A few guarded steps on whatever device there is, the same natively, and the comparison.
"""

from __future__ import annotations

import argparse
import time

import attrs
import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.doctor import examine
from qeffect.gpu_runtime.evidence.cases import STEPWISE, Case, small
from qeffect.gpu_runtime.evidence.command import compare_cases
from qeffect.gpu_runtime.measure.report import Report
from qeffect.report import UnusableError

__all__ = ["add_demo_arguments", "run_demo"]


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (default 4)")


def run_demo(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Run and report; refused when one bit differs or a side failed.

    Raises:
        UnusableError: Nothing can be run here.
    """
    if args.steps < 1:
        raise UnusableError(f"--steps must be at least 1, not {args.steps}")
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
        f"{case.order().source}: {args.steps} guarded steps with {backend}, and the same natively,",
        "as full backward, in a process of its own. Then every bit of every tensor is compared:",
        *(
            f"  {name:22} {total['mismatched']:4} of {total['compared']:6} differ"
            for name, total in derived["categories"].items()
        ),
        *(f"{failure['side']} failed: {failure['error']}" for failure in failures),
        f"{'The same bits' if same else 'NOT the same'}, in {time.perf_counter() - began:.0f} s.",
    ]
    data = {"backend": backend, "derived": derived, "failures": failures}
    return Outcome("accepted" if same else "refused", data, lines)


def _case(on_gpu: bool, steps: int) -> Case:
    case = next(c for c in STEPWISE if c.name == "zbv-accumulate-h4")
    return attrs.evolve(case if on_gpu else small(case), steps=steps)
