"""
Breadth-first exploration of every reachable state; the states of a level are handled in chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from qeffect.countdown import Countdown
from qeffect.spec.predicates import Predicate

from .engine import Engine
from .packing import Words
from .space import Space
from .stateset import KeyCollisionError, StateSet, distinct
from .symmetry import canonical_words
from .tally import Sighting, State, Tally

__all__ = ["Exploration", "chunks", "explore"]

Progress = Callable[[str], None]
Canonical = Callable[[Words], Words]

_CHUNK: Final = 1 << 15  # so that a chunk's entries stay in a core's cache
_SETTLE: Final = 1 << 22  # arrivals to gather before duplicates are removed
_SALTS: Final = 4
_FEW: Final = 50  # the rest is estimated once 1/_FEW of the states are explored


@define
class Exploration:
    """
    The result of an exploration.

    Args:
        engine: The engine that ran.
        levels: For each level (number of moves from the initial state), its new states, sorted. A
            move is a call that the explorer tries.
        seen: The states of all levels.
        canonical: Function that maps a state to the representative of its symmetry orbit; None
            without symmetry reduction.
        tally: The counts of accepted moves and of refusals.
        seconds: Wall-clock time in seconds.
        cpu_seconds: Processor time in seconds.
    """

    engine: Engine
    levels: list[Words]
    seen: StateSet
    canonical: Canonical | None
    tally: Tally = field(factory=Tally)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def depth(self) -> int:
        """Number of levels after the initial state."""
        return len(self.levels) - 1

    def representatives(self, words: Words) -> Words:
        """Return each state's orbit representative; without symmetry, the states themselves."""
        return words if self.canonical is None else self.canonical(words)

    def predecessors(self, sightings: Iterable[Sighting]) -> dict[State, State]:
        """
        Return, for every state on a shortest path to the sighted states, its predecessor.

        The exploration stores no predecessors, so each level is expanded again, from the last to
        the first.
        """
        wanted: dict[int, set[State]] = {}
        for sighting in sightings:
            wanted.setdefault(sighting.level, set()).add(sighting.state)
        found: dict[State, State] = {}
        for level in range(max(wanted, default=0), 0, -1):
            before = self._before(level, wanted.get(level, set()))
            found |= before
            wanted.setdefault(level - 1, set()).update(before.values())
        return found

    def _before(self, level: int, states: set[State]) -> dict[State, State]:
        """Return, for each given state of a level, its predecessor in the previous level."""
        found: dict[State, State] = {}
        targets = np.array(sorted({state[0] for state in states}), np.int64)
        for moves in (self.engine.space.right, None):  # a sound kernel accepts only right arguments
            for chunk in chunks(self.levels[level - 1]):
                for origin, _, _, after in self.leading_to(targets, chunk, moves):
                    if after in states and after not in found:
                        found[after] = tuple(chunk[:, origin].tolist())
                if len(found) == len(states):
                    return found
        raise AssertionError(
            f"found no predecessor of {len(states) - len(found)} states of level {level}"
        )

    def leading_to(
        self, targets: NDArray[np.int64], words: Words, moves: Iterable[int] | None
    ) -> Iterator[tuple[int, int, State, State]]:
        """
        Yield moves (calls that the explorer tries) from some states that may lead to given
        representatives.

        Args:
            targets: The first packed integer of each representative.
            words: The packed states to start from.
            moves: Positions, in the scope's list of moves, of the moves to try; None for all.

        Returns:
            For each move: the row of the state before it, the move's position, the state after it,
            and the representative of that state.
        """
        arrivals = list(self.engine.expand(words, Tally(), check=False, moves=moves))
        if not arrivals:
            return
        rows = [np.arange(words.shape[1]) if a.rows is None else a.rows for a in arrivals]
        taken = np.repeat([a.move for a in arrivals], [len(some) for some in rows])
        after = np.concatenate([a.words for a in arrivals], axis=1)
        origin, found = np.concatenate(rows), self.representatives(after)
        for i in np.flatnonzero(np.isin(found[0], targets)).tolist():
            yield (
                int(origin[i]),
                int(taken[i]),
                tuple(after[:, i].tolist()),
                tuple(found[:, i].tolist()),
            )


def explore(
    space: Space,
    predicates: Iterable[Predicate] = (),
    *,
    symmetry: bool = False,
    progress: Progress | None = None,
    total: int = 0,
) -> Exploration:
    """
    Visit every reachable state, breadth first, and stop at the first level with a violation.

    Args:
        space: The state space to explore.
        predicates: Predicates to check in every state.
        symmetry: Whether to explore only one state of each symmetry orbit.
        progress: Function that is called with a progress line from time to time.
        total: Expected number of states, for the progress lines; 0 if it is unknown.

    Raises:
        ValueError: The scope's entries are too large to pack.
        OutOfRangeError: A value is outside its column's range, and no predicate fails.
    """
    engine = Engine(space, predicates)
    began, cpu = time.perf_counter(), time.process_time()
    for salt in range(_SALTS):
        try:
            found = _explore(engine, salt, symmetry, progress, total)
        except KeyCollisionError:
            continue
        found.seconds = time.perf_counter() - began
        found.cpu_seconds = time.process_time() - cpu
        return found
    raise KeyCollisionError(
        f"scope {space.scope.name}: two states have the same sort key with every salt tried"
    )


def _explore(
    engine: Engine, salt: int, symmetry: bool, progress: Progress | None, total: int
) -> Exploration:
    count = Countdown("states", total)

    def shown(states: int) -> str:
        """
        Return the number of states so far as text, with an estimated remaining time if possible.
        """
        if not total:
            return f"states={states:,}"
        return f"{count(states) if states * _FEW > total else f'{states:,} of {total:,} states'},"

    canonical = canonical_words(engine.packing) if symmetry else None
    seen = StateSet(engine.packing.num_words, salt)
    found = Exploration(engine, [], seen, canonical)
    frontier = found.representatives(engine.initial())
    while frontier.shape[1]:
        found.levels.append(frontier)
        seen.add(frontier)
        found.tally.level = found.depth
        fresh: list[Words] = []
        for arrived in _gathered(engine, frontier, found.tally, salt):
            if canonical is not None:
                arrived = distinct(canonical(arrived), salt)
            fresh.append(seen.missing(arrived))
            if progress is not None:
                moves = found.tally.accepted.total()
                progress(f"Exploring: {shown(len(seen))} transitions={moves:,} depth={found.depth}")
        frontier = fresh[0] if len(fresh) == 1 else distinct(np.concatenate(fresh, axis=1), salt)
        if found.tally.broken is not None:
            break
    return found


def chunks(words: Words) -> Iterator[Words]:
    """Split states into chunks that are small enough to expand at once."""
    for start in range(0, words.shape[1], _CHUNK):
        yield np.ascontiguousarray(words[:, start : start + _CHUNK])


def _gathered(engine: Engine, frontier: Words, tally: Tally, salt: int) -> Iterator[Words]:
    """Yield the distinct states that a level's moves reach, a few chunks at a time."""
    waiting: list[Words] = []
    size = 0
    for chunk in chunks(frontier):
        for arrival in engine.expand(chunk, tally):
            waiting.append(arrival.words)
            size += arrival.words.shape[1]
        if size >= _SETTLE:
            yield distinct(np.concatenate(waiting, axis=1), salt)
            waiting, size = [], 0
    yield distinct(
        np.concatenate([np.empty((engine.packing.num_words, 0), np.int64), *waiting], axis=1), salt
    )
