"""
``qeffect plan``: compute the tapes, slots, graphs and gradient memory that a schedule needs. From
given times of its actions, the command also computes the step time. With ``--wgrad-group`` it also
compares grouped dW with ungrouped dW: how many more slots it needs, and how much time it saves.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ..report import write_text
from ..schedule.actions import Schedule, ScheduleError
from ..schedule.durations import read_durations
from ..schedule.group_plans import GroupPlan, comparison_lines, fastest
from ..schedule.plan import Layers, Provision, plan
from ..schedule.ranks import check_ranks
from ..schedule.steptime import Span, StepTime, step_time
from ..schedule.timeline import timeline
from ..schedule.trace import timed_trace_json
from ..text import counted, decoded
from .command import Outcome, Progress, UnusableError, refuse_unused
from .source import add_source, one_rank, read_source, read_transport, refuse_one_file

__all__ = ["Plan"]

#: The largest size of a layer; Python could not print byte counts far beyond it.
_MOST = 1 << 32
#: Number of actions printed at each end of a stretch of the critical path.
_SHOWN = 8


class Plan:
    """Plan a schedule's resources, with one slot per microbatch and with one slot per live tape."""

    name = "plan"
    help = (
        "plan a schedule's tapes (what each forward keeps for its backward), slots (sets of "
        "buffers for one microbatch), CUDA graphs, gradient memory and step time"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add_source(parser)
        parser.add_argument(
            "--hidden", type=int, metavar="N", help="hidden size; adds byte counts to the plan"
        )
        parser.add_argument(
            "--ffn", type=int, metavar="N", help="feed-forward size (default 4 * hidden)"
        )
        parser.add_argument("--layers", type=int, metavar="N", help="layers per stage (default 1)")
        parser.add_argument(
            "--dtype", metavar="TYPE", help="gradient type: bf16, fp16 or fp32 (default bf16)"
        )
        parser.add_argument(
            "--wgrad-group",
            type=int,
            action="append",
            metavar="G",
            help="assume that one matrix product computes the dW (weight gradients) of G "
            "consecutive microbatches of a stage, and compare slots (sets of buffers) and step "
            "time with one product per microbatch. Repeat the option to compare several values "
            "of G",
        )
        times = parser.add_argument_group("step time")
        times.add_argument(
            "--durations",
            type=Path,
            metavar="F",
            help="JSON file of the times of actions and messages; adds a simulated step to the "
            'plan. Example: {"unit": "ms", "F": 0.3, "I": 0.3, "W": 0.3, "message": 0.04}. All '
            "fields: qeffect/schedule/durations.schema.json",
        )
        times.add_argument(
            "--svg", type=Path, metavar="F", help="SVG file of the simulated step's timeline"
        )
        times.add_argument(
            "--trace", type=Path, metavar="F", help="JSON file of the simulated step's Chrome trace"
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Plan the schedule's resources and report them."""
        layers = _layers(args)
        if args.hidden is None:
            refuse_unused(
                args,
                ("--ffn", "--layers", "--dtype"),
                "byte counts need --hidden N",
            )
        if args.durations is None:
            refuse_unused(
                args,
                ("--svg", "--trace"),
                "a plan includes times only with --durations F",
                wants="--durations F",
            )
        refuse_one_file(args)
        schedule = read_source(args)
        groups = _groups(args, schedule)
        transport = read_transport(args, schedule)
        findings = check_ranks(schedule, transport)
        if findings:
            raise UnusableError(
                "only a schedule that keeps the contract can be planned; this schedule breaks the "
                f"contract: {findings[0]}"
            )
        planned = plan(schedule, layers)
        lines = [
            f"{planned.source}",
            "rank  live tapes  deferred dW  slots  open sends  graphs live/paper  arena live/paper",
        ]
        for rank in planned.ranks:
            lines.append(
                f"{rank.rank:4}  {rank.peak_live:10}  {rank.peak_deferred:11}  {rank.slots:5}  "
                f"{'-' if rank.outstanding_sends is None else rank.outstanding_sends:>10}  "
                f"{rank.live_slots.graphs:6} / {rank.paper.graphs:<6}    "
                f"{_bytes(rank.live_slots)} / {_bytes(rank.paper)}"
            )
            for stage in rank.stages:
                lines.append(
                    f"      stage {stage.stage}: {stage.peak_live} live, "
                    f"{stage.peak_deferred} deferred, {stage.forwards} forwards"
                    + (f", {stage.held_by_sends} held by sends" if stage.held_by_sends else "")
                )
        lines.append(
            "live: one slot per tape (what a forward leaves for its backward) that is live at the "
            "same time; paper: one slot per microbatch"
            + ("; add --hidden N to count bytes" if layers is None else "")
        )
        lines += one_rank(schedule)
        data: dict[str, Any] = {"plan": planned.record()}
        found: list[GroupPlan] = []
        try:
            durations = None if args.durations is None else read_durations(args.durations)
            timed = None if durations is None else step_time(schedule, durations, transport)
            for group in groups:
                found.append(GroupPlan.of(schedule, group, durations, transport))
        except ScheduleError as error:
            raise UnusableError(str(error)) from error
        if timed is not None:
            _draw(args, timed)
            data["step_time"] = timed.record()
            lines.extend(_times(timed))
        if found:
            data["groups"] = [one.record(found[0]) for one in found]
            best = fastest(found)
            data["fastest_group"] = None if best is None else best.group
            lines.extend(comparison_lines(found, schedule))
        return Outcome("accepted", data, lines)


def _draw(args: argparse.Namespace, timed: StepTime) -> None:
    """Write the pictures that the arguments name."""
    if args.svg is not None:
        write_text(args.svg, decoded(timeline(timed.schedule, timed=timed)))
    if args.trace is not None:
        write_text(args.trace, timed_trace_json(timed))


def _groups(args: argparse.Namespace, schedule: Schedule) -> list[int]:
    """
    Return the group sizes to compare, in ascending order: 1 and the given sizes. The list is empty
    if no size was given.

    Raises:
        UnusableError: A given group size does not divide the number of microbatches.
    """
    if not args.wgrad_group:
        return []
    whole = schedule.num_microbatches
    for group in args.wgrad_group:
        if group < 1 or whole % group:
            fits = [str(one) for one in range(1, whole + 1) if whole % one == 0]
            if len(fits) > 2 * _SHOWN:
                fits[_SHOWN:-_SHOWN] = ["..."]
            raise UnusableError(
                f"--wgrad-group: expected a divisor of the table's {counted(whole, 'microbatch')}, "
                f"found {group}; give {' or '.join(filter(None, (', '.join(fits[:-1]), fits[-1])))}"
            )
    return sorted({1, *args.wgrad_group})


def _times(timed: StepTime) -> Iterator[str]:
    """Yield the lines for the step time, each rank's busy and idle time, and the critical path."""
    step, bound, unit = float(timed.time), float(timed.bound), timed.unit
    over = f": the step takes {step / bound:.3f} times as long" if bound else ""
    yield f"step time {step:.4g} {unit}; the busiest rank computes for {bound:.4g} {unit}{over}"
    yield f"rank  busy {unit:>3}  idle {unit:>3}  bubble  idle before / inside / after computation"
    for rank in timed.ranks:
        idle = " / ".join(f"{float(t):.4g}" for t in (rank.before, rank.inside, rank.after))
        yield (
            f"{rank.rank:4}  {float(rank.busy):8.4g}  {float(rank.idle):8.4g}  "
            f"{rank.bubble:6.1%}  {idle}"
        )
    shares: dict[str, float] = {}
    for span in timed.critical:
        shares[span.what] = shares.get(span.what, 0.0) + float(span.end - span.start)
    parts = ", ".join(f"{what} {time:.4g}" for what, time in shares.items() if time)
    yield f"critical path of {counted(len(timed.critical), 'part')}: {parts or 'nothing'} {unit}"
    for where, group in groupby((s for s in timed.critical if s.end > s.start), key=_where):
        spans = list(group)
        names = [span.name for span in spans]
        if len(names) > 2 * _SHOWN:
            names[_SHOWN:-_SHOWN] = [f"... {len(names) - 2 * _SHOWN} more ..."]
        yield (
            f"  {float(spans[0].start):8.4g} to {float(spans[-1].end):8.4g}  {where:16}  "
            f"{' '.join(names)}"
        )


def _where(span: Span) -> str:
    if span.what == "message":
        return f"rank {span.rank} to {span.peer}"
    place = "all ranks" if span.rank < 0 else f"rank {span.rank}"
    return f"{place} {span.what}" if span.what in ("host", "reduction") else place


def _layers(args: argparse.Namespace) -> Layers | None:
    """Return the layer sizes from the options; refuse a bad value even if no option uses it."""
    for option in ("hidden", "ffn", "layers"):
        size = getattr(args, option)
        if size is not None and size > _MOST:
            raise UnusableError(f"--{option} must be at most {_MOST:,}, not {size}")
    hidden = 1 if args.hidden is None else args.hidden
    try:
        layers = Layers(
            hidden,
            4 * max(hidden, 1) if args.ffn is None else args.ffn,
            1 if args.layers is None else args.layers,
            "bf16" if args.dtype is None else args.dtype,
        )
    except ScheduleError as error:
        raise UnusableError(f"--{error}") from error
    return None if args.hidden is None else layers


def _bytes(provision: Provision) -> str:
    if provision.arena_bytes is None:
        return "-"
    return f"{provision.arena_bytes / 2**20:,.0f} MiB"
