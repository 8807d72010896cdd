"""
Launched steps (one CUDA graph launch per step) in a replay of rank logs.

The hosts log launches, commits, the votes on each step that their device published, and after a
stop the epoch of the device's weights. The devices' actions are not logged; the replay derives them
from what the hosts of all ranks read.

- A rank voted yes on a step if any host read a yes of that rank, or if any device made the step's
  update.
- A device made the update of a step if its host read a yes of all ranks, or reported weights from
  after that step, or if the rank voted yes on a later step.
- A device skipped an update if its host read a no, or reported weights from before that step.

If the logs show neither, the replay considers both cases: a killed rank's device may or may not
have made the update.

The messages that a rank logs while it captures its step are the messages of its graph, in order.
Each launch moves these messages through the model. The runtime also keeps the order of the messages
with the graph itself, and logs its digests (`order`) before each launch. These digests must be the
digests of the captured messages, and the digests of both ends of a channel must be equal. If a log
begins in the middle of a run, it has no capture; then the digests of both ends are compared alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from qeffect.log.rank_log import order_digest
from qeffect.log.rank_series import TAKEN_ON_TRUST
from qeffect.refusals import Refused
from qeffect.spec.ranks import NOBODY

from .concrete_state import Impossible
from .launches import LAUNCHES
from .messages_of_logs import MESSAGE_EVENTS, number_of
from .protocol import TRANSITIONS
from .replayed_messages import take_transfers
from .replayed_state import ReplayedState, UnlikeError, same

__all__ = ["LAUNCH_EVENTS", "LaunchFacts", "LaunchesOfRank", "launch_facts", "settle_launched"]

#: Events that occur only with steps that are one launch.
LAUNCH_EVENTS: Final = frozenset(
    {"captured", "order", "launch", "votes", "leave", "resume", "report"}
)
_OF_A_STEP: Final = frozenset({*MESSAGE_EVENTS, "finish"})

#: Columns with a row for each rank that a round begins with zeros.
_ROWS: Final = ("heard", "word", "graph_sends", "graph_receives", "sends_run", "receives_run")

_Event = Mapping[str, Any]
#: Makes a step of the replay from an event, a transition's name and its function.
_Make = Callable[..., Any]


@attrs.frozen
class LaunchFacts:
    """
    Facts about launches from the logs of all ranks.

    Args:
        agreed: Epochs of captured steps that some rank logged as agreed by all.
        captures: The epochs of `agreed`, and those of captured steps to which every rank consented.
        votes: For each rank and epoch, the event in which its host read the votes.
        reports: For each rank that stopped, the reported epoch of its weights.
        launched: For each rank and epoch, the event of the launch.
        orders: For each rank and epoch, the digests of the messages of the launch: by peer and
            whether they are sends.
        yes: Pairs of a rank and an epoch, if the rank must have voted yes on that epoch's step.
    """

    agreed: frozenset[int]
    captures: frozenset[int]
    votes: Mapping[tuple[int, int], _Event]
    reports: Mapping[int, int]
    launched: Mapping[tuple[int, int], _Event]
    orders: Mapping[tuple[int, int], Mapping[tuple[int, bool], int]]
    yes: frozenset[tuple[int, int]]

    def moved(self, r: int, epoch: int) -> bool | None:
        """Return whether a rank's device made an epoch's update; None if the logs do not tell."""
        found = _moved(self.votes, self.reports, r, epoch)
        if found is None and any(q == r and later > epoch for q, later in self.yes):
            return True
        return found

    def voted_yes(self, r: int, epoch: int) -> bool:
        """Return whether a rank's device must have voted yes on the step of an epoch."""
        return (r, epoch) in self.yes or self.moved(r, epoch) is True


def _moved(votes: Any, reports: Mapping[int, int], r: int, epoch: int) -> bool | None:
    if (r, epoch) in votes:
        return not any(votes[r, epoch]["votes"])
    return epoch < reports[r] if r in reports else None


def launch_facts(events: Mapping[int, tuple[_Event, ...]]) -> LaunchFacts:
    """
    Collect the facts about launches from the logs.

    Args:
        events: For each rank, its events in one attempt.
    """
    consented: Counter[int] = Counter()
    agreed: set[int] = set()
    votes, launched, reports, orders = {}, {}, {}, {}
    for r, own in events.items():
        capture = None
        for event in own:
            what = event["event"]
            if what == "capture":
                capture = event["epoch"]
            elif what in ("begin_step", "stop"):
                capture = None
            elif what == "consent" and capture is not None:
                consented[capture] += 1
            elif what == "captured":
                agreed.add(event["epoch"])
            elif what == "votes":
                votes[r, event["epoch"]] = event
            elif what == TAKEN_ON_TRUST and event["launches"]:
                launched[r, event["epoch"] - 1] = event
            elif what == "launch":
                launched[r, event["epoch"]] = event
            elif what == "order":
                orders[r, event["epoch"]] = {
                    (peer, sends): digest
                    for peer, *both in event["messages"]
                    for sends, digest in zip((True, False), both, strict=True)
                }
            elif what == "report":
                reports[r] = event["epoch"]
    captures = agreed | {epoch for epoch, count in consented.items() if count == len(events)}
    yes = {(q, e) for (_, e), event in votes.items() for q, v in enumerate(event["votes"]) if not v}
    for r, epoch in launched:
        if _moved(votes, reports, r, epoch):
            yes |= {(q, epoch) for q in events}
    return LaunchFacts(
        frozenset(agreed), frozenset(captures), votes, reports, launched, orders, frozenset(yes)
    )


@attrs.define(eq=False)
class LaunchesOfRank:
    """
    The launches of one rank in one attempt.

    Args:
        st: The state of all ranks.
        r: The rank.
        facts: Facts about launches from all logs.
        tally: Counts for the report.
        phase: ``none``, ``capture``, ``left out`` (a capture to which the ranks did not agree),
            ``launches`` or ``paused`` (between `leave` and `resume`).
        capture: Epoch of the latest capture.
        wrote: Whether the rank wrote its newest checkpoint part between two launches.
        trusted: Whether the log has no capture, because it begins in the middle of a run.
    """

    st: ReplayedState
    r: int
    facts: LaunchFacts
    tally: Counter[str]
    phase: str = "none"
    capture: int = -1
    wrote: bool = False
    trusted: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether some rank has begun to launch steps, and no guarded step came later."""
        captures = self.phase == "capture" and self.capture in self.facts.agreed
        return captures or self.phase in ("launches", "paused")

    def leaves_out(self, event: _Event) -> bool:
        """Return whether an event belongs to a capture to which the ranks did not agree."""
        what = event["event"]
        if what == "capture":
            self.capture = event["epoch"]
            self.phase = "capture" if self.capture in self.facts.captures else "left out"
        elif what == "stop" and not self.takes_part:
            self.phase = "none"
        return self.phase == "left out" and what in {*_OF_A_STEP, "capture", "consent"}

    def begin(self) -> None:
        """The rank's device begins to launch, from the epoch of its contract."""
        st, r = self.st, self.r
        for column in ("begin", "booked", "launched", "known", "voted", "vote", "ran", "weights"):
            getattr(st, column)[r] = st.epoch[r]
        for column in ("quits", "cut", "dead", "paused", "read_no"):
            getattr(st, column)[r] = 0
        st.round[r] = st.born[r] = st.life[r]
        self.trusted = False
        for column in _ROWS:
            getattr(st, column)[r] = st.zeros(column)
        st.report[st.round[r], r] = NOBODY

    def trust(self, event: _Event, make: _Make) -> Iterator[Any]:
        """
        Yield the step for a log that begins in the middle of a run: if steps are launched, the last
        launch is still running.
        """
        if event["launches"]:
            yield make(event, "launches", self._begin_under_way)
            self.phase = "launches"

    def _begin_under_way(self) -> None:
        st, r = self.st, self.r
        self.begin()
        for column in ("begin", "known", "voted", "vote", "ran", "weights"):
            getattr(st, column)[r] = st.epoch[r] - 1
        self.trusted = True
        for (source, to), count in st.total.messages.items():  # which messages, is not known
            if r == source:
                st.graph_sends[r, to] = count
            elif r == to:
                st.graph_receives[r, source] = count

    def capture_message(self, event: _Event, make: _Make) -> Iterator[Any]:
        """Yield the capture of a message, if the rank captures a step."""
        if self.phase == "capture":
            name = "capture_send" if event["event"] == "post_send" else "capture_receive"
            run = LAUNCHES[name].run
            given = self.st, self.r, event["peer"], number_of(event)
            yield make(event, name, lambda: run(*given))

    def before_step(self, event: _Event, make: _Make) -> Iterator[Any]:
        """Yield the check that comes before a guarded step and before a checkpoint part."""
        if self.phase == "launches":
            yield make(event, "leave", lambda: _unlike("`leave` after the launches", "none"))
        if event["event"] == "begin_step":
            self.phase = "none"

    def write(self, event: _Event, make: _Make) -> Iterator[Any]:
        """Yield the copy of the device's weights for a part of a checkpoint between launches."""
        self.wrote = self.phase == "paused"
        if self.wrote:
            yield make(event, "write_part", lambda: LAUNCHES["write_part"].run(self.st, self.r))

    def publish(self, event: _Event) -> None:
        """Publish the whole checkpoint whose parts were written between launches."""
        same("epoch", self.st.part_epoch[self.r], event["epoch"])
        LAUNCHES["publish_parts"].run(self.st, self.r)

    def events(self, event: _Event, make: _Make) -> Iterator[Any]:
        """
        Yield the steps in the model for an event of `LAUNCH_EVENTS` or the commit of a launch.
        """
        st, r, what, epoch = self.st, self.r, event["event"], event["epoch"]
        if what == "captured":
            yield make(event, "epoch", lambda: same("epoch", st.epoch[r], epoch))
            yield make(event, "commit", self._captured)
            self.phase = "launches"
        elif what in ("leave", "resume"):
            yield from self._pause(event, make)
        elif what == "report":
            yield make(
                event, "report_epoch", lambda part=self.takes_part: self._report(part, epoch)
            )
        elif self.phase not in ("launches", "paused"):
            yield make(event, what, lambda: _unlike("a captured step before this event", "none"))
        elif what == "order":
            yield make(event, "epoch", lambda: same("epoch", st.booked[r], epoch))
            yield make(event, "order", lambda: self._order(epoch))
        elif what == "launch":
            yield make(event, "epoch", lambda: same("epoch", st.booked[r], epoch))
            if self.facts.orders and (r, epoch) not in self.facts.orders:
                yield make(event, "order", lambda: _unlike("`order` before this launch", "none"))
            yield make(event, "launch", self._launch)
        elif what == "votes":
            yield make(event, "epoch", lambda: same("epoch", st.booked[r] - 1, epoch))
            many = len(event["votes"])
            yield make(event, "votes", lambda: same("votes", len(st.ranks), many))
            name = "read_a_no" if any(event["votes"]) else "read_votes"
            yield make(event, name, lambda: LAUNCHES[name].run(st, r))
        else:
            yield make(event, "epoch", lambda: same("epoch", st.booked[r], epoch))
            yield make(event, "commit_launched", self._commit)

    def _order(self, epoch: int) -> None:
        """Require that the next launch posts the captured messages, as the other ends expect."""
        st, r, orders = self.st, self.r, self.facts.orders
        own = orders[r, epoch]
        for q in st.ranks:
            for sends in (True, False):
                ends = (r, q) if sends else (q, r)
                what = f"of the messages from rank {ends[0]} to {ends[1]}"
                digest = own.get((q, sends), 0)
                if not self.trusted:
                    count = (st.graph_sends if sends else st.graph_receives)[r, q]
                    column = st.graph_out if sends else st.graph_into
                    captured = order_digest(column[r, q, k] for k in range(count))
                    _same_order(f"the digest {what} that the rank captured:", captured, digest)
                if (q, epoch) in orders:
                    other = orders[q, epoch].get((r, not sends), 0)
                    _same_order(f"the digest {what} that rank {q} launched:", other, digest)

    def _captured(self) -> None:
        """All ranks agreed to the captured step; it is launched before the contract commits it."""
        TRANSITIONS["commit"].run(self.st, self.r)
        self.st.epoch[self.r] = self.st.booked[self.r]

    def _launch(self) -> None:
        LAUNCHES["launch"].run(self.st, self.r)
        self.tally["launches"] += 1

    def _commit(self) -> None:
        LAUNCHES["commit_launched"].run(self.st, self.r)
        self.st.epoch[self.r] = self.st.booked[self.r]
        self.tally["commits"] += 1

    def _pause(self, event: _Event, make: _Make) -> Iterator[Any]:
        st, r, what, epoch = self.st, self.r, event["event"], event["epoch"]
        yield make(event, "epoch", lambda: same("epoch", st.epoch[r], epoch))
        if what == "leave" and self.phase == "launches":
            yield make(event, "leave_launches", self._leave)
            self.phase = "paused"
        elif what == "resume" and self.phase == "paused":
            yield make(event, "resume_launches", lambda: LAUNCHES["resume_launches"].run(st, r))
            self.phase = "launches"

    def _leave(self) -> None:
        st, r = self.st, self.r
        LAUNCHES["leave_launches"].run(st, r)
        st.yes[r] = st.booked[r]

    def _report(self, takes_part: bool, epoch: int) -> None:
        st, r = self.st, self.r
        if takes_part:
            LAUNCHES["report_epoch"].run(st, r)
            same("epoch", st.weights[r], epoch)
            st.epoch[r] = epoch
        else:
            same("epoch", st.epoch[r], epoch)

    # Stopping

    def quit(self, event: _Event) -> None:
        """Record that the host cannot continue."""
        st, r, kind = self.st, self.r, event["kind"]
        if st.quits[r]:  # it read a no
            if kind == "refused":
                LAUNCHES["refuse_counts"].run(st, r)
        elif kind == "disagreed":
            raise Impossible
        elif kind == "lost":
            self._wake()
        elif kind in ("late", "ended"):
            LAUNCHES["run_out"].run(st, r)
        else:
            LAUNCHES["fail_host"].run(st, r)

    def _wake(self) -> None:
        for q in self.st.ranks:
            try:
                LAUNCHES["wake_launched"].run(self.st, self.r, q)
            except Impossible:
                continue
            return
        raise Impossible

    def cut(self) -> None:
        """End the rank's connections, also on its device."""
        LAUNCHES["cut_connections"].run(self.st, self.r)

    def die(self) -> None:
        """End the rank's process."""
        if not self.st.dead[self.r]:
            LAUNCHES["die"].run(self.st, self.r)

    # The device

    def device(self, make: _Make) -> Iterator[Any]:
        """Yield the steps of the rank's device, as far as the logs show them."""
        r, facts = self.r, self.facts
        for epoch in sorted(e for q, e in facts.launched if q == r):
            moved, yes = facts.moved(r, epoch), facts.voted_yes(r, epoch)
            event = facts.votes.get((r, epoch), facts.launched[r, epoch])
            if moved is None and not yes:
                return
            name = "vote_yes" if yes else "vote_no"
            yield make(event, name, lambda yes=yes, step=epoch + 1: self._vote(yes, step))
            if moved is None:
                return
            read = event.get("votes")
            for q in self.st.ranks:
                if moved or (read is not None and q < len(read) and not read[q]):
                    yield make(event, "deliver", lambda q=q: LAUNCHES["deliver"].run(self.st, r, q))
            if moved:
                yield make(event, "move", lambda: LAUNCHES["move"].run(self.st, r))
            else:
                yield make(event, "skip", self._skip)

    def _vote(self, yes: bool, step: int) -> None:
        st, r = self.st, self.r
        if st.ran[r] + 1 != step:
            raise Impossible
        if yes:
            LAUNCHES["vote_yes"].run(st, r)
        elif not self._unheard():
            skipped = st.weights[r] < st.ran[r]
            LAUNCHES["vote_after_skip" if skipped else "vote_no"].run(st, r)

    def _unheard(self) -> bool:
        """Vote without the missing messages if the rank has closed its connections."""
        try:
            LAUNCHES["vote_unheard"].run(self.st, self.r)
        except Impossible:
            return False
        return True

    def settle(self) -> bool:
        """
        Make the device's update if all ranks voted yes and no log shows whether it was made; return
        whether this was possible. Without the update, the device could not send the next launch's
        messages.
        """
        st, r, epoch = self.st, self.r, self.st.ran[self.r]
        if (r, epoch) not in self.facts.launched or self.facts.moved(r, epoch) is not None:
            return False
        mark = st.mark()
        try:
            for q in st.ranks:
                if st.word[r, q] != epoch + 1:
                    LAUNCHES["deliver"].run(st, r, q)
            LAUNCHES["move"].run(st, r)
        except (Impossible, Refused):
            st.back(mark)
            return False
        return True

    def _skip(self) -> None:
        st, r = self.st, self.r
        step = st.ran[r] + 1
        for q in st.ranks:
            if st.voted[q] >= step > st.vote[q] and st.heard[r, q] < step and not st.cut[r]:
                LAUNCHES["deliver"].run(st, r, q)  # a no
        LAUNCHES["skip"].run(st, r)


def settle_launched(st: ReplayedState, launches: Mapping[int, LaunchesOfRank]) -> None:
    """Take every transfer in launches, and every update of unknown outcome, that is possible."""
    transfer, moved = LAUNCHES["transfer_launched"], True
    while moved:
        moved = take_transfers(st, transfer, st.sends_run, st.graph_sends)
        moved |= any(part.settle() for part in launches.values())


def _same_order(what: str, expected: int, found: int) -> None:
    if expected != found:
        raise UnlikeError(f"{what} {expected}", f"{found}: other messages, or another order")


def _unlike(expected: str, found: str) -> None:
    raise UnlikeError(expected, found)
