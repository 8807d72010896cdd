"""
Map each event of an attempt's logs to the transitions of the model of ranks.

Messages, checkpoints, stops and launches have separate modules; this module handles how ranks meet
at the start of an attempt, and their steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from qeffect.log.rank_log import RankLines
from qeffect.log.rank_series import TAKEN_ON_TRUST
from qeffect.spec.ranks import BETWEEN

from .messages_of_logs import ENDED
from .order_search import LoggedStep
from .protocol import TRANSITIONS
from .replayed_launches import LAUNCH_EVENTS, LaunchesOfRank
from .replayed_messages import ReplayedMessages
from .replayed_saves import ReplayedSaves
from .replayed_spans import Span
from .replayed_state import ReplayedState, same
from .replayed_stops import ReplayedStops

__all__ = ["EventsOfAttempt", "step_of"]

#: Makes a step of a rank from an event, a transition's name and optionally a function that replaces
#: the transition.
_Make = Callable[..., LoggedStep]


def step_of(
    span: Span, event: Mapping[str, Any] | None, name: str, run: Callable[[], None]
) -> LoggedStep:
    """Return a step of the replay for an event in a rank's span."""
    return LoggedStep(name, run, span.log, event)


@attrs.define
class EventsOfAttempt:
    """
    The steps of all ranks in one attempt.

    Args:
        state: The state of all ranks.
        tally: Counts for the report; this class counts commits.
        attempts: The logs of all attempts of the job.
        names: A number for each name under which ranks meet.
        launches: For each rank, its launched steps.
        messages: The state of the job's messages.
        saves: The state of the job's checkpoints.
    """

    state: ReplayedState
    tally: Counter[str]
    attempts: Sequence[Sequence[RankLines]]
    names: dict[str, int]
    launches: Mapping[int, LaunchesOfRank]
    messages: ReplayedMessages
    saves: ReplayedSaves
    _stops: ReplayedStops = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._stops = ReplayedStops(self.state, self.launches, self.tally)

    def rows(self, r: int, span: Span, number: int) -> list[list[LoggedStep]]:
        """
        Return four rows of steps for a rank: its own steps, those of its saves, those of its
        device, and its unlogged reason to stop.

        Args:
            r: The rank.
            span: The rank's span: its events in the attempt.
            number: Position of the span in the rank's log.
        """
        own: list[LoggedStep] = []
        saver: list[LoggedStep] = []
        for step in self._steps(r, span, number):
            (saver if step.name == "publish" else own).append(step)
        device = list(self.launches[r].device(partial(step_of, span)))
        return [own, saver, device, self._unlogged_reason(r, span)]

    def _unlogged_reason(self, r: int, span: Span) -> list[LoggedStep]:
        """
        Return the step that publishes a rank's reason to stop, if the log may lack this step: the
        rank may have been killed after it published the reason and before it logged that.
        """
        if not (span.leaves and span.events and span.events[-1]["event"] == "stop"):
            return []
        return [step_of(span, None, "say", lambda: self._say_unless_gone(r))]

    def _say_unless_gone(self, r: int) -> None:
        if self.state.up[r]:
            TRANSITIONS["say"].run(self.state, r)

    def _steps(self, r: int, span: Span, number: int) -> Iterator[LoggedStep]:
        st = self.state

        def op(event: Any, name: str, run: Callable[[], None] | None = None) -> LoggedStep:
            return step_of(span, event, name, run or partial(TRANSITIONS[name].run, st, r))

        name = "start_again" if span.again else "start"
        began = span.trusted or span.load or span.first
        yield op(began, name)
        yield op(began, "epoch", lambda: same("epoch", st.epoch[r], span.epoch))
        yield op(began, "generations", lambda: self.messages.restart(st, r))
        if not any(event["event"] == "connect" for event in span.events):
            yield from self._meet(r, span, number, op)
        for event in span.events:
            yield from self._event(r, event, op)
        if span.leaves:
            died = self.launches[r].takes_part
            yield op(None, "gone", lambda: self._stops.gone(r, died))

    def _meet(self, r: int, span: Span, number: int, op: _Make) -> Iterator[LoggedStep]:
        """Yield the steps by which ranks meet without logged events, such as in a rebuild."""
        event, st = span.first, self.state
        name = f"{span.log.header['attempt']}/{number}"
        if any(event["event"] in ("offer", "take_seat") for event in span.events):
            return  # it connected to no rank
        a = self._named(name)
        if r == st.lead[0]:
            yield op(event, "offer", lambda: TRANSITIONS["offer"].run(st, r, a))
            yield op(event, "confirm", lambda: TRANSITIONS["confirm"].run(st, r, a))
        else:
            yield op(event, "take_seat", lambda: TRANSITIONS["take_seat"].run(st, r, a))
        yield op(event, "connect", lambda: TRANSITIONS["connect"].run(st, r, a))

    def _named(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _event(self, r: int, event: Mapping[str, Any], op: _Make) -> Iterator[LoggedStep]:
        st, what, part = self.state, event["event"], self.launches[r]
        if part.leaves_out(event):
            return
        if what == TAKEN_ON_TRUST:
            yield op(event, "generations", lambda: self.messages.trust(r))
            yield op(event, "saves", lambda: self.saves.trust(st, r, event))
            yield from part.trust(event, op)
            return
        if what in ("begin_step", "write_shard"):
            yield from part.before_step(event, op)
        if what in LAUNCH_EVENTS or (what == "commit" and part.phase == "launches"):
            yield from part.events(event, op)
        elif what in ("offer", "take_seat", "confirm", "connect"):
            if what == "take_seat" and not self._offered(event["name"]):
                return  # under the name of an attempt whose ranks left no log
            yield op(event, what, partial(TRANSITIONS[what].run, st, r, self._named(event["name"])))
        elif what in ("begin_step", "capture"):
            if what == "capture":
                yield op(event, "launches", part.begin)
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
            yield op(event, "begin_step")
            yield op(event, "act")
            yield op(event, "forget", lambda: self.messages.forget(r))
        elif what in ("post_send", "post_receive"):
            yield op(event, "release", lambda: self.messages.release(st, r, event))
            yield op(event, what, lambda: self.messages.post(st, r, event))
            yield from part.capture_message(event, op)
        elif what in ENDED:
            yield op(event, what, lambda: self.messages.end(st, r, event))
        elif what == "finish":
            yield op(event, "end_act")
            yield op(event, "finish")
        elif what == "second_run":
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
        elif what in ("consent", "commit"):
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
            yield op(event, what)
            if what == "commit":
                yield op(event, "count", self._committed)
        elif what == "write_shard":
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
            yield op(event, "write_shard", lambda: self.saves.write(st, r, event))
            yield from part.write(event, op)
        elif what == "publish":
            yield op(
                event, "publish", lambda launched=part.wrote: self._publish(r, event, launched)
            )
        elif what == "stop":
            if part.takes_part:
                yield op(event, "fail_host", lambda: part.quit(event))
            yield from self._stops.stop(r, event, op)
        elif what in ("say", "close"):
            yield op(event, what)
            if what == "close" and part.takes_part:
                yield op(event, "cut_connections", part.cut)
        elif what == "end":
            launches = part.takes_part
            yield op(event, "end", lambda: self._stops.end(r, event, launches))

    def _publish(self, r: int, event: Mapping[str, Any], launched: bool) -> None:
        if launched:
            self.launches[r].publish(event)
        self.saves.publish(self.state, r, event)

    def _offered(self, name: str) -> bool:
        return any(
            event["event"] == "offer" and event["name"] == name
            for logs in self.attempts
            for log in logs
            for event in log.events
        )

    def _committed(self) -> None:
        self.tally["commits"] += 1
        st = self.state
        if all(st.phase[q] == BETWEEN and st.up[q] for q in st.ranks):
            self._count_anew()

    def _count_anew(self) -> None:
        """
        Reset the counts of steps and messages to zero; the protocol compares only differences of
        counts.

        At this point all ranks are between two steps, and every message has ended.
        """
        st = self.state
        for name in ("sent", "sent_before", "sent_done", "taken", "taken_before", "taken_done"):
            getattr(st, name).entries.clear()
        for name in ("out", "out_generation", "out_message"):
            getattr(st, name).entries.clear()
        for name in ("into", "into_generation", "into_message", "step"):
            getattr(st, name).entries.clear()
        st.base.entries[0] = st.epoch[0]
        self.messages.clear()
        st.keep()
