"""
Event logs and rank logs of one run, compared with each other.

Both are written by the same process, so both tell which epochs each rank committed and kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from qeffect.spec.clauses import CLAUSES

from .joint import JointReport, kept_epochs, span_of
from .rank_log import RankLines

__all__ = ["compare_commits"]


def compare_commits(
    logs: Sequence[Sequence[str | os.PathLike[str]]],
    rank_logs: Sequence[str | os.PathLike[str]],
) -> JointReport | None:
    """
    Compare which epochs each rank committed, by its event log and by its rank logs.

    A rank has a rank log for each attempt; one of them has to fit. Epochs that were undone by a
    restore are left out on both sides. An event log that names no rank is not compared.

    Args:
        logs: The files of each event log, oldest first; a replay has accepted each log.
        rank_logs: The rank logs, which a replay has accepted.

    Returns:
        The first difference, as a refusal; None if there is none.
    """
    told: dict[int, list[tuple[int, ...]]] = {}
    for path in rank_logs:
        lines = RankLines.read(path)
        told.setdefault(lines.header["rank"], []).append(_kept(lines))
    for files in logs:
        rank, epochs, whole = kept_epochs(files)
        if rank not in told or (not whole and not epochs):
            continue
        first = 0 if whole else epochs[0]  # the log's beginning was rotated away
        others = [tuple(e for e in own if e >= first) for own in told[rank]]
        if epochs in others:
            continue
        other = max(others, key=lambda own: _alike(own, epochs))
        alike = _alike(other, epochs)
        one = epochs[alike] if alike < len(epochs) else other[alike]
        return JointReport(
            "refused",
            (),
            epochs=alike,
            rank=rank,
            epoch=one,
            clause=CLAUSES["epoch.wrong-epoch"].id,
            action="commit_update",
            message=f"the event log {files[0]} has commits of {span_of(epochs)}; the rank log has "
            f"commits of {span_of(other)}.",
            expected=span_of(other),
            found=span_of(epochs),
            remedy="Give logs of one run; if they are, one of them was changed, or the process "
            "committed without asking the other ranks.",
        )
    return None


def _kept(log: RankLines) -> tuple[int, ...]:
    found: list[int] = []
    for event in log.events:
        if event["event"] == "commit":
            found.append(event["epoch"])
        elif event["event"] in ("rebuilt", "load"):
            found = [epoch for epoch in found if epoch < event["epoch"]]
    return tuple(found)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
