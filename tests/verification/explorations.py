"""
Explorations that several tests use, each run once.
"""

from __future__ import annotations

import os
import pickle
from functools import cache
from pathlib import Path

import attrs
import pytest

from qeffect.engine.concrete_memory import Memory
from qeffect.verification.explorer import standard_scopes
from qeffect.verification.explorer.exploration import Exploration, explore
from qeffect.verification.explorer.packing import Packing
from qeffect.verification.explorer.plain import PlainExplorer, State
from qeffect.verification.explorer.runs import ExploreReport, report_of
from qeffect.verification.explorer.scopes import configuration, sizes
from qeffect.verification.explorer.space import Space
from qeffect.verification.induction import INVARIANTS

NAMES = tuple(standard_scopes())

#: Scopes that the plain explorer walks in a second or two, and some that take up to ten seconds.
SMALL = (
    "pool-2-2-2",
    "stage-epochs",
    "stage-walks",
    "domains-readers",
    "stage-messages",
    "domains-messages",
    "stage-buckets",
    "callers-update",
    "stage-skips-epochs",
    "stage-skips-declared",
    "stage-evaluated",
    "stage-evaluated-reports",
    "domains-evaluated",
    "stages-tied",
    "stages-shared-streams",
    "stages-fed",
    "stages-exchange",
    "domains-buckets",
    "stage-groups-scales",
    "stage-groups-apart",
)
MEDIUM = (
    "stage-faults",
    "callers-weights",
    "stage-reuse",
    "stage-readers",
    "callers-copies",
    "stages-refreshed-in-pool",
)
SIZED = [
    pytest.param(
        name,
        marks=()
        if name in SMALL[::3]
        else pytest.mark.ci
        if name in (*SMALL[1::3], MEDIUM[0])
        else pytest.mark.nightly
        if name in (*SMALL, *MEDIUM)
        # One worker walks a scope once.
        else (pytest.mark.slow, pytest.mark.xdist_group(f"plain-{name}")),
    )
    for name in NAMES
]


def walk(space: Space) -> Exploration:
    """Explore with every claimed invariant checked."""
    return explore(space, space.claimed(INVARIANTS))


def walk_plainly(space: Space) -> PlainExplorer:
    """Explore one state at a time with every claimed invariant checked."""
    return PlainExplorer(space, space.claimed(INVARIANTS)).explore()


@cache
def space(name: str) -> Space:
    """Return the space of a standard scope."""
    return Space(standard_scopes()[name])


@cache
def explored(name: str) -> Exploration:
    """Return the exploration of a standard scope."""
    return walk(space(name))


@cache
def plain(name: str) -> PlainExplorer:
    """Return the plain exploration of a standard scope."""
    return walk_plainly(space(name))


@attrs.frozen
class Reports:
    """
    Reports of explorations, shared by the workers of one run of the suite.

    Args:
        folder: Folder in which the first worker stores each report for the others.
    """

    folder: Path

    @classmethod
    def of_run(cls, factory: pytest.TempPathFactory) -> Reports:
        """The reports in the folder that all workers of this run share."""
        own = factory.getbasetemp()
        folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "explorations"
        folder.mkdir(exist_ok=True)
        return cls(folder)

    def of(self, name: str) -> ExploreReport:
        """Return the report of a standard scope; explore the scope if no worker has."""
        kept = self.folder / name
        if kept.exists():
            report: ExploreReport = pickle.loads(kept.read_bytes())
            return report
        report = report_of(explored(name), 0)
        unfinished = kept.with_name(f"{name}.{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(report))
        unfinished.replace(kept)
        return report


def columns_of(space: Space, state: State) -> dict[str, list[int]]:
    """Return the kept columns (arrays of the contract's memory) of a plain state."""
    found, start = {}, 0
    for name, initial in space.initial().items():
        if name in space.kept:
            found[name] = list(state[start : start + len(initial)])
            start += len(initial)
    return found


def packed(packing: Packing, space: Space, state: State) -> tuple[int, ...]:
    """Return a plain state, packed."""
    return packing.pack(columns_of(space, state))


def real_memory(space: Space) -> Memory:
    """Return the kernel's own memory for a scope, without the explorer's reductions."""
    scope = space.scope
    return Memory(space.transitions.columns, dict(sizes(scope)), dict(configuration(scope)))


def restored(memory: Memory, snapshot: dict[str, tuple[int, ...]]) -> None:
    """Put a memory back to one of its snapshots."""
    for name, values in snapshot.items():
        getattr(memory, name)[:] = values
