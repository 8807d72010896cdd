"""
Checkpoints in a replay of rank logs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .concrete_state import Impossible
from .protocol import TRANSITIONS
from .replayed_spans import Span
from .replayed_state import ReplayedState, same

__all__ = ["ReplayedSaves"]


class ReplayedSaves:
    """
    The checkpoints of one job.

    Args:
        tally: Counts for the report; this class counts the whole checkpoints.

    Attributes:
        published: Epochs of the whole checkpoints.
        trusted: Checkpoints up to this epoch may be logged in missing files; -1 if no file is
            missing.
    """

    def __init__(self, tally: Counter[str]) -> None:
        self.tally = tally
        self.published: set[int] = set()
        self.trusted = -1
        self._before: Counter[tuple[int, int]] = Counter()
        self._saved: Counter[int] = Counter()

    def begin(self, present: Mapping[int, Span]) -> None:
        """
        For each checkpoint part that a rank of the attempt writes, count the earlier saves.
        """
        self._saved.clear()
        self._before.clear()
        for rank, span in present.items():
            saves = 0
            for event in span.events:
                saves += event["event"] == "publish"
                if event["event"] == "write_shard":
                    self._before[rank, event["seq"]] = saves

    def trust(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """
        Prepare for a log that begins in the middle of a run. The rank's last checkpoint part comes
        from the log's header, and its save may not have ended.
        """
        if event["wrote"] >= 0:
            st.shard[r], st.shard_life[r] = event["wrote"], st.life[r]

    def write(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """Write a rank's next checkpoint part; the previous save must have ended."""
        before = self._before[r, event["seq"]]
        if self._saved[r] < before:
            raise Impossible
        TRANSITIONS["write_shard"].run(st, r)

    def publish(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """Publish a whole checkpoint."""
        same("epoch", st.shard[r], event["epoch"])
        TRANSITIONS["publish"].run(st, r)
        self.published.add(event["epoch"])
        self._saved[r] += 1
        self.tally["checkpoints"] += 1
