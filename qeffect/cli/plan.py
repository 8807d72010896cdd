"""
``qeffect plan``: what a schedule needs in tapes, slots, graphs and gradient memory.
"""

from __future__ import annotations

import argparse

from ..schedule.actions import ScheduleError
from ..schedule.plan import Layers, Provision, plan
from ..schedule.ranks import check_ranks
from .command import Outcome, Progress, UnusableError, refuse_unused
from .source import add_source, read_source, read_transport

__all__ = ["Plan"]

#: No size of a layer is larger; byte counts beyond it would not even be printed.
_MOST = 1 << 32


class Plan:
    """Plan a schedule's resources in both provisionings."""

    name = "plan"
    help = "plan the tapes, slots, graphs and gradient bytes of a schedule"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add_source(parser)
        parser.add_argument("--hidden", type=int, help="hidden size, for byte counts")
        parser.add_argument("--ffn", type=int, help="feed-forward size (default 4 * hidden)")
        parser.add_argument("--layers", type=int, help="layers a stage (default 1)")
        parser.add_argument("--dtype", help="gradient type (default bf16)")

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Plan and report."""
        if args.hidden is None:
            refuse_unused(
                args,
                ("--ffn", "--layers", "--dtype"),
                "bytes are counted only with --hidden N",
            )
        schedule = read_source(args)
        findings = check_ranks(schedule, read_transport(args, schedule))
        if findings:
            raise UnusableError(
                "only a schedule that keeps the contract can be planned, and this one does not: "
                f"{findings[0]}"
            )
        try:
            layers = _layers(args)
        except ScheduleError as error:
            raise UnusableError(str(error)) from error
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
            "live: a slot for each tape that is live at once; paper: one for each microbatch"
            + ("; add --hidden N to count bytes" if layers is None else "")
        )
        return Outcome("accepted", {"plan": planned.record()}, lines)


def _layers(args: argparse.Namespace) -> Layers | None:
    if args.hidden is None:
        return None
    for option in ("hidden", "ffn", "layers"):
        size = getattr(args, option)
        if size is not None and size > _MOST:
            raise UnusableError(f"--{option} must be at most {_MOST:,}, not {size}")
    return Layers(
        args.hidden,
        4 * args.hidden if args.ffn is None else args.ffn,
        1 if args.layers is None else args.layers,
        "bf16" if args.dtype is None else args.dtype,
    )


def _bytes(provision: Provision) -> str:
    if provision.arena_bytes is None:
        return "-"
    return f"{provision.arena_bytes / 2**20:,.0f} MiB"
