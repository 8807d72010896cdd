"""
Capture memory: whether graphs that share a memory pool would be replayed out of their capture
order.

While graphs are captured, memory that an earlier graph frees becomes scratch of a later one.
Replayed in another order, one graph overwrites what another still needs. So while any tape lives
in a pool, the graphs of that pool must be replayed in the order of their capture; once none does,
the order begins anew.

With one pool a slot, F, dI and dW of one tape is the only order there is, and ownership forces it.
With one pool for all slots it is the schedule that decides: a slot that is used again while
another is live replays its forward a second time, and then no capture order is right
(`some_order`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import attrs

from qeffect.schedule.actions import Atom, Kind, Schedule, ScheduleError
from qeffect.schedule.findings import Finding, finding, place
from qeffect.schedule.slots import assign, own_readers

Graph = tuple[Kind, int, int]
"""What is captured: F, dI or dW of one tape of one stage."""

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
        graph: Which graph.
        pool: The pool that it is in.
        atom: The action that replays it.
        live: Tapes live in the pool before it.
    """

    graph: Graph
    pool: tuple[int, ...]
    atom: Atom
    live: int


def graph_name(graph: Graph) -> str:
    """
    A captured graph for people.

    >>> graph_name((Kind.DGRAD, 3, 1))
    'dI of stage 3, tape 1'
    """
    kind, stage, tape = graph
    return f"{_NAMES[kind]} of stage {stage}, tape {tape}"


def replays(
    schedule: Schedule, rank: int, *, tapes: str = "slots", pool: str = "rank"
) -> Iterator[Replay]:
    """
    The graphs that a rank replays in one step, in order.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        rank: The rank.
        tapes: One tape for every live slot of a stage, reused, or one for every microbatch.
        pool: What shares a memory pool: all graphs of the rank, of a stage, or of a tape.

    Raises:
        ScheduleError: `tapes` or `pool` is unknown.
    """
    _require("tapes", tapes, TAPES)
    _require("pool", pool, POOLS)
    steps = [(atom.kind, atom.stage, atom.microbatch) for atom in schedule.atoms[rank]]
    held = assign(steps, own_readers(steps), reuse=tapes == "slots").slot_of
    live: dict[tuple[int, ...], int] = defaultdict(int)
    for atom in schedule.atoms[rank]:
        if atom.kind not in _KINDS:
            continue
        stage, tape = atom.stage, held[atom.stage, atom.microbatch]
        shared = {"rank": (), "stage": (stage,), "slot": (stage, tape)}[pool]
        yield Replay((atom.kind, stage, tape), shared, atom, live[shared])
        if atom.kind is Kind.FORWARD:
            live[shared] += 1
        elif atom.kind is Kind.WGRAD:
            live[shared] -= 1


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


def check_pools(
    schedule: Schedule, *, tapes: str = "slots", pool: str = "rank", order: str = "kind"
) -> tuple[Finding, ...]:
    """
    The first replay on each rank that breaks its pool's capture order.

    Args:
        schedule: The schedule, free of findings of `check_ranks`.
        tapes: As in `replays`.
        pool: As in `replays`.
        order: As in `capture_ranks`.

    Raises:
        ScheduleError: An argument is unknown.
    """
    found: list[Finding] = []
    for rank in range(schedule.num_ranks):
        steps = list(replays(schedule, rank, tapes=tapes, pool=pool))
        position = capture_ranks(steps, order)
        latest: dict[tuple[int, ...], Replay] = {}
        for step in steps:
            before = latest.get(step.pool)
            if before and step.live and position[step.graph] <= position[before.graph]:
                found.append(_violation(rank, step, before, position))
                break
            latest[step.pool] = step
    return tuple(sorted(found, key=lambda f: (f.step or 0, f.rank or 0)))


def some_order(
    schedule: Schedule, rank: int, *, tapes: str = "slots", pool: str = "rank"
) -> tuple[Graph, ...] | None:
    """
    A capture order under which a rank's replays keep all its pools, or `None` if there is none.

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


def _violation(rank: int, step: Replay, before: Replay, position: dict[Graph, int]) -> Finding:
    again = step.graph == before.graph
    return finding(
        "capture-order",
        f"{step.atom.action} replays {graph_name(step.graph)} (capture {position[step.graph]}) "
        f"after {graph_name(before.graph)} (capture {position[before.graph]}) while {step.live} "
        f"tape{'s are' if step.live > 1 else ' is'} live in their pool",
        rank=rank,
        atom=step.atom,
        expected=f"a graph captured after {position[before.graph]}, or an empty pool",
        found="the same graph again" if again else f"capture {position[step.graph]}",
        related=(place(rank, before.atom, "first"),),
    )


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ScheduleError(f"unknown {name} {value!r}; expected one of {', '.join(known)}")
