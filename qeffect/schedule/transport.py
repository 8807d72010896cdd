"""
How a runtime carries messages, as far as it decides whether a table is right.

A table says when messages are sent and received; which of them share a queue, when a send ends, and
how many may be under way, the runtime is configured with. Four ways to share queues:

* `pair`: all messages between two ranks, both ways. torch keeps one process group for a pipeline,
  and NCCL one communicator for each pair of ranks in it.
* `direction`: activations between two ranks, both ways, and gradients apart from them. torch 2.14
  can have a process group for each (`pipeline_per_direction_p2p`).
* `edge`: all messages from one rank to another. torch 2.15 can have a process group for each
  directed pair of ranks (`pipeline_per_edge_p2p`).
* `edge-direction`: a directed pair of ranks, activations and gradients apart.

The messages of a queue are received in the order in which they are sent. While sends are buffered,
whether a table is right then depends on that order alone, and a queue for both ways is no different
from one each way. Under rendezvous semantics a send ends only when its receive is posted, and until
then nothing behind it in its queue moves: there the two differ, since a rank's own receives stand
in the way of its sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from .actions import SENDS, Kind, Schedule, ScheduleError

#: Which messages share a queue, and so the order of their sends; with words for each.
QUEUES: Mapping[str, str] = MappingProxyType(
    {
        "pair": "a pair of ranks",
        "direction": "a pair of ranks and kind of message",
        "edge": "a directed pair of ranks",
        "edge-direction": "a directed pair of ranks and kind of message",
    }
)
#: What a send holds up until its receive is posted, under rendezvous semantics.
RENDEZVOUS = ("queue", "rank")


@attrs.frozen
class Transport:
    """
    What is known about the runtime that carries a table's messages.

    Args:
        queues: Which messages share a queue; one of `QUEUES`.
        max_outstanding_sends: The most sends that a rank may have posted and not awaited at once,
            torch 2.15's option of that name; without a limit when left out.
        rendezvous: What a send holds up until its receive is posted: `queue`, what comes behind it
            in its queue, or `rank`, that and its rank's whole row. Sends are buffered, and hold
            up nothing, when left out.
    """

    queues: str = "pair"
    max_outstanding_sends: int | None = None
    rendezvous: str | None = None

    def __attrs_post_init__(self) -> None:
        """
        Reject invalid values.

        Raises:
            ScheduleError: The queues or the rendezvous are unknown, or the limit is negative.
        """
        if self.queues not in QUEUES:
            raise ScheduleError(
                f"unknown queues {self.queues!r}; expected one of {', '.join(QUEUES)}"
            )
        if self.rendezvous is not None and self.rendezvous not in RENDEZVOUS:
            raise ScheduleError(
                f"unknown rendezvous {self.rendezvous!r}; expected one of {', '.join(RENDEZVOUS)}"
            )
        limit = self.max_outstanding_sends
        if limit is not None and limit < 0:
            raise ScheduleError(
                f"max_outstanding_sends must be a non-negative integer, not {limit}"
            )

    @property
    def by_kind(self) -> bool:
        """Whether activations and gradients have queues of their own."""
        return self.queues in ("direction", "edge-direction")

    @property
    def both_ways(self) -> bool:
        """Whether what a rank sends to another shares a queue with what it receives from it."""
        return self.queues in ("pair", "direction")

    def queue(self, kind: Kind) -> str:
        """The queue of a send, among those from one rank to another."""
        return str(kind) if self.by_kind else "all"

    def require(self, schedule: Schedule) -> None:
        """
        Refuse what is asked of a table that does not say it.

        Args:
            schedule: The schedule.

        Raises:
            ScheduleError: There is a limit, and sends but no waits; or sends are to block, and the
                table does not name them or lacks some ranks.
        """
        homes = set(schedule.stage_to_rank.values())
        if self.rendezvous is not None and (
            not schedule.complete or (not schedule.has_comms and len(homes) > 1)
        ):
            raise ScheduleError(
                f"{schedule.source}: rendezvous needs a table of all ranks that names its "
                "messages (SEND_F, RECV_F, SEND_B, RECV_B; torch's with comms); leave it out"
            )
        if self.max_outstanding_sends is None or schedule.awaits_sends:
            return
        if any(a is not None and a.kind in SENDS for row in schedule.rows for a in row):
            raise ScheduleError(
                f"{schedule.source}: max_outstanding_sends needs a table with the ends of its "
                "sends "
                "(WAIT_SEND_F, WAIT_SEND_B; torch 2.15 writes them); leave the limit out"
            )


#: torch's defaults: one queue for a pair of ranks, no limit, sends that are buffered.
DEFAULT = Transport()
