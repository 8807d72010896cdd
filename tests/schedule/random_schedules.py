"""
Random schedules that are legal and far from LIFO, and schedules that one edit has made illegal.

A legal schedule is the record of a random run of the pipeline: at every moment some rank does an
action that its inputs and free slots allow. Microbatches come in any order, weight gradients wait
for any time, and stages are on any ranks. Because the schedule is recorded in the order of one run,
no rank can deadlock: even a wait for a send is recorded after its receive. The run cannot get stuck
for lack of slots either. The deepest stage that holds a tape (the data of one F) can always
continue with this tape. A send that holds a tape is eventually received and awaited.

Every choice comes from a `random.Random`, so a seed identifies a schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from random import Random

import attrs

from qeffect.schedule.actions import Action, Kind, Schedule
from qeffect.schedule.infer import schedule_of


@attrs.frozen
class Shape:
    """
    The shape of a random schedule.

    Args:
        homes: The rank of each stage.
        microbatches: Microbatches of one step.
        slots: Maximum number of tapes (data of one F each) that each stage may have live at once.
        comms: Whether the table contains sends, receives, sharding and reductions.
        delay: How long weight gradients wait: 0 runs them as soon as other actions, 1 at the very
            end.
        full: The share of backwards that are not split.
        overlap: The share of forwards that are overlapped with a backward.
        ordered: Whether microbatches run in ascending order where there is a choice.
        waits: With `comms`, whether the table contains waits for the end of sends and reductions. A
            tape (the data of one F) then lives until its sends are awaited.
    """

    homes: tuple[int, ...]
    microbatches: int
    slots: tuple[int, ...]
    comms: bool = False
    delay: float = 0.5
    full: float = 0.1
    overlap: float = 0.1
    ordered: bool = False
    waits: bool = False


def random_shape(
    rng: Random, *, max_ranks: int = 4, max_chunks: int = 3, max_microbatches: int = 8
) -> Shape:
    """
    A random shape: stages in a loop, in a V, or anywhere.

    Args:
        rng: Random generator.
        max_ranks: Maximum number of ranks.
        max_chunks: Maximum number of stages per rank.
        max_microbatches: Maximum number of microbatches.
    """
    ranks = rng.randint(1, max_ranks)
    stages = ranks * rng.randint(1, max_chunks)
    style = rng.choice(("loop", "v", "anywhere"))
    homes = [stage % ranks for stage in range(stages)]
    if style == "v":
        homes = [h if stage // ranks % 2 == 0 else ranks - 1 - h for stage, h in enumerate(homes)]
    elif style == "anywhere":
        rng.shuffle(homes)
    microbatches = rng.randint(1, max_microbatches)
    return Shape(
        homes=tuple(homes),
        microbatches=microbatches,
        slots=tuple(rng.randint(1, microbatches) for _ in homes),
        comms=rng.random() < 0.5,
        delay=rng.random(),
        full=rng.choice((0.0, 0.1, 0.5)),
        overlap=rng.choice((0.0, 0.0, 0.2)),
        ordered=rng.random() < 0.5,
        waits=rng.random() < 0.5,
    )


def random_schedule(seed: int | Random, shape: Shape | None = None) -> Schedule:
    """
    A random legal schedule.

    Args:
        seed: A seed, or a random generator.
        shape: The shape; random if left out.
    """
    rng = seed if isinstance(seed, Random) else Random(seed)
    chosen = random_shape(rng) if shape is None else shape
    source = "random schedule" if isinstance(seed, Random) else f"random schedule, seed {seed}"
    return schedule_of(
        _Run(rng, chosen).rows(),
        source=source,
        num_stages=len(chosen.homes),
        num_microbatches=chosen.microbatches,
        stage_to_rank=dict(enumerate(chosen.homes)),
        complete=True,
    )


class _Run:
    """One random run of the pipeline, and the lines of the schedule table that it records, one per
    rank."""

    def __init__(self, rng: Random, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape
        self.awaits = shape.comms and shape.waits
        self.last = len(shape.homes) - 1
        ranks = max(shape.homes) + 1
        self.written: list[list[Action | None]] = [[] for _ in range(ranks)]
        self.ready: dict[Kind, list[list[tuple[int, int]]]] = {
            kind: [[] for _ in range(ranks)] for kind in (Kind.FORWARD, Kind.DGRAD, Kind.WGRAD)
        }
        self.live = [0] * len(shape.homes)
        self.to_settle = [shape.microbatches] * len(shape.homes)
        # What was sent to a rank and not received yet, by sender, in order.
        self.inbox: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        # What still reads each tape: its weight gradient, and the sends that are not awaited.
        self.readers: Counter[tuple[int, int]] = Counter()
        # Waits whose receive has been posted, by the rank that may write them.
        self.waits: dict[int, list[Action]] = defaultdict(list)
        self.ready[Kind.FORWARD][shape.homes[0]] = [(0, m) for m in range(shape.microbatches)]

    def rows(self) -> list[list[Action | None]]:
        if self.shape.comms:
            for stage, rank in enumerate(self.shape.homes):
                self.written[rank].append(Action(Kind.UNSHARD, stage))
        # F, dI and dW of every stage and microbatch; an unsplit backward counts twice.
        left = 3 * len(self.shape.homes) * self.shape.microbatches
        while left:
            rank = self.rng.randrange(len(self.written))
            if self.awaits and self.rng.random() < 0.3:
                self._catch_up(rank)
            left -= self._act(rank)
            if not self.shape.comms and self.written[rank] and self.rng.random() < 0.05:
                self.written[rank].append(None)
        for rank in range(len(self.written)):
            while self.waits[rank]:
                self._await(rank)
        return self.written

    def _catch_up(self, rank: int) -> None:
        """Post a receive of a message that was sent, and await a send that was received."""
        senders = [source for source, home in self.inbox if home == rank]
        waiting = [source for source in senders if self.inbox[source, rank]]
        if waiting:
            self._post(self.rng.choice(waiting), rank)
        if self.waits[rank]:
            self._await(rank)

    def _post(self, source: int, rank: int) -> None:
        receive = self.inbox[source, rank].popleft()
        self.written[rank].append(receive)
        if self.awaits:
            kind, offset = (
                (Kind.WAIT_SEND_F, -1) if receive.kind is Kind.RECV_F else (Kind.WAIT_SEND_B, 1)
            )
            self.waits[source].append(Action(kind, receive.stage + offset, receive.microbatch))

    def _await(self, rank: int) -> None:
        wait = self.waits[rank].pop(self.rng.randrange(len(self.waits[rank])))
        self.written[rank].append(wait)
        if wait.kind is not Kind.WAIT_REDUCE_GRAD:
            self._read((wait.stage, wait.microbatch))

    def _read(self, work: tuple[int, int]) -> None:
        """End the work of one reader of a tape (the data of one F); the last reader frees the
        slot."""
        self.readers[work] -= 1
        self.live[work[0]] -= not self.readers[work]

    def _act(self, rank: int) -> int:
        """
        Let a rank do an action if possible; return the number of schedule steps that were done.
        """
        options = [kind for kind in self.ready if self._choices(kind, rank)]
        if not options:
            return 0
        weights = [1 - self.shape.delay if k is Kind.WGRAD else 1.0 for k in options]
        kind = self.rng.choices(options, weights)[0] if sum(weights) else options[0]
        stage, microbatch = self._take(kind, rank)
        action = Action(kind, stage, microbatch)
        if kind is Kind.FORWARD:
            return self._forward(rank, action)
        if kind is Kind.DGRAD:
            return self._backward(rank, self._maybe_full(action))
        self.written[rank].append(action)
        self._settle(rank, stage, microbatch)
        return 1

    def _choices(self, kind: Kind, rank: int) -> list[tuple[int, int]]:
        ready = self.ready[kind][rank]
        if kind is Kind.FORWARD:
            return [work for work in ready if self.live[work[0]] < self.shape.slots[work[0]]]
        return ready

    def _take(self, kind: Kind, rank: int) -> tuple[int, int]:
        choices = self._choices(kind, rank)
        if self.shape.ordered and kind is not Kind.WGRAD:
            first = min(microbatch for _, microbatch in choices)
            choices = [work for work in choices if work[1] == first]
        work = self.rng.choice(choices)
        self.ready[kind][rank].remove(work)
        return work

    def _maybe_full(self, dgrad: Action) -> Action:
        if self.rng.random() < self.shape.full:
            return Action(Kind.BACKWARD, dgrad.stage, dgrad.microbatch)
        return dgrad

    def _forward(self, rank: int, forward: Action) -> int:
        self._receive(rank, forward, Kind.RECV_F, -1)
        self.live[forward.stage] += 1
        self.readers[forward.stage, forward.microbatch] += 1
        if forward.stage == self.last:
            self.ready[Kind.DGRAD][rank].append((forward.stage, forward.microbatch))
        if self.ready[Kind.DGRAD][rank] and self.rng.random() < self.shape.overlap:
            stage, microbatch = self._take(Kind.DGRAD, rank)
            backward = self._maybe_full(Action(Kind.DGRAD, stage, microbatch))
            self._receive(rank, backward, Kind.RECV_B, 1)
            self.written[rank].append(Action.overlap(forward, backward))
            self._hand_on(rank, forward, Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, 1)
            return 1 + self._after_backward(rank, backward)
        self.written[rank].append(forward)
        self._hand_on(rank, forward, Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, 1)
        return 1

    def _backward(self, rank: int, backward: Action) -> int:
        self._receive(rank, backward, Kind.RECV_B, 1)
        self.written[rank].append(backward)
        return self._after_backward(rank, backward)

    def _after_backward(self, rank: int, backward: Action) -> int:
        self._hand_on(rank, backward, Kind.DGRAD, Kind.SEND_B, Kind.RECV_B, -1)
        if backward.kind is Kind.BACKWARD:
            self._settle(rank, backward.stage, backward.microbatch)
            return 2
        self.ready[Kind.WGRAD][rank].append((backward.stage, backward.microbatch))
        return 1

    def _settle(self, rank: int, stage: int, microbatch: int) -> None:
        self._read((stage, microbatch))
        self.to_settle[stage] -= 1
        if self.shape.comms and not self.to_settle[stage]:
            self.written[rank].append(Action(Kind.REDUCE_GRAD, stage))
            if self.awaits:
                self.waits[rank].append(Action(Kind.WAIT_REDUCE_GRAD, stage))
            self.written[rank].append(Action(Kind.RESHARD, stage))

    def _hand_on(
        self, rank: int, done: Action, kind: Kind, send: Kind, receive: Kind, offset: int
    ) -> None:
        target = done.stage + offset
        if not 0 <= target <= self.last:
            return
        home = self.shape.homes[target]
        self.ready[kind][home].append((target, done.microbatch))
        if self.shape.comms and home != rank:
            self.written[rank].append(Action(send, done.stage, done.microbatch))
            self.inbox[rank, home].append(Action(receive, target, done.microbatch))
            if self.awaits:
                self.readers[done.stage, done.microbatch] += 1
            while self.inbox[rank, home] and self.rng.random() < 0.4:
                self._post(rank, home)

    def _receive(self, rank: int, action: Action, kind: Kind, offset: int) -> None:
        source = action.stage + offset
        if not 0 <= source <= self.last:
            return
        # Messages of one sender are received in the order in which they were sent.
        inbox = self.inbox[self.shape.homes[source], rank]
        wanted = Action(kind, action.stage, action.microbatch)
        while wanted in inbox:
            self._post(self.shape.homes[source], rank)
