"""
``qeffect runtime train CONFIG.toml``: a language model over the guarded pipeline.

Under torchrun with as many processes as the file says, or by itself where that is one.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from qeffect.cli.command import Outcome, Progress, refuse_unused
from qeffect.refusals import Refused
from qeffect.report import UnusableError, finite

from ..lab.commands.pipeline import begun, processes, said_once, stopped_outcome
from ..lab.comparisons.ranks import compared, native, summed, tensors_of
from ..lab.reports.report import Report, environment, require_place
from ..ranks.consent import StoppedError
from ..ranks.world import Limits, Member, gathered
from .config import Checkpointing, Config, read
from .loop import Opened, Trainer, backend_of, opened, settled
from .model import Language

__all__ = ["add_train_arguments", "release", "require_processes", "run_train"]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `train`."""
    parser.add_argument("config", type=Path, help="a TOML file; every field has a default")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the file's")
    parser.add_argument("--steps", type=int, metavar="N", help="instead of the file's")
    parser.add_argument(
        "--compare",
        choices=("all", "ends"),
        help="train natively too, under torch's own pipeline, and compare the losses of every step "
        "and every tensor bit for bit: of all steps, or at the end",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint, where there is one"
    )
    parser.add_argument("--out", type=Path, metavar="F", help="write a JSON report here")
    parser.add_argument("--commit", metavar="SHA", help="the commit, where git cannot tell")


def run_train(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train; refused where a bit differs or the contract was not kept.

    Rank 0 speaks; the others end with the same exit code: 1 for a violation, 2 where the run could
    not be made or was ended from outside (`stopped_outcome`), 0 also where the loss is no longer
    finite, which is said, and where a checkpoint has no step left to train.

    Raises:
        UnusableError: The run cannot be made by these processes; the same on every rank.
    """
    return said_once(lambda: _run(args, progress))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    config = read(args.config, run={"device": args.device, "steps": args.steps})
    if args.compare is not None:
        refuse_unused(args, ["--resume"], "--compare begins anew")
        config = attrs.evolve(config, checkpoint=Checkpointing())
    if args.compare == "all" and config.parallel.one_launch:
        raise UnusableError(
            f"{args.config}: [parallel] one_launch: --compare all looks at every action of a step, "
            "which one launch does not show; give --compare ends, or leave one out"
        )
    data = opened(config)  # before any rank waits for another
    job = data.job
    if args.out is not None:
        environment(args.commit)  # says now what would be said when all is trained
        require_place(args.out)
    require_processes(config, job, f"train {args.config}")
    limits = Limits(start=config.run.start_s, commit=config.run.commit_s)
    deterministic = args.compare is not None or config.run.deterministic
    member = begun(config.run.device, limits, deterministic=deterministic)
    config, data = settled(member, config, data, resume=args.resume)
    job = data.job
    what = (
        f"{config.source.name}: {config.model.layers} layers as {list(job.cut)}, "
        f"{_count(config):,} parameters, {config.parallel.schedule}, PP={job.pp}, DP={job.dp}, "
        f"{job.microbatches} microbatches, {backend_of(config)} on {config.run.device}"
    )
    try:
        if args.compare == "all":
            outcome = _compared(config, data, member, what, progress)
        elif args.compare == "ends":
            outcome = _both(config, data, member, what, progress)
        else:
            outcome = _trained(config, data, member, what, progress, resume=args.resume)
    except StoppedError as stopped:
        outcome = stopped_outcome(stopped.cause, what)
    except Refused as refused:
        facts = {"clause": refused.clause, "rank": member.rank, "step": None, "action": None}
        outcome = Outcome("refused", facts, [what, str(refused)])
    if args.out is not None and member.rank == 0 and "losses" in outcome.data:
        _write(args.out, args.commit, args.compare or "train", config, job, outcome)
    return outcome


def require_processes(config: Config, job: Language, how: str) -> None:
    """
    Require as many processes as a job takes; one that takes one may be started by itself.

    Args:
        config: The run.
        job: Its mapping.
        how: The command and its file, as they are typed.

    Raises:
        UnusableError: There are others.
    """
    started, source = processes(), config.source
    if started is None and job.world > 1:
        raise UnusableError(
            f"{source}: [parallel] pp = {job.pp} and dp = {job.dp} take {job.world} processes; "
            f"start them: torchrun --nproc-per-node {job.world} -m qeffect runtime {how}"
        )
    if started is None:
        _alone()
    elif started != job.world:
        raise UnusableError(
            f"{source}: [parallel] pp = {job.pp} and dp = {job.dp} take {job.world} processes, "
            f"{started} were started; start torchrun with --nproc-per-node {job.world}"
        )


def _trained(
    config: Config, data: Opened, member: Member, what: str, progress: Progress, *, resume: bool
) -> Outcome:
    trainer = Trainer(member, config, progress, data=data, note=progress.note, resume=resume)
    if trainer.began:
        what += f", from step {trainer.began} on"
    if member.rank == 0:
        progress.note(what)
    trainer.run()
    record = dict(trainer.record())
    trainer.close()
    losses = trainer.losses
    lines = [what, *_launched(record)]
    if losses:
        lines.append(_ends(losses))
        lines += _not_finite(trainer.began, losses)
    else:
        lines.append(
            f"  no step to train: the checkpoint is of {trainer.began} steps, [run] steps is "
            f"{config.run.steps}"
        )
    lines += [f"  held out, after {n} steps: {loss:.4f}" for n, loss in trainer.evaluations.items()]
    if trainer.log is not None and trainer.log.ended is not None:
        lines.append(f"  the log ends before the run: {trainer.log.ended}")
    return Outcome("accepted", record, lines)


def _launched(record: Mapping[str, Any]) -> list[str]:
    """A line where launches were asked for: how many there were, or why there were none."""
    if record["guarded_replays"]:
        return [f"  guarded replays, not one launch a step: {record['guarded_replays']}"]
    return [f"  {record['launches']} steps were one launch each"] if record["launches"] else []


def _ends(losses: Sequence[float]) -> str:
    return f"  loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end"


def _not_finite(began: int, losses: Sequence[float]) -> list[str]:
    """A line where the loss was not finite; a report has null for it."""
    odd = [began + n for n, loss in enumerate(losses) if not math.isfinite(loss)]
    return [f"  NOT FINITE: the loss of {len(odd)} steps, step {odd[0]} first"] if odd else []


def _unlike(a: float, b: float) -> bool:
    """Whether two losses differ; that neither is a number makes no difference."""
    return a != b and not (math.isnan(a) and math.isnan(b))


def _compared(
    config: Config, given: Opened, member: Member, what: str, progress: Progress
) -> Outcome:
    if member.rank == 0:
        progress.note(f"{what}, guarded and native")
    job = given.job
    captured = config.run.device == "cuda" and config.parallel.captured
    result = compared(
        member,
        job,
        config.run.steps,
        backend_of(config),
        captured=captured,
        limits=Limits(start=config.run.start_s, commit=config.run.commit_s),
    )
    own = {
        "totals": result.totals(),
        "first": [label for c in result.comparison.categories for label in c.first],
        "losses": result.losses,
        "native_losses": result.native_losses,
    }
    ranks = gathered(member, own)
    totals = summed([rank["totals"] for rank in ranks])
    # One stage alone has a loss, and neither outputs nor gradients that another stage takes.
    absent = ("outputs", "input gradients") if job.num_stages == 1 else ()
    same = all(bad == 0 and (n or name in absent) for name, (n, bad) in totals.items())

    def of(name: str) -> list[float]:
        steps = range(config.run.steps)
        return [sum(sum(rank[name][step]) for rank in ranks) for step in steps]

    losses, native = of("losses"), of("native_losses")
    lines = [
        f"{what}, {config.run.steps} steps, {'captured' if captured else 'eager'}, and torch's own "
        "pipeline over native full backwards:",
        *(f"  {name:20} {bad:6} of {n:8} differ" for name, (n, bad) in totals.items()),
        _ends(losses),
        *_not_finite(0, losses),
        "The same bits on every rank" if same else "NOT the same",
    ]
    data = {
        "categories": {name: {"compared": n, "differ": bad} for name, (n, bad) in totals.items()},
        "compared": sum(n for n, _ in totals.values()),
        "differ": sum(bad for _, bad in totals.values()),
        "first": [label for rank in ranks for label in rank["first"]],
        "losses": [finite(loss) for loss in losses],
        "native_losses": [finite(loss) for loss in native],
        "captured": captured,
    }
    return Outcome("accepted" if same else "refused", data, lines)


def _both(config: Config, given: Opened, member: Member, what: str, progress: Progress) -> Outcome:
    if member.rank == 0:
        progress.note(f"{what}, native first, then guarded")
    began = time.perf_counter()
    oracle = native(member, given.job, config.run.steps, backend_of(config), None)
    member.synchronize()
    native_s = time.perf_counter() - began
    theirs = tensors_of({stage.index: stage for stage in oracle.stages}, oracle.optimizer)
    native_losses = [sum(shares) for shares in oracle.losses]
    del oracle
    release(member)
    trainer = Trainer(member, config, progress, data=given, note=progress.note)
    trainer.run()
    runtime = trainer.worker.runtime
    ours = tensors_of(runtime.stages, trainer.worker.optimizer)
    record = dict(trainer.record())
    trainer.close()
    differ = sorted(
        name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)
    )
    own = {"losses": native_losses, "of": len(theirs), "differ": differ, "native_seconds": native_s}
    ranks = gathered(member, own)
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
        f"{what}, {config.run.steps} steps, and torch's own pipeline over native full backwards:",
        f"  losses of {len(apart)} of {len(losses)} steps differ",
        f"  {len(named)} of {data['compared']} tensors differ at the end",
        f"  {record['seconds']:.1f} s guarded, {data['native_seconds']:.1f} s native",
        *_launched(record),
        _ends(losses),
        *_not_finite(0, losses),
        "The same bits on every rank" if same else "NOT the same",
    ]
    return Outcome("accepted" if same else "refused", data, lines)


def release(member: Member) -> None:
    """Give back what the side before held."""
    gc.collect()
    if member.device.type == "cuda":
        torch.cuda.empty_cache()


def _count(config: Config) -> int:
    """Parameters of the model, norms and biases included."""
    m = config.model
    layer = m.hidden * (4 * m.hidden + 2 * m.ffn) + 9 * m.hidden + m.ffn
    return m.layers * layer + ((2 - m.tied) * m.vocabulary + m.sequence + 2) * m.hidden


def _alone() -> None:
    """The environment of a job of one process, which torchrun need not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _write(
    path: Path, commit: str | None, how: str, config: Config, job: Language, outcome: Outcome
) -> None:
    """The report of a run that came to its end, whatever it found."""
    data = outcome.data
    run = {
        "how": how,
        "schedule": job.schedule,
        "pp": job.pp,
        "dp": job.dp,
        "cut": list(job.cut),
        "microbatches": job.microbatches,
        "captured": data["captured"],
        "launches": data.get("launches", 0),
        "guarded_replays": data.get("guarded_replays", ""),
        "parameters": _count(config),
        "tokens_a_step": job.windows_a_step * job.config.sequence,
        "losses": data["losses"],
        "native_losses": data.get("native_losses"),
        "held_out": [[int(step), loss] for step, loss in data.get("held_out", {}).items()],
        "seconds": data.get("seconds"),
        "native_seconds": data.get("native_seconds"),
        "compared": data.get("compared"),
        "differ": data.get("differ"),
        "first": data.get("first", []),
    }
    try:
        Report("train", path, environment(commit), config.record(), {"runs": [run]}).finish()
    except OSError as error:
        raise UnusableError(f"--out {path}: {error.strerror or error}") from None
