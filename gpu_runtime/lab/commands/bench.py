"""
``qeffect runtime report bench``: measure the step, memory and sweep tables and write them as a JSON
report.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import UnusableError

from ..reports.report import Report, add_report_options, environment
from ..runner.device import require_device
from ..runner.rounds import CellRun
from ..sides.cells import (
    CELLS,
    SWEEP_MICROBATCHES,
    TINY,
    BenchCell,
    cells_named,
    sweep_cell,
)
from ..sides.columns import (
    COUNTED,
    LATE,
    REFERENCE_SPECS,
    SPECS,
    SWEEP_SPECS,
    UNGUARDED,
    ColumnSpec,
    Settings,
    specs_named,
)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench`."""
    parser.add_argument(
        "table",
        nargs="?",
        choices=("step", "sweep"),
        default="step",
        help="step (default): time, memory, set-up, copies and guards. sweep: slots (sets of "
        "buffers for one microbatch), graphs, memory and times for several numbers of microbatches",
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="CELL",
        help="cells (layer sizes) to measure, by index or name (default: the first three)",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME",
        help="columns (ways to run a step) to measure, by name or the beginning of a name "
        "(default: all columns of the cell)",
    )
    parser.add_argument(
        "--microbatches",
        nargs="+",
        type=int,
        metavar="M",
        help="numbers of microbatches to try in the sweep",
    )
    parser.add_argument(
        "--rank",
        type=int,
        choices=(0, 1),
        help="which of ZB-V's two ranks the sweep runs (default 1)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="timed rounds per column (default 5; 3 in the sweep)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps per round (default 20; 10 in the sweep)"
    )
    parser.add_argument(
        "--growth-steps",
        type=int,
        metavar="N",
        help="number of steps over which memory must not grow; 0 for no check (default 200; 0 in "
        "the sweep)",
    )
    parser.add_argument(
        "--history",
        type=int,
        default=1024,
        metavar="N",
        help="length of each amax history, in entries (default 1024)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="short trial run: 2 rounds of 5 steps each"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device (default cuda); cpu tries out the command with the eager reference backend, "
        "whose times mean nothing",
    )
    parser.add_argument(
        "--no-profile",
        action="store_true",
        help="run no steps under the profiler; the report then lacks kernel times",
    )
    add_report_options(parser)


def run_bench(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Measure all columns and write the report; the outcome is `refused` if a column (one variant of
    the step) failed.

    Raises:
        UnusableError: This machine cannot run the measurement, or an option is invalid.
    """
    _refuse_unused(args)
    settings = settings_of(args)
    work = _sweep(args) if args.table == "sweep" else _step(args)
    if settings.device == "cuda":
        require_device("--device cpu runs the same tables over the reference backend")
    report = Report(
        "sweep" if args.table == "sweep" else "bench",
        args.out,
        environment(args.commit, args.out),
        {"quick": args.quick, "settings": attrs.asdict(settings)},
        {"cells": []},
    )
    report.save()
    say = _timed(progress)
    for cell, specs in work:
        run = CellRun(cell, specs, settings, report.save, say)
        report.raw["cells"].append(run.record)
        run.run()
    finished = report.finish()
    errors = failures(finished)
    data = {"derived": finished["derived"], "failures": errors}
    return Outcome("refused" if errors else "accepted", data, report.lines())


def _refuse_unused(args: argparse.Namespace) -> None:
    """Refuse an option that the chosen table (step or sweep) does not use."""
    if args.table == "sweep":
        refuse_unused(args, ["--no-profile"], "the sweep runs no steps under the profiler")
    else:
        refuse_unused(
            args,
            ["--microbatches"],
            "only the sweep varies the number of microbatches",
            wants="sweep",
        )
        refuse_unused(args, ["--rank"], "only the sweep runs a single rank", wants="sweep")


def failures(report: dict[str, Any]) -> list[str]:
    """The error messages of the columns (variants of the step) that failed."""
    return [
        column["error"]
        for cell in report["raw"]["cells"]
        for column in cell["columns"].values()
        if column["error"]
    ]


def settings_of(args: argparse.Namespace) -> Settings:
    """
    The rounds and steps that the options ask for.

    Raises:
        UnusableError: A number is not positive.
    """
    sweep = args.table == "sweep"
    default = Settings(rounds=3, steps=10, growth_steps=0, profile_steps=0) if sweep else Settings()
    if args.quick:
        default = attrs.evolve(default, rounds=2, steps=5, growth_steps=0, profile_steps=1)
    if args.device == "cpu":
        default = attrs.evolve(default, device="cpu")
    if args.no_profile or sweep or args.device == "cpu":
        default = attrs.evolve(default, profile_steps=0)
    given = {
        name: getattr(args, name)
        for name in ("rounds", "steps", "growth_steps", "history")
        if getattr(args, name) is not None
    }
    settings = attrs.evolve(default, **given)
    for name in ("rounds", "steps", "history"):
        if getattr(settings, name) < 1:
            raise UnusableError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    return settings


def _step(args: argparse.Namespace) -> list[tuple[BenchCell, Sequence[ColumnSpec]]]:
    on_cpu = args.device == "cpu"
    known = REFERENCE_SPECS if on_cpu else (*SPECS, UNGUARDED, COUNTED, LATE)
    cells = cells_named(args.cells or ["tiny"]) if on_cpu else cells_named(args.cells or "012")
    if args.columns is not None:
        return [(cell, specs_named(args.columns, known)) for cell in cells]
    if on_cpu:
        return [(cell, known) for cell in cells]
    # Guards and counts cost the most beside the least work, so they are measured there.
    return [(cell, known if cell == CELLS[0] else SPECS) for cell in cells]


def _sweep(args: argparse.Namespace) -> list[tuple[BenchCell, Sequence[ColumnSpec]]]:
    default = TINY.name if args.device == "cpu" else CELLS[0].name
    base = cells_named(args.cells or [default])[0]
    specs = SWEEP_SPECS if args.columns is None else specs_named(args.columns, SWEEP_SPECS)
    counts = SWEEP_MICROBATCHES if args.microbatches is None else args.microbatches
    if min(counts) < 1:
        raise UnusableError(f"--microbatches must be at least 1, not {min(counts)}")
    rank = 1 if args.rank is None else args.rank
    return [(sweep_cell(base, m, rank=rank), specs) for m in counts]


def _timed(progress: Progress) -> Callable[[str], None]:
    started = time.monotonic()
    return lambda text: progress.note(f"Measuring: {time.monotonic() - started:6.1f} s  {text}")
