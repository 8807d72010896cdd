"""
``qeffect runtime report second_runs``: flip bits in steps that run twice, and time such steps.

Several ranks must be started with torchrun; a single rank needs no torchrun.
`lab/comparisons/second_runs.py` describes which bits flip, how a flip may end, and what is timed.
The outcome is a violation if a flipped bit reached an update.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import attrs
import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError
from qeffect.text import counted

from ...backends.layers import LayerConfig
from ...ranks.job import Job
from ...ranks.processes import join_ranks, process_count, report_once, stand_alone
from ...runtime import Mode
from ..comparisons.second_runs import (
    INSIDE,
    LIMITS,
    digest_price,
    flips_in_launches,
    flips_in_replays,
    look_price,
    price,
)
from ..reports.report import Report, add_report_options, environment, require_place

__all__ = ["add_second_runs_arguments", "run_second_runs"]

#: Width, inner width, heads and tokens of the model: for the timing, and for the bit flips.
_PRICED: Final = {"cpu": (64, 128, 2, 32), "cuda": (2048, 8192, 16, 512)}
_FLIPPED: Final = {"cpu": (64, 128, 2, 32), "cuda": (256, 1024, 2, 128)}
_COUNTS: Final = {
    "flips": (24, "number of flips after actions of guarded steps"),
    "inside": (16, "number of flips in outputs of matrix products inside a stage, in eager steps"),
    "launched": (10, "number of flips during launches, only with cuda"),
    "every": (100, "for the timing: every N-th step runs twice"),
    "rounds": (9, "for the timing: number of rounds"),
    "microbatches": (4, "microbatches per step"),
    "layers": (1, "layers per stage"),
}


def add_second_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report second_runs`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)"
    )
    for name, (default, text) in _COUNTS.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the random choice of bits to flip (default 0)",
    )
    add_report_options(parser)


def run_second_runs(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Flip bits, measure times, and write the report; the outcome is a violation if a flipped bit
    reached an update.

    Raises:
        UnusableError: The machine has too few devices, or a number is out of range.
    """
    require_place(args.out)
    return report_once(lambda: _run(args, progress))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    for name in (*_COUNTS, "seed"):
        least = 0 if name in ("flips", "inside", "launched", "seed") else 1
        if (value := getattr(args, name)) < least:
            raise UnusableError(f"--{name} must be at least {least}, found {value}")
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UnusableError("--device cuda: expected a GPU for each rank, found none")
    where = environment(args.commit, args.out)
    if process_count() is None:
        stand_alone()
    member = join_ranks(args.device, LIMITS, deterministic=True)
    if member.rank:
        progress = Progress(enabled=False)
    backend = "transformer-engine" if cuda else "reference"
    given: dict[str, Any] = {"pp": member.world, "microbatches": args.microbatches}
    large = Job(
        schedule="zbv",
        layers=args.layers,
        history=16,
        config=LayerConfig(*_PRICED[args.device]),
        **given,
    )
    small = attrs.evolve(large, config=LayerConfig(*_FLIPPED[args.device]))
    mode: Mode = "replays" if cuda else "eager"
    launched = args.launched if cuda else 0
    asked = {
        "device": args.device,
        "backend": backend,
        "ranks": member.world,
        "schedule": "zbv",
        **{name: getattr(args, name) for name in _COUNTS},
        "launched": launched,
        "seed": args.seed,
        "priced": list(_PRICED[args.device]),
        "flipped": list(_FLIPPED[args.device]),
    }
    raw: dict[str, list[dict[str, Any]]] = {"flips": [], "prices": []}
    report = Report("second_runs", args.out if member.rank == 0 else None, where, asked, raw)

    def add(steps: str, found: list[dict[str, Any]]) -> None:
        raw["flips"] += [{"steps": steps, **one} for one in found]
        report.save()
        progress.note(f"{counted(len(found), 'flip')} in {steps}")

    raw["prices"].append(price(member, large, backend, every=args.every, rounds=args.rounds))
    raw["prices"].append(digest_price(member, large, backend, rounds=args.rounds))
    raw["prices"].append(look_price(member, large, backend, every=args.every, rounds=args.rounds))
    report.save()
    if args.flips:
        found = flips_in_replays(member, small, backend, mode, args.flips, args.seed)
        add("guarded replays" if cuda else "guarded eager steps", found)
    if args.inside:
        found = flips_in_replays(
            member, small, backend, "eager", args.inside, args.seed, kinds=INSIDE
        )
        add("eager steps", found)
    if launched:
        add("launches", flips_in_launches(member, small, backend, launched, seed=args.seed))
    derived = report.finish()["derived"]
    return Outcome(
        "refused" if derived["wrong"] else "accepted", {"derived": derived}, report.lines()
    )
