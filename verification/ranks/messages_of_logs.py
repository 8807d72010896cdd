"""
Messages in rank logs, and the logged events that a device never reached because a message did not
arrive.

On a GPU the host does not wait for a transfer. It queues work behind the transfer (`behind_send`,
`behind_receive`) and continues up to its consent. If the other rank ends before it posts its end of
the message, the device never gets past this transfer. Then no event that the host logged later in
this step has happened on the device, except that the rank stopped. A send that was posted later did
not leave either, so the other rank's device may get stuck too.

This can happen only in a step that the rank did not commit. A commit needs the consent of all
ranks, and a rank consents only after it has posted all its messages. If the host itself waits
(`sent`, `received`), every event that it logged has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["ENDED", "MESSAGE_EVENTS", "SENT", "action_of", "number_of", "reached"]

SENT: Final = frozenset({"sent", "behind_send"})
ENDED: Final = frozenset({*SENT, "received", "behind_receive"})
MESSAGE_EVENTS: Final = frozenset({"post_send", "post_receive", *ENDED})
_QUEUED: Final = frozenset({"behind_send", "behind_receive"})
#: Events that the host logs ahead of its device. A rank whose host waits for messages is never
#: ahead.
_AHEAD: Final = frozenset(
    {"post_send", "post_receive", *_QUEUED, "second_run", "finish", "consent"}
)

_Event = Mapping[str, Any]
_Events = tuple[_Event, ...]


def action_of(event: _Event) -> str:
    """
    Return the action of `post_send` or `post_receive` in torch's notation. The log names the action
    in the same way when the message ends.
    """
    stage, microbatch, gradient = event["message"]
    what = "B" if gradient else "F"
    if event["event"] == "post_send":
        return f"{stage}SEND_{what}{microbatch}"
    return f"{stage - 1 if gradient else stage + 1}RECV_{what}{microbatch}"


def number_of(event: _Event) -> int:
    """Return the number of a message (its stage, microbatch and direction), as the runtime does."""
    stage, microbatch, gradient = event["message"]
    return int(1 + 2 * ((microbatch << 20) + stage) + gradient)


def reached(events: Mapping[int, _Events]) -> dict[int, _Events]:
    """
    Leave out the logged events that the rank's device did not reach, as far as the logs show.

    Args:
        events: For each rank, its events in one attempt.

    Returns:
        For each rank, the events that happened.
    """
    left = dict(events)
    moved = True
    while moved:  # a rank waits for what another rank did not post
        moved = False
        for rank, own in left.items():
            if (place := _stands(rank, left)) is not None:
                kept = (event for event in own[place:] if event["event"] not in _AHEAD)
                left[rank] = (*own[:place], *kept)
                moved = True
    return left


def _step(own: _Events, epoch: int | None = None) -> tuple[int, int]:
    """Return the positions at which a guarded step begins and ends; by default the last step."""
    begins = [
        place
        for place, event in enumerate(own)
        if event["event"] in ("begin_step", "capture") and epoch in (None, event["epoch"])
    ]
    if not begins:
        return 0, 0
    first = begins[-1]
    for place in range(first + 1, len(own)):
        if own[place]["event"] in ("begin_step", "capture", "commit", "captured"):
            return first, place
    return first, len(own)


def _stands(rank: int, events: Mapping[int, _Events]) -> int | None:
    """Return the position of the message in a rank's last step at which its device got stuck."""
    own = events[rank]
    first, last = _step(own)
    if last < len(own) or not own or own[first]["event"] != "begin_step":
        return None  # the step was committed, or is a capture, during which no device runs
    epoch = own[first]["epoch"]
    posted: dict[tuple[str, int], int] = {}
    places: dict[tuple[str, int, str], int] = {}
    for place in range(first, last):
        event = own[place]
        what = event["event"]
        if what in ("post_send", "post_receive"):
            end = what, event["peer"]
            posted[end] = posted.get(end, 0) + 1
            places[(*end, action_of(event))] = posted[end]
        elif what in _QUEUED:
            mine, other = ("post_send", "post_receive")[:: 1 if what in SENT else -1]
            number = places.get((mine, event["peer"], event["action"]))
            if number is not None and number > _posts(other, rank, epoch, event["peer"], events):
                return place
    return None


def _posts(what: str, rank: int, epoch: int, peer: int, events: Mapping[int, _Events]) -> int:
    """Return how often a peer posted one kind of message with a rank, in the step of an epoch."""
    own = events.get(peer, ())
    first, last = _step(own, epoch)
    return sum(event["event"] == what and event["peer"] == rank for event in own[first:last])
