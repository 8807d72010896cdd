"""
A dry run in which a send ends only when its receive is posted.

A rank runs its row in order and posts each message at its place in the table. A queue joins two
ranks, and holds the posted messages of each rank. Only the first message of each rank (its head)
can proceed: if one head is a send and the other head a receive, both messages end. So a send that
is not yet received blocks all messages behind it. A rank waits at a computation until its input has
arrived, at a wait for a send until the send has ended, and at its row's end until all its messages
have ended. If the transport lets a send block its rank, the rank also waits at the send.

Suppose that each of two ranks has posted a send to the other rank first. With one queue for both
directions, the ranks wait for each other. With buffered sends, or with one queue per direction,
they do not wait. So a table with such sends *can* deadlock. Whether a runtime really blocks depends
on the size of its buffers, and on the messages that it posts together. A table contains neither.

A rank waits for one message at a time, and each queue joins only two ranks. So the time of the run
is linear in the size of the table. If ranks stop, following their waits leads either to two heads
that do not match, or into a cycle of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

import attrs

from .actions import RECEIVES, SEND_WAITS, SENDS, WAITS, Atom, Kind
from .findings import Finding, finding, place
from .index import Event, Index, Occurrence
from .messages import COUNTERPART, INPUTS
from .processes import Processes
from .transport import QUEUES, Transport

_MESSAGES = SENDS | RECEIVES


@attrs.frozen
class Stop:
    """
    A rank that stopped before the end of the step.

    Args:
        rank: The rank that stopped.
        atom: The action that the rank cannot run; `None` at the end of its row.
        message: The rank's own message that must end first.
        head: The rank's first message in the queue of `message`: `message` itself, or an earlier
            message that blocks it.
        peer: The other rank of the queue.
        across: The other rank's first message in the queue; `None` if the other rank has posted
            nothing there.
    """

    rank: int
    atom: Atom | None
    message: Occurrence
    head: Occurrence
    peer: int
    across: Occurrence | None

    def __str__(self) -> str:
        """The stop in words, for use within a sentence."""
        where = "the end of its row" if self.atom is None else _named(self.atom)
        own = self.message.atom
        what = "" if own == self.atom else f", for {_named(own)}"
        behind = "" if self.head == self.message else f", behind {_named(self.head.atom)}"
        met = (
            f"rank {self.peer} has posted nothing in that queue"
            if self.across is None
            else f"rank {self.peer} has {_named(self.across.atom)} first in that queue"
        )
        return f"rank {self.rank} stops at {where}{what}{behind}, and {met}"


def rendezvous(index: Index, transport: Transport) -> tuple[Stop, ...]:
    """
    Run all ranks of an indexed schedule until they end or stop.

    Args:
        index: The indexed schedule. Repeated actions, and messages without a counterpart, are
            ignored, because other checks report them.
        transport: Which messages share a queue, and whether a send blocks its queue or its rank.

    Returns:
        The ranks that wait for each other, each for the next rank in the tuple; empty if all ranks
        reached the end.
    """
    return _Run(index, transport).stops()


def check_rendezvous(index: Index) -> Iterator[Finding]:
    """Yield a finding if ranks deadlock because the transport's sends block."""
    transport = index.transport
    if transport.rendezvous is None or not index.schedule.complete:
        return
    stops = rendezvous(index, transport)
    if not stops:
        return
    first = stops[0]
    atom = first.message.atom if first.atom is None else first.atom
    shown = [stop.message for stop in stops] + [s.across for s in stops if s.across is not None]
    yield finding(
        "deadlock",
        f"under rendezvous semantics (a send holds its {transport.rendezvous} until its "
        f"receive is posted) with one queue for {QUEUES[transport.queues]}, ranks wait for each "
        f"other: {'; '.join(map(str, stops))}",
        rank=first.rank,
        atom=atom,
        expected=f"the counterpart of {first.head.atom.action} to be posted on rank {first.peer}",
        found=(
            f"no message of rank {first.peer} in that queue"
            if first.across is None
            else f"{first.across.atom.action} before it"
        ),
        related=tuple(place(spot.rank, spot.atom, "waits") for spot in shown if spot.atom != atom),
    )


class _Run:
    def __init__(self, index: Index, transport: Transport) -> None:
        self.index = index
        self.transport = transport
        self.rows = index.schedule.atoms
        self.position = [0] * len(self.rows)
        #: Messages that were posted and have not ended, by queue and end.
        self.queues: dict[tuple[Hashable, int], deque[Occurrence]] = {}
        self.posted: dict[Event, tuple[Hashable, int, Occurrence]] = {}
        self.done: set[Event] = set()
        self.engine = Processes[Event]()
        #: By rank, the event that its row stopped for.
        self.waits = self.engine.run(self._row(rank) for rank in range(len(self.rows)))

    def _row(self, rank: int) -> Iterator[Event]:
        for number, atom in enumerate(self.rows[rank]):
            event = (atom.kind, atom.stage, atom.microbatch)
            if atom.kind in _MESSAGES:
                self._post(Occurrence(rank, number, atom), event)
            wanted = self._wanted(atom, event)
            if wanted is not None and wanted in self.posted and wanted not in self.done:
                yield wanted
            self.position[rank] += 1

    def _wanted(self, atom: Atom, event: Event) -> Event | None:
        """Return the rank's own message that must have ended before the row continues."""
        if atom.kind in INPUTS:
            return (INPUTS[atom.kind][0], atom.stage, atom.microbatch)
        if atom.kind in SEND_WAITS:
            return (WAITS[atom.kind], atom.stage, atom.microbatch)
        if atom.kind in SENDS and self.transport.rendezvous == "rank":
            return event
        return None

    def _post(self, spot: Occurrence, event: Event) -> None:
        counterpart, offset = COUNTERPART[spot.atom.kind]
        other = self.index.get(counterpart, spot.atom.stage + offset, spot.atom.microbatch)
        if other is None or other.rank == spot.rank or event in self.posted:
            return
        queue = self._queue(spot, other.rank)
        self.posted[event] = (queue, other.rank, spot)
        own = self.queues.setdefault((queue, spot.rank), deque())
        own.append(spot)
        across = self.queues.setdefault((queue, other.rank), deque())
        while own and across and (own[0].atom.kind in SENDS) != (across[0].atom.kind in SENDS):
            for end in (own, across):
                atom = end.popleft().atom
                ended = (atom.kind, atom.stage, atom.microbatch)
                self.done.add(ended)
                self.engine.happen(ended)

    def _queue(self, spot: Occurrence, peer: int) -> Hashable:
        sends = spot.atom.kind in SENDS
        ranks = (spot.rank, peer) if sends else (peer, spot.rank)
        if self.transport.both_ways:
            ranks = (min(ranks), max(ranks))
        forward = spot.atom.kind in (Kind.SEND_F, Kind.RECV_F)
        return (*ranks, forward) if self.transport.by_kind else ranks

    def stops(self) -> tuple[Stop, ...]:
        """Return the ranks that wait for each other, starting at the first two unmatched heads."""
        found = {rank: stop for rank in range(len(self.rows)) if (stop := self._stop(rank))}
        if not found:
            return ()
        path: list[int] = []
        rank = min(found, key=lambda r: (found[r].message.atom.step, r))
        while rank in found and rank not in path:
            path.append(rank)
            if found[rank].across is not None:
                return tuple(found[r] for r in path[-1:])
            rank = found[rank].peer
        return tuple(found[r] for r in path[path.index(rank) if rank in path else 0 :])

    def _stop(self, rank: int) -> Stop | None:
        row = self.rows[rank]
        atom = row[self.position[rank]] if self.position[rank] < len(row) else None
        if rank in self.waits:
            queue, peer, spot = self.posted[self.waits[rank]]
        else:
            left = [
                (queue, peer, spot)
                for event, (queue, peer, spot) in self.posted.items()
                if spot.rank == rank and event not in self.done
            ]
            if not left:
                return None
            queue, peer, spot = left[0]
        across = self.queues[queue, peer]
        head = self.queues[queue, rank][0]
        return Stop(rank, atom, spot, head, peer, across[0] if across else None)


def _named(atom: Atom) -> str:
    return f"{atom.action} (step {atom.step})"
