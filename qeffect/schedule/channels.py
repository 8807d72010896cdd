"""
Under which ways to carry messages a table is right, whichever one its runtime is taken to have.

Each way to share queues (`qeffect.schedule.transport.QUEUES`) is asked two things. Does every
receive get the message that it names, if a queue's messages arrive in the order of their sends? And
under rendezvous semantics, where a send ends only when its receive is posted, does every rank reach
the end of its row?

More queues never make a table wrong. And a table that ends with buffered sends, and whose messages
are in order in queues that go one way, ends under rendezvous semantics too, if a send holds its
queue alone: in such a queue nothing but earlier sends stands in the way of a send, and the receives
of these come earlier in the other rank's row. What is left to try are queues for both ways, and
sends that hold their rank.
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

#: A table that is refused for nothing else can still be asked about its messages.
_ASKED = frozenset({"schedule.message-order", "schedule.outstanding-sends"})


@attrs.frozen
class Channel:
    """
    What one way to share queues makes of a table.

    Args:
        queues: Which messages share a queue; one of `QUEUES`.
        exchanged: The first receive that gets another message than it names, if one does.
        deadlocks: For each of `RENDEZVOUS`, where ranks wait for each other, if they do.
    """

    queues: str
    exchanged: Finding | None
    deadlocks: dict[str, Finding | None]

    @property
    def in_order(self) -> bool:
        """Whether every receive gets the message that it names."""
        return self.exchanged is None

    def can_deadlock(self, held: str) -> bool:
        """Whether ranks can wait for each other if a send holds its `queue` or its `rank`."""
        return self.deadlocks[held] is not None

    def record(self) -> dict[str, Any]:
        """The answers as plain data, for JSON."""
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
    Ask every way to share queues about a table.

    Args:
        schedule: The schedule.
        findings: What `qeffect.schedule.ranks.check_ranks` found in it.

    Returns:
        An answer for each of `QUEUES`; none if the table names no messages, lacks ranks, or is
        wrong in a way that makes the question void: then it is wrong under all of them.
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
    """Whether it is a deadlock under rendezvous semantics alone."""
    return found.clause == "schedule.deadlock" and found.message.startswith("under rendezvous")
