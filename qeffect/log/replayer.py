"""
The replayer: it runs the transitions of an event log again, through the same functions that guard a
runtime.

The time of a replay is linear in the number of transitions, including the transitions of repeated
steps. Its memory use does not grow with the log, except by one number per restore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from qeffect.spec.clauses import CLAUSES

from ..text import counted, unreadable
from .checker import LogError
from .player import MAX_LINE, Player, Violation

__all__ = ["LogError", "ReplayReport", "replay", "replay_lines"]


@attrs.frozen
class ReplayReport:
    """
    The result of a replay.

    Args:
        verdict: ``accepted`` or ``refused``.
        events: Number of events that were replayed and accepted.
        epoch: Weight epoch after these events.
        rank: The rank in the log's header; None if the header names no rank.
        clause: Clause of the refusal. This and all fields below are None if nothing was refused.
        step: Sequence number of the refused event.
        action: Transition of the refused event.
        line: Number of the refused line in its file, from 1.
        field: The field of that line that most likely shows the error.
        found: The value that the guard found in the line.
        expected: The value that the guard expected.
        cause: The likely cause.
        remedy: What to do.
        file: The file with the refused line, if the log has several files; otherwise None.
        trusted: Number of events before the first file that was given, according to that file.
            These events were not replayed, and the contract's state after them is taken on trust.
        trusted_epoch: The weight epoch of that state; None if nothing is taken on trust.
    """

    verdict: str
    events: int
    epoch: int
    rank: int | None = None
    clause: str | None = None
    step: int | None = None
    action: str | None = None
    line: int | None = None
    field: str | None = None
    found: str | None = None
    expected: str | None = None
    cause: str | None = None
    remedy: str | None = None
    file: str | None = None
    trusted: int = 0
    trusted_epoch: int | None = None

    def asdict(self) -> dict[str, Any]:
        """Return the report as a plain dictionary."""
        return attrs.asdict(self)

    def summary(self) -> str:
        """Return the result as one line."""
        if self.clause is None:
            events = counted(self.events, "event")
            said = f"accepted: {events}, up to weight epoch {self.epoch}"
            if self.trusted_epoch is None:
                return said
            return (
                f"{said}. The beginning of this log was rotated away: the state after its first "
                f"{counted(self.trusted, 'event')}, at weight epoch {self.trusted_epoch}, is taken "
                "on trust from the first file given. Not checked: how the log reached that state, "
                "and whether a restore reuses an earlier incarnation"
            )
        action = f", {self.action}" if self.action else ""
        file = "" if self.file is None else f"{self.file}, "
        return (
            f"refused: {file}line {self.line}{action}, field {self.field}: {self.clause}: found "
            f"{self.found}; expected {self.expected}. Likely cause: {self.cause} "
            f"What to do: {self.remedy}"
        )


def replay(path: str | os.PathLike[str], *further: str | os.PathLike[str]) -> ReplayReport:
    """
    Replay an event log.

    Args:
        path: The log's file, or its oldest file if it has several (`qeffect.log.rotation`).
        further: The later files of the log, in order.

    Returns:
        A report with the verdict and, after a refusal, its place and reason.

    Raises:
        LogError: A file cannot be read, or is not an event log.
    """
    first = player = None
    for one in (path, *further):
        player = Player(str(one), player)
        first = first or player
        report = _replay(one, player)
        if report.clause is not None:
            break
    assert first is not None
    if first.part:
        report = attrs.evolve(
            report,
            events=report.events - first.since,
            trusted=first.since,
            trusted_epoch=first.began,
        )
    return attrs.evolve(report, file=str(one)) if further and report.clause else report


def _replay(path: str | os.PathLike[str], player: Player) -> ReplayReport:
    """
    Replay one file.

    Raises:
        LogError: The file cannot be read, or is not an event log.
    """
    try:
        with Path(path).open("rb") as file:
            return _played(player, iter(lambda: file.readline(MAX_LINE), b""))
    except OSError as error:
        raise LogError(f"{path}: {unreadable(error)}") from error
    except ValueError as error:  # a path that no system call takes, with a zero byte for example
        raise LogError(f"{path}: {unreadable(error)}") from error
    except (MemoryError, RecursionError) as error:
        raise LogError(f"{path}: not enough memory to replay it ({type(error).__name__})") from None


def replay_lines(lines: Iterable[bytes | str], name: str = "log") -> ReplayReport:
    """
    Replay an event log that is given as a list of lines.

    Args:
        lines: The lines, each with its newline.
        name: The log's name in error messages.

    Returns:
        A report with the verdict and, after a refusal, its place and reason.

    Raises:
        LogError: The lines are not an event log.

    >>> from qeffect import Contract, StageConfig
    >>> from qeffect.log.recorder import Recorder
    >>> with Recorder(Contract([StageConfig(0, microbatches=1, slots=1)])) as log:
    ...     log.contract.submit()
    >>> replay_lines(log.lines).summary()
    'accepted: 1 event, up to weight epoch 0'
    """
    return _played(Player(name), lines)


def _played(player: Player, lines: Iterable[bytes | str]) -> ReplayReport:
    """Replay the lines of one file."""
    try:
        player.play(line.encode() if isinstance(line, str) else line for line in lines)
    except UnicodeEncodeError as error:
        raise LogError(f"{player.name} is not text: {error}") from None
    except Violation as violation:
        clause = CLAUSES[violation.clause]
        return ReplayReport(
            "refused",
            player.events,
            player.epoch,
            player.rank,
            clause=clause.id,
            step=player.events + 1 if violation.action else None,
            action=violation.action,
            line=violation.line,
            field=violation.field,
            found=violation.found,
            expected=violation.expected,
            cause=clause.cause,
            remedy=clause.remedy,
        )
    return ReplayReport("accepted", player.events, player.epoch, player.rank)
