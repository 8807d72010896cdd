"""
Search for a way to run a declared order of F and dI to its end, when a contract is constructed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .keys import Cell
from .text import counted

__all__ = ["SlotPlaces", "require_feasible"]

#: Limit of the search: `_EACH` states per action of an order, plus `_BESIDE` states. Beyond this
#: limit the order is accepted without proof. With one pool per slot the search needs one state per
#: action.
_EACH: Final = 20
_BESIDE: Final = 20_000


class SlotPlaces(NamedTuple):
    """
    The slots (sets of buffers) of each stage, with the memory pool and the capture order of their
    graphs.

    Args:
        slots: For each stage, the indices of its slots.
        pool_of: For each slot, the memory pool in which its graphs were captured.
        ranks: For "F", "dI" and "dW", the capture rank (position in the order of capture) of each
            slot's graph.
    """

    slots: Mapping[int, Sequence[int]]
    pool_of: Sequence[int]
    ranks: Mapping[str, Sequence[int]]


class _State(NamedTuple):
    """Progress of an order: its next action, each live tape's slot, each pool's last graph."""

    position: int
    tapes: frozenset[tuple[Cell, int, bool]]
    cursors: frozenset[tuple[int, int]]


def require_feasible(
    domain: Hashable, order: Sequence[tuple[str, Cell]], places: SlotPlaces
) -> None:
    """
    Require that a declared order can run to its end, with some choice of slots and of times for dW.

    A declared order leaves open when dW and a tape's readers (such as sends) run: any time after dI
    is allowed. So the search frees each slot as early as possible. The order also leaves open when
    weight caches are refreshed, since a stage's first F may contain the refresh. So the search
    ignores the capture order of refreshes in a shared pool.

    Args:
        domain: Name of the state domain (stages whose FP8 scales are updated together), for the
            error message.
        order: The domain's F and dI in declared order, each once per cell (a key without its
            epoch).
        places: Slots, pools and capture ranks.

    Raises:
        ValueError: The order cannot run to its end; the message names the first action that cannot
            run with any choice.

    >>> cells = [(0, m, 0, 0) for m in (0, 1)]
    >>> order = [("F", cells[0]), ("F", cells[1]), ("dI", cells[0]), ("dI", cells[1])]
    >>> ranks = {"F": [0, 3], "dI": [1, 4], "dW": [2, 5]}
    >>> require_feasible("d", order, SlotPlaces({0: [0, 1]}, [0, 1], ranks))
    >>> require_feasible("d", order, SlotPlaces({0: [0]}, [0], ranks))
    Traceback (most recent call last):
    ...
    ValueError: the declared order of domain 'd' cannot run to its end: after 1 of its 4 actions \
no slot of stage 0 can take F of (0, 1, 0, 0); the stage has 1 slot; ...
    """
    sizes = Counter(places.pool_of)
    shared = frozenset(pool for pool, size in sizes.items() if size > 1)
    left = _EACH * len(order) + _BESIDE
    furthest = 0
    first = _State(0, frozenset(), frozenset())
    todo, seen = [first], {first}
    while todo:
        state = todo.pop()
        furthest = max(furthest, state.position)
        if state.position == len(order) and not state.tapes:
            return
        left -= 1
        if left < 0:
            return
        for following in _following(state, order, places, shared):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    if furthest == len(order):
        raise ValueError(
            f"the declared order of domain {domain!r} cannot run to its end: no choice of slots "
            "lets every dW follow in the order of capture; capture in another order, or give each "
            "slot a pool of its own"
        )
    kind, cell = order[furthest]
    number = len(places.slots[cell[0]])
    raise ValueError(
        f"the declared order of domain {domain!r} cannot run to its end: after {furthest} of its "
        f"{len(order)} actions no slot of stage {cell[0]} can take {kind} of {cell}; the stage has "
        f"{counted(number, 'slot')}; declare dI earlier, give the stage more slots, or give each "
        "slot a pool of its own"
    )


def _following(
    state: _State, order: Sequence[tuple[str, Cell]], places: SlotPlaces, shared: frozenset[int]
) -> Iterator[_State]:
    """Yield the states after one action; if some dW cannot block anything, that dW is the only
    choice."""
    deferred = [tape for tape in state.tapes if tape[2]]
    for tape in deferred:
        if places.pool_of[tape[1]] not in shared:
            yield from _replayed(state, "dW", tape, state.tapes - {tape}, places, 0)
            return
    if state.position < len(order):
        kind, cell = order[state.position]
        own = [tape for tape in state.tapes if tape[0] == cell]
        if kind == "F" and not own:
            for slot in _free(cell[0], state, places, shared):
                tape = (cell, slot, False)
                yield from _replayed(state, "F", tape, state.tapes | {tape}, places, 1)
        elif kind == "dI" and own:
            (tape,) = own
            tapes = state.tapes - {tape} | {(cell, tape[1], True)}
            yield from _replayed(state, "dI", tape, tapes, places, 1)
    for tape in deferred:
        yield from _replayed(state, "dW", tape, state.tapes - {tape}, places, 0)


def _free(stage: int, state: _State, places: SlotPlaces, shared: frozenset[int]) -> Iterator[int]:
    """Yield the free slots of a stage; of the slots with a pool of their own, only the first."""
    taken = {slot for _, slot, _ in state.tapes}
    alone = False
    for slot in places.slots[stage]:
        if slot not in taken and (places.pool_of[slot] in shared or not alone):
            alone = alone or places.pool_of[slot] not in shared
            yield slot


def _replayed(
    state: _State,
    kind: str,
    tape: tuple[Cell, int, bool],
    tapes: frozenset[tuple[Cell, int, bool]],
    places: SlotPlaces,
    steps: int,
) -> Iterator[_State]:
    """Yield the state after a replay, if the pool's capture order permits the replay now."""
    pool, rank = places.pool_of[tape[1]], places.ranks[kind][tape[1]]
    cursors = dict(state.cursors)
    if pool in cursors and cursors[pool] >= rank:
        return
    cursors[pool] = rank
    live = {places.pool_of[slot] for _, slot, _ in tapes}
    kept = frozenset((p, cursor) for p, cursor in cursors.items() if p in live)
    yield _State(state.position + steps, tapes, kept)
