"""
Every interleaving of a table: all orders in which its ranks can advance and its messages can
arrive.

`qeffect check` runs a table only once, in one order. This module visits every interleaving of a
small table. In each move, a rank takes the next step of its row, or a message that both ends have
posted arrives. A state without a move is either the end or a deadlock. The result shows that a
single run is enough: the run reaches its end if and only if no interleaving gets stuck.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from attrs import frozen

from qeffect.schedule.actions import RECEIVES, SEND_WAITS, SENDS, WAITS, Atom, Kind, Schedule
from qeffect.schedule.messages import COUNTERPART, INPUTS
from qeffect.schedule.transport import Transport

__all__ = ["Interleavings", "interleavings"]

_Event = tuple[Kind, int, int]


@frozen
class Interleavings:
    """
    The states of all interleavings of a table.

    Args:
        states: Number of reachable states.
        stuck: Number of states, other than the end, without a move.
        lost: Number of states from which the end is not reachable.
    """

    states: int
    stuck: int
    lost: int


def interleavings(schedule: Schedule, transport: Transport) -> Interleavings:
    """
    Visit every interleaving of a table with messages.

    Args:
        schedule: The table. The table must be small, since the number of states grows with the
            number of interleavings.
        transport: Which messages share a queue, and what a send blocks until it is received. If its
            `rendezvous` is not set, sends are buffered and a rank's receives do not block its
            sends.
    """
    rows = schedule.atoms
    start = tuple(0 for _ in rows)
    first = (start, frozenset[_Event]())
    number = {first: 0}
    onward: list[list[int]] = []
    states = [first]
    at = 0
    while at < len(states):
        found = []
        for after in _moves(schedule, transport, *states[at]):
            if after not in number:
                number[after] = len(states)
                states.append(after)
            found.append(number[after])
        onward.append(found)
        at += 1
    ends = [
        all(place == len(row) for place, row in zip(places, rows, strict=True))
        and not _posted(schedule, places) - done
        for places, done in states
    ]
    stuck = sum(not found and not end for found, end in zip(onward, ends, strict=True))
    back: list[list[int]] = [[] for _ in states]
    for before, found in enumerate(onward):
        for following in found:
            back[following].append(before)
    todo = deque(n for n, end in enumerate(ends) if end)
    reaches = list(ends)
    while todo:
        for before in back[todo.popleft()]:
            if not reaches[before]:
                reaches[before] = True
                todo.append(before)
    return Interleavings(len(states), stuck, reaches.count(False))


_State = tuple[tuple[int, ...], frozenset[_Event]]


def _event(atom: Atom) -> _Event:
    return atom.kind, atom.stage, atom.microbatch


def _messages(schedule: Schedule, rank: int, place: int) -> list[Atom]:
    """Return the messages that a rank has posted when it is at a given position of its row."""
    row = schedule.atoms[rank][: place + 1]
    # A message is posted once its rank has reached it, even if the rank then waits there.
    return [atom for atom in row if atom.kind in SENDS | RECEIVES]


def _posted(schedule: Schedule, places: tuple[int, ...]) -> frozenset[_Event]:
    return frozenset(
        _event(atom)
        for rank, place in enumerate(places)
        for atom in _messages(schedule, rank, place)
    )


def _moves(
    schedule: Schedule, transport: Transport, places: tuple[int, ...], done: frozenset[_Event]
) -> list[_State]:
    found: list[_State] = []
    for rank, place in enumerate(places):
        row = schedule.atoms[rank]
        if place < len(row) and not _held(schedule, transport, row[place], rank, done):
            found.append(((*places[:rank], place + 1, *places[rank + 1 :]), done))
    heads: dict[Any, dict[int, Atom]] = {}
    for rank, place in enumerate(places):
        for atom in _messages(schedule, rank, place):
            if _event(atom) not in done:
                heads.setdefault(_queue(schedule, transport, atom, rank), {}).setdefault(rank, atom)
    for ends in heads.values():
        if len(ends) == 2:
            one, other = ends.values()
            if (one.kind in SENDS) != (other.kind in SENDS):
                found.append((places, done | {_event(one), _event(other)}))
    return found


def _held(
    schedule: Schedule, transport: Transport, atom: Atom, rank: int, done: frozenset[_Event]
) -> bool:
    number = (atom.stage, atom.microbatch)
    wanted: _Event | None = None
    if atom.kind in INPUTS:
        receive, offset = INPUTS[atom.kind]
        home = schedule.stage_to_rank.get(atom.stage + offset)
        wanted = (receive, *number) if home not in (None, rank) else None
    elif atom.kind in SEND_WAITS:
        wanted = (WAITS[atom.kind], *number)
    elif atom.kind in SENDS and transport.rendezvous == "rank":
        wanted = _event(atom)
    return wanted is not None and wanted not in done


def _queue(schedule: Schedule, transport: Transport, atom: Atom, rank: int) -> Any:
    peer = schedule.stage_to_rank[atom.stage + COUNTERPART[atom.kind][1]]
    ends = (rank, peer) if atom.kind in SENDS else (peer, rank)
    if transport.both_ways and transport.rendezvous is not None:
        ends = (min(ends), max(ends))
    forward = atom.kind in (Kind.SEND_F, Kind.RECV_F)
    return (*ends, forward) if transport.by_kind else ends
