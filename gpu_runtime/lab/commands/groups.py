"""
``qeffect runtime report groups``: measure steps that compute the weight gradients of several
microbatches as one matrix product.

On a GPU the host launches every step as one CUDA graph; on a CPU steps are eager. Each combination
of cell (layer size and number of microbatches), schedule and data type of accumulated gradients has
several rows. The first row has the defaults: FP8 scales that are updated after every F and dI, and
no groups. The next rows update scales once per step, with one row for each group size (microbatches
per product). The last row repeats the defaults. After its first steps, a row with groups records
one digest of all ranks' parameters, moments and scales; `--digests` chooses the cells in which
digests are recorded. The report is written after every row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError

from ...backends.determinism import DETERMINISTIC
from ...backends.protocol import BackendError
from ...ranks.membership import Member, join
from ...ranks.processes import mute_unless_speaker
from ..reports.report import Report, add_report_options, environment
from ..runner.processes import first_line
from ..runner.profiles import SIDE_ERRORS
from ..runner.rank_process import Findings
from ..runner.rank_rows import RankRun, measure_rows
from ..runner.timing import RoundPlan
from ..sides.group_rows import CELLS, DTYPES, SCHEDULES, GroupRow, group_rows
from ..sides.pipelines import backend_on
from ..sides.products import product_rows
from ..statistics.summary import exact_median
from .options import rank_starts

__all__ = ["add_groups_arguments", "run_groups"]

_USUAL = tuple(name for name in CELLS if name != "tiny")
_DIGESTED = ("h2048-s256-m4", "h4096-s256-m8", "tiny")
_LIMIT_S = 570.0


def add_groups_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `groups`."""
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="pipeline ranks (default 2)")
    for option, known, usual, text in (
        ("--cells", tuple(CELLS), _USUAL, "cells to measure"),
        ("--schedules", SCHEDULES, SCHEDULES, "schedules to measure"),
        (
            "--dtypes",
            tuple(DTYPES),
            tuple(DTYPES),
            "data types of the accumulated weight gradients",
        ),
    ):
        parser.add_argument(
            option,
            nargs="+",
            default=list(usual),
            choices=known,
            metavar="NAME",
            help=f"{text}, from {', '.join(known)} (default: {' '.join(usual)})",
        )
    parser.add_argument(
        "--groups",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="numbers of microbatches per weight-gradient product; a cell (workload) with M "
        "microbatches skips numbers that do not divide M (default: every power of two that "
        "divides M)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="timed rounds per row, that is, per cell, schedule and group size (default 3)",
    )
    steps = ", ".join(f"{cell.steps} for {name}" for name, cell in CELLS.items())
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"steps per round (default: {steps})"
    )
    parser.add_argument(
        "--digests",
        nargs="*",
        default=list(_DIGESTED),
        choices=tuple(CELLS),
        metavar="NAME",
        help="cells (workloads) whose grouped steps are compared by a digest of parameters, "
        "moments and scales; each digest of a large cell takes up to 10 s; --digests without a "
        f"NAME takes no digests (default: {' '.join(_DIGESTED)})",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=_LIMIT_S,
        metavar="S",
        help=f"time limit for all measurements in seconds (default {_LIMIT_S:g}); after this time, "
        "--out has the measurements so far",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="device (default cuda)"
    )
    add_report_options(parser)


def run_groups(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Measure every row (one cell, schedule and group size); the outcome is `refused` if a row failed
    or two schedules' digests differ.

    Raises:
        UnusableError: The ranks cannot run the rows, or did not end within `--limit`.
    """
    _require(args)
    rows = group_rows(
        args.cells,
        args.schedules,
        args.dtypes,
        args.groups,
        pp=args.pp,
        launches=args.device == "cuda",
    )
    try:
        for row in rows:  # refuses before anything is measured
            row.job().table()
        report = _run(args, rows, progress)
    except (BackendError, ScheduleError, UnusableError) as error:
        mute_unless_speaker(failed=True)
        raise UnusableError(str(error)) from error
    derived = report.to_json()["derived"]
    bad = derived["errors"] or any(one["alike"] is False for one in derived["digests"])
    outcome = Outcome("refused" if bad else "accepted", {"derived": derived}, report.lines())
    mute_unless_speaker(failed=outcome.exit != 0)
    return outcome


def _require(args: argparse.Namespace) -> None:
    for option in ("pp", "rounds", "steps", "limit", *(["groups"] if args.groups else [])):
        value = getattr(args, option)
        least = min(value) if isinstance(value, list) else value
        if least is not None and not least >= 1:
            raise UnusableError(f"--{option}: expected at least 1, found {least:g}")
    if args.groups:
        for cell in args.cells:
            whole = CELLS[cell].microbatches
            if all(whole % group for group in args.groups):
                raise UnusableError(
                    f"--groups: expected a divisor of the {whole} microbatches of {cell}, found "
                    f"{' '.join(map(str, args.groups))}"
                )


def _run(args: argparse.Namespace, rows: Sequence[GroupRow], progress: Progress) -> Report:
    configuration = {
        "pp": args.pp,
        "cells": args.cells,
        "schedules": args.schedules,
        "dtypes": args.dtypes,
        "groups": sorted({row.group for row in rows}),
        "device": args.device,
        "backend": backend_on(args.device),
        "mode": "one launch" if args.device == "cuda" else "eager",
        "rounds": args.rounds,
        "steps": {cell: args.steps or CELLS[cell].steps for cell in args.cells},
        "digests": [cell for cell in args.cells if cell in args.digests],
        "settling_steps": GroupRow.settling_steps,
    }
    raw: dict[str, Any] = {"products": [], "rows": []}
    place = environment(args.commit, args.out)
    with rank_starts(args, progress) as (starts, shown):
        own = args.out if starts.speaks else None
        report = Report("groups", own, place, configuration, raw)

        def take(row: dict[str, Any]) -> None:
            raw["products" if "matrices" in row else "rows"].append(row)
            report.save()

        # Every row runs deterministic kernels, because grouped rows need them.
        starts.start(
            _measure,
            args,
            rows,
            limit=args.limit,
            environ=DETERMINISTIC,
            take=take,
            note=shown.note,
        ).require()
    report.finish()
    return report


def _measure(args: argparse.Namespace, rows: Sequence[GroupRow], findings: Findings) -> None:
    """Measure each cell's (workload's) matrix products, then every row; each rank calls this
    function."""
    member = join(args.device)
    if args.device == "cuda":
        for cell in args.cells:
            findings.note(f"Timing: the products of one layer of {cell}")
            for found in product_rows(CELLS[cell].config, CELLS[cell].microbatches):
                findings.add({"cell": cell, **found})

    def measure(row: GroupRow) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            found = _measure_row(member, args, row)
        except SIDE_ERRORS as error:
            findings.note(f"{row.label}: FAILED, {first_line(error)}")
            return {**row.name, "error": first_line(error)}
        took = time.perf_counter() - began
        median = exact_median(found["step_ms"])
        findings.note(f"{row.label}: {median:.3f} ms per step ({took:.1f} s for the row)")
        return {**row.name, "error": None, **found, "row_s": took}

    measure_rows(member, rows, findings, measure)


def _measure_row(member: Member, args: argparse.Namespace, row: GroupRow) -> dict[str, Any]:
    """Measure one row (a cell, schedule and group size), with a digest of all ranks' state after
    the first steps."""
    run = RankRun.of(member, row.make)
    side = run.side
    run.settle(row.settling_steps)
    side.drain()
    member.synchronize()
    wanted = row.scales == "epoch" and row.cell in args.digests
    digest = row.digest(side) if wanted else None
    facts = side.facts()
    slots = {str(own.stage): own.slots for own in side.worker.runtime.contract.stages}
    plan = RoundPlan(args.rounds, args.steps or CELLS[row.cell].steps)
    found = run.time(plan, {**facts, "slots_of": slots})
    side.close()
    del found["busy_ms"]  # this report has no profile
    return {**found, "mode": side.mode, "digest": digest}
