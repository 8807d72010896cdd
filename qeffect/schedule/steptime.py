"""
The time and the critical path of one step of a schedule, from the durations of its actions.

A dry run gives a time to every action and message (`step_time`). It assumes:

* A rank computes its row in order, one F, I or W at a time; B is I, then W, and an overlap runs its
  parts one after the other. A computation waits until the rank's previous computation has ended and
  its own inputs have arrived; then it takes the time `launch` to begin. A tensor between two stages
  of one rank takes no time.
* A stage's `refresh` (the quantization of its weights) comes before its first F in the row, and
  waits for no message.
* A message takes no computation time. A message is sent at its place in the row. If this place
  directly follows the entry that computes the tensor, the message is sent as soon as the tensor is
  computed. For example, the input gradient of a B is sent before B's W. In a table that names no
  messages, every message is sent as soon as its tensor is computed.
* The messages from one rank to another travel one at a time, in the order of their sends. If the
  transport's `queues` is `direction` or `edge-direction`, activations and gradients travel
  independently. For every value of `queues`, the two directions between two ranks never wait for
  each other.
* Sends are buffered: a message does not wait for its receive, and a receive blocks nothing. If the
  transport has a `rendezvous`, a message starts only when its receive is also reached. If
  `rendezvous` is `rank`, the message also blocks its sender's row until the message has arrived. A
  WAIT_SEND blocks its row until the message has arrived and the receive is reached, as in the
  deadlock check.
* Reductions run in parallel with computations, one at a time on a rank. A reduction starts at its
  place in the row or, in a table without reductions, after the last W of its stage.
  WAIT_REDUCE_GRAD and the update wait for the reduction.
* A rank's `host` is the time that the rank's host needs to issue one F, I or W. The host issues one
  action after the other, ahead of the device. The device cannot begin an action before the host has
  issued it.
* With grouped dW, one matrix product computes the dW of g microbatches. Each of these dW takes 1/g
  of the product's time, and only the first dW has a `host` and a `launch`. If the durations give no
  time for the product, each dW takes the time W and has its own `host` and `launch`.
* A rank's `update` starts after the rank's row and reductions. If `consent` is not zero, the update
  starts after the rows and reductions of all ranks, plus the time `consent` in which the ranks
  agree. Sharding takes no time.

The simulated step is as short as its schedule allows: more queues, faster messages or a shorter
action never make the step longer. With measured durations, the simulated step time is a lower bound
for the measured step time.

>>> from qeffect.schedule.durations import Durations
>>> from qeffect.schedule.tables import read_fixture
>>> schedule = read_fixture("ScheduleGPipe_pp4_vpp1_m8.compute.csv")
>>> timed = step_time(schedule, Durations({"F": 1, "I": 1, "W": 0}))
>>> timed.time, timed.bound, timed.ranks[0].bubble == 3 / 11
(22, 16, True)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any

import attrs

from .actions import (
    RECEIVES,
    SEND_WAITS,
    SENDS,
    WAITS,
    Action,
    Atom,
    Kind,
    Schedule,
    ScheduleError,
)
from .durations import Durations, Time
from .grouping import require_group
from .index import Event
from .messages import COUNTERPART, INPUTS
from .processes import Processes
from .transport import DEFAULT, Transport

__all__ = ["RankTime", "Span", "StepTime", "step_time"]

_COMPUTATIONS = frozenset({Kind.FORWARD, Kind.DGRAD, Kind.WGRAD})
_BUSY = ("computation", "refresh", "update")
_MADE_BY = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.DGRAD}
_SENT_AS = {made: send for send, made in _MADE_BY.items()}
_SHOWN = 8


@attrs.frozen
class Span:
    """
    An action, message or other part of a step, with its start and end.

    Args:
        what: `computation`, `refresh`, `message`, `reduction`, `host`, `consent` or `update`;
            `place` for a receive, a wait or a sharding action, which takes no time of its own.
        name: Name in torch's notation; for a `host` span, the name of the issued action.
        rank: Rank of the action; for a message, the sender; -1 for the consent (agreement before
            the update) of all ranks.
        step: Step of the entry in the row; None if the table has no entry for this span.
        start: Start time.
        end: End time.
        peer: Receiving rank of a message.
    """

    what: str
    name: str
    rank: int
    step: int | None
    start: Time
    end: Time
    peer: int | None = None

    def record(self) -> dict[str, Any]:
        """The span as plain data, for JSON."""
        return {**attrs.asdict(self), "start": float(self.start), "end": float(self.end)}


@attrs.frozen
class RankTime:
    """
    The busy time and the idle times of a rank within a step.

    Args:
        rank: The rank.
        busy: Time in which the rank computes: F, I, W, weight refreshes and its update.
        before: Idle time before the rank's first computation.
        inside: Idle time between the rank's first and last computation.
        after: Idle time from the rank's last computation to the end of the step.
    """

    rank: int
    busy: Time
    before: Time
    inside: Time
    after: Time

    @property
    def idle(self) -> Time:
        """Time in which the rank does not compute."""
        return self.before + self.inside + self.after

    @property
    def bubble(self) -> float:
        """The share of the step in which the rank is idle."""
        whole = self.busy + self.idle
        return float(self.idle / whole) if whole else 0.0

    def record(self) -> dict[str, Any]:
        """The times as plain data, for JSON."""
        times = {n: float(getattr(self, n)) for n in ("busy", "idle", "before", "inside", "after")}
        return {"rank": self.rank, **times, "bubble": self.bubble}


@attrs.frozen
class StepTime:
    """
    The times of all parts of a step.

    Args:
        schedule: The timed schedule.
        unit: The unit of the times.
        spans: All parts of the step, lane by lane, and in order within each lane. A lane is a
            rank's row, its host, its reductions, or a queue of messages.
        critical: The critical path: each span starts when the span before it ends.
    """

    schedule: Schedule
    unit: str
    spans: tuple[Span, ...]
    critical: tuple[Span, ...]

    @cached_property
    def time(self) -> Time:
        """The step time: the end of the last part of the step."""
        return max((span.end for span in self.spans), default=0)

    @cached_property
    def ranks(self) -> tuple[RankTime, ...]:
        """The busy time and the idle times of each rank."""
        found = []
        for rank in range(self.schedule.num_ranks):
            own = [s for s in self.spans if s.rank == rank and s.what in _BUSY]
            busy = sum(s.end - s.start for s in own)
            first = own[0].start if own else self.time
            last = own[-1].end if own else self.time
            found.append(RankTime(rank, busy, first, last - first - busy, self.time - last))
        return tuple(found)

    @property
    def bound(self) -> Time:
        """Computation time of the busiest rank; no order of actions gives a shorter step."""
        return max((rank.busy for rank in self.ranks), default=0)

    def record(self) -> dict[str, Any]:
        """The times as plain data, for JSON."""
        return {
            "unit": self.unit,
            "step": float(self.time),
            "bound": float(self.bound),
            "ranks": [rank.record() for rank in self.ranks],
            "critical_path": [span.record() for span in self.critical],
        }


def step_time(
    schedule: Schedule,
    durations: Durations,
    transport: Transport = DEFAULT,
    *,
    group: int = 1,
) -> StepTime:
    """
    Time every action and message of a schedule, in time linear in the table.

    Args:
        schedule: A schedule of all ranks that `qeffect.schedule.ranks.check_ranks` accepts.
        durations: The durations of actions and messages.
        transport: How the runtime carries messages; only its `queues` and `rendezvous` matter.
        group: Number of microbatches whose dW are one matrix product. If it is more than 1, the
            schedule must come from `qeffect.schedule.grouping.group_wgrads` with this group size.

    Raises:
        ScheduleError: The table lacks ranks, names an action twice, or lacks a needed action; ranks
            wait for each other; the durations are for another schedule; or the group size does not
            divide the number of microbatches.
    """
    if not schedule.complete:
        raise ScheduleError(
            f"{schedule.source}: a step's time depends on all ranks, and this table lacks "
            "some ranks; use the table of all ranks"
        )
    durations.require(schedule)
    require_group(group, schedule.num_microbatches)
    lanes = _Rows(schedule, durations, transport, group).lay()
    lanes.run()
    spans = tuple(task.span() for task in lanes.every())
    return StepTime(schedule, durations.unit, spans, lanes.critical())


@attrs.define(eq=False)
class _Task:
    """A part of the step; it starts after the previous task of its lane and the tasks it needs."""

    what: str
    name: str
    rank: int
    step: int | None = None
    length: Time = 0
    needs: list[_Task] = attrs.field(factory=list)
    peer: int | None = None
    gap: Time = 0
    start: Time = 0
    end: Time | None = None
    cause: _Task | None = None

    def span(self) -> Span:
        assert self.end is not None
        return Span(self.what, self.name, self.rank, self.step, self.start, self.end, self.peer)


@attrs.define
class _Lanes:
    """Lanes of tasks that run in order: a rank's row, its host, its reductions, a message queue."""

    lanes: dict[Hashable, list[_Task]] = attrs.field(factory=lambda: defaultdict(list))

    def put(self, lane: Hashable, task: _Task) -> _Task:
        """Add a task at the end of a lane."""
        before = self.lanes[lane]
        task.needs = [*before[-1:], *task.needs]
        before.append(task)
        return task

    def every(self) -> Iterator[_Task]:
        """Yield all tasks, lane by lane."""
        for lane in self.lanes.values():
            yield from lane

    def run(self) -> None:
        """Compute every task's times; a task starts when all tasks that it needs have ended."""
        engine = Processes[_Task]()

        def lane(tasks: Iterable[_Task]) -> Iterator[_Task]:
            for task in tasks:
                for need in task.needs:
                    if need.end is None:
                        yield need
                    if task.cause is None or _end(need) > task.start:
                        task.cause, task.start = need, _end(need)
                task.start += task.gap
                task.end = task.start + task.length
                engine.happen(task)

        if engine.run(map(lane, self.lanes.values())):
            raise ScheduleError(_circle(next(t for t in self.every() if t.end is None)))

    def critical(self) -> tuple[Span, ...]:
        """
        Return the critical path: a chain of tasks, each of which waited for the one before it. The
        chain ends with the task that finishes last.
        """
        task = max(self.every(), key=_end, default=None)
        path = []
        while task is not None:
            if task.what != "place":
                path.append(task.span())
            task = task.cause
        return tuple(reversed(path))


@attrs.define
class _Rows:
    """Makes a task of every action and message, puts it in its lane, and records what it needs."""

    schedule: Schedule
    durations: Durations
    transport: Transport
    group: int = 1
    lanes: _Lanes = attrs.field(factory=_Lanes)
    made: dict[Event, _Task] = attrs.field(factory=dict)
    #: Needs whose tasks may be made later, from another rank's row.
    open: list[tuple[_Task, Event]] = attrs.field(factory=list)
    #: For each rank, the last task that blocks the later tasks of the row.
    held: dict[int, _Task] = attrs.field(factory=dict)
    #: Stages whose first F has a task already.
    opened: set[int] = attrs.field(factory=set)

    def lay(self) -> _Lanes:
        """Make the tasks of all rows, then the tasks at the end of the step; return the lanes."""
        for rank, atoms in enumerate(self.schedule.atoms):
            for atom in atoms:
                self._lay(rank, atom)
        self._reduce_unasked()
        for task, event in self.open:
            if event not in self.made:
                raise ScheduleError(
                    f"{self.schedule.source}: {task.name} needs {_named(event)}, which is missing; "
                    "run qeffect check on the table",
                    rank=task.rank,
                    step=task.step,
                )
            task.needs.append(self.made[event])
        self._finish()
        return self.lanes

    def _lay(self, rank: int, atom: Atom) -> None:
        event = (atom.kind, atom.stage, atom.microbatch)
        name = _named(event)
        if atom.kind in _COMPUTATIONS:
            self._compute(rank, atom, name)
        elif atom.kind in SENDS:
            self._send(rank, atom.step, event)
        elif atom.kind is Kind.REDUCE_GRAD:
            self._reduce(rank, atom.step, atom.stage, self.held.get(rank))
        else:
            place = self._put(rank, _Task("place", name, rank, atom.step))
            if atom.kind in RECEIVES:
                self._make(event, place)
                return
            if atom.kind in WAITS:
                self.open.append((place, (WAITS[atom.kind], atom.stage, atom.microbatch)))
            if atom.kind in SEND_WAITS:
                self.open.append((place, _across(WAITS[atom.kind], atom.stage, atom.microbatch)))
            self.held[rank] = place

    def _compute(self, rank: int, atom: Atom, name: str) -> None:
        kind, stage, microbatch = atom.kind, atom.stage, atom.microbatch
        if kind is Kind.FORWARD and stage not in self.opened:
            self.opened.add(stage)
            if time := self.durations.refresh(stage):
                refresh = _Task("refresh", f"{stage}REFRESH", rank, atom.step, time)
                self.held[rank] = self._put(rank, refresh)
        length, launched = self._length(atom)
        task = _Task("computation", name, rank, atom.step, length)
        task.gap = self.durations.on(rank, "launch") if launched else 0
        host = self.durations.on(rank, "host")
        if host and launched:
            issued = _Task("host", name, rank, atom.step, host)
            task.needs.append(self.lanes.put(("host", rank), issued))
        self.held[rank] = self._put(rank, task)
        self._make((kind, stage, microbatch), task)
        if kind in INPUTS:
            offset = INPUTS[kind][1]
            source = self.schedule.stage_to_rank.get(stage + offset)
            if source is not None:
                arrives = kind if source == rank else _SENT_AS[kind]
                self.open.append((task, (arrives, stage + offset, microbatch)))
        if kind in _SENT_AS and not self.schedule.has_comms:
            target = self.schedule.stage_to_rank.get(stage + COUNTERPART[_SENT_AS[kind]][1])
            if target not in (None, rank):
                self._message(rank, None, (_SENT_AS[kind], stage, microbatch), [task])

    def _length(self, atom: Atom) -> tuple[Time, bool]:
        """
        Return the time of a computation, and whether it has a launch of its own: every computation
        has, except the second and later dW of a grouped product.
        """
        if atom.kind is Kind.WGRAD and self.group > 1:
            product = self.durations.product(atom.stage, self.group)
            if product is not None:
                return Fraction(product) / self.group, atom.microbatch % self.group == 0
        return self.durations.of(atom.kind, atom.stage), True

    def _send(self, rank: int, step: int, event: Event) -> None:
        kind, stage, microbatch = event
        made, held = (_MADE_BY[kind], stage, microbatch), self.held.get(rank)
        # A message does not wait for the rest of the entry that computes it, such as the W of a B.
        follows = made in self.made and held is not None and held.step == self.made[made].step
        task = self._message(rank, step, event, [] if held is None or follows else [held])
        self.open.append((task, made))
        if self.transport.rendezvous is not None:
            self.open.append((task, _across(*event)))
        if self.transport.rendezvous == "rank":
            self.held[rank] = self._put(
                rank, _Task("place", _named(event), rank, step, needs=[task])
            )

    def _message(self, rank: int, step: int | None, event: Event, needs: list[_Task]) -> _Task:
        target = self.schedule.stage_to_rank.get(event[1] + COUNTERPART[event[0]][1])
        if target is None:
            raise ScheduleError(
                f"{self.schedule.source}: {_named(event)} goes to a stage that does not exist; "
                "run qeffect check on the table",
                rank=rank,
                step=step,
            )
        length = self.durations.message(rank, target)
        task = _Task("message", _named(event), rank, step, length, needs, target)
        self.lanes.put(("channel", rank, target, self.transport.queue(event[0])), task)
        return self._make(event, task)

    def _reduce(self, rank: int, step: int | None, stage: int, after: _Task | None) -> None:
        event = (Kind.REDUCE_GRAD, stage, -1)
        task = _Task("reduction", _named(event), rank, step, self.durations.reduction(stage))
        task.needs = [] if after is None else [after]
        self._make(event, self.lanes.put(("reduction", rank), task))

    def _reduce_unasked(self) -> None:
        """Reduce each stage after its last W, if the table has no reductions."""
        if any(kind is Kind.REDUCE_GRAD for kind, _, _ in self.made):
            return
        for rank, atoms in enumerate(self.schedule.atoms):
            last = {atom.stage: atom for atom in atoms if atom.kind is Kind.WGRAD}
            for atom in sorted(last.values(), key=lambda atom: atoms.index(atom)):
                if self.durations.reduction(atom.stage):
                    task = self.made[atom.kind, atom.stage, atom.microbatch]
                    self._reduce(rank, None, atom.stage, task)

    def _finish(self) -> None:
        ranks = range(self.schedule.num_ranks)
        ends = [
            [
                self.lanes.lanes[lane][-1]
                for lane in (("row", rank), ("reduction", rank))
                if self.lanes.lanes.get(lane)
            ]
            for rank in ranks
        ]
        if self.durations.consent:
            consent = _Task("consent", "consent", -1, length=self.durations.consent)
            consent.needs = [task for end in ends for task in end]
            self.lanes.put("consent", consent)
            ends = [[consent] for _ in ranks]
        for rank, end in enumerate(ends):
            length = self.durations.on(rank, "update")
            if length:
                self._put(rank, _Task("update", "update", rank, None, length, end))

    def _put(self, rank: int, task: _Task) -> _Task:
        return self.lanes.put(("row", rank), task)

    def _make(self, event: Event, task: _Task) -> _Task:
        if event in self.made:
            raise ScheduleError(
                f"{self.schedule.source}: {_named(event)} occurs twice; run qeffect check on the "
                "table",
                rank=task.rank,
                step=task.step,
            )
        self.made[event] = task
        return task


def _end(task: _Task) -> Time:
    assert task.end is not None
    return task.end


def _named(event: Event) -> str:
    kind, stage, microbatch = event
    return str(Action(kind, stage, microbatch))


def _across(kind: Kind, stage: int, microbatch: int) -> Event:
    """Return the receive that belongs to a send."""
    receive, offset = COUNTERPART[kind]
    return receive, stage + offset, microbatch


def _circle(task: _Task) -> str:
    path: list[_Task] = []
    while task not in path:
        path.append(task)
        task = next(need for need in task.needs if need.end is None)
    circle = path[path.index(task) :]
    # A send that blocks its row is in two lanes: its channel and the row.
    legs = list(dict.fromkeys(f"{t.name} on rank {t.rank}" for t in circle))
    shown = ", which waits for ".join(legs[:_SHOWN]) + (" ..." if len(legs) > _SHOWN else "")
    return f"ranks wait for each other: {shown}, and so on; run qeffect check on the table"
