"""Every worker of a test's ranks keeps a rank log, and the model of ranks takes the logs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.log.rank_log import RankLines
from qeffect.verification.ranks.replay import RankReport, replay_ranks

__all__ = ["keep_logs", "logs_of", "replayed"]


def keep_logs(folder: Path, rank: int) -> None:
    """Give every worker that this process makes a rank log in a folder."""
    made = Worker.__init__
    numbers = itertools.count()

    def init(self: Worker, *given: Any, **named: Any) -> None:
        named.setdefault("rank_log", folder / f"{next(numbers)}.{rank}.ranks.jsonl")
        made(self, *given, **named)

    Worker.__init__ = init  # type: ignore[method-assign]


def logs_of(folder: Path) -> list[Path]:
    """The logs of those workers that every rank made; a rank may have ended before its own."""
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
    """What the model says of some logs; it refuses them by this clause, or accepts them."""
    logs = list(logs)
    if not logs:
        return None
    report = replay_ranks(logs)
    assert report.clause == (refused or None), report.summary()
    return report
