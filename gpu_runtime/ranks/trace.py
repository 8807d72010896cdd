"""
Write a Chrome trace that contains one step on every rank, followed by a simulation of the same
step.

Times come from the host's clock on a CPU, and from events on the graph stream on a GPU. A message
has a slice (a bar in the trace) on each of its two ranks. The slice begins when the rank posts the
transfer, and ends when the rank has waited for the transfer. An arrow goes from the send to the
receive. Time zero of a rank is the moment at which the rank leaves a barrier of all ranks. Ranks on
one host share the host's clock. Ranks on different hosts leave the barrier at slightly different
moments, so their time zeros differ slightly.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from qeffect.schedule.actions import Kind, Schedule
from qeffect.schedule.durations import Durations
from qeffect.schedule.steptime import step_time
from qeffect.schedule.trace import timed_trace

from ..backends.protocol import BackendError
from ..step.eager import StageMemory
from ..step.effects import Effects
from .channels import ChannelEnds, Channels, Message, Transfer
from .consent import action_name
from .membership import Member, all_gather
from .pipeline import Entry, Passage
from .worker import Worker

__all__ = ["Span", "Tracer", "chrome_trace"]

_COMPUTATIONS = {Kind.FORWARD: "F", Kind.DGRAD: "I", Kind.WGRAD: "W"}
_LANES = ("computation", "sends", "receives", "reductions", "end of the step")
_APART = 1_000_000
"""Smallest identifier of an arrow in the simulated step."""


@attrs.frozen
class Span:
    """
    A span of time on a rank, in microseconds since the barrier.

    Args:
        lane: Name of the lane (a line of the trace viewer) that shows the span.
        name: The action in the notation of schedule tables, such as ``1W2``.
        start: Begin of the span, in microseconds.
        end: End of the span, in microseconds.
        stage: The stage of a computation, otherwise -1.
        kind: `F`, `I` or `W` for a computation; `refresh` for the cache refresh before a stage's
            first F; `wait` while a computation waits for its message; otherwise empty.
        message: For a send or a receive: the sending rank, the receiving rank, and the number of
            the message.
    """

    lane: str
    name: str
    start: float
    end: float
    stage: int = -1
    kind: str = ""
    message: tuple[int, int, int] | None = None


class _Clock:
    """Reads points in time, and converts them to microseconds since time zero of the step."""

    def __init__(self, member: Member, seconds: float) -> None:
        self.cuda = member.device.type == "cuda"
        member.synchronize(seconds, action="trace")
        all_gather(member, None)  # a barrier
        self.host = time.perf_counter()
        self.origin = self.mark()

    def mark(self) -> Any:
        """
        Return a mark of the present time: the host's clock, or on a GPU an event on the current
        stream.
        """
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def of(self, mark: Any) -> float:
        """Return the microseconds from time zero to a mark that the device has reached."""
        if self.cuda:
            return 1e3 * float(self.origin.elapsed_time(mark))
        return 1e6 * float(mark - self.host)


class _RecordingChannels:
    """Channels that record each transfer."""

    def __init__(self, inner: Channels, tracer: Tracer) -> None:
        self._inner, self._tracer = inner, tracer

    def send(self, tensor: Tensor, to: int, message: Message) -> Transfer:
        ends = ChannelEnds(self._inner.rank, to)
        return self._posted(self._inner.send, tensor, to, message, ends, "sends")

    def receive(self, into: Tensor, source: int, message: Message) -> Transfer:
        ends = ChannelEnds(source, self._inner.rank)
        return self._posted(self._inner.receive, into, source, message, ends, "receives")

    def _posted(
        self, post: Any, tensor: Tensor, peer: int, message: Message, ends: ChannelEnds, lane: str
    ) -> Transfer:
        began = self._tracer.clock.mark()
        transfer: Transfer = post(tensor, peer, message)
        self._tracer.under_way[id(transfer)] = (lane, began, (*ends, message.number))
        return transfer

    def wait(self, transfer: Transfer) -> None:
        self._inner.wait(transfer)
        ended = self._tracer.clock.mark()
        lane, began, message = self._tracer.under_way.pop(id(transfer))
        self._tracer.note(lane, transfer.action, began, ended, message=message)
        self._tracer.resumed = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _RecordingReduction:
    """A reduction that records its end."""

    def __init__(self, work: Any, bucket: int | str, tracer: Tracer) -> None:
        self.work, self.bucket, self.tracer = work, bucket, tracer
        self.began = tracer.clock.mark()

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        ended = self.tracer.clock.mark()
        self.tracer.note("reductions", f"reduction of {self.bucket}", self.began, ended)


class _RefreshRecorder:
    """An executor that records each refresh separately from the F after it."""

    def __init__(self, inner: Any, tracer: Tracer) -> None:
        self._inner, self._tracer = inner, tracer

    def refresh(self, memory: StageMemory) -> Effects:
        tracer, stage = self._tracer, memory.stage.index
        began = tracer.clock.mark()
        effects: Effects = self._inner.refresh(memory)
        tracer.refreshed = ended = tracer.clock.mark()
        name = f"{stage}REFRESH"
        tracer.note("computation", name, began, ended, stage=stage, kind="refresh")
        return effects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Tracer:
    """
    A recorder of one step on one rank.

    Args:
        worker: The rank's worker, between two steps.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.clock: _Clock
        self.under_way: dict[int, tuple[str, Any, tuple[int, int, int]]] = {}
        self.resumed: Any = None
        self.refreshed: Any = None
        self._noted: list[tuple[str, str, Any, Any, dict[str, Any]]] = []

    def note(self, lane: str, name: str, began: Any, ended: Any, **more: Any) -> None:
        """Record a span between two points in time that `mark` returned."""
        self._noted.append((lane, name, began, ended, more))

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """
        A context that records one step. Every rank must enter the context, because it begins with a
        barrier.
        """
        pipeline: Any = self.worker.pipeline
        runtime: Any = self.worker.runtime
        program, channels, reducer = list(pipeline.program), pipeline.channels, runtime.reducer
        with runtime.caller_scope():
            self.clock = _Clock(self.worker.member, self.worker.limits.commit)
        pipeline.program[:] = [self._entry(entry) for entry in program]
        pipeline.channels = _RecordingChannels(channels, self)
        if reducer is not None:
            runtime.reducer = lambda name, given: _RecordingReduction(
                reducer(name, given), name, self
            )
        executor = runtime.performer.executor
        runtime.performer.executor = _RefreshRecorder(executor, self)
        pipeline._agree = self._timed("consent of all", pipeline._agree)
        runtime.update = self._timed("update", runtime.update)
        try:
            yield
        finally:
            pipeline.program[:] = program
            pipeline.channels, runtime.reducer = channels, reducer
            runtime.performer.executor = executor
            del pipeline._agree, runtime.update
        runtime.bound(runtime.handoff.synchronize)

    def _timed(self, name: str, act: Any) -> Any:
        def timed(*given: Any, **named: Any) -> Any:
            began = self.clock.mark()
            found = act(*given, **named)
            self.note("end of the step", name, began, self.clock.mark())
            return found

        return timed

    def _entry(self, entry: Entry) -> Entry:
        kind = _COMPUTATIONS.get(entry.atom.kind)
        if kind is None:
            return entry
        name, stage = action_name(entry.atom), entry.atom.stage

        def act(passage: Passage) -> None:
            began, self.resumed, self.refreshed = self.clock.mark(), None, None
            entry.act(passage)
            ended = self.clock.mark()
            began = self.refreshed or began
            if self.resumed is not None:
                self.note("computation", f"{name} waits", began, self.resumed, kind="wait")
                began = self.resumed
            self.note("computation", name, began, ended, stage=stage, kind=kind)

        return entry._replace(act=act)

    def spans(self) -> list[Span]:
        """Return the recorded spans, once the device has finished the step."""
        of = self.clock.of
        return [Span(lane, name, of(a), of(b), **more) for lane, name, a, b, more in self._noted]


def chrome_trace(member: Member, tracer: Tracer, table: Schedule) -> dict[str, Any]:
    """
    Return the spans of all ranks in Chrome's trace format. Every rank must call this function.

    Args:
        member: This process.
        tracer: The recorder of this process, with a recorded step.
        table: The schedule, which is also simulated with the measured times.

    Raises:
        BackendError: The trace has only the send or only the receive of a message.
    """
    own = (socket.gethostname(), tracer.clock.host, [attrs.astuple(s) for s in tracer.spans()])
    said = all_gather(member, own)
    one_host = len({host for host, _, _ in said}) == 1
    ranks = []
    for _, zero, spans in said:
        # Ranks of one host share its clock, so the offset between their exits from the barrier is
        # known.
        late = 1e6 * (zero - said[0][1]) if one_host else 0.0
        ranks.append([_moved(Span(*span), late) for span in spans])
    first = min(span.start for spans in ranks for span in spans)
    ranks = [[_moved(span, -first) for span in spans] for spans in ranks]
    events = list(_events(ranks, table))
    durations = measured_durations(ranks[: table.num_ranks])
    timed = step_time(table, durations)
    for event in timed_trace(timed)["traceEvents"]:
        event["pid"] += len(ranks)
        if "id" in event:
            event["id"] += _APART
        if event["name"] == "process_name":
            event["args"]["name"] = f"simulated {event['args']['name']}"
        events.append(event)
    last = max(span.end for spans in ranks for span in spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "source": table.source,
            "clock": "events on the graph stream" if tracer.clock.cuda else "the host's",
            "aligned": "one host's clock" if one_host else "at a barrier",
            "step": f"{last:.1f} us",
            "simulated step": f"{float(timed.time):.1f} us",
        },
    }


def measured_durations(ranks: Sequence[Sequence[Span]]) -> Durations:
    """
    Compute the durations of actions and messages, in microseconds, for a simulation of one
    pipeline's step.

    The duration of each stage's F, I, W and refresh is the median of the measured times. The
    duration of a message is a median too. It begins when both ranks have posted the message, and
    ends with the receiver's wait. This duration is an upper bound of the transfer time. Each rank's
    update has its own duration.

    Args:
        ranks: The spans of each rank of the pipeline.
    """
    stages: dict[int, dict[str, list[float]]] = {}
    for spans in ranks:
        for span in spans:
            if span.stage >= 0:
                took = stages.setdefault(span.stage, {}).setdefault(span.kind, [])
                took.append(span.end - span.start)
    ends = _ends([span for spans in ranks for span in spans])
    took = [came.end - max(left.start, came.start) for left, came in ends.values()]
    updates = {
        rank: {"update": sum(s.end - s.start for s in spans if s.name == "update")}
        for rank, spans in enumerate(ranks)
    }
    times = dict.fromkeys("FIW", 0.0)
    times["message"] = max(0.0, statistics.median(took)) if took else 0.0
    medians = {
        stage: {kind: statistics.median(each) for kind, each in kinds.items()}
        for stage, kinds in stages.items()
    }
    return Durations(times, "us", medians, updates)


def _moved(span: Span, by: float) -> Span:
    return attrs.evolve(span, start=span.start + by, end=span.end + by)


def _ends(spans: Sequence[Span]) -> dict[tuple[int, int, int], tuple[Span, Span]]:
    """Return the spans of the send and the receive of every message."""
    sends = {s.message: s for s in spans if s.message is not None and s.lane == "sends"}
    receives = {s.message: s for s in spans if s.message is not None and s.lane == "receives"}
    if odd := sorted(sends.keys() ^ receives.keys()):
        source, to, number = odd[0]
        raise BackendError(
            f"the trace has only one end of {Message.of(number).sent} from rank {source} to {to}; "
            "trace a step that completes"
        )
    return {message: (sends[message], receives[message]) for message in sends}


def _events(ranks: Sequence[Sequence[Span]], table: Schedule) -> Iterator[dict[str, Any]]:
    threads: dict[int, Mapping[Span, int]] = {}
    for rank, spans in enumerate(ranks):
        stages = ", ".join(map(str, table.stages_of(rank % table.num_ranks)))
        yield _named("process_name", rank, 0, f"rank {rank} (stage {stages})")
        threads[rank], names = _threads(spans)
        for thread, name in enumerate(names):
            yield _named("thread_name", rank, thread, name)
        for span in spans:
            yield {
                "name": span.name,
                "cat": span.kind or span.lane,
                "ph": "X",
                "pid": rank,
                "tid": threads[rank][span],
                "ts": span.start,
                "dur": span.end - span.start,
                "args": {} if span.stage < 0 else {"stage": span.stage},
            }
    every = [span for spans in ranks for span in spans]
    for number, ((source, to, _), (left, came)) in enumerate(_ends(every).items()):
        flow = {"name": "message", "cat": "messages", "id": number}
        at = {"pid": source, "tid": threads[source][left], "ts": left.start}
        yield flow | {"ph": "s"} | at
        at = {"pid": to, "tid": threads[to][came], "ts": came.end}
        yield flow | {"ph": "f", "bp": "e"} | at


def _threads(spans: Sequence[Span]) -> tuple[Mapping[Span, int], list[str]]:
    """
    Assign a thread of the trace to each lane, and further threads if the lane's spans overlap.
    """
    names: list[str] = []
    found: dict[Span, int] = {}
    for lane in _LANES:
        ends: list[tuple[float, int]] = []
        for span in sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start, s.end)):
            free = next((n for n, (end, _) in enumerate(ends) if end <= span.start), None)
            if free is None:
                names.append(lane if not ends else f"{lane}, {len(ends) + 1}")
                ends.append((span.end, len(names) - 1))
                free = len(ends) - 1
            ends[free] = span.end, ends[free][1]
            found[span] = ends[free][1]
    return found, names


def _named(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": {"name": value}}
