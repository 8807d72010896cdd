"""
``qeffect check``: check that every action of a schedule keeps the contract.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..countdown import Countdown
from ..report import write_text
from ..schedule.actions import Schedule, ScheduleError
from ..schedule.check import Verdict, check
from ..schedule.grid import grid
from ..schedule.page import page, require_small
from ..schedule.pairing import DISCIPLINES
from ..schedule.tables import fixture_names, read_fixture
from ..schedule.timeline import timeline
from ..schedule.trace import trace_json
from ..schedule.transport import QUEUES, RENDEZVOUS
from ..text import counted, decoded
from .command import PLACE, Outcome, Progress, UnusableError, needs, refuse_unused
from .source import (
    PAIRING,
    SHAPE,
    add_source,
    one_rank,
    read_source,
    read_transport,
    refuse_one_file,
)

__all__ = ["Check"]

#: Options that name a file to draw into.
_FILES = ("--svg", "--trace", "--html")


class Check:
    """Check one schedule, all shipped schedules, or random schedules."""

    name = "check"
    help = "check a pipeline schedule against the contract"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        named = add_source(parser)
        named.add_argument(
            "--fixtures", action="store_true", help="check every table shipped with QEffect"
        )
        named.add_argument(
            "--random", type=int, metavar="N", help="number of random schedules to check"
        )
        parser.add_argument("--seed", type=int, metavar="S", help="seed of --random (default 0)")
        rules = parser.add_argument_group("rules")
        rules.add_argument(
            "--pairing",
            choices=tuple(DISCIPLINES),
            help=PAIRING,
        )
        rules.add_argument(
            "--shared-pool",
            action="store_true",
            help="let all CUDA graphs of a rank share one memory pool (default: one pool per "
            "slot; a slot is a set of buffers for one microbatch)",
        )
        pictures = parser.add_argument_group("pictures")
        pictures.add_argument("--svg", type=Path, metavar="F", help="SVG file of the timeline")
        pictures.add_argument(
            "--trace", type=Path, metavar="F", help="JSON file of the Chrome trace"
        )
        pictures.add_argument(
            "--html",
            type=Path,
            metavar="F",
            help="HTML page with a timeline to step through and zoom, the slots (sets of buffers "
            "for one microbatch), the messages, and the reasons for a refusal; it opens in any "
            "browser, without network",
        )

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Check the schedule or schedules, and report the verdict."""
        if args.random is not None:
            return _random(args, progress)
        refuse_unused(args, ("--seed",), "only --random N uses it")
        if args.fixtures:
            return _fixtures(args, progress)
        refuse_one_file(args)
        schedule = read_source(args)
        if args.html is not None:
            _require_small(schedule)
        verdict = check(
            schedule,
            pairing=_pairing(args),
            shared_pool=args.shared_pool,
            transport=read_transport(args, schedule),
        )
        if args.svg is not None:
            write_text(args.svg, decoded(timeline(schedule, verdict.finding)))
        if args.trace is not None:
            write_text(args.trace, trace_json(schedule, verdict.finding))
        data = {**verdict.record(), "complete": schedule.complete}
        outcome = Outcome(verdict.verdict, data, _lines(schedule, verdict))
        if args.html is not None:
            write_text(args.html, decoded(page(schedule, outcome.record(), verdict.finding)))
        return outcome


def _require_small(schedule: Schedule) -> None:
    try:
        require_small(schedule)
    except ScheduleError as error:
        raise UnusableError(f"--html: {error}") from error


def _pairing(args: argparse.Namespace) -> str:
    return "contract" if args.pairing is None else str(args.pairing)


def _lines(schedule: Schedule, verdict: Verdict) -> list[str]:
    if verdict.finding is None:
        return [
            f"accepted: {schedule.source}",
            f"  {_extent(schedule)}, {counted(schedule.num_microbatches, 'microbatch')}, "
            f"{counted(verdict.actions, 'action')} checked in two optimizer steps; slots per "
            f"stage: {verdict.slots_text}",
            *one_rank(schedule),
            *_channels(verdict),
            *_notes(schedule),
        ]
    finding = verdict.finding
    return [
        f"refused: {schedule.source}",
        grid(schedule, finding),
        *one_rank(schedule),
        "",
        str(finding),
        f"  expected: {finding.expected}",
        f"  found:    {finding.found}",
        f"  do:       {finding.remedy}",
        *_channels(verdict),
        *_notes(schedule),
    ]


def _notes(schedule: Schedule) -> list[str]:
    return [f"  note: {note}" for note in schedule.notes]


def _extent(schedule: Schedule) -> str:
    ranks = counted(schedule.num_ranks, "rank")
    if schedule.complete:
        return f"{ranks}, {counted(schedule.num_stages, 'stage')}"
    own = sorted(schedule.stage_to_rank)
    return f"{ranks} with stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"


def _channels(verdict: Verdict) -> list[str]:
    """List every way to share queues, with the check's result for it; mark the assumed way."""
    if not verdict.channels:
        return []
    transport = verdict.transport
    held = transport.rendezvous
    sends = "buffered sends" if held is None else f"sends that hold their {held}"
    wide = max(map(len, QUEUES.values()))
    lines = [
        f"  messages: check assumes one queue for {QUEUES[transport.queues]}, and {sends} "
        "(--queues, --rendezvous)",
        f"    {'one queue for':{wide}}  messages   the step, if a send holds its "
        f"{' / its '.join(RENDEZVOUS)} until received",
    ]
    for channel in verdict.channels:
        mark = ">" if channel.queues == transport.queues else " "
        order = "in order" if channel.in_order else "swapped"
        ends = " / ".join(
            "can deadlock" if channel.can_deadlock(held) else "ends" for held in RENDEZVOUS
        )
        lines.append(f"  {mark} {QUEUES[channel.queues]:{wide}}  {order:9}  {ends}")
    return lines


def _blocking(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Count the tables that can deadlock under rendezvous semantics, by how queues are shared."""
    asked = [row for row in rows if row["channels"]]
    if not asked:
        return
    yield (
        f"Of {len(asked)} tables with messages, this many can deadlock under rendezvous semantics "
        "(a send ends only when its receive is posted):"
    )
    for number, (queues, words) in enumerate(QUEUES.items()):
        counts = (
            f"{sum(r['channels'][number]['rendezvous'][held] != 'ends' for r in asked)} if a send "
            f"holds its {held}"
            for held in RENDEZVOUS
        )
        yield f"  {', '.join(counts)}, with one queue for {words} ({queues})"


def _fixtures(args: argparse.Namespace, progress: Progress) -> Outcome:
    refuse_unused(
        args,
        (*SHAPE, *_FILES),
        "--fixtures checks every shipped table unchanged and draws nothing",
    )
    pairing = _pairing(args)
    rows: list[dict[str, Any]] = []
    text = []
    names = fixture_names()
    count = Countdown("tables", len(names))
    for number, name in enumerate(names):
        progress(f"Checking: {count(number)}: {name}")
        verdict = check(read_fixture(name), pairing=pairing, shared_pool=args.shared_pool)
        if verdict.finding is not None and all(row["verdict"] == "accepted" for row in rows):
            progress.note(f"First refusal. {name}: {verdict.finding}")
        rows.append({"table": name, **verdict.record()})
        said = "accepted" if verdict.finding is None else f"refused  {verdict.finding}"
        text.append(f"{said:9} {name} ({verdict.actions} actions)")
    refused = [row for row in rows if row["verdict"] != "accepted"]
    first = {k: refused[0][k] for k in PLACE} if refused else {}
    text.append(f"{len(rows) - len(refused)} of {len(rows)} shipped tables accepted.")
    text.extend(_blocking(rows))
    return Outcome(
        "refused" if refused else "accepted",
        {**first, "tables": rows, "pairing": pairing},
        text,
    )


def _random(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Check random schedules; the verification package makes them and needs Hypothesis."""
    if args.random < 1:
        raise UnusableError(f"--random must be at least 1, not {args.random}")
    refuse_unused(
        args,
        (*SHAPE, "--pairing", "--shared-pool", *_FILES),
        "--random makes its own schedules and checks them with --pairing contract only",
    )
    args.seed = 0 if args.seed is None else args.seed
    for entry in entry_points(group="qeffect.random"):
        run = needs("verify", entry.load)
        outcome: Outcome = needs("verify", lambda: run(args, progress))  # noqa: B023
        return outcome
    raise UnusableError(
        "random schedules need the verification layer: pip install 'qeffect[verify]'"
    )
