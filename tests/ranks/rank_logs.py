"""
Rank logs and event logs of the workers in a test. The model of ranks replays the rank logs, and
each rank log is compared with the event log of the same worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qeffect.gpu_runtime.ranks.membership import Member
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.log.beside import compare_beside
from qeffect.log.rank_log import RankLines
from qeffect.log.replayer import replay
from qeffect.verification.ranks.replay import RankReport, replay_ranks

__all__ = ["alike", "keep_logs", "logs_of", "replayed", "replayed_run"]


def keep_logs(folder: Path, rank: int) -> None:
    """
    Give every worker that this process makes a rank log in a folder, and on a CPU an event log.
    """
    made = Worker.__init__
    numbers = itertools.count()

    def init(self: Worker, member: Member, *given: Any, **named: Any) -> None:
        number = next(numbers)
        named.setdefault("rank_log", folder / f"{number}.{rank}.ranks.jsonl")
        if named.get("event_log") is None and member.device.type == "cpu":
            named["event_log"] = folder / f"{number}.{rank}.events.jsonl"
        made(self, member, *given, **named)

    Worker.__init__ = init  # type: ignore[method-assign]


def logs_of(folder: Path) -> list[Path]:
    """
    The logs of those workers that every rank made; a rank may have ended before it made a worker.
    """
    logs = [RankLines.read(path) for path in sorted(folder.glob("*.ranks.jsonl"))]
    found: dict[int, list[RankLines]] = {}
    for log in logs:
        found.setdefault(log.header["worker"], []).append(log)
    return [
        Path(log.name)
        for own in found.values()
        if len(own) == own[0].header["world"]
        for log in own
    ]


def replayed(logs: Iterable[Path], refused: str = "") -> RankReport | None:
    """
    The result of replaying some logs through the model; the model must refuse the logs by the given
    clause, or accept them.
    """
    logs = list(logs)
    if not logs:
        return None
    report = replay_ranks(logs)
    assert report.clause == (refused or None), report.summary()
    return report


def replayed_run(folder: Path, commits: int = 0) -> RankReport:
    """
    The result of replaying the rank logs of a training run, which the model must accept.

    Attempts in which a rank ended before it had a log are skipped.

    Args:
        folder: The run's `event_logs`; logs of earlier processes lie in folders below it.
        commits: Minimum number of commits in the logs of all ranks together.
    """
    found: dict[tuple[str, int], list[RankLines]] = {}
    for path in sorted(folder.rglob("*.ranks.jsonl")):
        if b"\n" in path.read_bytes():
            log = RankLines.read(path)
            found.setdefault((log.header["attempt"], log.header["worker"]), []).append(log)
    whole = [own for own in found.values() if len(own) == own[0].header["world"]]
    report = replayed(Path(log.name) for own in whole for log in own)
    assert report is not None, (
        f"expected an attempt with the logs of all ranks, found {sorted(found)}"
    )
    assert report.commits >= commits, report.summary()
    return report


def alike(logs: Iterable[Path]) -> int:
    """Compare rank logs with the event logs beside them; return how many pairs there are."""
    pairs = [(log, log.with_name(log.name.replace(".ranks.", ".events."))) for log in logs]
    kept = [(log, events) for log, events in pairs if events.exists() and events.stat().st_size]
    for log, events in kept:
        report = replay(events)
        early = report.clause == "log.closing" and report.expected == "a closing line"
        assert report.clause is None or early, report.summary()
        unlike = compare_beside([[events]], [log])
        assert unlike is None, unlike.summary()
    return len(kept)
