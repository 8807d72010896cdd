"""
The batch reading: breadth first over every reachable state, a chunk of a level at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from .engine import Arrival, Engine
from .packing import Words
from .stateset import KeyCollisionError, StateSet, distinct
from .tally import Sighting, Tally

__all__ = ["BatchExploration", "explore"]

Progress = Callable[[str], None]
Canonical = Callable[[Words], Words]
State = tuple[int, ...]

_CHUNK: Final = 1 << 15  # a chunk's entries then stay in a core's cache
_SETTLE: Final = 1 << 22  # arrivals to gather before duplicates are removed
_SALTS: Final = 4


@define
class BatchExploration:
    """
    Everything a batch exploration saw.

    Args:
        engine: What ran.
        levels: New states of each level, sorted.
        seen: All of them.
        canonical: Maps states to their orbits' representatives; None without symmetry.
        tally: What happened.
    """

    engine: Engine
    levels: list[Words]
    seen: StateSet
    canonical: Canonical | None
    tally: Tally = field(factory=Tally)

    @property
    def depth(self) -> int:
        """Levels below the initial state."""
        return len(self.levels) - 1

    def chains(self, sightings: Iterable[Sighting]) -> dict[State, list[State]]:
        """
        Return the states on a shortest path to each state sighted, the initial state first.

        No parents are kept while exploring: each level is expanded once more, from the last back.
        """
        wanted: dict[int, set[State]] = {}
        for sighting in sightings:
            wanted.setdefault(sighting.level, set()).add(sighting.state)
        states = {state for found in wanted.values() for state in found}
        parents: dict[State, State] = {}
        for level in range(max(wanted, default=0), 0, -1):
            found = self._parents(level, wanted.get(level, set()))
            parents |= found
            wanted.setdefault(level - 1, set()).update(found.values())
        chains = {}
        for state in states:
            chain = [state]
            while chain[-1] in parents:
                chain.append(parents[chain[-1]])
            chains[state] = chain[::-1]
        return chains

    def _parents(self, level: int, children: set[State]) -> dict[State, State]:
        """Return a state of the level before for each of some states of a level."""
        found: dict[State, State] = {}
        targets = np.array(sorted({state[0] for state in children}), np.int64)
        for wrong in (False, True):  # a sound kernel accepts right arguments only
            for chunk in _chunks(self.levels[level - 1]):
                for arrival in self.engine.expand(chunk, Tally(), check=False, wrong=wrong):
                    self._match(arrival, chunk, targets, children, found)
                    if len(found) == len(children):
                        return found
        raise AssertionError(f"{len(children) - len(found)} states of level {level} have no parent")

    def _match(
        self,
        arrival: Arrival,
        chunk: Words,
        targets: NDArray[np.int64],
        children: set[State],
        found: dict[State, State],
    ) -> None:
        """Enter where an arrival came from for those of the children that it is."""
        words = arrival.words if self.canonical is None else self.canonical(arrival.words)
        for row in np.flatnonzero(np.isin(words[0], targets)):
            child = tuple(int(word[row]) for word in words)
            if child in children and child not in found:
                origin = row if arrival.rows is None else arrival.rows[row]
                found[child] = tuple(int(word[origin]) for word in chunk)


def explore(
    engine: Engine,
    initial: State,
    *,
    canonical: Canonical | None = None,
    progress: Progress | None = None,
) -> BatchExploration:
    """
    Walk every reachable state, breadth first, and stop at the first level with a violation.

    Args:
        engine: What runs the moves.
        initial: The initial state, packed and in normal form.
        canonical: Maps states to their orbits' representatives.
        progress: Called with a line now and then.

    Raises:
        OutOfRangeError: A value is outside its column's range.
    """
    for salt in range(_SALTS):
        try:
            return _explore(engine, initial, salt, canonical, progress)
        except KeyCollisionError:
            continue
    raise KeyCollisionError(f"scope {engine.scope.name}: every salt has a collision")


def _explore(
    engine: Engine,
    initial: State,
    salt: int,
    canonical: Canonical | None,
    progress: Progress | None,
) -> BatchExploration:
    frontier: Words = np.array([[word] for word in initial], np.int64)
    if canonical is not None:
        frontier = canonical(frontier)
    seen = StateSet(engine.packing.num_words, salt)
    seen.add(frontier)
    found = BatchExploration(engine, [frontier], seen, canonical)
    while frontier.shape[1] and found.tally.broken is None:
        found.tally.level = found.depth
        fresh: list[Words] = []
        for arrived in _gathered(engine, frontier, found.tally, salt):
            if canonical is not None:
                arrived = distinct(canonical(arrived), salt)
            fresh.append(seen.missing(arrived))
            if progress is not None:
                progress(
                    f"Exploring. states={len(seen):,} "
                    f"transitions={found.tally.accepted.total():,} depth={found.depth}"
                )
        frontier = fresh[0] if len(fresh) == 1 else distinct(np.concatenate(fresh, axis=1), salt)
        if frontier.shape[1]:
            found.levels.append(frontier)
            seen.add(frontier)
    return found


def _chunks(words: Words) -> Iterator[Words]:
    for start in range(0, words.shape[1], _CHUNK):
        yield np.ascontiguousarray(words[:, start : start + _CHUNK])


def _gathered(engine: Engine, frontier: Words, tally: Tally, salt: int) -> Iterator[Words]:
    """Yield the distinct states that a level leads to, a few chunks at a time."""
    waiting: list[Words] = []
    size = 0
    for chunk in _chunks(frontier):
        for arrival in engine.expand(chunk, tally):
            waiting.append(arrival.words)
            size += arrival.words.shape[1]
        if size >= _SETTLE:
            yield distinct(np.concatenate(waiting, axis=1), salt)
            waiting, size = [], 0
    yield distinct(
        np.concatenate([np.empty((engine.packing.num_words, 0), np.int64), *waiting], axis=1), salt
    )
