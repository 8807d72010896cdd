"""
Cut a rank's log into spans: each begins at a start, in place or from a checkpoint, and ends at the
next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from qeffect.log.rank_log import RankLines
from qeffect.log.rank_series import TAKEN_ON_TRUST

__all__ = ["Span", "spans_of"]


@attrs.frozen
class Span:
    """
    The part of a rank's log that belongs to one attempt.

    Args:
        log: The rank's log.
        first: The event of the restart in place or of the checkpoint load with which the span
            begins; None at the log's beginning.
        events: The events of the span.
        leaves: Whether no restart in place follows the span.
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
        """The event that loads the checkpoint from which the span begins; None without a load."""
        if self.first is not None and self.first["event"] == "load":
            return self.first
        for event in self.events:
            if event["event"] == "begin_step":
                return None
            if event["event"] == "load":
                return event
        return None

    @property
    def trusted(self) -> Mapping[str, Any] | None:
        """The event that says that the log begins in the middle of a run; None if it does not."""
        begins = self.events and self.events[0]["event"] == TAKEN_ON_TRUST
        return self.events[0] if begins else None

    @property
    def epoch(self) -> int:
        """The epoch in which the rank began."""
        found = self.first or self.trusted or self.load or self.log.header
        return int(found["epoch"])


def spans_of(log: RankLines) -> list[Span]:
    """Cut a rank's log where the rank restarts."""
    cuts: list[int] = []
    stepped = False
    for place, event in enumerate(log.events):
        if event["event"] in ("begin_step", TAKEN_ON_TRUST):
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
        # A save may end after its rank has restarted.
        parts[wrote if event["event"] == "publish" else part].append(event)
    firsts = [None, *(log.events[cut] for cut in cuts)]
    following = [*(log.events[cut]["event"] for cut in cuts), "load"]
    return [
        Span(log, first, tuple(events), then == "load")
        for first, events, then in zip(firsts, parts, following, strict=True)
    ]
