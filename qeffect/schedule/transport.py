"""
How a runtime carries messages, as far as it decides whether a table is right.

A table says when messages are sent and received; which of them share a queue, and how many may be
under way, the runtime is configured with. torch keeps one process group for all messages of a
pipeline, so that those from one rank to another are received in the order in which they are sent.
torch 2.14 can give activations and gradients a group each (`pipeline_per_direction_p2p`): then the
two are ordered apart. torch 2.15 has a group for each directed pair of ranks instead
(`pipeline_per_edge_p2p`), where activations and gradients share one queue again.
"""

from __future__ import annotations

import attrs

from qeffect.schedule.actions import SENDS, Kind, Schedule, ScheduleError

#: Which messages from one rank to another are received in the order in which they are sent.
QUEUES = ("pair", "direction")


@attrs.frozen
class Transport:
    """
    What is known about the runtime that carries a table's messages.

    Args:
        queues: `pair` when all messages from one rank to another share a queue, `direction` when
            activations and gradients have a queue each.
        max_outstanding_sends: The most sends that a rank may have posted and not awaited at once,
            torch 2.15's option of that name; without a limit when left out.
    """

    queues: str = "pair"
    max_outstanding_sends: int | None = None

    def __attrs_post_init__(self) -> None:
        """
        Refuse what is no configuration.

        Raises:
            ScheduleError: The queues are unknown, or the limit is negative.
        """
        if self.queues not in QUEUES:
            raise ScheduleError(
                f"unknown queues {self.queues!r}; expected one of {', '.join(QUEUES)}"
            )
        limit = self.max_outstanding_sends
        if limit is not None and limit < 0:
            raise ScheduleError(
                f"max_outstanding_sends must be a non-negative integer, not {limit}"
            )

    def queue(self, kind: Kind) -> str:
        """The queue of a send, among those between the same two ranks."""
        return "all" if self.queues == "pair" else str(kind)

    def require_waits(self, schedule: Schedule) -> None:
        """
        Refuse a limit on a table that does not say where its sends end.

        Args:
            schedule: The schedule.

        Raises:
            ScheduleError: There is a limit, and sends but no waits.
        """
        if self.max_outstanding_sends is None or schedule.awaits_sends:
            return
        if any(a is not None and a.kind in SENDS for row in schedule.rows for a in row):
            raise ScheduleError(
                f"{schedule.source}: max_outstanding_sends needs a table that says where its sends "
                "end (WAIT_SEND_F, WAIT_SEND_B; torch 2.15 writes them); leave the limit out"
            )


#: torch's defaults: one queue for a pair of ranks, no limit.
DEFAULT = Transport()
