"""
``qeffect runtime report scales``: compare the losses of training whose FP8 scales are updated
(move) at every action with training whose scales are updated once per step.

For each seed, one process trains the model of a training file twice: once with scales that are
updated at the end of every F and dI, and once with scales that are updated once per step. Both runs
of a seed begin with the same weights and read the same windows.
`qeffect.gpu_runtime.lab.statistics.scales` derives the figures.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import attrs

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError

from ...backends.epoch_scales import SCALES
from ...ranks.consent import StoppedError
from ...ranks.processes import join_ranks, report_once, stopped_outcome
from ...training.command import require_processes
from ...training.config import Checkpointing
from ...training.config_file import read
from ...training.job_assembly import backend_of, open_job
from ..reports.report import Report, add_report_options, environment, require_place
from ..runner.training_run import RunControl, RunName, train_run

__all__ = ["add_scales_arguments", "run_scales"]

_FIELDS = ("losses", "held_out", "cut", "parameters", "tokens_a_step")


def add_scales_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scales`."""
    parser.add_argument(
        "config", type=Path, help="TOML file of a training run of one process, with held-out text"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="seeds of the runs, each added to the file's seeds of parameters and text (default: "
        "0 1 2)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps per run (default: the file's)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: the file's)")
    add_report_options(parser, required=True)


def run_scales(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train run after run, and report their final losses.

    Raises:
        UnusableError: This process cannot train the runs.
    """
    require_place(args.out)
    if bad := next((seed for seed in args.seeds if not 0 <= seed < 10**9), None):
        raise UnusableError(f"--seeds: expected numbers from 0 to 999999999, found {bad}")
    if len(set(args.seeds)) < len(args.seeds):
        raise UnusableError(
            f"--seeds: expected each seed once, found {' '.join(map(str, args.seeds))}"
        )
    return report_once(lambda: _run(args, progress))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    base = read(args.config, run={"device": args.device, "steps": args.steps})
    runs = []
    for seed in args.seeds:
        named = RunName("guarded", base.parallel.schedule, seed)
        config = named.of_file(args.config, args.device, args.steps)
        for scales in SCALES:
            model = attrs.evolve(config.model, scales=scales)
            runs.append((named, attrs.evolve(config, model=model)))
    data = [open_job(config) for _, config in runs]
    job, held_out = data[0]
    if held_out is None:
        raise UnusableError(
            f"{args.config}: [data] held_out: expected a file, because runs are compared by "
            "held-out text, found none"
        )
    where = environment(args.commit, args.out)
    require_processes(base, job, f"report scales {args.config}")
    member = join_ranks(base.run.device, base.waits(), deterministic=True)
    assert job.loader is not None
    windows = min(base.run.evaluate_windows, held_out.tokens.windows(held_out.sequence))
    asked = {
        **attrs.evolve(base, checkpoint=Checkpointing()).record(),
        "backend": backend_of(base),
        "windows": windows,
        "text": {"train": job.loader.tokens.facts(), "held_out": held_out.tokens.facts()},
        "seeds": list(args.seeds),
    }
    report = Report("scales", args.out if not member.rank else None, where, asked, {"runs": []})
    for (named, config), own in zip(runs, data, strict=True):
        recipe = config.model.scales
        control = RunControl(windows=windows, note=partial(_note, progress, recipe))
        try:
            row = train_run(member, named, config, own, control)
        except StoppedError as stopped:
            return stopped_outcome(stopped.cause, f"{recipe}, seed {named.seed}")
        kept = {name: row[name] for name in _FIELDS}
        report.raw["runs"].append({"scales": recipe, "seed": named.seed, **kept})
        report.save()
    derived = report.finish()["derived"]
    return Outcome("accepted", derived, [f"{args.config.name}: {len(runs)} runs", *report.lines()])


def _note(progress: Progress, recipe: str, text: str) -> None:
    progress.note(f"FP8 scales updated per {recipe}: {text}")
