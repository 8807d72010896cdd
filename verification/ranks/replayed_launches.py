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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from qeffect.log.rank_series import TAKEN_ON_TRUST
from qeffect.spec.ranks import NOBODY

from .concrete_state import Impossible
from .launches import LAUNCHES
from .messages_of_logs import MESSAGE_EVENTS
from .protocol import TRANSITIONS
from .replayed_state import ReplayedState, UnlikeError, same

__all__ = ["LAUNCH_EVENTS", "LaunchFacts", "LaunchesOfRank", "launch_facts"]

#: Events that occur only with steps that are one launch.
LAUNCH_EVENTS: Final = frozenset({"captured", "launch", "votes", "leave", "resume", "report"})
_OF_A_STEP: Final = frozenset({*MESSAGE_EVENTS, "finish"})

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
        yes: Pairs of a rank and an epoch, if the rank must have voted yes on that epoch's step.
    """

    agreed: frozenset[int]
    captures: frozenset[int]
    votes: Mapping[tuple[int, int], _Event]
    reports: Mapping[int, int]
    launched: Mapping[tuple[int, int], _Event]
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
    votes, launched, reports = {}, {}, {}
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
            elif what == "report":
                reports[r] = event["epoch"]
    captures = agreed | {epoch for epoch, count in consented.items() if count == len(events)}
    yes = {(q, e) for (_, e), event in votes.items() for q, v in enumerate(event["votes"]) if not v}
    for r, epoch in launched:
        if _moved(votes, reports, r, epoch):
            yes |= {(q, epoch) for q in events}
    return LaunchFacts(
        frozenset(agreed), frozenset(captures), votes, reports, launched, frozenset(yes)
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
    """

    st: ReplayedState
    r: int
    facts: LaunchFacts
    tally: Counter[str]
    phase: str = "none"
    capture: int = -1
    wrote: bool = False

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
        for column in ("heard", "word"):
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
        elif what == "launch":
            yield make(event, "epoch", lambda: same("epoch", st.booked[r], epoch))
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
        else:
            skipped = st.weights[r] < st.ran[r]
            LAUNCHES["vote_after_skip" if skipped else "vote_no"].run(st, r)

    def _skip(self) -> None:
        st, r = self.st, self.r
        step = st.ran[r] + 1
        for q in st.ranks:
            if st.voted[q] >= step > st.vote[q] and st.heard[r, q] < step and not st.cut[r]:
                LAUNCHES["deliver"].run(st, r, q)  # a no
        LAUNCHES["skip"].run(st, r)


def _unlike(expected: str, found: str) -> None:
    raise UnlikeError(expected, found)
