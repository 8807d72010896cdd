"""
The logs of all ranks, taken through the model of ranks: by the very transitions that are proved.

The logs have no common clock. The replay looks for an order of all events, each log in its own
order, in which every event is a transition that the protocol takes. It refuses what no order
explains. Three things are not logged, and are taken as soon as they are possible: a transfer of a
message that both ends have posted, the choice of a cause by the first rank that ends, and the start
of an attempt. A log that merely ends is one of a process that died. Of steps that are one launch,
`replayed_launches` says what the logs tell about the devices.

Attempts follow one another by the hosts' clocks; nothing else reads those.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import attrs

from qeffect.log.checker import LogError
from qeffect.log.rank_log import RankLines
from qeffect.refusals import Refused
from qeffect.spec.ranks import AGREED, BETWEEN, STEP
from qeffect.text import counted

from .concrete_state import Impossible
from .launches import LAUNCHES
from .protocol import TRANSITIONS
from .replayed_launches import LAUNCH_EVENTS, LaunchesOfRank, told_by
from .replayed_state import ReplayedState, UnlikeError, same

__all__ = ["RankReport", "replay_ranks"]

#: Orders of the events that stop ranks; only these are tried in more than one order.
_MOST_ORDERS: Final = 20_000
_TALLIED: Final = ("attempts", "commits", "launches", "messages", "checkpoints", "stops")
#: Events that take possibilities from other ranks, or give them new ones.
_CHOSEN: Final = frozenset({"say", "close", "end", "gone"})


@attrs.frozen
class RankReport:
    """
    What a replay of rank logs found.

    Args:
        verdict: ``accepted`` or ``refused``.
        logs: Number of logs.
        attempts: Attempts, those in place included.
        commits: Commits of all ranks.
        launches: Steps of all ranks that were one launch.
        messages: Messages that arrived.
        checkpoints: Whole checkpoints.
        stops: Ranks that stopped by themselves.
        log: The refused log; this and what follows is None if nothing was refused.
        rank: Its rank.
        line: Line of the refused event.
        step: The event's sequence number.
        action: The event.
        clause: What the protocol asks, or `ranks.order` if the protocol takes no such step there.
        message: One sentence.
        expected: What was expected.
        found: What was found.
        remedy: What to do.
    """

    verdict: str
    logs: int
    attempts: int = 0
    commits: int = 0
    launches: int = 0
    messages: int = 0
    checkpoints: int = 0
    stops: int = 0
    log: str | None = None
    rank: int | None = None
    line: int | None = None
    step: int | None = None
    action: str | None = None
    clause: str | None = None
    message: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary."""
        return attrs.asdict(self)

    def summary(self) -> str:
        """Return the result as one line."""
        if self.clause is None:
            ending = "" if self.launches == 1 else "es"
            launches = f"{self.launches:,} launch{ending}, " if self.launches else ""
            return (
                f"accepted: {counted(self.logs, 'rank log')}, {counted(self.attempts, 'attempt')}, "
                f"{counted(self.commits, 'commit')}, {launches}"
                f"{counted(self.messages, 'message')}, "
                f"{counted(self.checkpoints, 'checkpoint')}, {counted(self.stops, 'stop')}"
            )
        return (
            f"refused: rank {self.rank}, event {self.step} ({self.action}) in line {self.line} of "
            f"{self.log}: {self.clause}: {self.message} What to do: {self.remedy}"
        )


def replay_ranks(paths: Sequence[str | os.PathLike[str]]) -> RankReport:
    """
    Replay the rank logs of one job through the model of ranks.

    Args:
        paths: The logs of all ranks, of one attempt or of several, in any order.

    Raises:
        LogError: A file is not a rank log, or a rank's log is missing.
    """
    logs = [RankLines.read(path) for path in paths]
    tally: Counter[str] = Counter()
    jobs: dict[int, list[RankLines]] = {}
    for log in logs:
        jobs.setdefault(log.header["worker"], []).append(log)
    for _, job in sorted(jobs.items()):
        found = _Job(_attempts(job), tally).run()
        if found is not None:
            return found.report(len(logs), tally)
    return _report("accepted", len(logs), tally)


def _report(verdict: str, logs: int, tally: Mapping[str, int], **refusal: Any) -> RankReport:
    counts: dict[str, Any] = {name: tally.get(name, 0) for name in _TALLIED}
    return RankReport(verdict, logs, **counts, **refusal)


def _attempts(logs: Sequence[RankLines]) -> list[list[RankLines]]:
    """
    Return the logs of each attempt, by rank; attempts by their beginning.

    Raises:
        LogError: Two logs are of the same rank, or a rank's log is missing.
    """
    found: dict[str | None, dict[int, RankLines]] = {}
    for log in logs:
        ranks = found.setdefault(log.header["attempt"], {})
        other = ranks.setdefault(log.header["rank"], log)
        if other is not log:
            raise LogError(
                f"{log.name} and {other.name} are both of rank {log.header['rank']} in one attempt"
            )
    for attempt, ranks in found.items():
        first = next(iter(ranks.values()))
        for name in ("world", "channels"):
            for log in ranks.values():
                if log.header[name] != first.header[name]:
                    raise LogError(f"{log.name} and {first.name} differ in {name}")
        missing = sorted(set(range(first.header["world"])) - ranks.keys())
        if missing:
            raise LogError(
                f"the log of rank {missing[0]} in attempt {attempt} is missing; expected the logs "
                f"of all {first.header['world']} ranks"
            )
    ordered = sorted(
        found.values(), key=lambda ranks: min(log.header["began"] for log in ranks.values())
    )
    return [[ranks[rank] for rank in range(len(ranks))] for ranks in ordered]


@attrs.frozen
class _Op:
    """
    One step that a log tells of.

    Args:
        name: The transition, or what is looked at.
        run: Takes it, and raises `Refused`, `Impossible` or `UnlikeError`.
        log: The log.
        event: The event; None for the end of the log.
    """

    name: str
    run: Callable[[], None]
    log: RankLines
    event: Mapping[str, Any] | None


@attrs.frozen
class _Found:
    """An event that no order explains."""

    op: _Op
    error: Exception

    def report(self, logs: int, tally: Mapping[str, int]) -> RankReport:
        op = self.op
        seq = len(op.log.events) + 1 if op.event is None else op.event["seq"]
        action = "end of the log" if op.event is None else op.event["event"]
        transition = TRANSITIONS.get(op.name) or LAUNCHES.get(op.name)
        asks = "" if transition is None else transition.text
        if isinstance(self.error, UnlikeError):
            clause, expected, found = "ranks.as-recorded", self.error.expected, self.error.found
            message = f"expected {expected}, found {found}."
        elif isinstance(self.error, Refused):
            clause = self.error.clause
            expected = clause.removeprefix("ranks.").replace("-", " ")
            found = f"`{op.name}` without it"
            message = f"`{op.name}` asks for: {expected}. {asks}".strip()
        else:
            clause, expected, found = "ranks.order", asks or op.name, f"`{op.name}`"
            message = f"the protocol does not take `{op.name}` here, in any order. {asks}".strip()
        return _report(
            "refused",
            logs,
            tally,
            log=op.log.name,
            rank=op.log.header["rank"],
            line=seq + 1,
            step=seq,
            action=action,
            clause=clause,
            message=message,
            expected=expected,
            found=found,
            remedy="Compare this rank's events with those of the other ranks up to this line; one "
            "rank did what the others did not agree to, or a log was changed.",
        )


@attrs.frozen
class _Span:
    """
    One rank's part in an attempt.

    Args:
        log: The rank's log.
        first: The event with which it began in place or loaded; None at the log's beginning.
        events: Its events.
        leaves: Whether the rank does not begin again in place behind it.
    """

    log: RankLines
    first: Mapping[str, Any] | None
    events: tuple[Mapping[str, Any], ...]
    leaves: bool

    @property
    def again(self) -> bool:
        """Whether the attempt began in place."""
        return self.first is not None and self.first["event"] == "rebuilt"

    @property
    def load(self) -> Mapping[str, Any] | None:
        """The event of the checkpoint that the span began from."""
        if self.first is not None and self.first["event"] == "load":
            return self.first
        for event in self.events:
            if event["event"] == "begin_step":
                return None
            if event["event"] == "load":
                return event
        return None

    @property
    def epoch(self) -> int:
        """The epoch in which the rank began."""
        found = self.first or self.load or self.log.header
        return int(found["epoch"])


def _spans(log: RankLines) -> list[_Span]:
    cuts: list[int] = []
    stepped = False
    for place, event in enumerate(log.events):
        if event["event"] == "begin_step":
            stepped = True
        elif event["event"] == "rebuilt" or (event["event"] == "load" and stepped):
            cuts.append(place)
            stepped = False
    parts: list[list[Mapping[str, Any]]] = [[] for _ in (None, *cuts)]
    wrote = part = 0
    for place, event in enumerate(log.events):
        if place in cuts:
            part += 1
            continue
        if event["event"] == "write_shard":
            wrote = part
        # A save under way may end when its rank has already begun again.
        parts[wrote if event["event"] == "publish" else part].append(event)
    firsts = [None, *(log.events[cut] for cut in cuts)]
    following = [*(log.events[cut]["event"] for cut in cuts), "load"]
    return [
        _Span(log, first, tuple(events), then == "load")
        for first, events, then in zip(firsts, parts, following, strict=True)
    ]


class _Job:
    """The attempts of one job, one after the other."""

    def __init__(self, attempts: Sequence[Sequence[RankLines]], tally: Counter[str]) -> None:
        self.attempts, self.tally = attempts, tally
        self.names: dict[str, int] = {}
        self.published: set[int] = set()
        self._posted: dict[tuple[Any, ...], int] = {}
        self._saves: Counter[tuple[int, int]] = Counter()
        self._saved: Counter[int] = Counter()
        self._offset: Counter[int] = Counter()
        self._parts: dict[int, LaunchesOfRank] = {}

    def run(self) -> _Found | None:
        """Take every attempt; return the first event that no order explains."""
        header = self.attempts[0][0].header
        self.state = self._state_of(header)
        for logs in self.attempts:
            if logs[0].header["world"] != len(self.state.ranks):
                self.state = self._state_of(logs[0].header)
            spans = [_spans(log) for log in logs]
            for number in range(max(map(len, spans))):
                present = {r: own[number] for r, own in enumerate(spans) if number < len(own)}
                found = self._begin(present) or self._walk(present, number)
                if found is not None:
                    return found
        return None

    def _state_of(self, header: Mapping[str, Any], saved: int = 0) -> ReplayedState:
        messages = {(a, b): n for a, b, n in header["channels"]}
        state = ReplayedState(header["world"], messages)
        state.saved[0] = saved
        for rank in state.ranks:
            state.kept[rank] = saved
        self.names.clear()
        return state

    def _begin(self, present: Mapping[int, _Span]) -> _Found | None:
        """Begin an attempt: in place, or from a checkpoint."""
        first = next(iter(present.values()))
        for span in present.values():
            if span.again != first.again:
                expected = "a rebuild" if first.again else "a checkpoint"
                error = UnlikeError(f"{expected}, as on rank {first.log.header['rank']}", "another")
                return _Found(self._op(span, span.first, "start", lambda: None), error)
        for r, span in present.items():
            if span.again and r in self._parts and self._parts[r].takes_part:
                try:
                    LAUNCHES["rebuild"].run(self.state, r)
                except (Refused, Impossible) as refusal:
                    return _Found(self._op(span, span.first, "rebuild", lambda: None), refusal)
        name = "begin_again" if first.again else "begin_attempt"
        if not first.again and first.epoch != self.state.saved[0]:
            if first.load is not None and self.published and first.epoch not in self.published:
                saved = ", ".join(map(str, sorted(self.published)))
                error = UnlikeError(f"a checkpoint of epoch {saved}", f"epoch {first.epoch}")
                return _Found(self._op(first, first.load, "start", lambda: None), error)
            self.state = self._state_of(first.log.header, first.epoch)
        try:
            TRANSITIONS[name].run(self.state)
        except (Refused, Impossible) as error:
            return _Found(self._op(first, first.first, name, lambda: None), error)
        self.tally["attempts"] += 1
        return None

    def _op(
        self, span: _Span, event: Mapping[str, Any] | None, name: str, run: Callable[[], None]
    ) -> _Op:
        return _Op(name, run, span.log, event)

    def _walk(self, present: Mapping[int, _Span], number: int) -> _Found | None:
        rows: list[list[_Op]] = []
        self._saved.clear()
        self._saves.clear()
        told = told_by({rank: span.events for rank, span in present.items()})
        self._parts = {r: LaunchesOfRank(self.state, r, told, self.tally) for r in present}
        for rank, span in present.items():
            saves = 0
            for event in span.events:
                saves += event["event"] == "publish"
                if event["event"] == "write_shard":
                    self._saves[rank, event["seq"]] = saves
            own: list[_Op] = []
            saver: list[_Op] = []
            for op in self._ops(rank, span, number):
                (saver if op.name == "publish" else own).append(op)
            make = partial(self._op, span)
            rows += [own, saver, list(self._parts[rank].device(make))]
        walk = _Walk(rows, self._settle, self.state)
        return walk.run()

    def _settle(self) -> None:
        """Take every transfer that is possible."""
        st = self.state
        moved = True
        while moved:
            moved = False
            for (r, q), n in st.total.messages.items():
                if n and st.sent_done[r, q] < st.sent[r, q]:
                    try:
                        TRANSITIONS["transfer"].run(st, r, q)
                    except Impossible:
                        continue
                    moved = True

    # What each event is in the model

    def _ops(self, r: int, span: _Span, number: int) -> Iterator[_Op]:
        st = self.state

        def take(name: str, *given: int) -> Callable[[], None]:
            return lambda: TRANSITIONS[name].run(st, r, *given)

        def op(event: Any, name: str, run: Callable[[], None] | None = None) -> _Op:
            return self._op(span, event, name, run or take(name))

        name = "start_again" if span.again else "start"
        began = span.load or span.first
        yield op(began, name)
        yield op(began, "epoch", lambda: same("epoch", st.epoch[r], span.epoch))
        yield op(began, "generations", lambda: self._restart(r))
        if not any(event["event"] == "connect" for event in span.events):
            yield from self._meet(r, span, number, op)
        for event in span.events:
            yield from self._event(r, span, event, op, take)
        if span.leaves:
            died = self._parts[r].takes_part
            yield op(None, "gone", lambda: self._gone(r, died))

    def _restart(self, r: int) -> None:
        """A contract that starts, or is restored, counts its slots' generations from 0."""
        held = [n for (q, _), n in self.state.generation.entries.items() if q == r]
        self._offset[r] = max(held, default=0)

    def _meet(self, r: int, span: _Span, number: int, op: Any) -> Iterator[_Op]:
        """How ranks meet without events of their own: in a rebuild, or by another library."""
        event, st = span.first, self.state
        name = f"{span.log.header['attempt']}/{number}"
        if any(event["event"] in ("offer", "take_seat") for event in span.events):
            return  # it met nobody
        a = self._named(name)
        if r == st.lead[0]:
            yield op(event, "offer", lambda: TRANSITIONS["offer"].run(st, r, a))
            yield op(event, "confirm", lambda: TRANSITIONS["confirm"].run(st, r, a))
        else:
            yield op(event, "take_seat", lambda: TRANSITIONS["take_seat"].run(st, r, a))
        yield op(event, "connect", lambda: TRANSITIONS["connect"].run(st, r, a))

    def _named(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _event(
        self, r: int, span: _Span, event: Mapping[str, Any], op: Any, take: Any
    ) -> Iterator[_Op]:
        st, what, part = self.state, event["event"], self._parts[r]
        if part.leaves_out(event):
            return
        if what in ("begin_step", "write_shard"):
            yield from part.before_step(event, op)
        if what in LAUNCH_EVENTS or (what == "commit" and part.phase == "launches"):
            yield from part.events(event, op)
        elif what in ("offer", "take_seat", "confirm", "connect"):
            if what == "take_seat" and not self._offered(event["name"]):
                return  # under the name of an attempt whose ranks left no log
            yield op(event, what, take(what, self._named(event["name"])))
        elif what in ("begin_step", "capture"):
            if what == "capture":
                yield op(event, "launches", part.begin)
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
            yield op(event, "begin_step")
            yield op(event, "act")
            yield op(event, "forget", lambda: self._forget(r))
        elif what in ("post_send", "post_receive"):
            yield op(event, "release", lambda: self._release(r, event))
            yield op(event, what, lambda: self._post(r, event))
        elif what in ("sent", "received"):
            yield op(event, what, lambda: self._ended(r, event))
        elif what == "finish":
            yield op(event, "end_act")
            yield op(event, "finish")
        elif what in ("consent", "commit"):
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
            yield op(event, what)
            if what == "commit":
                yield op(event, "count", lambda: self._committed())
        elif what == "write_shard":
            yield op(event, "epoch", lambda: same("epoch", st.epoch[r], event["epoch"]))
            yield op(event, "write_shard", lambda: self._write(r, event))
        elif what == "publish":
            yield op(event, "publish", lambda: self._publish(r, event))
        elif what == "stop":
            if part.takes_part:
                yield op(event, "fail_host", lambda: part.quit(event))
            yield from self._stop(r, event, op, take)
        elif what in ("say", "close"):
            yield op(event, what)
            if what == "close" and part.takes_part:
                yield op(event, "cut_connections", part.cut)
        elif what == "end":
            yield op(event, "end", lambda: self._end(r, event))

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
        Count steps and messages from here, as the protocol compares only differences of counts.

        All ranks are between two steps, and no message is under way.
        """
        st = self.state
        for name in ("sent", "sent_before", "sent_done", "taken", "taken_before", "taken_done"):
            getattr(st, name).entries.clear()
        for name in ("out", "out_generation", "out_message"):
            getattr(st, name).entries.clear()
        for name in ("into", "into_generation", "into_message", "step"):
            getattr(st, name).entries.clear()
        st.base.entries[0] = st.epoch[0]
        self._posted.clear()
        st.keep()

    def _forget(self, r: int) -> None:
        """Forget the places of an earlier step's messages."""
        for posted in [one for one in self._posted if one[0] == r]:
            del self._posted[posted]

    def _buffer(self, event: Mapping[str, Any]) -> int:
        gradient = event["message"][2]
        sends = event["event"] == "post_send"
        return int(4 * event["slot"] + 2 * gradient + sends)

    def _release(self, r: int, event: Mapping[str, Any]) -> None:
        st, buffer = self.state, self._buffer(event)
        wanted = event["generation"] + self._offset[r]
        if wanted < st.generation[r, buffer]:
            held = st.generation[r, buffer] - self._offset[r]
            raise UnlikeError(f"generation {held} or later", f"generation {event['generation']}")
        while st.generation[r, buffer] < wanted:
            TRANSITIONS["release"].run(st, r, buffer)

    def _post(self, r: int, event: Mapping[str, Any]) -> None:
        st, q = self.state, event["peer"]
        if q not in st.ranks or q == r:
            raise UnlikeError(f"another rank below {len(st.ranks)}", f"rank {q}")
        stage, microbatch, gradient = event["message"]
        sends = event["event"] == "post_send"
        place = (st.sent if sends else st.taken)[r, q]
        message = self._named_message(stage, microbatch, gradient)
        TRANSITIONS[event["event"]].run(st, r, q, self._buffer(event), message)
        self._posted[r, sends, q, _action(sends, stage, microbatch, gradient)] = place

    @staticmethod
    def _named_message(stage: int, microbatch: int, gradient: bool) -> int:
        return 1 + 2 * ((microbatch << 20) + stage) + gradient

    def _ended(self, r: int, event: Mapping[str, Any]) -> None:
        st, q = self.state, event["peer"]
        sends = event["event"] == "sent"
        place = self._posted.get((r, sends, q, event["action"]))
        if place is None:
            raise UnlikeError(f"a message that was posted as {event['action']}", "none")
        if (st.sent_done if sends else st.taken_done)[r, q] <= place:
            raise Impossible
        self.tally["messages"] += not sends

    def _write(self, r: int, event: Mapping[str, Any]) -> None:
        """A rank waits for the save that is under way before it writes its next part."""
        before = self._saves[r, event["seq"]]
        if self._saved[r] < before:
            raise Impossible
        TRANSITIONS["write_shard"].run(self.state, r)

    def _publish(self, r: int, event: Mapping[str, Any]) -> None:
        same("epoch", self.state.shard[r], event["epoch"])
        TRANSITIONS["publish"].run(self.state, r)
        self.published.add(event["epoch"])
        self._saved[r] += 1
        self.tally["checkpoints"] += 1

    # Stopping

    def _stop(self, r: int, event: Mapping[str, Any], op: Any, take: Any) -> Iterator[_Op]:
        kind = event["kind"]
        if kind in ("late", "ended"):
            yield op(event, "run_late")
        elif kind == "lost":
            yield op(event, "wake", lambda: self._wake(r, event))
        elif kind == "disagreed":
            given_up = self._parts[r].takes_part  # the votes that it read told it
            yield op(event, "disagree", take("give_up") if given_up else lambda: self._disagree(r))
        else:
            yield op(event, "give_up", lambda: self._give_up(r, event))

    def _give_up(self, r: int, event: Mapping[str, Any]) -> None:
        st = self.state
        at_commit = st.phase[r] == STEP and not event["in_row"]
        if event["kind"] == "refused" and at_commit and not st.whole[r]:
            TRANSITIONS["refuse"].run(st, r)
            return
        if st.live[r] and st.phase[r] == STEP:
            TRANSITIONS["fail"].run(st, r)
        TRANSITIONS["give_up"].run(st, r)

    def _wake(self, r: int, event: Mapping[str, Any]) -> None:
        st, peer = self.state, event["peer"]
        others = [peer] if peer in st.ranks else [q for q in st.ranks if q != r]
        for q in others:
            try:
                TRANSITIONS["wake"].run(st, r, q)
            except Impossible:
                continue
            return
        raise Impossible

    def _disagree(self, r: int) -> None:
        """Whether messages differ, the model knows; epochs and gradients are the rank's reason."""
        st = self.state
        for q, p in st.total.messages:
            for k in range(st.sent_before[q, p], st.sent[q, p]):
                try:
                    TRANSITIONS["disagree"].run(st, r, q, p, k)
                except Impossible:
                    continue
                return
        if st.phase[r] != AGREED:
            raise Impossible
        TRANSITIONS["give_up"].run(st, r)

    def _end(self, r: int, event: Mapping[str, Any]) -> None:
        st, cause = self.state, event["cause"]
        if cause not in st.ranks:
            raise UnlikeError(f"a rank below {len(st.ranks)}", f"rank {cause}")
        n = st.life[r]
        if not st.halted[n]:
            TRANSITIONS["decide"].run(st, r, cause)
        TRANSITIONS["end"].run(st, r)
        same("cause", f"rank {st.told[r]}", f"rank {cause}")
        self.tally["stops"] += 1

    def _gone(self, r: int, launches: bool) -> None:
        if launches:
            self._parts[r].die()
        if self.state.up[r]:
            TRANSITIONS["crash"].run(self.state, r)


def _action(sends: bool, stage: int, microbatch: int, gradient: bool) -> str:
    """A message as torch writes it at one of its ends."""
    if sends:
        return f"{stage}SEND_{'B' if gradient else 'F'}{microbatch}"
    return f"{stage - 1 if gradient else stage + 1}RECV_{'B' if gradient else 'F'}{microbatch}"


class _Walk:
    """The search for an order of some rows of steps."""

    def __init__(
        self, rows: Sequence[Sequence[_Op]], settle: Callable[[], None], state: ReplayedState
    ) -> None:
        self.rows, self.settle, self.state = rows, settle, state
        self.at = [0] * len(rows)
        self._orders = count()
        self._seen: set[Any] = set()
        self._furthest = -1
        self._blocked: list[_Found] = []
        self._asked: dict[int, _Found] = {}  # by step, what the protocol once asked for it

    def run(self) -> _Found | None:
        """Return None if an order was found, else an event that none explains."""
        if self._search(0):
            return None
        asked = [self._asked[id(f.op)] for f in self._blocked if id(f.op) in self._asked]
        return (asked or self._blocked)[0]

    def _search(self, depth: int) -> bool:
        blocked = self._advance()
        if all(at == len(row) for at, row in zip(self.at, self.rows, strict=True)):
            return True
        if sum(self.at) > self._furthest:
            self._furthest, self._blocked = sum(self.at), blocked
        seen = (*self.at, *sorted(self.state.cause.entries.items()))
        if seen in self._seen or next(self._orders) > _MOST_ORDERS:
            return False
        self._seen.add(seen)
        mark, at = self.state.mark(), list(self.at)
        tried = 0
        for row, ops in enumerate(self.rows):
            if at[row] == len(ops) or ops[at[row]].name not in _CHOSEN:
                continue
            if (error := self._try(row)) is not None:
                blocked.append(_Found(ops[at[row]], error))
                continue
            tried += 1
            if self._search(depth + 1):
                return True
            self.state.back(mark)
            self.at = list(at)
        if not tried and sum(at) == self._furthest:
            self._blocked = blocked
        return False

    def _try(self, row: int) -> Exception | None:
        mark = self.state.mark()
        try:
            self.rows[row][self.at[row]].run()
        except (Refused, Impossible, UnlikeError) as error:
            self.state.back(mark)
            if not isinstance(error, Impossible):
                op = self.rows[row][self.at[row]]
                self._asked[id(op)] = _Found(op, error)
            return error
        self.at[row] += 1
        self.settle()
        return None

    def _advance(self) -> list[_Found]:
        """Take what takes nothing from others, as far as that goes; return what is held."""
        moved = True
        while moved:
            moved = False
            held: list[_Found] = []
            for row, ops in enumerate(self.rows):
                while self.at[row] < len(ops) and ops[self.at[row]].name not in _CHOSEN:
                    op = ops[self.at[row]]
                    if (error := self._try(row)) is not None:
                        held.append(_Found(op, error))
                        break
                    moved = True
        return held
