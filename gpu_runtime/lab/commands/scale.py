"""
``qeffect runtime report scale``: a guarded pipeline, compared with torch's own and timed beside it.

torchrun starts the ranks; rank 0 writes the report. The native side is torch's schedule runtime
over stages with the library's full backward. Both sides train the same model from the same bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from qeffect.cli.command import Outcome, Progress
from qeffect.report import UnusableError
from qeffect.schedule.actions import ScheduleError

from ...backends.layers import LayerConfig
from ...backends.protocol import BackendError
from ...ranks.consent import StoppedError
from ...ranks.job import Job
from ...ranks.membership import Member, all_gather, join
from ...ranks.one_launch import OneLaunch
from ...ranks.processes import mute_unless_speaker
from ...ranks.worker import Worker
from ...runtime import mode_on
from ...step.memory.digests import digests
from ...step.optimizer import Gradients
from ...step.plan.order import Order
from ..comparisons.ranks import compared, tensor_digests, totals_of_ranks
from ..reports.report import Report, add_report_options, environment
from ..runner.profiler import traced
from ..runner.rank_parts import (
    bound_ms,
    message_ms,
    row_as_one_graph,
    spent_ms,
    times_alone,
    times_in_row,
)
from ..runner.timing import RoundPlan, meet_idle, time_side
from ..sides.pipelines import (
    LaunchSide,
    NativeSide,
    ReplaySide,
    backend_on,
    build_side,
    isolated,
)
from ..statistics.traces import shares

__all__ = ["add_scale_arguments", "run_scale"]

SCHEDULES = ("il", "izb", "zbv")
CELLS: dict[str, tuple[LayerConfig, int]] = {
    "h2048-s256-m4": (LayerConfig(2048, 8192, 16, 256), 4),
    "h4096-s256-m8": (LayerConfig(4096, 11008, 32, 256), 8),
    "tiny": (LayerConfig(32, 64, 2, 16), 4),
}
"""Layers and microbatches of the timed cells; `tiny` is for a CPU."""
COMPARED: dict[str, tuple[LayerConfig, int]] = {
    "hidden 512": (LayerConfig(512, 2048, 8, 256), 20),
    "hidden 2048": (LayerConfig(2048, 8192, 16, 256), 6),
    "tiny": (LayerConfig(32, 64, 2, 16), 3),
}
"""Layers and steps of the compared models."""
BEFORE = 6
"""Steps after which replays and one launch per step are compared."""
TRACED = 5
"""Steps under the profiler whose time is split; the first only marks where the second begins."""


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scale`."""
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="pipeline ranks (default 2)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=list(SCHEDULES),
        metavar="NAME",
        help="schedules: il, izb, zbv (default all)",
    )
    parser.add_argument(
        "--cells",
        nargs="*",
        default=list(CELLS)[:2],
        choices=CELLS,
        metavar="CELL",
        help=f"cells to time (default {' '.join(list(CELLS)[:2])})",
    )
    parser.add_argument(
        "--compared",
        nargs="*",
        default=list(COMPARED)[:2],
        choices=COMPARED,
        metavar="NAME",
        help=f"cases to compare bit for bit (default: {', '.join(list(COMPARED)[:2])})",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="rounds per side (default 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="steps per round (default 10)"
    )
    parser.add_argument(
        "--native-steps",
        type=int,
        default=3,
        metavar="N",
        help="steps per round for native (default 3)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="device (default cuda)"
    )
    add_report_options(parser)


def run_scale(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare, then time; refused where a bit differs.

    Raises:
        UnusableError: The ranks cannot run it.
    """
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if args.rounds < 1 or args.steps < 1 or args.native_steps < 1:
        raise UnusableError("--rounds, --steps and --native-steps must be at least 1")
    if not args.cells and not args.compared:
        raise UnusableError("--cells and --compared are both empty; name something to measure")
    try:
        for name in args.schedules:
            Job(schedule=name, pp=args.pp).table()
        outcome = _run(args, progress)
    except (BackendError, ScheduleError) as error:
        mute_unless_speaker(failed=True)
        raise UnusableError(str(error)) from error
    except StoppedError as stopped:
        cause = stopped.cause
        data = {"clause": cause.clause, "rank": cause.rank, "step": None, "action": cause.action}
        outcome = Outcome("refused", data, [f"Every rank stopped: {cause.text}"])
    mute_unless_speaker(failed=outcome.exit != 0)
    return outcome


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
    member = join(args.device)
    if member.world != args.pp:
        raise UnusableError(
            f"{member.world} processes were started for --pp {args.pp}; start torchrun with "
            f"--nproc-per-node {args.pp}"
        )
    configuration = {
        "pp": args.pp,
        "vpp": 2,
        "layers_a_stage": 1,
        "device": args.device,
        "backend": backend_on(args.device),
        "schedules": args.schedules,
        "rounds": args.rounds,
        "steps": args.steps,
        "native_steps": args.native_steps,
    }
    own = args.out if member.rank == 0 else None
    raw: dict[str, Any] = {"compared": [], "timed": []}
    report = Report("scale", own, environment(args.commit, args.out), configuration, raw)
    for name in args.compared:
        for schedule in args.schedules:
            progress(f"Comparing. {schedule}, {name}")
            raw["compared"].append(_compare(member, args, schedule, name))
            report.save()
    for name in args.cells:
        progress(f"Timing. {name}, native")
        with isolated(member):
            raw["timed"].append(_native(member, args, name))
        for schedule in args.schedules:
            progress(f"Timing. {name}, {schedule}")
            with isolated(member):
                guarded, final = _guarded(member, args, schedule, name)
            raw["timed"].append(guarded)
            if args.device == "cuda":
                progress(f"Timing. {name}, {schedule}, one launch a step")
                with isolated(member):
                    raw["timed"].append(_one_launch(member, args, schedule, name, guarded, final))
            report.save()
    finished = report.finish()
    derived = finished["derived"]
    same = all(not row["different"] and row["values"] for row in derived["compared"])
    same = same and not any(row.get("final_different") for row in derived["timed"])
    return Outcome("accepted" if same else "refused", {"derived": derived}, report.lines())


def _job(args: argparse.Namespace, schedule: str, config: LayerConfig, microbatches: int) -> Job:
    return Job(
        schedule=schedule, pp=args.pp, vpp=2, microbatches=microbatches, config=config, history=16
    )


def _compare(member: Member, args: argparse.Namespace, schedule: str, name: str) -> dict[str, Any]:
    config, steps = COMPARED[name]
    job = _job(args, schedule, config, 2 * args.pp)
    with isolated(member):
        captured = args.device == "cuda"
        found = compared(member, job, steps, backend_on(args.device), captured=captured)
    ranks = all_gather(member, (found.totals(), found.slots))
    return {
        "name": name,
        "schedule": schedule,
        "steps": steps,
        "microbatches": job.microbatches,
        "categories": {
            c: list(of) for c, of in totals_of_ranks([rank for rank, _ in ranks]).items()
        },
        "slots": [slots for _, slots in ranks],
    }


def _native(member: Member, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """torch's Interleaved 1F1B over full backwards: what users run today."""
    config, microbatches = CELLS[name]
    job = _job(args, "il", config, microbatches)
    side, made = build_side(member, lambda: NativeSide(member, job, backend_on(args.device)))
    return _timed(member, args, name, "native", "il", side.step, args.native_steps, made, {})


def _final(worker: Worker) -> dict[str, str]:
    """Digests of this rank's whole state after its last step, weight caches included."""
    runtime = worker.runtime
    runtime.handoff.synchronize()
    caches = {
        f"cache {index} {name}": digests([held.detach()])[0]
        for index, stage in runtime.stages.items()
        for name, held in stage.cached_weights().items()
    }
    return {**tensor_digests(runtime.stages, worker.optimizer), **caches}


def _one_launch(
    member: Member,
    args: argparse.Namespace,
    schedule: str,
    name: str,
    guarded: dict[str, Any],
    final: dict[str, str],
) -> dict[str, Any]:
    """The same steps, each one launch; their final state is compared with that of replays."""
    config, microbatches = CELLS[name]
    job = _job(args, schedule, config, microbatches)
    side, made = build_side(member, lambda: LaunchSide(member, job, backend_on(args.device)))
    worker, whole = side.worker, side.whole
    for _ in range(BEFORE):
        whole.step()
    whole.leave()
    own = _final(worker)
    odd = sorted(n for n in final.keys() | own.keys() if final.get(n) != own.get(n))
    facts = {"capture_s": whole.capture_seconds, "first": odd[:3]}
    whole.resume()
    found = _timed(member, args, name, "one launch", schedule, whole.step, args.steps, made, facts)
    parts, ahead = _ahead(member, whole, args)
    meet_idle(member)
    launches = shares(traced(whole.step, member.synchronize, TRACED), TRACED)
    whole.leave()
    gradients = worker.pipeline.step(worker.optimizer)
    order = Order.of_rank(job.table(), member.rank % job.pp)
    meet_idle(member)
    split = {"launch": launches, **_own_row(worker, gradients, order)}
    ranks = all_gather(member, (len(final), len(odd), parts, whole.rehearsal.steps, ahead))
    found["final"] = [sum(rank[n] for rank in ranks) for n in (0, 1)]
    for fact, (_, _, own_ms, counted, _) in zip(found["facts"], ranks, strict=True):
        fact["host_parts_ms"], fact["rehearsed_and_as_one"] = own_ms, counted
    found["host_ahead_ms"] = [
        max(times) for times in zip(*(rank[4] for rank in ranks), strict=True)
    ]
    for what in ("alone_ms", "update_ms", "message_ms", "bound_ms", "in_order"):
        found[what] = guarded[what]
    found["split"] = all_gather(member, split)
    side.close()
    return found


def _ahead(
    member: Member, whole: OneLaunch, args: argparse.Namespace
) -> tuple[dict[str, float], list[float]]:
    """
    Host time per step of launches back to back, in milliseconds.

    Returns:
        The median of each part; and by round the median step without the wait for the step before,
        since a host that is ahead only waits for its device.
    """
    rounds: list[float] = []
    parts: list[dict[str, float]] = []
    for _ in range(args.rounds):
        meet_idle(member)
        took = []
        for _ in range(args.steps):
            began = time.perf_counter()
            whole.step()
            took.append(1e3 * (time.perf_counter() - began) - whole.host_ms["step before"])
            parts.append(whole.host_ms)
        rounds.append(statistics.median(took))
    return {part: statistics.median(one[part] for one in parts) for part in parts[0]}, rounds


def _own_row(worker: Worker, gradients: Gradients, order: Order) -> dict[str, Any]:
    """A rank's row as one graph without messages: its time and its shares."""
    with row_as_one_graph(worker, gradients, order) as replay:
        took = spent_ms(replay)
        return {
            "row_ms": took,
            "row": shares(traced(replay, torch.cuda.synchronize, TRACED), TRACED),
        }


def _guarded(
    member: Member, args: argparse.Namespace, schedule: str, name: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Guarded replays, or eager calls on a CPU, under one schedule; and their final state."""
    config, microbatches = CELLS[name]
    job = _job(args, schedule, config, microbatches)
    side, made = build_side(
        member, lambda: ReplaySide(member, job, backend_on(args.device), mode_on(args.device))
    )
    worker = side.worker
    for _ in range(BEFORE):
        worker.step()
    final = _final(worker)
    facts: dict[str, Any] = {"slots": [s.slots for s in worker.runtime.contract.stages]}
    found = _timed(member, args, name, "guarded", schedule, worker.step, args.steps, made, facts)
    gradients = worker.pipeline.step(worker.optimizer)
    ranks = all_gather(member, times_alone(worker, gradients))
    found["message_ms"] = max(all_gather(member, message_ms(member, job, worker)))
    found["alone_ms"] = {stage: times for rank, _ in ranks for stage, times in rank.items()}
    found["update_ms"] = [update for _, update in ranks]
    found["bound_ms"] = bound_ms(job, found["alone_ms"], found["update_ms"], found["message_ms"])
    order = Order.of_rank(job.table(), member.rank % job.pp)
    ranks = all_gather(member, times_in_row(worker, gradients, order))
    times = {stage: took for rank, _ in ranks for stage, took in rank.items()}
    updates = [update for _, update in ranks]
    bound = bound_ms(job, times, updates, found["message_ms"])
    found["in_order"] = {"times_ms": times, "update_ms": updates, "bound_ms": bound}
    worker.close()
    return found, final


def _timed(
    member: Member,
    args: argparse.Namespace,
    name: str,
    side: str,
    schedule: str,
    step: Callable[[], object],
    steps: int,
    made: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """A side of a cell, with its names."""
    found = time_side(member, step, RoundPlan(args.rounds, steps), construction_s=made, facts=facts)
    return {"cell": name, "side": side, "schedule": schedule, **found}
