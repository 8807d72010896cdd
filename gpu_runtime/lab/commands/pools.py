"""
``qeffect runtime report pools``: show which values become wrong if graphs share one memory pool.

Graphs with a pool per slot, and graphs with one pool for all slots, are replayed out of capture
order and compared with native full backward, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from ...backends.determinism import DETERMINISTIC
from ..comparisons.capture_memory import DISCIPLINES, NATIVE, ORDERS, WATCHED, run_trial
from ..comparisons.cases import Case, shrink
from ..comparisons.recording import Recording, compare
from ..reports.report import Report, add_report_options, environment
from ..runner.device import require_device
from ..runner.processes import ChildError, ChildProcess, answer

__all__ = ["add_pools_arguments", "compare_pools", "run_pools"]

TIMEOUT_S = 300.0

#: The problem that `derive_pools` reports if a shared pool corrupted nothing; on a CPU, a shared
#: pool never corrupts anything.
HARMLESS = "the shared pool corrupted nothing, so the comparison proves nothing"


def add_pools_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pools`."""
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps per run (default: depends on the case)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device (default cuda); cpu runs the eager reference backend with hidden size 128, "
        "which has no pools and corrupts nothing",
    )
    add_report_options(parser)


def run_pools(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Replay with private pools and with a shared pool, and write the report.

    The outcome is `refused` in three cases: private pools differ from native in a bit; the contract
    allowed a shared pool; or a shared pool corrupted nothing on a GPU, so that the comparison
    proves nothing.

    Raises:
        UnusableError: This machine cannot run the trials.
    """
    if args.steps is not None and args.steps < 1:
        raise UnusableError(f"--steps must be at least 1, not {args.steps}")
    on_cpu = args.device == "cpu"
    if not on_cpu:
        require_device("--device cpu runs the trials over the reference backend")
    cases = [shrink(case) for case in ORDERS] if on_cpu else list(ORDERS)
    if args.steps is not None:
        cases = [case.with_steps(args.steps) for case in cases]
    configuration = {"orders": [case.to_json() for case in cases]}
    report = Report(
        "pools", args.out, environment(args.commit, args.out), configuration, {"runs": []}
    )
    report.save()
    backend = "reference" if on_cpu else "transformer-engine"
    for case in cases:
        compare_pools(case, backend, args.device, report, progress.note)
    finished = report.finish()
    data = {"derived": finished["derived"]}
    harmless = (p.endswith(HARMLESS) for p in finished["derived"]["problems"])
    verdict = "accepted" if all(on_cpu and found for found in harmless) else "refused"
    return Outcome(verdict, data, report.lines())


def compare_pools(
    case: Case, backend: str, device: str, report: Report, say: Callable[[str], None]
) -> None:
    """
    Run native twice and each pool discipline (private or shared pools) once, all in fresh
    processes, and compare with the first native run.
    """
    os.environ.update(DETERMINISTIC)
    names = (*NATIVE, *DISCIPLINES)
    started = [
        ChildProcess(answer, run_trial, case.to_json(), name, backend, device) for name in names
    ]
    found = {name: _answer(each) for name, each in zip(names, started, strict=True)}
    base = found["native"]
    for name in names[1:]:
        run = record_of(case, name, base, found[name])
        report.raw["runs"].append(run)
        say(_line(run))
    report.save()


def _answer(process: ChildProcess) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = process.receive(TIMEOUT_S)
        return found
    except ChildError as error:
        return {"error": str(error)}
    finally:
        process.end()


def record_of(
    case: Case, name: str, native: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """One run's raw record: the refused action, and the differences from native."""
    error = own["error"] or (f"native: {native['error']}" if native["error"] else None)
    categories = []
    if error is None:
        reference = Recording.from_json(native["recording"])
        result = compare(reference, Recording.from_json(own["recording"]), categories=WATCHED)
        for category in result.categories:
            categories.append({**attrs.asdict(category), "first": list(category.first)})
    return {
        "order": case.name,
        "cells": " ".join(map(str, case.order().steps)),
        "rule": case.rule,
        "steps": case.steps,
        "discipline": name,
        "slots": dict(own.get("slots", {})),
        "refused": own.get("refused"),
        "nonfinite": own.get("nonfinite", 0),
        "categories": categories,
        "error": error,
    }


def _line(run: Mapping[str, Any]) -> str:
    if run["error"]:
        return f"{run['order']}: {run['discipline']} FAILED, {run['error']}"
    compared = sum(c["compared"] for c in run["categories"])
    mismatched = sum(c["mismatched"] for c in run["categories"])
    return (
        f"{run['order']}: {run['discipline']}: {mismatched} of {compared} values differ from native"
    )
