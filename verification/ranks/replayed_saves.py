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
        tally: Counts the whole checkpoints.

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
        Count the earlier saves at each part of a checkpoint that a rank of the attempt writes.
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
        The log begins in the middle of a run, with the part that the rank wrote last; its save may
        not have ended.
        """
        if event["wrote"] >= 0:
            st.shard[r], st.shard_life[r] = event["wrote"], st.life[r]

    def write(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """A rank writes its next part only after the save under way has ended."""
        before = self._before[r, event["seq"]]
        if self._saved[r] < before:
            raise Impossible
        TRANSITIONS["write_shard"].run(st, r)

    def publish(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """A rank publishes a whole checkpoint."""
        same("epoch", st.shard[r], event["epoch"])
        TRANSITIONS["publish"].run(st, r)
        self.published.add(event["epoch"])
        self._saved[r] += 1
        self.tally["checkpoints"] += 1
