"""
A dry run of all ranks at once: each rank runs its row in order and waits for other ranks.

In a compute+comms table a receive blocks until its send has run; sends do not block. A wait for a
send blocks until the other rank reaches the receive of that message (pytorch pull request 194121: a
badly placed wait deadlocks at replay). In a compute-only table a computation blocks until the
neighbour stage's computation has run. An action never blocks on an action that is missing from the
table, or that comes later in the same row, because other checks report such mistakes. So if ranks
stop early, they wait for each other, and following one rank's wait leads into a cycle.

The time of the run is linear in the size of the table. The run also yields start times: F, I and W
take one unit each, as in torch's visualizer, and messages take no time. torch's runtime posts a
receive and waits only where the received tensor is used. So a run that does not block on receives
has the same times as torch. A schedule that also finishes with blocking receives is safe on NCCL,
which runs the messages of a pair of ranks in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from .actions import RECEIVES, SEND_WAITS, Atom, Kind
from .findings import Finding, finding, place
from .index import Event, Index, Occurrence
from .messages import INPUTS
from .processes import Processes

_SEND_OF = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}
_RECEIVE_OF = {Kind.WAIT_SEND_F: (Kind.RECV_F, 1), Kind.WAIT_SEND_B: (Kind.RECV_B, -1)}
_UNIT = frozenset({Kind.FORWARD, Kind.DGRAD, Kind.WGRAD})


@attrs.frozen
class Wait:
    """
    A rank that stopped before the end of its row.

    Args:
        rank: The rank that stopped.
        atom: The action that the rank cannot run.
        needs: The action of another rank that must run first.
    """

    rank: int
    atom: Atom
    needs: Occurrence


@attrs.frozen
class Run:
    """
    The result of a dry run.

    Args:
        start: Start time of each entry that ran, by (rank, step).
        finish: End time of each entry that ran, by (rank, step).
        waits: The ranks that stopped early; empty if all ranks reached the end.
        cycle: The ranks that wait for each other: each for the next rank, the last for the first.
    """

    start: dict[tuple[int, int], int]
    finish: dict[tuple[int, int], int]
    waits: tuple[Wait, ...]
    cycle: tuple[Wait, ...]


def simulate(index: Index, *, blocking: bool = True) -> Run:
    """
    Run all ranks of an indexed schedule until they end or stop.

    Args:
        index: The indexed schedule.
        blocking: If True, a rank waits for a message at the receive; if False, at the computation
            that uses the message.
    """
    rows = index.schedule.atoms
    ran = [0] * len(rows)
    start: dict[tuple[int, int], int] = {}
    finish: dict[tuple[int, int], int] = {}
    done: dict[Event, int] = {}
    waits: dict[int, Wait] = {}
    engine = Processes[Event]()

    def row(rank: int) -> Iterator[Event]:
        clock = 0
        for atom in rows[rank]:
            needs = _needs(index, rank, atom, blocking)
            if needs is not None:
                event = _event(needs.atom)
                if event not in done:
                    waits[rank] = Wait(rank, atom, needs)
                    yield event
                    del waits[rank]
                clock = max(clock, done[event])
            start.setdefault((rank, atom.step), clock)
            clock += atom.kind in _UNIT
            finish[rank, atom.step] = clock
            ran[rank] += 1
            event = _event(atom)
            done.setdefault(event, clock)
            engine.happen(event)

    stopped = engine.run(row(rank) for rank in range(len(rows)))
    if not blocking:
        for rank, atoms in enumerate(rows):
            for atom in atoms[: ran[rank]]:
                sent = _needs(index, rank, atom, True) if atom.kind in RECEIVES else None
                if sent is not None:
                    arrival = max(start[rank, atom.step], done.get(_event(sent.atom), 0))
                    start[rank, atom.step] = finish[rank, atom.step] = arrival
    return Run(start, finish, tuple(waits[rank] for rank in stopped), _cycle(waits))


def check_deadlock(run: Run) -> Iterator[Finding]:
    """Yield a finding if ranks wait for each other."""
    if not run.cycle:
        return
    head = run.cycle[0]
    legs = [
        f"rank {wait.rank} stops at step {wait.atom.step} ({wait.atom.action}) until rank "
        f"{wait.needs.rank} runs step {wait.needs.atom.step} ({wait.needs.atom.action})"
        for wait in run.cycle
    ]
    yield finding(
        "deadlock",
        f"{len(run.cycle)} ranks wait for each other: {'; '.join(legs)}",
        rank=head.rank,
        atom=head.atom,
        expected=f"{head.needs.atom.action} to run on rank {head.needs.rank} first",
        found=f"rank {head.needs.rank} stopped before its step {head.needs.atom.step}",
        related=tuple(place(wait.needs.rank, wait.needs.atom, "awaited") for wait in run.cycle)
        + tuple(place(wait.rank, wait.atom, "waits") for wait in run.cycle[1:]),
    )


def _needs(index: Index, rank: int, atom: Atom, blocking: bool) -> Occurrence | None:
    """Return the action on another rank that must run before this action, or `None`."""
    if atom.kind in RECEIVES and blocking:
        kind, offset = _SEND_OF[atom.kind]
    elif atom.kind in SEND_WAITS:
        kind, offset = _RECEIVE_OF[atom.kind]
    elif atom.kind in INPUTS and not index.schedule.has_comms:
        kind, offset = atom.kind, INPUTS[atom.kind][1]
    elif atom.kind in INPUTS and not blocking:
        kind, offset = _SEND_OF[INPUTS[atom.kind][0]]
    else:
        return None
    spot = index.get(kind, atom.stage + offset, atom.microbatch)
    return None if spot is None or spot.rank == rank else spot


def _event(atom: Atom) -> Event:
    """Return the kind, stage and microbatch of an action, which name its event in the dry run."""
    return atom.kind, atom.stage, atom.microbatch


def _cycle(waiting: dict[int, Wait]) -> tuple[Wait, ...]:
    if not waiting:
        return ()
    seen: dict[int, int] = {}
    path: list[Wait] = []
    rank = min(waiting)
    while rank not in seen:
        seen[rank] = len(path)
        path.append(waiting[rank])
        rank = waiting[rank].needs.rank
    cycle = path[seen[rank] :]
    first = min(range(len(cycle)), key=lambda i: (cycle[i].atom.step, cycle[i].rank))
    return tuple(cycle[first:] + cycle[:first])
