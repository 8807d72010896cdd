"""
A few guarded steps on whatever device there is, the same natively, and the comparison.
"""

from __future__ import annotations

import argparse
import sys
import time

import attrs
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.doctor import examine
from qeffect.gpu_runtime.evidence.cases import STEPWISE, Case, small
from qeffect.gpu_runtime.evidence.command import compare_cases
from qeffect.gpu_runtime.measure.report import Report

__all__ = ["add_demo_arguments", "run_demo"]


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (default 4)")


def run_demo(args: argparse.Namespace) -> int:
    """
    Run and print.

    Returns:
        0 when every bit is the same, 1 when one is not, 2 when nothing could run.
    """
    if args.steps < 1:
        print(f"demo: --steps must be at least 1, not {args.steps}", file=sys.stderr)
        return 2
    on_gpu = torch.cuda.is_available() and all(f.works for f in examine())
    case = _case(on_gpu, args.steps)
    backend = "Transformer Engine, captured" if on_gpu else "the reference backend, eager"
    print(f"{case.order().source}: {args.steps} guarded steps with {backend},")
    print("the same as native full backward in a process of its own; then every tensor's bits.")
    began = time.perf_counter()
    report = Report("compare", None, {}, {}, {"runs": [], "failures": []})
    sides = ("native", "captured" if on_gpu else "eager")
    try:
        compare_cases([case], sides, "cuda" if on_gpu else "cpu", report)
    except BackendError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    derived = report.finish()["derived"]
    for failure in report.raw["failures"]:
        print(f"{failure['side']} failed: {failure['error']}", file=sys.stderr)
    for name, total in derived["categories"].items():
        print(f"  {name:22} {total['mismatched']:4} of {total['compared']:6} differ")
    same = not derived["mismatched"] and not report.raw["failures"] and derived["compared"]
    print(f"{'The same bits' if same else 'NOT the same'}, in {time.perf_counter() - began:.0f} s.")
    return 0 if same else 1


def _case(on_gpu: bool, steps: int) -> Case:
    case = next(c for c in STEPWISE if c.name == "zbv-accumulate-h4")
    return attrs.evolve(case if on_gpu else small(case), steps=steps)
