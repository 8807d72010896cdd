"""
Replay the logs of all ranks through the model of ranks, by the same transitions that are proved.

The logs have no common clock. The replay looks for an order of all events in which the protocol
allows every event, and in which each log keeps its own order. It refuses an event that fits no such
order. Three kinds of transitions are not logged; the replay takes them as soon as they are
possible: a transfer of a message that both ends have posted, the choice of a cause by the first
rank that ends, and the start of an attempt. If a log does not end with a stop, its process died.
`replayed_launches` derives from the logs what the devices did in launched steps (one CUDA graph
launch per step). A host may have logged work that it queued but that its device never reached,
because another rank ended; `messages_of_logs` leaves these events out.

If a log has several files and the first files are missing, the replay begins after a commit that
all logs have, and takes the ranks' states at this commit on trust (`qeffect.log.rank_series`).

The hosts' clocks only determine the order of the attempts.

`replayed_spans` cuts the logs into attempts, `replayed_events` maps each event to transitions of
the model (with modules for messages, checkpoints, stops and launches), and `order_search` looks for
the order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from qeffect.log.checker import LogError
from qeffect.log.rank_log import RankLines
from qeffect.log.rank_series import begun_together, joined
from qeffect.refusals import Refused
from qeffect.text import counted

from .concrete_state import Impossible
from .launches import LAUNCHES
from .messages_of_logs import reached
from .order_search import OrderSearch, Unexplained
from .protocol import TRANSITIONS
from .replayed_events import EventsOfAttempt, step_of
from .replayed_launches import LaunchesOfRank, launch_facts, settle_launched
from .replayed_messages import ReplayedMessages, settle_transfers
from .replayed_saves import ReplayedSaves
from .replayed_spans import Span, spans_of
from .replayed_state import ReplayedState, UnlikeError

__all__ = ["RankReport", "replay_ranks"]

_TALLIED: Final = ("attempts", "commits", "launches", "messages", "checkpoints", "stops")


@attrs.frozen
class RankReport:
    """
    The result of a replay of rank logs.

    Args:
        verdict: ``accepted`` or ``refused``.
        logs: Number of logs.
        attempts: Number of attempts (runs of all ranks), including restarts in place.
        commits: Number of commits, over all ranks.
        launches: Number of steps that ran as one CUDA graph launch, over all ranks.
        messages: Number of messages that arrived.
        checkpoints: Number of complete checkpoints.
        stops: Number of ranks that stopped without a crash.
        trusted_epoch: The epoch in which the first attempt with missing first files begins; None if
            every log is complete.
        log: Path of the refused log. This and all later fields are None if nothing was refused.
        rank: Rank of the refused log.
        line: Number of the line with the refused event.
        step: Sequence number of the refused event.
        action: Name of the refused event.
        clause: The protocol's condition that is not met, or `ranks.order` if the protocol does not
            allow the event at this point in any order.
        message: The refusal in a sentence.
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
    trusted_epoch: int | None = None
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
            trust = (
                ""
                if self.trusted_epoch is None
                else f"; the state at the beginning of epoch {self.trusted_epoch} is taken on "
                "trust, since earlier files are missing"
            )
            launches = f"{self.launches:,} launch{ending}, " if self.launches else ""
            return (
                f"accepted: {counted(self.logs, 'rank log')}, {counted(self.attempts, 'attempt')}, "
                f"{counted(self.commits, 'commit')}, {launches}"
                f"{counted(self.messages, 'message')}, "
                f"{counted(self.checkpoints, 'checkpoint')}, {counted(self.stops, 'stop')}{trust}"
            )
        return (
            f"refused: rank {self.rank}, event {self.step} ({self.action}) in line {self.line} of "
            f"{self.log}: {self.clause}: {self.message} What to do: {self.remedy}"
        )


def replay_ranks(paths: Sequence[str | os.PathLike[str]]) -> RankReport:
    """
    Replay the rank logs of one job through the model of ranks.

    Args:
        paths: The logs of all ranks, of one or more attempts, in any order. If a log has several
            files, give all of them, or only the newest ones.

    Raises:
        LogError: A file is not a rank log; a rank's log is missing; a file between two other files
            is missing; or the logs of an attempt share no commit at which all logs can begin.
    """
    logs = joined(paths)
    tally: Counter[str] = Counter()
    jobs: dict[int, list[RankLines]] = {}
    for log in logs:
        jobs.setdefault(log.header["worker"], []).append(log)
    for _, job in sorted(jobs.items()):
        found = _Job(_attempts(job), tally).run()
        if found is not None:
            return _refusal(found, len(logs), tally)
    return _report("accepted", len(logs), tally)


def _report(verdict: str, logs: int, tally: Mapping[str, int], **refusal: Any) -> RankReport:
    counts: dict[str, Any] = {name: tally.get(name, 0) for name in _TALLIED}
    counts["trusted_epoch"] = tally.get("trusted epoch")
    return RankReport(verdict, logs, **counts, **refusal)


def _attempts(logs: Sequence[RankLines]) -> list[list[RankLines]]:
    """
    Return the attempts in the order of their start; each is a list of its logs by rank.

    Raises:
        LogError: Two logs are of the same rank, or a rank's log is missing.
    """
    found: dict[str | None, dict[int, RankLines]] = {}
    for log in logs:
        ranks = found.setdefault(log.header["attempt"], {})
        other = ranks.setdefault(log.header["rank"], log)
        if other is not log:
            raise LogError(
                f"{log.name} and {other.name} are both logs of rank {log.header['rank']} in the "
                "same attempt; expected one log per rank"
            )
    for attempt, ranks in found.items():
        first = next(iter(ranks.values()))
        for name in ("world", "channels"):
            for log in ranks.values():
                if log.header[name] != first.header[name]:
                    raise LogError(
                        f"{log.name} and {first.name} are logs of the same attempt, "
                        f"but their headers differ in {name}"
                    )
        missing = sorted(set(range(first.header["world"])) - ranks.keys())
        if missing:
            raise LogError(
                f"the log of rank {missing[0]} in attempt {attempt} is missing; expected the logs "
                f"of all {first.header['world']} ranks"
            )
    ordered = sorted(
        found.values(), key=lambda ranks: min(log.header["began"] for log in ranks.values())
    )
    return [begun_together([ranks[rank] for rank in range(len(ranks))]) for ranks in ordered]


def _refusal(unexplained: Unexplained, logs: int, tally: Mapping[str, int]) -> RankReport:
    """Return the report on an event that fits no order of the events."""
    op, error = unexplained.step, unexplained.error
    last = op.log.events[-1]["seq"] if op.log.events else 0
    seq = last + 1 if op.event is None else op.event["seq"]
    name, line = op.log.where(seq)
    action = "end of the log" if op.event is None else op.event["event"]
    transition = TRANSITIONS.get(op.name) or LAUNCHES.get(op.name)
    asks = "" if transition is None else transition.text
    if isinstance(error, UnlikeError):
        clause, expected, found = "ranks.as-recorded", error.expected, error.found
        message = f"expected {expected}, found {found}."
    elif isinstance(error, Refused):
        clause = error.clause
        expected = clause.removeprefix("ranks.").replace("-", " ")
        found = f"`{op.name}`, where this does not hold"
        message = f"`{op.name}` requires: {expected}. {asks}".strip()
    else:
        clause, expected, found = "ranks.order", asks or op.name, f"`{op.name}`"
        message = f"`{op.name}` is not possible here, in any order of the logs' events. {asks}"
        message = message.strip()
    return _report(
        "refused",
        logs,
        tally,
        log=name,
        rank=op.log.header["rank"],
        line=line,
        step=seq,
        action=action,
        clause=clause,
        message=message,
        expected=expected,
        found=found,
        remedy="Compare this rank's events with those of the other ranks up to this line; either "
        "one rank acted without the consent of the others, or a log was changed.",
    )


class _Job:
    """The attempts of one job, one after the other."""

    def __init__(self, attempts: Sequence[Sequence[RankLines]], tally: Counter[str]) -> None:
        self.attempts, self.tally = attempts, tally
        self.names: dict[str, int] = {}
        self._messages, self._saves = ReplayedMessages(tally), ReplayedSaves(tally)
        self._launches: dict[int, LaunchesOfRank] = {}

    def run(self) -> Unexplained | None:
        """Replay all attempts; return the first event that fits no order, or None."""
        header = self.attempts[0][0].header
        self.state = self._state_of(header)
        for logs in self.attempts:
            if logs[0].header["world"] != len(self.state.ranks):
                self.state = self._state_of(logs[0].header)
            spans = [spans_of(log) for log in logs]
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

    def _begin(self, present: Mapping[int, Span]) -> Unexplained | None:
        """Begin an attempt, in place or from a checkpoint; return an error if it cannot begin."""
        first = next(iter(present.values()))
        for span in present.values():
            if span.again != first.again:
                expected = "a rebuild" if first.again else "a checkpoint"
                error = UnlikeError(f"{expected}, as on rank {first.log.header['rank']}", "another")
                return Unexplained(step_of(span, span.first, "start", lambda: None), error)
        if first.again:
            return self._begin_in_place(present, first)
        if first.trusted is not None:
            return self._trust(present, first.trusted)
        if first.epoch != self.state.saved[0]:
            if (
                first.load is not None
                and self._saves.published
                and first.epoch not in self._saves.published
                and first.epoch > self._saves.trusted
            ):
                saved = ", ".join(map(str, sorted(self._saves.published)))
                error = UnlikeError(f"a checkpoint of epoch {saved}", f"epoch {first.epoch}")
                return Unexplained(step_of(first, first.load, "start", lambda: None), error)
            self.state = self._state_of(first.log.header, first.epoch)
        found = self._run(
            first, "begin_attempt", lambda: TRANSITIONS["begin_attempt"].run(self.state)
        )
        self.tally["attempts"] += found is None
        return found

    def _begin_in_place(self, present: Mapping[int, Span], first: Span) -> Unexplained | None:
        """Begin an attempt in place; return an error if a rank that launched cannot rebuild."""
        st = self.state
        again = self._run(first, "begin_again", lambda: TRANSITIONS["begin_again"].run(st))
        for r, span in present.items():
            if r in self._launches and self._launches[r].takes_part:
                found = self._run(span, "rebuild", partial(LAUNCHES["rebuild"].run, st, r))
                if found is not None:
                    return found
        self.tally["attempts"] += again is None
        return again

    def _run(self, span: Span, name: str, run: Callable[[], None]) -> Unexplained | None:
        """Take a step at the beginning of a rank's span; return an error if it cannot be taken."""
        try:
            run()
        except (Refused, Impossible) as error:
            return Unexplained(step_of(span, span.first, name, lambda: None), error)
        return None

    def _trust(self, present: Mapping[int, Span], trusted: Mapping[str, Any]) -> Unexplained | None:
        """Begin in the middle of a run, from the state at the beginning of the logs."""
        for span in present.values():
            own = span.trusted
            if own is None or own["launches"] != trusted["launches"]:
                error = UnlikeError("a log that begins like rank 0's", "another start")
                return Unexplained(step_of(span, own, "start", lambda: None), error)
        epoch = trusted["epoch"]
        self.state = self._state_of(present[0].log.header, epoch)
        self._saves.trusted = max(self._saves.trusted, epoch)
        TRANSITIONS["begin_attempt"].run(self.state)
        self.tally["attempts"] += 1
        self.tally.setdefault("trusted epoch", epoch)
        return None

    def _walk(self, present: Mapping[int, Span], number: int) -> Unexplained | None:
        """Look for an order of an attempt's events; return an event that fits no order, or None."""
        happened = reached({rank: span.events for rank, span in present.items()})
        present = {r: attrs.evolve(span, events=happened[r]) for r, span in present.items()}
        facts = launch_facts({rank: span.events for rank, span in present.items()})
        st = self.state
        self._launches = {r: LaunchesOfRank(st, r, facts, self.tally) for r in present}
        self._saves.begin(present)
        events = EventsOfAttempt(
            st,
            self.tally,
            self.attempts,
            self.names,
            self._launches,
            self._messages,
            self._saves,
        )
        rows = [row for rank, span in present.items() for row in events.rows(rank, span, number)]

        def settle() -> None:
            settle_transfers(st)
            settle_launched(st, self._launches)

        return OrderSearch(rows, settle, st).run()
