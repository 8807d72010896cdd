"""
``qeffect runtime train --compare``: compare a training run with native training under torch's
pipeline.
"""

from __future__ import annotations

import argparse
import math
import time

import attrs

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.report import UnusableError, finite
from qeffect.text import counted

from ...ranks.membership import all_gather
from ...ranks.processes import report_once
from ...runtime import mode_on
from ...training.command import (
    JoinedRun,
    carry_out,
    launch_lines,
    loss_line,
    nonfinite_lines,
    release_memory,
    skip_lines,
)
from ...training.config import Checkpointing
from ...training.config_file import read
from ...training.job_assembly import backend_of
from ...training.loop import Trainer
from ..comparisons.ranks import compare_pipelines, tensor_digests, totals_of_ranks, train_natively

__all__ = ["add_train_arguments", "run_train"]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--compare` beside the options of `train`."""
    parser.add_argument(
        "--compare",
        choices=("all", "ends"),
        help="also train under torch's own pipeline without guards and graphs, and compare the "
        "loss of every step bit for bit. all: also compare every tensor after each step. ends: "
        "also compare every tensor after the last step",
    )


def run_train(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train guarded and natively; the outcome is `refused` if a bit differs or the contract was
    violated.

    Raises:
        UnusableError: These processes cannot train the run; every rank raises this error.
    """
    return report_once(lambda: _run(args, progress))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    config = read(args.config, run={"device": args.device, "steps": args.steps})
    refuse_unused(args, ["--resume"], "--compare always starts from the beginning")
    refuse_unused(args, ["--digest"], "--compare compares every tensor and prints no digest")
    config.require_drawn("--compare")
    config = attrs.evolve(config, checkpoint=Checkpointing())
    if config.model.wgrad_group > 1:
        raise UnusableError(
            f"{args.config}: [model] wgrad_group: expected 1 with --compare, found "
            f"{config.model.wgrad_group}; native full backwards compute the weight gradient of "
            "each microbatch by itself, so bf16 bits differ; set wgrad_group = 1, or leave "
            "--compare out"
        )
    if args.compare == "all" and config.parallel.mode == "one launch":
        raise UnusableError(
            f"{args.config}: [parallel] mode: --compare all needs every action of a step, which "
            "mode one launch does not show; give --compare ends, or set another mode"
        )
    side = _every_action if args.compare == "all" else _ends
    return carry_out(
        args, config, lambda run: side(run, progress), how=args.compare, deterministic=True
    )


def _every_action(run: JoinedRun, progress: Progress) -> Outcome:
    """Compare every value of every step."""
    config, member, what = run.config, run.member, run.what
    if member.rank == 0:
        progress.note(f"{what}, training guarded and natively")
    job = run.data.job
    mode = mode_on(config.run.device, config.parallel.mode)
    result = compare_pipelines(
        member,
        job,
        config.run.steps,
        backend_of(config),
        mode=mode,
        limits=config.waits(),
    )
    own = {
        "totals": result.totals(),
        "first": [label for c in result.comparison.categories for label in c.first],
        "losses": result.losses,
        "native_losses": result.native_losses,
    }
    ranks = all_gather(member, own)
    totals = totals_of_ranks([rank["totals"] for rank in ranks])
    # A single stage has a loss, but no outputs or input gradients that another stage takes.
    absent = ("outputs", "input gradients") if job.num_stages == 1 else ()
    same = all(bad == 0 and (n or name in absent) for name, (n, bad) in totals.items())

    def of(name: str) -> list[float]:
        steps = range(config.run.steps)
        return [sum(sum(rank[name][step]) for rank in ranks) for step in steps]

    losses, native_losses = of("losses"), of("native_losses")
    lines = [
        f"{what}, {counted(config.run.steps, 'step')}, "
        f"{'eager' if mode == 'eager' else 'captured'}, compared with torch's own pipeline over "
        "native full backwards:",
        *(f"  {name:20} {bad:6} of {n:8} differ" for name, (n, bad) in totals.items()),
        loss_line(losses),
        *nonfinite_lines(0, losses),
        "The same bits on every rank" if same else "NOT the same",
    ]
    data = {
        "categories": {name: {"compared": n, "differ": bad} for name, (n, bad) in totals.items()},
        "compared": sum(n for n, _ in totals.values()),
        "differ": sum(bad for _, bad in totals.values()),
        "first": [label for rank in ranks for label in rank["first"]],
        "losses": [finite(loss) for loss in losses],
        "native_losses": [finite(loss) for loss in native_losses],
        "captured": mode != "eager",
    }
    return Outcome("accepted" if same else "refused", data, lines)


def _ends(run: JoinedRun, progress: Progress) -> Outcome:
    """Compare the losses of all steps, and every tensor after the last step."""
    config, member, what = run.config, run.member, run.what
    if member.rank == 0:
        progress.note(f"{what}, training natively first, then guarded")
    began = time.perf_counter()
    oracle = train_natively(member, run.data.job, config.run.steps, backend_of(config), None)
    member.synchronize()
    native_s = time.perf_counter() - began
    theirs = tensor_digests({stage.index: stage for stage in oracle.stages}, oracle.optimizer)
    native_losses = [sum(shares) for shares in oracle.losses]
    del oracle
    release_memory(member)
    trainer = Trainer(
        member, config, progress.stay, data=run.data, note=progress.note, lock=run.lock
    )
    trainer.run()
    runtime = trainer.worker.runtime
    ours = tensor_digests(runtime.stages, trainer.worker.optimizer)
    record = dict(trainer.record())
    trainer.close()
    differ = sorted(
        name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)
    )
    own = {"losses": native_losses, "of": len(theirs), "differ": differ, "native_seconds": native_s}
    ranks = all_gather(member, own)
    losses = [math.fsum(rank["losses"][n] for rank in ranks) for n in range(config.run.steps)]
    pairs = zip(losses, trainer.losses, strict=True)
    apart = [n for n, pair in enumerate(pairs) if _unlike(*pair)]
    named = [f"rank {n}: {name}" for n, rank in enumerate(ranks) for name in rank["differ"]]
    same = not apart and not named and all(rank["of"] for rank in ranks)
    data = {
        **record,
        "native_losses": [finite(loss) for loss in losses],
        "native_seconds": max(rank["native_seconds"] for rank in ranks),
        "losses_differ": apart,
        "compared": sum(rank["of"] for rank in ranks),
        "differ": len(named),
        "first": named[:8],
    }
    lines = [
        f"{what}, {counted(config.run.steps, 'step')}, compared with torch's own pipeline over "
        "native full backwards:",
        f"  losses of {len(apart)} of {len(losses)} steps differ",
        f"  {len(named)} of {data['compared']} tensors differ at the end",
        f"  {record['seconds']:.1f} s guarded, {data['native_seconds']:.1f} s native",
        *launch_lines(record),
        loss_line(losses),
        *nonfinite_lines(0, losses),
        *skip_lines(trainer.watch),
        "The same bits on every rank" if same else "NOT the same",
    ]
    return Outcome("accepted" if same else "refused", data, lines)


def _unlike(a: float, b: float) -> bool:
    """Whether two losses differ; two losses that are NaN are equal."""
    return a != b and not (math.isnan(a) and math.isnan(b))
