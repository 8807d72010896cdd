"""
``qeffect runtime report scale``: compare a guarded pipeline with torch's own pipeline, and time
both.

The native side is torch's schedule runtime over stages with the library's full backward. Both sides
train the same model from the same bits. The command starts one process per rank twice: first to
measure, then to profile. Under torchrun, each of torchrun's ranks starts its own processes.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import attrs

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
from ...step.plan.order import Order
from ..comparisons.ranks import compare_pipelines, tensor_digests, totals_of_ranks
from ..reports.report import Report, environment
from ..runner.profiles import add_profiles
from ..runner.rank_parts import bound_ms, message_ms, times_alone, times_in_row
from ..runner.rank_process import Findings
from ..runner.rank_rows import RankRun, measure_rows
from ..runner.timing import RoundPlan, meet_idle
from ..sides.pipelines import (
    GuardedSide,
    LaunchSide,
    NativeSide,
    backend_on,
    build_guarded,
    build_native,
    isolation,
)
from ..sides.side import NamedRow
from ..statistics.summary import exact_median
from .options import add_rank_options, rank_starts, require_rounds

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
"""Number of steps after which replays and one launch per step are compared."""


@attrs.frozen
class ScaleRow(NamedRow):
    """
    One row of the report, to be measured: one cell under one schedule, run by one side.

    Args:
        cell: The workload (layer dimensions and number of microbatches), a name of `CELLS`.
        side: The way to run a step: `native`, `guarded` or `one launch`.
        schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
        pp: Number of pipeline ranks.
    """

    pp: int
    settling_steps = BEFORE
    copies = False

    @property
    def split(self) -> bool:
        """
        Whether the row runs each step as one launch. To split the time of such a step into parts,
        the profile compares the step with the same rank's actions without messages.
        """
        return self.side == "one launch"

    def job(self) -> Job:
        """The pipeline job that this row describes."""
        config, microbatches = CELLS[self.cell]
        return _job(self.pp, self.schedule, config, microbatches)

    def make(self, member: Member) -> NativeSide | GuardedSide:
        """Build the row's pipeline; the native side is torch's own pipeline."""
        if self.side == "native":
            return build_native(member, self.job())
        return build_guarded(member, self.job(), "one launch" if self.split else None)


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scale`."""
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="pipeline ranks (default 2)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=list(SCHEDULES),
        metavar="NAME",
        help="schedules to measure, from il, izb, zbv (default: all)",
    )
    parser.add_argument(
        "--cells",
        nargs="*",
        default=list(CELLS)[:2],
        choices=CELLS,
        metavar="CELL",
        help="cells to time (layer size and number of microbatches; default "
        f"{' '.join(list(CELLS)[:2])})",
    )
    parser.add_argument(
        "--compared",
        nargs="*",
        default=list(COMPARED)[:2],
        choices=COMPARED,
        metavar="NAME",
        help=f"cases to compare bit for bit (default: {', '.join(list(COMPARED)[:2])})",
    )
    add_rank_options(parser, rounds=5, profiles=False)


def run_scale(args: argparse.Namespace, progress: Progress) -> Outcome:
    """
    Compare the pipelines, then time them; the outcome is `refused` if a bit differs.

    Raises:
        UnusableError: The ranks cannot run the pipeline.
    """
    require_rounds(args)
    if not args.cells and not args.compared:
        raise UnusableError("--cells and --compared are both empty; name something to measure")
    try:
        for name in args.schedules:
            Job(schedule=name, pp=args.pp).table()
        outcome = _run(args, progress)
    except (BackendError, ScheduleError, UnusableError) as error:
        mute_unless_speaker(failed=True)
        raise UnusableError(str(error)) from error
    except StoppedError as stopped:
        cause = stopped.cause
        data = {"clause": cause.clause, "rank": cause.rank, "step": None, "action": cause.action}
        outcome = Outcome("refused", data, [f"Every rank stopped: {cause.text}"])
    mute_unless_speaker(failed=outcome.exit != 0)
    return outcome


def _run(args: argparse.Namespace, progress: Progress) -> Outcome:
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
    raw: dict[str, Any] = {"compared": [], "timed": []}
    place = environment(args.commit, args.out)
    rows = _rows(args)
    with rank_starts(args, progress) as (starts, shown):
        own = args.out if starts.speaks else None
        report = Report("scale", own, place, configuration, raw)

        def take(found: dict[str, Any]) -> None:
            ((kind, row),) = found.items()
            raw[kind].append(row)
            report.save()

        starts.start(_measure, args, rows, take=take, note=shown).require()
        timed = list(zip(rows, raw["timed"], strict=True))
        if timed:
            meet = partial(join, args.device)
            add_profiles(starts, meet, timed, save=report.save, note=shown.note).require()
    finished = report.finish()
    derived = finished["derived"]
    same = all(not row["different"] and row["values"] for row in derived["compared"])
    same = same and not any(row.get("final_different") for row in derived["timed"])
    return Outcome("accepted" if same else "refused", {"derived": derived}, report.lines())


def _rows(args: argparse.Namespace) -> list[ScaleRow]:
    """
    The rows to measure. Each cell (workload) has one native row, then, under every schedule, a row
    of replays and a row of one launch per step.
    """
    sides = ("guarded", "one launch") if args.device == "cuda" else ("guarded",)
    rows = []
    for cell in args.cells:
        rows.append(ScaleRow(cell, "native", "il", args.pp))
        rows += [ScaleRow(cell, side, name, args.pp) for name in args.schedules for side in sides]
    return rows


def _job(pp: int, schedule: str, config: LayerConfig, microbatches: int) -> Job:
    return Job(
        schedule=schedule, pp=pp, vpp=2, microbatches=microbatches, config=config, history=16
    )


def _measure(args: argparse.Namespace, rows: list[ScaleRow], findings: Findings) -> None:
    """Run every comparison, then measure every row (a cell under one schedule, run by one side);
    each rank calls this function."""
    member = join(args.device)
    for name in args.compared:
        for schedule in args.schedules:
            findings.note(f"Comparing: {schedule}, {name}")
            findings.add({"compared": _compare(member, args, schedule, name)})
    guarded: dict[str, Any] = {}
    final: dict[str, str] = {}

    def measure(row: ScaleRow) -> dict[str, Any]:
        nonlocal guarded, final
        if row.side == "native":
            found = _time_native(member, args, row)
        elif row.side == "guarded":
            found, final = _time_guarded(member, args, row)
            guarded = found
        else:
            found = _time_launches(member, args, row, guarded, final)
        return {"timed": {**row.name, **found}}

    measure_rows(member, rows, findings, measure)


def _compare(member: Member, args: argparse.Namespace, schedule: str, name: str) -> dict[str, Any]:
    config, steps = COMPARED[name]
    job = _job(args.pp, schedule, config, 2 * args.pp)
    with isolation(member):
        backend, mode = backend_on(args.device), mode_on(args.device)
        found = compare_pipelines(member, job, steps, backend, mode=mode)
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


def _time_native(member: Member, args: argparse.Namespace, row: ScaleRow) -> dict[str, Any]:
    return RankRun.of(member, row.make).time(
        RoundPlan(args.rounds, args.native_steps, settles=True)
    )


def _time_guarded(
    member: Member, args: argparse.Namespace, row: ScaleRow
) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Time guarded replays, or eager calls on a CPU, under one schedule; return their final state too.
    """
    job = row.job()
    run = RankRun.of(member, row.make)
    side = run.side
    assert isinstance(side, GuardedSide)
    worker = side.worker
    run.settle(row.settling_steps)
    final = _final_digests(worker)
    facts: dict[str, Any] = {"slots": [s.slots for s in worker.runtime.contract.stages]}
    found = run.time(RoundPlan(args.rounds, args.steps), facts)
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
    side.close()
    return found, final


def _time_launches(
    member: Member,
    args: argparse.Namespace,
    row: ScaleRow,
    guarded: dict[str, Any],
    final: dict[str, str],
) -> dict[str, Any]:
    """
    Time the same steps as one launch each, and compare their final state with that of replays.
    """
    run = RankRun.of(member, row.make)
    side = run.side
    assert isinstance(side, LaunchSide)
    whole = side.whole
    run.settle(row.settling_steps)
    whole.leave()
    own = _final_digests(side.worker)
    odd = sorted(n for n in final.keys() | own.keys() if final.get(n) != own.get(n))
    facts = {"capture_s": whole.capture_seconds, "first": odd[:3]}
    whole.resume()
    found = run.time(RoundPlan(args.rounds, args.steps), facts)
    parts, ahead = _host_times(member, whole, args)
    whole.leave()
    ranks = all_gather(member, (len(final), len(odd), parts, whole.rehearsal.steps, ahead))
    found["final"] = [sum(rank[n] for rank in ranks) for n in (0, 1)]
    for fact, (_, _, own_ms, counted, _) in zip(found["facts"], ranks, strict=True):
        fact["host_parts_ms"], fact["rehearsed_and_as_one"] = own_ms, counted
    found["host_ahead_ms"] = [
        max(times) for times in zip(*(rank[4] for rank in ranks), strict=True)
    ]
    for what in ("alone_ms", "update_ms", "message_ms", "bound_ms", "in_order"):
        found[what] = guarded[what]
    side.close()
    return found


def _final_digests(worker: Worker) -> dict[str, str]:
    """Digests of this rank's whole state after its last step, weight caches included."""
    runtime = worker.runtime
    runtime.handoff.synchronize()
    caches = {
        f"cache {index} {name}": digests([held.detach()])[0]
        for index, stage in runtime.stages.items()
        for name, held in stage.cached_weights().items()
    }
    return {**tensor_digests(runtime.stages, worker.optimizer), **caches}


def _host_times(
    member: Member, whole: OneLaunch, args: argparse.Namespace
) -> tuple[dict[str, float], list[float]]:
    """
    Host time per step, in milliseconds, when steps are launched back to back.

    Returns:
        The median time of each part of a step, and for each round the median time of a step. The
        step's time excludes the wait for the previous step: in this wait, a host that is ahead of
        its device does no work.
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
        rounds.append(exact_median(took))
    return {part: exact_median(one[part] for one in parts) for part in parts[0]}, rounds
