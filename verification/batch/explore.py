"""
The batch reading: breadth first over every reachable state, a chunk of a level at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from attrs import define, field

from verification.explorer.walker import Walker

from .engine import Engine, Tally
from .packing import Words
from .stateset import KeyCollisionError, StateSet, distinct

__all__ = ["BatchExploration", "explore"]

Progress = Callable[[str], None]

_CHUNK: Final = 1 << 15  # a chunk's entries then stay in a core's cache
_SETTLE: Final = 1 << 22  # arrivals to gather before they are told apart


@define
class BatchExploration:
    """
    Everything a batch exploration saw.

    Args:
        engine: What ran.
        levels: New states of each level, sorted.
        seen: All of them.
        tally: What happened.
    """

    engine: Engine
    levels: list[Words]
    seen: StateSet
    tally: Tally = field(factory=Tally)

    @property
    def depth(self) -> int:
        """Levels below the initial state."""
        return len(self.levels) - 1


def explore(
    walker: Walker, *, engine: Engine | None = None, progress: Progress | None = None
) -> BatchExploration:
    """
    Walk every reachable state, breadth first.

    Args:
        walker: The scope's memory and moves; it gives the initial state.
        engine: What runs the moves; by default one made for the walker.
        progress: Called with a line now and then.
    """
    made = Engine(walker.scope, walker.transitions, walker.moves, walker.kept)
    chosen = made if engine is None else engine
    for salt in range(4):
        try:
            return _explore(walker, chosen, salt, progress)
        except KeyCollisionError:
            continue
    raise KeyCollisionError(f"scope {walker.scope.name}: every salt has a collision")


def _explore(
    walker: Walker, engine: Engine, salt: int, progress: Progress | None
) -> BatchExploration:
    walker.memory.thaw(walker.initial)
    packed = engine.packing.pack(walker.memory.read())
    frontier: Words = np.array([[word] for word in packed], np.int64)
    found = BatchExploration(engine, [frontier], StateSet(engine.packing.num_words, salt))
    found.seen.add(frontier)
    while frontier.shape[1] and found.tally.broken is None:
        fresh: list[Words] = []
        for arrived in _gathered(engine, frontier, found.tally, salt):
            fresh.append(found.seen.missing(arrived))
            if progress is not None:
                moves = sum(found.tally.accepted.values())
                progress(
                    f"Exploring. states={len(found.seen):,} transitions={moves:,} "
                    f"depth={found.depth}"
                )
        frontier = fresh[0] if len(fresh) == 1 else distinct(np.concatenate(fresh, axis=1), salt)
        if frontier.shape[1]:
            found.levels.append(frontier)
            found.seen.add(frontier)
    return found


def _gathered(engine: Engine, frontier: Words, tally: Tally, salt: int) -> Iterator[Words]:
    """Yield the distinct states that a level leads to, a few chunks at a time."""
    waiting: list[Words] = []
    size = 0
    for start in range(0, frontier.shape[1], _CHUNK):
        chunk = np.ascontiguousarray(frontier[:, start : start + _CHUNK])
        for arrival in engine.expand(chunk, tally):
            waiting.append(arrival.words)
            size += arrival.words.shape[1]
        if size >= _SETTLE:
            yield distinct(np.concatenate(waiting, axis=1), salt)
            waiting, size = [], 0
    yield distinct(
        np.concatenate([np.empty((engine.packing.num_words, 0), np.int64), *waiting], axis=1), salt
    )
