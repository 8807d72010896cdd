"""
``qeffect runtime times``: measure the times of a model's parts on this device, and compare group
sizes. A group consists of the microbatches whose weight gradients one matrix product computes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError, require_place, write_text
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.durations import parse_durations
from qeffect.schedule.group_plans import GroupPlan, comparison_lines, fastest
from qeffect.schedule.grouping import require_group
from qeffect.text import aligned

from ..backends.determinism import DETERMINISTIC
from ..backends.protocol import BackendError
from ..ranks.processes import process_count
from ..runtime import mode_on, without_launches
from .balance import ACTIONS, Times, measure_times
from .config import Config
from .config_file import read
from .job_assembly import backend_of, cut_by_times, open_job, require_grouped
from .language_model import LanguageJob

__all__ = ["add_times_arguments", "run_times"]

_NOT_MEASURED = (
    "not measured, and 0 in the simulated step: messages, reductions, the host and the update; add "
    "them to the file of --out, and compare again with qeffect plan --durations"
)


def add_times_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `times`."""
    parser.add_argument("config", type=Path, help="TOML file of a training run")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to measure on (default: the file's)"
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        type=int,
        metavar="G",
        help="group sizes to compare with one product per microbatch; a group is the "
        "microbatches whose weight gradients one matrix product computes (default: every "
        "power of two that divides the number of microbatches in one pass over the schedule)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="F", help="JSON file of the times, for qeffect plan --durations"
    )


def run_times(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Measure the parts of a model (a layer, the embedding, the head), and simulate its schedule with
    each group size.

    Raises:
        UnusableError: The file, the device or a group cannot be used, or a part cannot be measured.
    """
    if process_count() not in (None, 1):
        raise UnusableError(
            "runtime times measures one device in one process; start it without torchrun"
        )
    config = read(args.config, run={"device": args.device})
    job = open_job(config).job
    device = torch.device(config.run.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnusableError(
            f"{config.source}: [run] device: expected a GPU that torch can use, found none; "
            "give --device cpu"
        )
    if args.out is not None:
        require_place(args.out)
    groups, why = _groups(config, job, args.groups)
    mode = without_launches(mode_on(device, config.parallel.mode))
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    if device.type == "cpu":
        torch.set_num_threads(1)
    progress.note(f"Measuring F, dI and dW of {config.source.name} on {device.type}")
    try:
        times = measure_times(job, device, backend_of(config), mode=mode, groups=groups)
    except (BackendError, RuntimeError, ValueError) as error:
        raise UnusableError(f"{config.source}: cannot measure: {error}") from error
    if config.parallel.cut == "measured" and not config.parallel.layer_times:
        job = cut_by_times(config, job, times.fields(config.model.layers))[1]
    return _outcome(args, config, job, times, why)


def _outcome(
    args: argparse.Namespace, config: Config, job: LanguageJob, times: Times, why: str | None
) -> Outcome:
    """
    Simulate the schedule with each measured group size, write `--out`, and name the fastest size.
    """
    given = times.durations(job.cut)
    table, durations = job.table(), parse_durations(given)
    plans = [GroupPlan.of(table, group, durations) for group in (1, *times.products)]
    best = fastest(plans)
    if args.out is not None:
        write_text(args.out, json.dumps(given, indent=1) + "\n")
    data = {
        "times": attrs.asdict(times),
        "cut": list(job.cut),
        "durations": given,
        "groups": [one.record(plans[0]) for one in plans],
        "fastest_group": None if best is None else best.group,
    }
    lines = [*_table(times), f"layers per stage: {' '.join(map(str, job.cut))}"]
    lines += comparison_lines(plans, table)
    lines.append(_NOT_MEASURED)
    if why is not None:
        lines.append(f"only group 1 was measured: {why}")
    elif best is not None and best.group != config.model.wgrad_group:
        lines.append(f"[model] wgrad_group is {config.model.wgrad_group}; set it to {best.group}")
    return Outcome("accepted", data, lines)


def _groups(
    config: Config, job: LanguageJob, given: Sequence[int] | None
) -> tuple[list[int], str | None]:
    """
    Return the group sizes above 1 to measure, and the reason if the file allows no such size.

    Raises:
        UnusableError: A given group size does not divide the microbatches of a walk (pass over the
            schedule), or the file allows no groups.
    """
    whole = job.microbatches // job.walks
    try:
        for group in given or ():
            require_group(group, whole)
    except ScheduleError as error:
        raise UnusableError(f"--groups: {error}") from None
    powers = (2**n for n in range(1, whole.bit_length()))
    chosen = sorted({*(given or (p for p in powers if whole % p == 0))} - {1})
    try:
        for group in chosen:
            require_grouped(
                attrs.evolve(config, model=attrs.evolve(config.model, wgrad_group=group))
            )
    except UnusableError as error:
        if given:
            raise
        return [], str(error)
    return chosen, None


def _table(times: Times) -> Iterator[str]:
    """Return the measured times as lines of a table."""
    rows = [["ms", *ACTIONS, *(f"dW of {group}" for group in times.products)]]
    rows += [[name, *(f"{one:.4g}" for one in own)] for name, own in times.parts.items()]
    return aligned(rows)
