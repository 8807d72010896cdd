"""
Messages in a replay of rank logs: which buffer each message uses, and whether it has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .concrete_state import Impossible
from .messages_of_logs import SENT, action_of, number_of
from .protocol import TRANSITIONS
from .replayed_state import ReplayedState, UnlikeError

__all__ = ["ReplayedMessages", "settle_transfers", "take_transfers"]


class ReplayedMessages:
    """
    The messages of one job.

    Args:
        tally: Counts for the report; this class counts the messages that arrived.
    """

    def __init__(self, tally: Counter[str]) -> None:
        self.tally = tally
        self._posted: dict[tuple[Any, ...], int] = {}
        self._offset: Counter[int] = Counter()
        self._trusted: dict[int, set[int]] = {}  # by rank, buffers with a known generation

    def restart(self, st: ReplayedState, r: int) -> None:
        """Reset a rank's generations: after a start or a restore, its contract counts from 0."""
        self._trusted.pop(r, None)
        held = [n for (q, _), n in st.generation.entries.items() if q == r]
        self._offset[r] = max(held, default=0)

    def trust(self, r: int) -> None:
        """
        Prepare for a log that begins in the middle of a run: the first generation of each buffer is
        taken from the log.
        """
        self._trusted[r] = set()

    def clear(self) -> None:
        """Forget the positions of all messages, since every message has ended."""
        self._posted.clear()

    def forget(self, r: int) -> None:
        """Forget the positions of a rank's messages in earlier steps."""
        for posted in [one for one in self._posted if one[0] == r]:
            del self._posted[posted]

    def release(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """Release a message's buffer as often as the generation in the event requires."""
        buffer = _buffer(event)
        wanted = event["generation"] + self._offset[r]
        if r in self._trusted and buffer not in self._trusted[r]:
            self._trusted[r].add(buffer)
            st.generation[r, buffer] = max(wanted, st.generation[r, buffer])
        if wanted < st.generation[r, buffer]:
            held = st.generation[r, buffer] - self._offset[r]
            raise UnlikeError(
                f"generation {held} or later of the message's slot",
                f"generation {event['generation']}",
            )
        while st.generation[r, buffer] < wanted:
            TRANSITIONS["release"].run(st, r, buffer)

    def post(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """Post a message."""
        q = event["peer"]
        if q not in st.ranks or q == r:
            raise UnlikeError(f"the number of another rank, below {len(st.ranks)}", f"rank {q}")
        sends = event["event"] == "post_send"
        place = (st.sent if sends else st.taken)[r, q]
        TRANSITIONS[event["event"]].run(st, r, q, _buffer(event), number_of(event))
        self._posted[r, sends, q, action_of(event)] = place

    def end(self, st: ReplayedState, r: int, event: Mapping[str, Any]) -> None:
        """Require that a message has arrived or left if the rank logged the message's end."""
        q = event["peer"]
        sends = event["event"] in SENT
        place = self._posted.get((r, sends, q, event["action"]))
        if place is None:
            raise UnlikeError(f"a message that was posted as {event['action']}", "none")
        if (st.sent_done if sends else st.taken_done)[r, q] <= place:
            raise Impossible
        self.tally["messages"] += not sends


def _buffer(event: Mapping[str, Any]) -> int:
    gradient = event["message"][2]
    sends = event["event"] == "post_send"
    return int(4 * event["slot"] + 2 * gradient + sends)


def settle_transfers(st: ReplayedState) -> None:
    """Take every transfer that is possible."""
    while take_transfers(st, TRANSITIONS["transfer"], st.sent_done, st.sent):
        pass


def take_transfers(st: ReplayedState, transfer: Any, ended: Any, posted: Any) -> bool:
    """
    Take one transfer between each two ranks where a transfer is possible; return whether any
    transfer was taken.

    Args:
        st: The state of all ranks.
        transfer: The transition that ends one message from a rank to another.
        ended: By sender and receiver, how many messages have ended.
        posted: By sender and receiver, how many messages the sender has posted.
    """
    moved = False
    for (r, q), n in st.total.messages.items():
        if n and ended[r, q] < posted[r, q]:
            try:
                transfer.run(st, r, q)
            except Impossible:
                continue
            moved = True
    return moved
