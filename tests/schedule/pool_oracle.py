"""
An oracle for capture memory: whether graphs that share a memory pool would be replayed out of the
order of their capture.

The oracle reads the rows itself and shares no code with the contract that `check` runs, or with the
planner of slots.

While graphs are captured, memory that an earlier graph frees becomes scratch memory of a later
graph. If the graphs are replayed in another order, one graph overwrites what another graph still
needs. So while any tape lives in a pool, the graphs of that pool must be replayed in the order of
their capture; once no tape lives in the pool, the order starts again.

With one pool per slot, F, dI and dW of one tape is the only possible order; ownership forces it.
With one pool for all slots the schedule decides. A slot that is used again while another slot is
live replays its forward a second time; then no capture order is right (`some_order`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs

from qeffect.schedule.actions import SEND_WAITS, SENDS, Atom, Kind, Schedule, ScheduleError

Graph = tuple[Kind, int, int]
"""A captured graph: F, dI or dW of one tape of one stage."""

TAPES = ("slots", "microbatches")
POOLS = ("rank", "stage", "slot")
ORDERS = ("kind", "tape", "first-use")

_NAMES = {Kind.FORWARD: "F", Kind.DGRAD: "dI", Kind.WGRAD: "dW"}
_KINDS = tuple(_NAMES)


@attrs.frozen
class Replay:
    """
    One replay of a captured graph.

    Args:
        graph: The graph that is replayed.
        pool: The memory pool of the graph.
        atom: The action that replays the graph.
        live: Number of tapes (data that one F left) that are live in the pool before the replay.
    """

    graph: Graph
    pool: tuple[int, ...]
    atom: Atom
    live: int


def graph_name(graph: Graph) -> str:
    """A readable name of a captured graph, such as "dI of stage 3, tape 1"."""
    kind, stage, tape = graph
    return f"{_NAMES[kind]} of stage {stage}, tape {tape}"


def replays(
    schedule: Schedule, rank: int, *, tapes: str = "slots", pool: str = "rank"
) -> Iterator[Replay]:
    """
    The graphs that a rank replays in one step, in order.

    From its first receive or F on, a tape has the lowest free slot of its stage. The tape keeps the
    slot and its memory until its dW has run and its sends have ended.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        rank: The rank.
        tapes: Which tapes (memory for the data of one F) a stage has: one for every live slot,
            reused, or one for every microbatch.
        pool: Which graphs share a memory pool: all graphs of the rank, of a stage, or of a tape.

    Raises:
        ScheduleError: `tapes` or `pool` is unknown.
    """
    _require("tapes", tapes, TAPES)
    _require("pool", pool, POOLS)
    atoms = schedule.atoms[rank]
    ends = {Kind.WGRAD, *(SEND_WAITS if schedule.awaits_sends else SENDS)}
    readers = Counter((atom.stage, atom.microbatch) for atom in atoms if atom.kind in ends)
    held: dict[tuple[int, int], int] = {}
    shared = {
        "rank": lambda stage, tape: (),
        "stage": lambda stage, tape: (stage,),
        "slot": lambda stage, tape: (stage, tape),
    }[pool]
    live: Counter[tuple[int, ...]] = Counter()
    for atom in atoms:
        work = (atom.stage, atom.microbatch)
        if atom.kind in (Kind.FORWARD, Kind.RECV_F) and work not in held:
            taken = {tape for (stage, _), tape in held.items() if stage == atom.stage}
            lowest = next(tape for tape in range(len(taken) + 1) if tape not in taken)
            held[work] = lowest if tapes == "slots" else atom.microbatch
        if atom.kind in _KINDS:
            its = shared(atom.stage, held[work])
            yield Replay((atom.kind, atom.stage, held[work]), its, atom, live[its])
            live[its] += atom.kind is Kind.FORWARD
        if atom.kind in ends:
            readers[work] -= 1
            if not readers[work]:
                live[shared(atom.stage, held.pop(work))] -= 1


def capture_ranks(steps: list[Replay], order: str) -> dict[Graph, int]:
    """
    The position of each graph in a capture order.

    Args:
        steps: All replays of one rank.
        order: `kind` captures all F, then all dI, then all dW; `tape` captures F, dI and dW tape
            by tape; `first-use` captures in the order in which the schedule first uses the graphs.

    Raises:
        ScheduleError: `order` is unknown.
    """
    _require("order", order, ORDERS)
    graphs = list(dict.fromkeys(step.graph for step in steps))
    if order == "kind":
        graphs.sort(key=lambda g: (_KINDS.index(g[0]), g[1], g[2]))
    elif order == "tape":
        graphs.sort(key=lambda g: (g[1], g[2], _KINDS.index(g[0])))
    return {graph: position for position, graph in enumerate(graphs)}


@attrs.frozen
class OutOfOrder:
    """
    A replay that breaks the capture order of its pool.

    Args:
        rank: Rank of the replay.
        replay: The replay.
        position: Position of the replayed graph in the capture order.
        before: The previous replay in the same pool.
        after: Position of the previous replay's graph in the capture order.
    """

    rank: int
    replay: Replay
    position: int
    before: Replay
    after: int

    @property
    def step(self) -> int:
        """The step of the replay."""
        return self.replay.atom.step

    @property
    def action(self) -> str:
        """The entry that replays."""
        return str(self.replay.atom.action)

    def __str__(self) -> str:
        """One sentence."""
        live = self.replay.live
        return (
            f"{self.action} replays {graph_name(self.replay.graph)} (capture {self.position}) "
            f"after {graph_name(self.before.graph)} (capture {self.after}) while {live} "
            f"tape{'s are' if live > 1 else ' is'} live in their pool"
        )


def out_of_order(
    schedule: Schedule, *, tapes: str = "slots", pool: str = "rank", order: str = "kind"
) -> tuple[OutOfOrder, ...]:
    """
    The first replay on each rank that breaks its pool's capture order, by step and then rank.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        tapes: As in `replays`.
        pool: As in `replays`.
        order: As in `capture_ranks`.

    Raises:
        ScheduleError: An argument is unknown.
    """
    found: list[OutOfOrder] = []
    for rank in range(schedule.num_ranks):
        steps = list(replays(schedule, rank, tapes=tapes, pool=pool))
        position = capture_ranks(steps, order)
        latest: dict[tuple[int, ...], Replay] = {}
        for step in steps:
            before = latest.get(step.pool)
            if before and step.live and position[step.graph] <= position[before.graph]:
                here, there = position[step.graph], position[before.graph]
                found.append(OutOfOrder(rank, step, here, before, there))
                break
            latest[step.pool] = step
    return tuple(sorted(found, key=lambda f: (f.step, f.rank)))


def some_order(
    schedule: Schedule, rank: int, *, tapes: str = "slots", pool: str = "rank"
) -> tuple[Graph, ...] | None:
    """
    A capture order that is correct for all pools of a rank's replays, or `None` if no such order
    exists.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        rank: The rank.
        tapes: As in `replays`.
        pool: As in `replays`.

    Raises:
        ScheduleError: An argument is unknown.
    """
    after: dict[Graph, set[Graph]] = {}
    latest: dict[tuple[int, ...], Graph] = {}
    for step in replays(schedule, rank, tapes=tapes, pool=pool):
        after.setdefault(step.graph, set())
        before = latest.get(step.pool)
        if before is not None and step.live:
            after[before].add(step.graph)
        latest[step.pool] = step.graph
    # Kahn's algorithm: consecutive replays are the only constraints that matter, the others follow.
    waiting: dict[Graph, int] = dict.fromkeys(after, 0)
    for successors in after.values():
        for graph in successors:
            waiting[graph] += 1
    ready = [graph for graph, count in waiting.items() if count == 0]
    ordered: list[Graph] = []
    while ready:
        graph = ready.pop()
        ordered.append(graph)
        for successor in after[graph]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready.append(successor)
    return tuple(ordered) if len(ordered) == len(after) else None


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ScheduleError(f"unknown {name} {value!r}; expected one of {', '.join(known)}")
