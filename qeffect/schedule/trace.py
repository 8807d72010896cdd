"""
A schedule as Chrome trace JSON, for Perfetto and chrome://tracing.

Each rank is a process of the trace, with three threads: computation, messages, and sharding with
reductions. Flow arrows connect sends with their receives. An instant event marks the refused entry,
which also has the id of its clause.

`timed_trace` shows a step with simulated times, in microseconds. In this trace a rank has threads
for its computation, its host and its reductions, and one thread for each other rank, direction and
kind of message (activations or gradients).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .actions import RECEIVES, SEND_WAITS, SENDS, Kind, Schedule
from .durations import UNITS
from .findings import Finding
from .layout import TimedEntry, layout
from .steptime import Span, StepTime

MICROSECONDS = 1000
_THREADS = ("computation", "messages", "sharding and reduction")
_CATEGORIES = {
    Kind.FORWARD: "forward",
    Kind.DGRAD: "dgrad",
    Kind.WGRAD: "wgrad",
    Kind.BACKWARD: "backward",
    Kind.OVERLAP_F_B: "overlap",
}
_RECEIVER = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
_BLINK = MICROSECONDS // 20


def trace(schedule: Schedule, finding: Finding | None = None) -> dict[str, Any]:
    """
    Return the JSON object of a Chrome trace file that shows a schedule.

    Args:
        schedule: The schedule.
        finding: The finding to mark; `None` marks nothing.
    """
    return {
        "traceEvents": list(_events(schedule, finding)),
        "displayTimeUnit": "ms",
        "otherData": {
            "source": schedule.source,
            "format": schedule.format,
            "clause": "" if finding is None else finding.clause,
            "message": "" if finding is None else finding.message,
        },
    }


def trace_json(schedule: Schedule, finding: Finding | None = None) -> str:
    """Return the text of a Chrome trace file of a schedule; the arguments are those of `trace`."""
    return json.dumps(trace(schedule, finding), indent=1)


def timed_trace(timed: StepTime) -> dict[str, Any]:
    """
    Return the JSON object of a Chrome trace file that shows a simulated step.

    Args:
        timed: The simulated times of a schedule's step.
    """
    return {
        "traceEvents": list(_timed_events(timed)),
        "displayTimeUnit": "ms",
        "otherData": {
            "source": timed.schedule.source,
            "format": timed.schedule.format,
            "step": f"{float(timed.time):g} {timed.unit}",
            "bound": f"{float(timed.bound):g} {timed.unit}",
        },
    }


def timed_trace_json(timed: StepTime) -> str:
    """Return the text of a Chrome trace file of a step with simulated times."""
    return json.dumps(timed_trace(timed), indent=1)


def _timed_events(timed: StepTime) -> Iterator[dict[str, Any]]:
    # Threads of a rank are numbered by first use, computation first.
    threads: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    critical = {(span.what, span.rank, span.name) for span in timed.critical}
    for rank in range(timed.schedule.num_ranks):
        stages = ", ".join(map(str, timed.schedule.stages_of(rank)))
        yield _metadata("process_name", rank, 0, f"rank {rank} (stage {stages})")
        threads[rank, "computation"] = 0
    for number, span in enumerate(s for s in timed.spans if s.what not in ("place", "consent")):
        marked = (span.what, span.rank, span.name) in critical
        if span.peer is None:
            name = "computation" if span.what in ("refresh", "update") else span.what
            events.append(_timed_slice(timed, span, span.rank, name, threads, marked))
            continue
        # A queue carries one message at a time; the two queues of a link may overlap.
        kind = "activations" if Kind.SEND_F in span.name else "gradients"
        sent = _timed_slice(timed, span, span.rank, f"{kind} to rank {span.peer}", threads, marked)
        came = _timed_slice(
            timed, span, span.peer, f"{kind} from rank {span.rank}", threads, marked
        )
        for phase, event in (("s", sent), ("f", came)):
            # An arrow must end within a slice: just before the end of the transfer.
            late = 0.0 if phase == "s" else 0.9 * event["dur"]
            flow = {"name": "message", "cat": "messages", "ph": phase, "id": number}
            flow |= {"pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + late}
            events += [event, flow | ({} if phase == "s" else {"bp": "e"})]
    for (rank, name), thread in threads.items():
        yield _metadata("thread_name", rank, thread, name)
    yield from events


def _timed_slice(
    timed: StepTime,
    span: Span,
    rank: int,
    thread: str,
    threads: dict[tuple[int, str], int],
    critical: bool,
) -> dict[str, Any]:
    own = sum(1 for at, _ in threads if at == rank)
    scale = UNITS[timed.unit]
    args: dict[str, Any] = {} if span.step is None else {"step": span.step}
    return {
        "name": span.name,
        "cat": span.what,
        "ph": "X",
        "pid": rank,
        "tid": threads.setdefault((rank, thread), own),
        "ts": float(span.start) * scale,
        "dur": float(span.end - span.start) * scale,
        "args": args | ({"critical": True} if critical else {}),
    }


def _events(schedule: Schedule, finding: Finding | None) -> Iterator[dict[str, Any]]:
    for rank in range(schedule.num_ranks):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        yield _metadata("process_name", rank, 0, f"rank {rank} (stage {stages})")
        for thread, name in enumerate(_THREADS):
            yield _metadata("thread_name", rank, thread, name)
    entries = layout(schedule).entries
    receives = {
        (c.action.kind, c.action.stage, c.action.microbatch): c
        for c in entries
        if c.action.kind in RECEIVES
    }
    for number, entry in enumerate(entries):
        yield _slice(entry, finding)
        action = entry.action
        if action.kind in SENDS:
            kind, offset = _RECEIVER[action.kind]
            receive = receives.get((kind, action.stage + offset, action.microbatch))
            if receive is not None:
                yield _flow("s", number, entry)
                yield _flow("f", number, receive)
        if finding is not None and (entry.rank, entry.step) == (finding.rank, finding.step):
            yield {
                "name": f"refused: {finding.clause}",
                "cat": "refused",
                "ph": "i",
                "s": "p",
                "pid": entry.rank,
                "tid": _thread(entry),
                "ts": entry.start * MICROSECONDS,
                "args": {
                    "message": finding.message,
                    "expected": finding.expected,
                    "found": finding.found,
                },
            }


def _metadata(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": {"name": value}}


def _thread(entry: TimedEntry) -> int:
    if entry.action.is_compute:
        return 0
    return 1 if entry.action.kind in SENDS | RECEIVES | SEND_WAITS else 2


def _slice(entry: TimedEntry, finding: Finding | None) -> dict[str, Any]:
    args: dict[str, Any] = {"step": entry.step}
    if entry.action.stage >= 0:
        args["stage"] = entry.action.stage
    if entry.action.microbatch >= 0:
        args["microbatch"] = entry.action.microbatch
    if not entry.ran:
        args["ran"] = False
    if finding is not None and (entry.rank, entry.step) == (finding.rank, finding.step):
        args["refused"] = finding.clause
    return {
        "name": str(entry.action),
        "cat": _CATEGORIES.get(entry.action.kind, _THREADS[_thread(entry)]),
        "ph": "X",
        "pid": entry.rank,
        "tid": _thread(entry),
        "ts": entry.start * MICROSECONDS,
        "dur": entry.length * MICROSECONDS or _BLINK,
        "args": args,
    }


def _flow(phase: str, number: int, entry: TimedEntry) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": "message",
        "cat": "messages",
        "ph": phase,
        "id": number,
        "pid": entry.rank,
        "tid": _thread(entry),
        "ts": entry.start * MICROSECONDS,
    }
    if phase == "f":
        event["bp"] = "e"
    return event
