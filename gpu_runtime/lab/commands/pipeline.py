"""
``qeffect runtime pipeline``: train a guarded pipeline over the ranks that torchrun started.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import attrs
import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError, finite, require_place, write_text
from qeffect.text import counted

from ...backends.layers import LayerConfig
from ...ranks.consent import StoppedError
from ...ranks.fallback import fall_back
from ...ranks.job import NAMES, Batches, Job
from ...ranks.membership import Limits, Member, agree_on, all_gather
from ...ranks.obstacles import first_obstacle, obstacles
from ...ranks.one_launch import OneLaunch
from ...ranks.processes import join_ranks, process_count, report_once, stopped_outcome
from ...ranks.trace import Tracer, chrome_trace
from ...ranks.worker import Worker
from ...ranks.worker_assembly import build_worker
from ...runtime import Mode, mode_on
from ...step.memory.arena import RULES
from ...step.memory.scaling import AMAX
from ...step.plan.slots import PROVISIONINGS
from ..comparisons.ranks import PipelineComparison, compare_pipelines, totals_of_ranks
from ..statistics.summary import exact_median

__all__ = ["add_pipeline_arguments", "run_pipeline"]

_SIZES = {"cpu": (64, 128, 2, 32), "cuda": (512, 2048, 8, 256)}


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline`."""
    parser.add_argument(
        "--schedule",
        default="zbv",
        metavar="NAME",
        help=f"schedule: {', '.join(NAMES)}, a schedule class of torch, or the path of a CSV table "
        "that lists the messages (default zbv)",
    )
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="pipeline ranks (default 2)")
    parser.add_argument(
        "--vpp", type=int, metavar="N", help="stages per rank (default: as the schedule needs)"
    )
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="replicas (default 1)")
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="microbatches per step and replica (default 2 * PP)",
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="optimizer steps (default 4)"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device (default cpu); cpu selects gloo, cuda selects NCCL",
    )
    parser.add_argument(
        "--backend",
        choices=("reference", "transformer-engine"),
        help="implementation of the layers (default: reference on cpu, transformer-engine on cuda)",
    )
    parser.add_argument(
        "--eager", action="store_true", help="run without CUDA graphs (only with --device cuda)"
    )
    parser.add_argument(
        "--rule",
        choices=RULES,
        default="accumulate",
        help="memory into which dW (a weight-gradient action) writes. accumulate: one buffer per "
        "matrix, to which all microbatches add (default). per_microbatch: one buffer per "
        "matrix and microbatch. copied: the library's own memory, which is cloned after "
        "each dW",
    )
    parser.add_argument(
        "--provisioning",
        choices=PROVISIONINGS,
        default="live",
        help="number of slots (sets of buffers for one microbatch) per stage. live (default): the "
        "largest number of microbatches that are in progress at the same time. static: one slot "
        "for each microbatch",
    )
    parser.add_argument(
        "--amax",
        choices=AMAX,
        default="replica",
        help="which amaxes (largest absolute values) the FP8 scales are computed from. replica "
        "(default): each replica's own amaxes. replicas: the largest amaxes of all replicas",
    )
    for name, text in (
        ("layers", "layers per stage (default 1)"),
        ("hidden", "layer width"),
        ("ffn", "MLP width"),
        ("heads", "attention heads per layer"),
        ("sequence", "tokens per microbatch"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also run torch's own pipeline without guards and graphs, and compare every bit",
    )
    # Not --log: torchrun reads an option that could be the beginning of one of its own as such.
    parser.add_argument(
        "--event-logs", metavar="DIR", help="folder for the event logs of all ranks"
    )
    parser.add_argument(
        "--one-launch",
        action="store_true",
        help="run each step as one CUDA graph (only with --device cuda)",
    )
    parser.add_argument(
        "--clip-norm",
        type=float,
        metavar="X",
        help="maximum norm of all ranks' gradients; larger gradients are clipped (default: no "
        "clipping)",
    )
    parser.add_argument(
        "--skip-nonfinite",
        action="store_true",
        help="skip the update of a step whose gradient norm is not finite",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="F",
        help="JSON file for a Chrome trace of the last step on all ranks",
    )


def run_pipeline(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Train, and with `--compare` also compare; the outcome is `refused` if a bit differs or the
    contract was broken.

    Rank 0 prints; all ranks end with the same exit code: 1 for a violation, 2 if the ranks stopped
    for another reason (`stopped_outcome`).

    Raises:
        UnusableError: These processes cannot run the job; every rank raises this error.
    """
    return report_once(lambda: _run(args, progress))


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    _require_together(args)
    job = _job(args)
    world = process_count()
    if world is not None and world != job.world:
        raise UnusableError(
            f"expected {job.world} processes for --pp {job.pp} --dp {job.dp}, found {world}; "
            f"start torchrun with --nproc-per-node {job.world}"
        )
    limits = Limits()
    member = join_ranks(args.device, limits, deterministic=args.compare)
    backend = args.backend or ("reference" if args.device == "cpu" else "transformer-engine")
    log = _log(args.event_logs, member)
    _require_writable(args.trace, member)
    mode: Mode = "one launch" if args.one_launch else "replays"
    mode = "eager" if args.eager else mode_on(args.device, mode)
    what = (
        f"{Path(args.schedule).name}: PP={job.pp}, {job.num_stages} stages, DP={job.dp}, "
        f"{counted(job.microbatches, 'microbatch')}, {counted(args.steps, 'step')} with the "
        f"{backend} backend, "
        f"{'eager' if mode == 'eager' else 'captured'}, on {args.device}"
    )
    try:
        if args.compare:
            result = compare_pipelines(
                member, job, args.steps, backend, mode=mode, limits=limits, event_log=log
            )
            return _compare_outcome(member, what, result)
        return _train_outcome(args, member, job, backend, mode, limits, log, what)
    except StoppedError as stopped:
        return stopped_outcome(stopped.cause, what)


def _require_together(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if args.one_launch and args.device != "cuda":
        raise UnusableError(
            "--one-launch makes a step one CUDA graph, so it needs --device cuda; leave it out"
        )
    if args.amax == "replicas" and args.dp == 1:
        raise UnusableError(
            "--amax replicas shares amaxes between replicas, but --dp is 1; give --dp 2 or more"
        )
    clips = args.clip_norm is not None or args.skip_nonfinite
    for given, name, other, why in (
        (args.eager, "--one-launch", "--eager", "one launch per step needs CUDA graphs"),
        (args.trace, "--one-launch", "--trace", "the host cannot see the actions inside a launch"),
        (
            args.compare,
            "--one-launch",
            "--compare",
            "here only replays are compared; runtime report scale compares launches",
        ),
        (args.compare, "--trace", "--compare", "a comparison cannot trace a step"),
        (
            args.compare,
            "--clip-norm and --skip-nonfinite",
            "--compare",
            "torch's pipeline, the reference of the comparison, does not clip or skip",
        ),
    ):
        asked = {"--one-launch": args.one_launch, "--trace": args.trace}.get(name, clips)
        if asked and given:
            raise UnusableError(f"{name} cannot be used with {other}: {why}; leave one out")


def _job(args: argparse.Namespace) -> Job:
    for name in ("pp", "vpp", "dp", "microbatches", "steps", "layers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UnusableError(f"--{name} must be at least 1, not {value}")
    given = (args.hidden, args.ffn, args.heads, args.sequence)
    hidden, ffn, heads, sequence = (
        usual if value is None else value
        for value, usual in zip(given, _SIZES[args.device], strict=True)
    )
    if heads < 1:
        raise UnusableError(f"--heads must be at least 1, not {heads}")
    try:
        config = LayerConfig(hidden, ffn, heads, sequence)
    except ValueError as error:
        raise UnusableError(str(error)) from error
    job = Job(
        schedule=args.schedule,
        pp=args.pp,
        vpp=args.vpp,
        dp=args.dp,
        microbatches=args.microbatches or 2 * args.pp,
        layers=args.layers or 1,
        rule=args.rule,
        provisioning=args.provisioning,
        config=config,
        amax=args.amax,
    )
    if job.cls_name:
        return job
    if args.compare:
        raise UnusableError(
            "--compare needs a --schedule that is a class of torch; name a class, or leave "
            "--compare out"
        )
    table = job.table()
    if table.num_ranks != job.pp:
        raise UnusableError(
            f"{Path(args.schedule).name} is a table for {table.num_ranks} ranks, but --pp is "
            f"{job.pp}; give --pp {table.num_ranks}, or a table for {job.pp} ranks"
        )
    stages, microbatches = table.num_stages // table.num_ranks, table.num_microbatches
    for name, found in (("vpp", stages), ("microbatches", microbatches)):
        asked = getattr(args, name)
        if asked is not None and asked != found:
            raise UnusableError(
                f"{Path(args.schedule).name} fixes --{name} at {found}, found {asked}; leave "
                f"--{name} out"
            )
    return attrs.evolve(job, vpp=stages, microbatches=microbatches)


def _log(folder: str | None, member: Member) -> Path | None:
    if folder is None:
        return None
    problem = ""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank{member.rank}.jsonl").touch()
    except OSError as error:
        problem = (
            f"--event-logs {folder}: {error.strerror or error}; name a folder that can be written"
        )
    agree_on(member, problem)
    return place / f"rank{member.rank}.jsonl"


def _require_writable(file: Path | None, member: Member) -> None:
    """Require, before the first step, that rank 0 can write the trace."""
    problem = ""
    if file is not None and member.rank == 0:
        try:
            require_place(file, "--trace")
        except UnusableError as error:
            problem = str(error)
    agree_on(member, problem)


def _compare_outcome(member: Member, what: str, result: PipelineComparison) -> Outcome:
    own = {
        "totals": result.totals(),
        "slots": result.slots,
        "first": [label for c in result.comparison.categories for label in c.first],
    }
    ranks = all_gather(member, own)
    totals = totals_of_ranks([rank["totals"] for rank in ranks])
    same = not any(bad for _, bad in totals.values()) and all(n for n, _ in totals.values())
    lines = [
        what + ", compared with torch's own pipeline over native full backwards:",
        *(f"  {name:20} {bad:6} of {n:8} differ" for name, (n, bad) in totals.items()),
        "The same bits on every rank" if same else "NOT the same",
    ]
    data = {
        "categories": {name: {"compared": n, "differ": bad} for name, (n, bad) in totals.items()},
        "slots": [rank["slots"] for rank in ranks],
        "first": [rank["first"] for rank in ranks],
    }
    return Outcome("accepted" if same else "refused", data, lines)


def _train_outcome(
    args: argparse.Namespace,
    member: Member,
    job: Job,
    backend: str,
    mode: Mode,
    limits: Limits,
    log: Path | None,
    what: str,
) -> Outcome:
    worker = build_worker(
        member,
        job,
        backend,
        mode=mode,
        limits=limits,
        event_log=log,
        repeat=True,
        clip_norm=args.clip_norm,
        skip_nonfinite=args.skip_nonfinite,
    )
    notes: list[str] = []
    norms = []
    whole = _launch_runner(worker, notes) if mode == "one launch" else None
    runner = whole or worker
    tracer = None if args.trace is None else Tracer(worker)
    seconds, losses = [], []
    for number in range(args.steps):
        began = time.perf_counter()
        last = number == args.steps - 1
        with tracer.tracing() if tracer is not None and last else nullcontext():
            try:
                runner.step()
            except StoppedError as stopped:
                if (why := fall_back(whole, stopped)) is None:
                    raise
                notes.append(f"guarded replays: {why}")
                whole, runner = None, worker
                runner.step()
        if member.device.type == "cuda":
            torch.cuda.synchronize(member.device)
        seconds.append(time.perf_counter() - began)
        losses.append(_loss(worker, whole, number))
        if (norm := runner.norm) is not None:
            norms.append(attrs.asdict(norm))
    if whole is not None:
        whole.leave()
        whole.close()
    own = {
        "losses": losses,
        "slots": [config.slots for config in worker.runtime.contract.stages],
        "seconds": seconds,
    }
    if tracer is not None:
        traced = chrome_trace(member, tracer, worker.table)
        if member.rank == 0:
            write_text(args.trace, json.dumps(traced, indent=1) + "\n")
        notes.append(f"{args.trace}: the last step took {traced['otherData']['step']}; simulated: "
            f"{traced['otherData']['simulated step']}")  # fmt: skip
    worker.close()
    ranks = all_gather(member, own)
    losses = [sum(rank["losses"][step] for rank in ranks) for step in range(args.steps)]
    slowest = [max(rank["seconds"][step] for rank in ranks) for step in range(args.steps)]
    median = exact_median(slowest)
    lines = [
        f"{what}, each with the same data",
        f"  loss {', '.join(f'{loss:.6f}' for loss in losses)}",
        f"  slots of each stage, by rank: {[rank['slots'] for rank in ranks]}",
        f"  {median * 1e3:.1f} ms per step (median of {args.steps} steps on the slowest rank, "
        "each step timed until the device is idle)",
        *(f"  {note}" for note in notes),
    ]
    data = {"losses": losses, "slots": [rank["slots"] for rank in ranks], "step_s": slowest}
    if norms:
        # JSON cannot hold a number that is not finite.
        data["norms"] = [
            {**norm, "total": finite(norm["total"]), "factor": finite(norm["factor"])}
            for norm in norms
        ]
        totals = ", ".join(f"{norm['total']:.6g}" for norm in norms)
        skipped = sum(norm["skipped"] for norm in norms)
        lines.insert(2, f"  norm {totals}; {skipped} updates skipped")
    return Outcome("accepted", data, lines)


def _launch_runner(worker: Worker, notes: list[str]) -> OneLaunch | None:
    """
    Return a runner that launches each step as one graph. Return None, and note the reason, if a
    rank's step cannot be one graph.
    """
    why = first_obstacle(worker.member, obstacles(worker))
    if not why:
        return OneLaunch(worker)
    notes.append(f"guarded replays, because the step cannot be one graph: {why}")
    return None


def _loss(worker: Worker, whole: OneLaunch | None, step: int) -> float:
    """This rank's share of the loss of the last step."""
    if whole is not None and whole.graph is not None:
        return sum(float(whole.feed.losses[m]) for m in sorted(whole.feed.losses))
    feed = worker.feed
    assert isinstance(feed, Batches)
    return sum(feed.losses_of(step))
