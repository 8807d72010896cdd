"""
What the batch reading finds, handed over as plain states.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qeffect.spec.predicates import Predicate

from ..coverage import refusal_name
from ..explorer.findings import Findings, Occurrence, Stopwatch
from ..explorer.walker import Walker
from .engine import Engine
from .explore import BatchExploration, explore
from .packing import Packing
from .symmetry import canonical_words
from .tally import Sighting

__all__ = ["batch_findings", "find", "frozen_state", "packed_state"]


def packed_state(packing: Packing, walker: Walker, state: bytes) -> tuple[int, ...]:
    """Return a frozen state's words."""
    walker.memory.thaw(state)
    return packing.pack(walker.memory.read())


def frozen_state(packing: Packing, walker: Walker, words: tuple[int, ...]) -> bytes:
    """Return a packed state, frozen."""
    columns = packing.unpack(np.array([[word] for word in words], np.int64))
    for (name, index), value in columns.items():
        getattr(walker.memory, name)[index] = int(np.asarray(value).flat[0])
    return walker.memory.freeze()


def find(
    walker: Walker,
    predicates: tuple[Predicate, ...],
    symmetry: bool,
    progress: Callable[[str], None] | None,
    witnesses: bool,
) -> Findings:
    """
    Explore with the batch reading.

    Raises:
        ValueError: The scope's states do not fit in two words.
        OutOfRangeError: A transition left a value that a packed state has no room for.
    """
    engine = Engine(walker.scope, walker.transitions, walker.moves, walker.kept, predicates)
    packing = engine.packing
    watch = Stopwatch()
    found = explore(
        engine,
        packed_state(packing, walker, walker.initial),
        canonical=canonical_words(packing) if symmetry else None,
        progress=progress,
    )
    return batch_findings(walker, found, watch(), witnesses=witnesses)


def batch_findings(
    walker: Walker, found: BatchExploration, took: tuple[float, float], *, witnesses: bool = True
) -> Findings:
    """Return what a batch exploration found."""
    packing = found.engine.packing
    named: dict[str, tuple[Sighting, str | None]] = {}
    if witnesses:
        for (transition, path), sighting in found.tally.first_path.items():
            named.setdefault(transition, (sighting, None))
            if not walker.scope.omit:  # paths are numbered within one composition
                named[f"{transition}#{path}"] = (sighting, None)
        for (index, clause), sighting in found.tally.first_refused.items():
            name = refusal_name(walker.moves[index].steps, clause)
            named.setdefault(name, (sighting, clause))
    broken = found.tally.broken
    sightings = [sighting for sighting, _ in named.values()]
    chains = found.chains([*sightings, broken[1]] if broken else sightings)

    def seen(sighting: Sighting, clause: str | None) -> Occurrence:
        chain = [frozen_state(packing, walker, state) for state in chains[sighting.state]]
        return Occurrence(chain, sighting.move, clause)

    return Findings(
        states=len(found.seen),
        depth=found.depth,
        accepted=found.tally.accepted,
        refused=found.tally.refused,
        took=took,
        witnesses={name: seen(*what) for name, what in named.items()},
        violation=(broken[0], seen(broken[1], broken[2])) if broken else None,
    )
