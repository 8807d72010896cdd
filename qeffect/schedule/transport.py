"""
How a runtime carries messages: the settings that decide whether a table is right.

A table says when messages are sent and received. The runtime's configuration says which messages
share a queue, when a send ends, and how many sends may be outstanding. There are four ways to share
queues:

* `pair`: one queue for all messages between two ranks, in both directions. torch does this by
  default: it has one process group for a pipeline, and NCCL has one communicator for each pair of
  ranks in the group.
* `direction`: two queues between two ranks, one for activations in both directions and one for
  gradients. torch 2.14 can have a process group for each (`pipeline_per_direction_p2p`).
* `edge`: one queue for all messages from one rank to another. torch 2.15 can have a process group
  for each directed pair of ranks (`pipeline_per_edge_p2p`).
* `edge-direction`: two queues from one rank to another, one for activations and one for gradients.

The messages of a queue are received in the order in which they are sent. With buffered sends, only
the order of messages within each queue decides whether a table is correct. One queue for both
directions then gives the same verdict as one queue per direction. Under rendezvous semantics, a
send ends only when its receive is posted, and until then it blocks all messages behind it in its
queue. The verdicts can then differ: in a queue for both directions, a rank's own receives can block
its sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from ..text import shown
from .actions import SENDS, Kind, Schedule, ScheduleError

#: Ways to share queues, each with a description of the messages that share one.
QUEUES: Mapping[str, str] = MappingProxyType(
    {
        "pair": "a pair of ranks",
        "direction": "a pair of ranks and kind of message",
        "edge": "a directed pair of ranks",
        "edge-direction": "a directed pair of ranks and kind of message",
    }
)
#: What a send blocks until its receive is posted, under rendezvous semantics.
RENDEZVOUS = ("queue", "rank")


@attrs.frozen
class Transport:
    """
    The settings of the runtime that carries a table's messages.

    Args:
        queues: Which messages share a queue; one of `QUEUES`.
        max_outstanding_sends: Maximum number of sends that a rank has posted and not yet awaited,
            as in torch 2.15's option with this name; `None` for no limit.
        rendezvous: What a send blocks until its receive is posted. With `queue`, a send blocks the
            later messages of its queue; with `rank`, also the row of its rank. By default sends are
            buffered and block nothing.
    """

    queues: str = "pair"
    max_outstanding_sends: int | None = None
    rendezvous: str | None = None

    def __attrs_post_init__(self) -> None:
        """
        Check the values of all fields.

        Raises:
            ScheduleError: `queues` or `rendezvous` has an unknown value, or the limit of sends is
                negative or not an integer.
        """
        if not isinstance(self.queues, str) or self.queues not in QUEUES:
            raise ScheduleError(
                f"unknown queues {shown(self.queues)}; expected one of {', '.join(QUEUES)}"
            )
        if self.rendezvous is not None and self.rendezvous not in RENDEZVOUS:
            raise ScheduleError(
                f"unknown rendezvous {self.rendezvous!r}; expected one of {', '.join(RENDEZVOUS)}"
            )
        limit = self.max_outstanding_sends
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ScheduleError(
                f"max_outstanding_sends must be a non-negative integer, not {shown(limit)}"
            )

    @property
    def by_kind(self) -> bool:
        """Whether activations and gradients use separate queues."""
        return self.queues in ("direction", "edge-direction")

    @property
    def both_ways(self) -> bool:
        """Whether both directions between two ranks share a queue."""
        return self.queues in ("pair", "direction")

    def queue(self, kind: Kind) -> str:
        """
        Return the name of the queue for a kind of send. Queues of the same sender and receiver have
        different names.
        """
        return str(kind) if self.by_kind else "all"

    def require(self, schedule: Schedule) -> None:
        """
        Refuse a table that lacks the entries that these settings need.

        Args:
            schedule: The schedule whose table is tested.

        Raises:
            ScheduleError: Outstanding sends are limited, but the table has no waits for its sends;
                or sends block, but the table does not name its sends or lacks ranks.
        """
        homes = set(schedule.stage_to_rank.values())
        if self.rendezvous is not None and (
            not schedule.complete or (not schedule.has_comms and len(homes) > 1)
        ):
            raise ScheduleError(
                f"{schedule.source}: rendezvous needs a table of all ranks that names its "
                "messages (SEND_F, RECV_F, SEND_B, RECV_B; torch's with comms); leave out "
                "rendezvous"
            )
        if self.max_outstanding_sends is None or schedule.awaits_sends:
            return
        if any(a is not None and a.kind in SENDS for row in schedule.rows for a in row):
            raise ScheduleError(
                f"{schedule.source}: max_outstanding_sends needs a table that says when its "
                "sends end (WAIT_SEND_F, WAIT_SEND_B; torch 2.15 writes them); leave the limit out"
            )


#: torch's defaults: one queue per pair of ranks, no limit, buffered sends.
DEFAULT = Transport()
