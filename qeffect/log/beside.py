"""
Compare the event logs and the rank logs of one run.

A worker writes two logs. Its contract writes the event log. The worker's parts for messages, votes,
checkpoints and graph launches write the rank log. Both logs must record the same commits and
restores in the same order. Between two commits or restores, both logs must record the same receives
in the same slots (sets of buffers).

A log may end early if its process was killed. An event log is written in blocks of lines, so it is
then compared only up to its end. A rank log is written line by line without a buffer, so it may
lack only the commit or restore that was in progress.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from qeffect.spec.clauses import CLAUSES

from ..relations.constants import IN_BIT
from .joint import JointReport, moves_of
from .rank_log import RankLines
from .rank_series import joined
from .rotation import CONTINUES

__all__ = ["compare_beside"]

#: By event of a rank log that changes the epoch, the same event of an event log.
_MOVES: Final[Mapping[str, str]] = {"commit": "commit", "rebuilt": "restore", "load": "restore"}
_REMEDY: Final = (
    "Give only logs of the same run. If all these logs are of the same run, a log was changed, or "
    "the process acted without asking its contract."
)


def compare_beside(
    logs: Sequence[Sequence[str | os.PathLike[str]]],
    rank_logs: Sequence[str | os.PathLike[str]],
) -> JointReport | None:
    """
    Compare the commits, restores and receives of each event log and the same worker's rank log.

    A rank may have several rank logs, for example from runs before a resume. One of these rank logs
    must agree with the event log. If none agrees, the report describes the rank log whose first
    difference comes latest. An event log without a rank in its header is not compared.

    Args:
        logs: For each event log, the list of its files, oldest file first. Each log must have been
            replayed; the only finding that is allowed is that a log ends too early.
        rank_logs: The paths of the rank logs. A replay must have accepted each.

    Returns:
        A refusal that states the first difference; None if the logs agree.
    """
    told: dict[int, list[_RankRecord]] = {}
    for lines in joined(rank_logs):
        told.setdefault(lines.header["rank"], []).append(_RankRecord.of(lines))
    for files in logs:
        rank, moves, whole = moves_of(files)
        if rank not in told:
            continue
        spans = _spans(files, moves)
        unlike = [_first_unlike(str(files[0]), spans, whole, other) for other in told[rank]]
        if None in unlike:
            continue
        found = max((one for one in unlike if one is not None), key=lambda one: one.alike)
        return found.report(rank)
    return None


@attrs.frozen
class _Span:
    """
    A section of a log that ends with a commit or a restore.

    Args:
        seq: Sequence number of the section's last line.
        name: How the section ends: ``commit``, ``restore``, ``closed``, or empty if the log breaks
            off.
        epoch: The epoch that was committed or restored; -1 for the section at the log's end.
        receives: The posted receives, each as the sender's stage, the microbatch, 1 for a gradient
            or 0 for an activation, the slot and its generation. None if a graph launch posted them.
    """

    seq: int
    name: str
    epoch: int
    receives: tuple[tuple[int, ...], ...] | None


def _spans(
    files: Sequence[str | os.PathLike[str]], moves: Sequence[tuple[int, str, int]]
) -> list[_Span]:
    """Cut an event log into sections; `moves` are its commits and restores."""
    receives: list[tuple[int, tuple[int, ...]]] = []
    again: set[int] = set()
    seq, closed = 0, False
    for path in files:
        with Path(path).open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    continue  # the process was killed in it
                event = json.loads(line)
                closed = "seq" not in event and "events" in event
                seq = event.get("seq", seq)
                kind = event.get("transition")
                if kind == "repeat_step":
                    again.add(seq)
                elif kind == "post_receive":
                    _, stage, microbatch, *_ = event["key"]
                    slot, generation, *_ = event["ref"]
                    sender = (stage - 1, microbatch, 0)
                    if event["message"] != IN_BIT:
                        sender = (stage + 1, microbatch, 1)
                    receives.append((seq, (*sender, slot, generation)))
    spans, before = [], 0
    for end, name, epoch in (*moves, (seq + 1, "closed" if closed else "", -1)):
        own = tuple(one for at, one in receives if before < at < end)
        spans.append(_Span(end, name, epoch, None if end in again else own))
        before = end
    return spans


@attrs.frozen
class _RankRecord:
    """
    The entries of a rank log with which the event log of the same worker must agree.

    Args:
        name: The log's path.
        spans: Commits and restores, each with the receives before it. The last span has an empty
            name if the log breaks off.
        under_way: ``commit`` or ``restore`` if the worker may have made it without a line in the
            rank log.
        closed: Whether the process closed the log.
        first: Whether the log still has its first file.
    """

    name: str
    spans: tuple[_Span, ...]
    under_way: tuple[str, ...]
    closed: bool
    first: bool = True

    @classmethod
    def of(cls, log: RankLines) -> _RankRecord:
        spans: list[_Span] = []
        receives: list[tuple[int, ...]] = []
        launched = False
        first = CONTINUES not in log.header
        under_way: tuple[str, ...] = ("restore",) if first else ()
        closed = False
        for event in log.events:
            kind = event["event"]
            closed = kind == "closed"
            if kind == "post_receive":
                stage, microbatch, gradient = event["message"]
                receives.append(
                    (stage, microbatch, int(gradient), event["slot"], event["generation"])
                )
            elif kind in _MOVES:
                posts = None if launched and not receives else tuple(receives)
                spans.append(_Span(event["seq"], _MOVES[kind], event["epoch"], posts))
                receives, launched = [], False
                under_way = ()
            elif kind == "launch":
                launched = True
                under_way = ("commit",)
            elif kind in ("begin_step", "capture"):
                under_way = ()
            elif kind == "consent":
                under_way = ("commit",)
            elif kind == "end":
                under_way = ("restore",)
        end = log.events[-1]["seq"] if log.events else 0
        spans.append(_Span(end, "", -1, None if launched else tuple(receives)))
        return cls(log.name, tuple(spans), under_way, closed, first)


@attrs.frozen
class _Unlike:
    """The first difference of two logs, and the number of commits and restores before it."""

    alike: int
    epoch: int | None
    step: int
    action: str
    clause: str
    files: tuple[str, str]
    expected: str
    found: str

    def report(self, rank: int) -> JointReport:
        events, ranks = self.files
        return JointReport(
            "refused",
            (),
            epochs=self.alike,
            rank=rank,
            epoch=self.epoch,
            clause=self.clause,
            step=self.step,
            action=self.action,
            message=f"the event log {events} has {self.found}; the rank log {ranks} has "
            f"{self.expected}.",
            expected=f"{self.expected}, as in the rank log",
            found=self.found,
            remedy=_REMEDY,
        )


def _first_unlike(
    name: str, spans: Sequence[_Span], whole: bool, told: _RankRecord
) -> _Unlike | None:
    """
    Return the first difference between an event log and a rank log of one worker.

    If log rotation removed the beginning of a log, the logs may be aligned in several ways. Each
    way matches the first commit or restore of one log with an equal commit or restore of the other
    log. The alignment with the longest agreement gives the difference.
    """
    found: list[_Unlike] = []
    for own, others in _alignments(spans, whole, told):
        unlike = _unlike(name, own, whole, told, others)
        if unlike is None:
            return None
        found.append(unlike)
    return max(found, key=lambda one: one.alike)


def _alignments(
    spans: Sequence[_Span], whole: bool, told: _RankRecord
) -> Iterator[tuple[Sequence[_Span], Sequence[_Span]]]:
    """Yield, at least once, the sections of two logs that may record the same commits and
    restores."""
    others = told.spans
    yield spans, others if whole else others[max(0, len(others) - len(spans)) :]
    for log, other, late in ((others, spans, not whole), (spans, others, not told.first)):
        move = (other[0].name, other[0].epoch)
        for place, span in enumerate(log if late else ()):
            if (span.name, span.epoch) == move:
                pair = log[place:], other
                yield pair if log is spans else pair[::-1]


def _unlike(
    name: str,
    spans: Sequence[_Span],
    whole: bool,
    told: _RankRecord,
    others: Sequence[_Span],
) -> _Unlike | None:
    """Return the first difference between two logs whose first entries should be equal."""
    closed = spans[-1].name == "closed"
    files = (name, told.name)
    for alike, (own, other) in enumerate(zip(spans, others, strict=False)):
        if own.name in ("", "closed") or not other.name:
            ended = own.name in ("", "closed")
            if (
                (ended and not other.name)
                or (ended and not closed)
                or (not ended and not told.closed and own.name in told.under_way)
            ):
                return None
        elif (own.name, own.epoch) == (other.name, other.epoch):
            first = alike == 0 and not whole
            if first or own.receives is None or other.receives is None:
                continue
            if own.name == "commit" and own.receives != other.receives:
                return _Unlike(
                    alike,
                    own.epoch,
                    own.seq,
                    "post_receive",
                    "ranks.as-recorded",
                    files,
                    *_words(other.receives, own.receives, own.epoch),
                )
            continue
        epoch = own.epoch if own.name == "commit" else other.epoch
        return _Unlike(
            alike,
            epoch if epoch >= 0 else None,
            own.seq,
            own.name if own.name != "closed" else "end of the log",
            CLAUSES["epoch.wrong-epoch"].id,
            files,
            _said(other),
            _said(own),
        )
    return None


def _said(span: _Span) -> str:
    """Describe a commit or a restore in words."""
    if span.name == "commit":
        return f"a commit of epoch {span.epoch}"
    if span.name == "restore":
        return f"a restore to epoch {span.epoch}"
    return "no further commit or restore"


def _words(
    expected: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]], epoch: int
) -> Iterator[str]:
    """Describe the first receive that differs in two lists: expected, then found."""
    pairs = enumerate(zip(expected, found, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(found)))
    for receives in (expected, found):
        if place >= len(receives):
            yield f"{len(receives)} receives in epoch {epoch}"
            continue
        stage, microbatch, gradient, slot, generation = receives[place]
        what = "gradient" if gradient else "activation"
        yield (
            f"receive {place} of epoch {epoch}: the {what} of stage {stage}, microbatch "
            f"{microbatch}, in slot {slot}, generation {generation}"
        )
