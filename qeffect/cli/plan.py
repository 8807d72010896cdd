"""
``qeffect plan``: the tapes, slots, graphs and gradient memory that a schedule needs, and the time
of its step, computed from given times of its actions. With ``--wgrad-group`` also the cost of
grouped dW in slots, and its gain in step time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs

from ..report import write_text
from ..schedule.actions import Schedule, ScheduleError
from ..schedule.durations import Durations, read_durations
from ..schedule.grouping import group_wgrads
from ..schedule.plan import Layers, Provision, RankPlan, plan, runtime_slots
from ..schedule.ranks import check_ranks
from ..schedule.steptime import Span, StepTime, step_time
from ..schedule.timeline import timeline
from ..schedule.trace import timed_trace_json
from ..schedule.transport import Transport
from ..text import counted, decoded
from .command import Outcome, Progress, UnusableError, refuse_unused
from .source import add_source, one_rank, read_source, read_transport, refuse_one_file

__all__ = ["Plan"]

#: The largest size of a layer; Python could not print byte counts far beyond it.
_MOST = 1 << 32
#: How many names at each end of a stretch of the critical path are printed.
_SHOWN = 8
#: The largest number of ranks whose numbers are all in one row of the comparison of groups.
_RANKS = 4


class Plan:
    """Plan a schedule's resources in both provisionings."""

    name = "plan"
    help = "plan the tapes, slots, graphs, gradient bytes and step time of a schedule"

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
            help="number of consecutive microbatches per product, if one product computes the dW "
            "(weight gradients) of several microbatches of a stage; adds a comparison of slots and "
            "step time with one product per microbatch. Repeat the option to compare several "
            "numbers",
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
        """Plan and report."""
        layers = _layers(args)
        if args.hidden is None:
            refuse_unused(
                args,
                ("--ffn", "--layers", "--dtype"),
                "bytes are counted only with --hidden N",
            )
        if args.durations is None:
            refuse_unused(
                args,
                ("--svg", "--trace"),
                "a plan has times only with --durations F",
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
            "live: one slot per tape that is live at once; paper: one slot per microbatch"
            + ("; add --hidden N to count bytes" if layers is None else "")
        )
        lines += one_rank(schedule)
        data: dict[str, Any] = {"plan": planned.record()}
        found: list[_Grouped] = []
        try:
            durations = None if args.durations is None else read_durations(args.durations)
            timed = None if durations is None else step_time(schedule, durations, transport)
            for group in groups:
                found.append(_Grouped.of(schedule, group, durations, transport))
        except ScheduleError as error:
            raise UnusableError(str(error)) from error
        if timed is not None:
            _draw(args, timed)
            data["step_time"] = timed.record()
            lines.extend(_times(timed))
        if found:
            data["groups"] = [one.record(found[0]) for one in found]
            lines.extend(_comparison(found, schedule))
        return Outcome("accepted", data, lines)


def _draw(args: argparse.Namespace, timed: StepTime) -> None:
    """Write the pictures that the arguments name."""
    if args.svg is not None:
        write_text(args.svg, decoded(timeline(timed.schedule, timed=timed)))
    if args.trace is not None:
        write_text(args.trace, timed_trace_json(timed))


@attrs.frozen
class _Grouped:
    """
    The needs and the step time of a table with grouped dW.

    Args:
        group: Microbatches in each group.
        ranks: The needs of each rank.
        slots: By stage, the slots in QEffect's own runtime; None if the runtime does not take the
            table.
        timed: The simulated step, if there are durations.
        untimed: Stages whose product the durations give no time for.
    """

    group: int
    ranks: tuple[RankPlan, ...]
    slots: dict[int, int] | None
    timed: StepTime | None
    untimed: tuple[int, ...]

    @classmethod
    def of(
        cls, schedule: Schedule, group: int, durations: Durations | None, transport: Transport
    ) -> _Grouped:
        """Plan and time a table with grouped dW."""
        table = group_wgrads(schedule, group)
        timed, untimed = None, []
        if durations is not None:
            timed = step_time(table, durations, transport, group=group)
            if group > 1:
                stages = sorted(table.stage_to_rank)
                untimed = [s for s in stages if durations.product(s, group) is None]
        return cls(group, plan(table).ranks, runtime_slots(table), timed, tuple(untimed))

    @property
    def rank_slots(self) -> tuple[int, ...] | None:
        """Slots of each rank in QEffect's own runtime."""
        if self.slots is None:
            return None
        return tuple(sum(self.slots[s.stage] for s in rank.stages) for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """The idle share of the step, over all ranks."""
        ranks = () if self.timed is None else self.timed.ranks
        whole = sum(rank.busy + rank.idle for rank in ranks)
        return float(sum(rank.idle for rank in ranks) / whole) if whole else 0.0

    def over(self, first: _Grouped) -> float | None:
        """Step time divided by that of another group; None if that other step takes no time."""
        if self.timed is None or first.timed is None or not first.timed.time:
            return None
        return float(self.timed.time / first.timed.time)

    def record(self, first: _Grouped) -> dict[str, Any]:
        """The comparison with the first group as plain data, for JSON."""
        totals = self.rank_slots
        ranks = [
            {
                "rank": rank.rank,
                "peak_live": rank.peak_live,
                "peak_deferred": rank.peak_deferred,
                "slots": rank.slots,
                "runtime_slots": None if totals is None else totals[place],
                "stages": [
                    {
                        "stage": stage.stage,
                        "peak_live": stage.peak_live,
                        "peak_deferred": stage.peak_deferred,
                        "runtime_slots": None if self.slots is None else self.slots[stage.stage],
                    }
                    for stage in rank.stages
                ],
            }
            for place, rank in enumerate(self.ranks)
        ]
        found: dict[str, Any] = {"group": self.group, "ranks": ranks}
        if self.timed is not None:
            found["step_time"] = self.timed.record()
            found["bubble"] = self.bubble
            found["over_group_1"] = self.over(first)
            found["stages_without_product_time"] = list(self.untimed)
        return found


def _groups(args: argparse.Namespace, schedule: Schedule) -> list[int]:
    """
    Return the groups to compare, ascending: 1 and the given ones; none if none is given.

    Raises:
        UnusableError: A given group does not divide the number of microbatches.
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


def _comparison(found: Sequence[_Grouped], schedule: Schedule) -> Iterator[str]:
    """Lines that compare groups with the first, which is group 1."""
    first = found[0]
    yield "grouped dW: one product computes the dW of a group of microbatches, after their last dI"
    columns = [
        ["group", *(str(one.group) for one in found)],
        ["live tapes", *(_by_rank(r.peak_live for r in one.ranks) for one in found)],
        ["deferred dW", *(_by_rank(r.peak_deferred for r in one.ranks) for one in found)],
        ["slots", *(_by_rank(r.slots for r in one.ranks) for one in found)],
    ]
    if first.rank_slots is not None:
        columns.append(["runtime slots", *(_by_rank(one.rank_slots or ()) for one in found)])
    if first.timed is not None:
        unit = first.timed.unit
        ratios = [one.over(first) for one in found]
        columns += [
            [
                f"step time {unit}",
                *(f"{float(one.timed.time):.4g}" for one in found if one.timed is not None),
            ],
            ["over group 1", *("-" if r is None else f"{r:.3f}" for r in ratios)],
            ["bubble", *(f"{one.bubble:.1%}" for one in found)],
        ]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    if len(first.ranks) > _RANKS:
        yield (
            "live tapes, deferred dW and slots: of the rank with the fewest, and of the rank with "
            "the most; --json has every rank"
        )
    elif len(first.ranks) > 1:
        yield "live tapes, deferred dW and slots: by rank, rank 0 first"
    if first.rank_slots is not None:
        yield (
            "runtime slots: in QEffect's own runtime, where a receive takes the slot, and other "
            "stages of the rank also read the tape"
        )
    elif schedule.complete:
        yield (
            "no runtime slots (slots in QEffect's own runtime): the table names no messages; give "
            "a table with messages (--comms with --torch CLASS)"
        )
    for one in found:
        yield from _untimed(one)


def _untimed(one: _Grouped) -> Iterator[str]:
    """A line that says which products the durations give no time for, if any."""
    if not one.untimed:
        return
    group, missing = one.group, f"no time for a product of {one.group} microbatches"
    field = f'"grouped_W": {{"{group}": TIME}}'
    if len(one.untimed) == sum(len(rank.stages) for rank in one.ranks):
        yield f"group {group}: {missing}: {group} times W; add {field} to the durations"
    else:
        names = ", ".join(map(str, one.untimed))
        several = len(one.untimed) > 1
        stages = f"{'stages' if several else 'stage'} {names}"
        place = "each stage" if several else "the stage"
        yield f"group {group}: {missing} of {stages}: {group} times W there; add {field} to {place}"


def _by_rank(numbers: Iterable[int]) -> str:
    """The numbers of all ranks; for many ranks the smallest and the largest."""
    every = list(numbers)
    if len(every) > _RANKS:
        least, most = min(every), max(every)
        return str(most) if least == most else f"{least} to {most}"
    return " / ".join(map(str, every))


def _times(timed: StepTime) -> Iterator[str]:
    """Lines for a step's time, for each rank's use of that time, and for the critical path."""
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
    """Return the layers; refuse a bad value even if nothing would use it."""
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
