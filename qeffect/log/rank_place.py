"""
The state of a rank at a point of its log. If a log has several files, the header of each later file
holds this state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["RankPlace"]


@attrs.define
class RankPlace:
    """
    The state of a rank at one point of its log.

    Args:
        epoch: The weight epoch (number of optimizer steps) that the rank is in.
        again: Number of the worker's restarts, in place or from a checkpoint.
        launches: Whether the rank runs each step as one launch of a CUDA graph. If so, after a
            commit the last launch is still running, and its votes are not yet read.
        wrote: The epoch of the newest checkpoint of which the rank wrote its files; -1 before the
            first.
        stepped: Whether a guarded step has begun since the worker started. If so, loading a
            checkpoint increases `again`.

    >>> place = RankPlace(4)
    >>> place.take({"event": "commit", "epoch": 4}), place.epoch
    (True, 5)
    """

    epoch: int
    again: int = 0
    launches: bool = False
    wrote: int = -1
    stepped: bool = False

    @classmethod
    def beginning(cls, header: Mapping[str, Any]) -> RankPlace:
        """Return the state with which a log with this header begins."""
        continues = header.get("continues")
        if continues is None:
            return cls(header["epoch"])
        names = ("epoch", "again", "launches", "wrote")
        return cls(**{name: continues[name] for name in names}, stepped=True)

    def take(self, event: Mapping[str, Any]) -> bool:
        """
        Update the state for the next event of the log.

        Returns:
            Whether the event is a commit, after which a file may begin.
        """
        what = event["event"]
        if what == "commit":
            self.epoch = event["epoch"] + 1
            return True
        if what == "begin_step":
            self.stepped, self.launches = True, False
        elif what == "captured":
            self.launches = True
        elif what == "write_shard":
            self.wrote = event["epoch"]
        elif what in ("rebuilt", "load"):
            if what == "rebuilt" or self.stepped:
                self.again += 1
                self.stepped = self.launches = False
            self.epoch = event["epoch"]
        return False
