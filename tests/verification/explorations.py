"""
Explorations that several tests look at, each run once.
"""

from __future__ import annotations

from functools import cache

import pytest

from qeffect.engine.concrete_memory import Memory
from qeffect.engine.stage import Transitions
from qeffect.verification.batch.engine import Engine
from qeffect.verification.batch.explore import BatchExploration
from qeffect.verification.batch.explore import explore as explore_batch
from qeffect.verification.batch.findings import packed_state
from qeffect.verification.explorer import Scope, standard_scopes
from qeffect.verification.explorer.plain import Exploration, explore
from qeffect.verification.explorer.properties import Checker, claimed
from qeffect.verification.explorer.scopes import configuration, sizes
from qeffect.verification.explorer.walker import Walker
from qeffect.verification.induction import INVARIANTS
from tests.profiles import by_profile

NAMES = tuple(standard_scopes())

#: Exploring this scope takes half as long as all others; without it everything still happens once.
#: The profile dev leaves it out.
LONG = "stages-two"
MARKED = [pytest.param(name, marks=pytest.mark.ci) if name == LONG else name for name in NAMES]
EXPLORED = by_profile(dev=tuple(name for name in NAMES if name != LONG), ci=NAMES)


def walk(scope: Scope, composed: Transitions | None = None) -> Exploration:
    """Explore with the plain reading, every claimed invariant checked."""
    walker = Walker(scope, composed)
    return explore(walker, check=Checker(walker, claimed(walker, INVARIANTS)))


@cache
def plain(name: str) -> Exploration:
    """Return the plain exploration of a standard scope."""
    return walk(standard_scopes()[name])


@cache
def batched(name: str) -> BatchExploration:
    """Return the batch exploration of a standard scope."""
    walker = plain(name).walker
    predicates = claimed(walker, INVARIANTS)
    engine = Engine(walker.scope, walker.transitions, walker.moves, walker.kept, predicates)
    return explore_batch(engine, packed_state(engine.packing, walker, walker.initial))


def real_memory(walker: Walker) -> Memory:
    """Return the kernel's own memory for a scope, which forgets nothing and is never rewritten."""
    return Memory(
        walker.transitions.columns, dict(sizes(walker.scope)), dict(configuration(walker.scope))
    )


def restored(memory: Memory, snapshot: dict[str, tuple[int, ...]]) -> None:
    """Put a memory back to one of its snapshots."""
    for name, values in snapshot.items():
        getattr(memory, name)[:] = values
