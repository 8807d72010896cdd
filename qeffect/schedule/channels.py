"""
Check whether a table is correct for every way to carry messages, not only for the assumed way.

This module answers two questions for each way to share queues
(`qeffect.schedule.transport.QUEUES`). Does every receive get the message that it names, if a
queue's messages arrive in the order of their sends? And does every rank reach the end of its row
under rendezvous semantics, where a send ends only when its receive is posted?

More queues never make a correct table wrong. Suppose that all ranks of a table finish with buffered
sends, and that messages are in order in one-way queues. Then the ranks also finish under rendezvous
semantics if a send blocks only its queue. The reason is that in a one-way queue only earlier sends
can delay a send, and the receives of those sends come earlier in the other rank's row. So two cases
remain to be checked: queues that carry both directions, and sends that block their rank.
"""

from __future__ import annotations

from typing import Any

import attrs

from .actions import Schedule
from .findings import Finding
from .index import index_of
from .messages import check_message_order
from .rendezvous import check_rendezvous
from .transport import QUEUES, RENDEZVOUS, Transport

#: Clauses of findings after which the questions about messages still make sense.
_ASKED = frozenset({"schedule.message-order", "schedule.outstanding-sends"})


@attrs.frozen
class Channel:
    """
    The results for a table with one way to share queues.

    Args:
        queues: Which messages share a queue; one of `QUEUES`.
        exchanged: The finding for the first receive that gets a wrong message; None if every
            receive gets the message that it names.
        deadlocks: For each value of `RENDEZVOUS`, the finding for the deadlock, or None if all
            ranks finish.
    """

    queues: str
    exchanged: Finding | None
    deadlocks: dict[str, Finding | None]

    @property
    def in_order(self) -> bool:
        """Whether every receive gets the message that it names."""
        return self.exchanged is None

    def can_deadlock(self, held: str) -> bool:
        """Whether ranks can deadlock if a send blocks its `queue` or its `rank`."""
        return self.deadlocks[held] is not None

    def record(self) -> dict[str, Any]:
        """The results as plain data for JSON."""
        return {
            "queues": self.queues,
            "one_queue_for": QUEUES[self.queues],
            "order": "in order" if self.in_order else "exchanged",
            "exchanged": None if self.exchanged is None else str(self.exchanged),
            "rendezvous": {
                held: "can deadlock" if self.can_deadlock(held) else "ends" for held in RENDEZVOUS
            },
            "deadlocks": {
                held: None if found is None else str(found)
                for held, found in self.deadlocks.items()
            },
        }


def channels(schedule: Schedule, findings: tuple[Finding, ...]) -> tuple[Channel, ...]:
    """
    Check message order and deadlocks of a table for every way to share queues.

    Args:
        schedule: The schedule.
        findings: The findings of `qeffect.schedule.ranks.check_ranks` for the table.

    Returns:
        A result for each of `QUEUES`; empty if the table names no messages, lacks ranks, or has a
        finding that makes the table wrong for every way to share queues.
    """
    if not schedule.complete or not schedule.has_comms:
        return ()
    if any(found.clause not in _ASKED and not _blocks(found) for found in findings):
        return ()
    index = index_of(schedule)
    answers = []
    for queues in QUEUES:
        of = attrs.evolve(index, transport=Transport(queues))
        deadlocks = {
            held: next(
                check_rendezvous(attrs.evolve(of, transport=Transport(queues, rendezvous=held))),
                None,
            )
            for held in RENDEZVOUS
        }
        answers.append(Channel(queues, next(check_message_order(of), None), deadlocks))
    return tuple(answers)


def _blocks(found: Finding) -> bool:
    """Return whether the finding is a deadlock that occurs only under rendezvous semantics."""
    return found.clause == "schedule.deadlock" and found.message.startswith("under rendezvous")
