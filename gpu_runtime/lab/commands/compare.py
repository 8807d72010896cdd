"""
``qeffect runtime compare``: native, eager and captured steps, each in its own process, compared bit
for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from ...backends.determinism import DETERMINISTIC
from ...backends.protocol import BackendError
from ..comparisons.cases import DEFAULT_SETS, SETS, Case, fit_to_device, shrink
from ..comparisons.faults import INJECTED
from ..comparisons.recording import (
    CATEGORIES,
    REQUIRED,
    Category,
    Recording,
    compare,
)
from ..comparisons.sides import GUARDED, SIDES, record
from ..reports.report import Report, add_report_options, environment
from ..runner.device import require_device
from ..runner.processes import ChildError, ChildProcess

__all__ = [
    "add_compare_arguments",
    "compare_cases",
    "run_compare",
]


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `compare`."""
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=tuple(SETS),
        default=list(DEFAULT_SETS),
        help="sets of cases to compare. stepwise: hidden size 512. wide: hidden size 2048. "
        "recipes: other FP8 recipes. timed: the shapes of the step-time report. matrix: all "
        "schedules, amax histories and gradient rules at hidden size 128 (default "
        f"{' '.join(DEFAULT_SETS)})",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME",
        help="names of the cases to compare, from the chosen sets (default: all cases)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps per run (default: depends on the case)",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        help="sides (implementations) to run (default: all). native: Transformer Engine's own full "
        "backward. "
        "native-again: the native side a second time. eager and captured: the guarded "
        "runtime without and with CUDA graphs. disturbed: the guarded runtime with "
        "injected faults",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device (default cuda); cpu compares the reference backend, with hidden size 128 and "
        "without CUDA graphs",
    )
    add_report_options(parser)


def run_compare(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare all cases and write the report; the outcome is `refused` if a bit differs, a side
    failed, or a case had fewer than two sides (implementations) to compare.

    Raises:
        UnusableError: This machine cannot run what the options request.
    """
    cases = _cases_of(args)
    if args.device == "cuda":
        require_device("--device cpu compares the reference backend")
    sides = _sides(args)
    report = Report(
        "compare",
        args.out,
        environment(args.commit, args.out),
        {"sides": list(sides), "device": args.device},
        {"runs": [], "failures": []},
    )
    report.save()
    compare_cases(cases, sides, args.device, report, progress.note)
    finished = report.finish()
    differ = finished["derived"]["mismatched"] or report.raw["failures"]
    data = {"derived": finished["derived"], "failures": report.raw["failures"]}
    return Outcome("refused" if differ else "accepted", data, report.lines())


def _sides(args: argparse.Namespace) -> list[str]:
    usual = SIDES if args.device == "cuda" else ("native", "native-again", "eager")
    sides = list(dict.fromkeys(args.sides or usual))
    if args.device == "cpu" and "captured" in sides:
        raise UnusableError("a CPU has no CUDA graphs; leave `captured` out of --sides")
    if len(sides) < 2:
        raise UnusableError(
            f"--sides {sides[0]} names one side, but a comparison needs two; name two or more"
        )
    if "disturbed" in sides and args.steps is not None and args.steps <= max(INJECTED):
        raise UnusableError(
            f"--steps {args.steps} ends before the last fault is injected; use "
            f"{max(INJECTED) + 1} or more, or leave `disturbed` out of --sides"
        )
    return sides


def _cases_of(args: argparse.Namespace) -> list[Case]:
    cases = [case for name in args.sets for case in SETS[name]]
    if args.cases:
        known = {case.name: case for case in cases}
        if missing := [name for name in args.cases if name not in known]:
            raise UnusableError(f"unknown case {missing[0]!r}; choose from {', '.join(known)}")
        cases = [known[name] for name in args.cases]
    if args.device == "cuda":
        cases = [fit_to_device(case) for case in cases]
    else:
        cases = [shrink(case) for case in cases if case.scaling == "delayed"]
        if not cases:
            raise UnusableError(
                "the reference backend runs only cases with delayed scaling; choose other cases"
            )
    if args.steps is not None:
        if args.steps < 1:
            raise UnusableError(f"--steps must be at least 1, not {args.steps}")
        cases = [case.with_steps(args.steps) for case in cases]
    return cases


def compare_cases(
    cases: Sequence[Case],
    sides: Sequence[str],
    device: str,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Run all sides at once, each in its own process; compare and report case by case."""
    backend = "transformer-engine" if device == "cuda" else "reference"
    os.environ.update(DETERMINISTIC)
    data = [case.to_json() for case in cases]
    running = {side: ChildProcess(_serve, side, backend, device, data) for side in sides}
    for case in cases:
        recordings: dict[str, Recording] = {}
        for side, process in running.items():
            try:
                text = process.receive()
            except ChildError as error:
                report.raw["failures"].append(
                    {"case": case.name, "side": side, "error": str(error)}
                )
                continue
            if text is not None:
                recordings[side] = Recording.from_json(json.loads(text))
        runs = _compare_recordings(case, recordings)
        for run in runs:
            report.raw["runs"].append(run)
            say(_line(run))
        if not runs and not any(f["case"] == case.name for f in report.raw["failures"]):
            # A case that fewer than two sides ran must not count as equal.
            lacking = {
                "case": case.name,
                "side": ", ".join(recordings) or "none",
                "error": "fewer than two sides ran, so nothing was compared",
            }
            report.raw["failures"].append(lacking)
        report.save()
    for process in running.values():
        process.end()


def _compare_recordings(case: Case, recordings: Mapping[str, Recording]) -> list[dict[str, Any]]:
    """
    Compare the sides of one case with their reference. The reference is the native side or, without
    a native side, the eager guarded side.
    """
    reference = "native" if "native" in recordings else "eager"
    if reference not in recordings:
        return []
    base = recordings[reference]
    runs = []
    for side, recording in recordings.items():
        if side == reference:
            continue
        held: list[Category] = [c for c in CATEGORIES if base.values.get(c)]
        held += REQUIRED if side in GUARDED else ()
        result = compare(base, recording, categories=held)
        runs.append(
            {
                "case": case.to_json(),
                "reference": base.what,
                "candidate": side,
                "injected": recording.injected,
                "categories": [
                    {
                        "category": c.category,
                        "compared": c.compared,
                        "mismatched": c.mismatched,
                        "first": list(c.first),
                    }
                    for c in result.categories
                ],
            }
        )
    return runs


def _serve(
    pipe: Any, side: str, backend: str, device: str, cases: Sequence[Mapping[str, Any]]
) -> None:
    """
    Run one side of every case in this process, because Transformer Engine keeps only one FP8 state
    per process.
    """
    # Results on a CPU depend on the number of threads; with a GPU more threads only interfere.
    torch.set_num_threads(1)
    for data in cases:
        case = Case.from_json(data)
        try:
            recording = record(case, side, backend, device)
            text = None if recording is None else json.dumps(recording.to_json())
            pipe.send(("done", text))
        except BackendError as error:
            pipe.send(("failed", str(error)))
        except Exception:
            pipe.send(("failed", traceback.format_exc(limit=-6)))


def _line(run: Mapping[str, Any]) -> str:
    compared = sum(c["compared"] for c in run["categories"])
    differ = {c["category"]: c["mismatched"] for c in run["categories"] if c["mismatched"]}
    said = f"DIFFER {differ}" if differ else "all equal"
    name = run["case"]["name"]
    return (
        f"{name}: {run['candidate']} against {run['reference']}: {compared} values compared, {said}"
    )
