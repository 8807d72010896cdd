"""
Symmetry: one state stands for its orbit, and every orbit is there.
"""

from __future__ import annotations

import pytest

from qeffect.verification.explorer import Scope, pool_scope, run, standard_scopes
from qeffect.verification.explorer.plain import explore
from qeffect.verification.explorer.symmetry import canonical_form
from qeffect.verification.explorer.walker import Walker

from .explorations import NAMES, plain

SCOPES = {
    scope.name: scope
    for scope in (
        pool_scope(3, 3, 2),
        standard_scopes()["stage-small"],
        standard_scopes()["stage-tickets"],
        standard_scopes()["stage-declared"],
        Scope("buffers", slots=(2,), cells=(2,), generation_max=1, accumulate=False),
    )
}
#: States, and orbits.
COUNTS = {
    "pool-3-3-2": (3_753, 165),
    "stage-small": (12_620, 3_948),
    "stage-tickets": (19_412, 5_792),
    "stage-declared": (6_068, 6_068),
    "buffers": (12_796, 3_948),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ci) if n == "buffers" else n for n in SCOPES]
)
def test_every_orbit_is_represented(name: str) -> None:
    """The representatives of all states are the states that the reduced exploration visits,
    and each represents itself."""
    walker = Walker(SCOPES[name])
    canonical = canonical_form(walker.scope, walker.memory)
    full = (plain(name) if name in NAMES else explore(walker)).parents
    representatives = set()
    for state in full:
        walker.memory.thaw(state)
        canonical()
        representatives.add(walker.memory.freeze())
    reduced = explore(walker, canonical=canonical).parents

    for state in representatives:
        walker.memory.thaw(state)
        canonical()
        assert state == walker.memory.freeze()
    assert representatives == reduced.keys()
    assert COUNTS[name] == (len(full), len(reduced))


@pytest.mark.parametrize("batch", [False, True])
def test_the_pool_of_four(batch: bool) -> None:
    """4 slots, 4 keys and 3 generations: 13 ways for a slot to be, so C(16, 4) orbits."""
    report = run(pool_scope(4, 4, 3), batch=batch, symmetry=True)

    assert (1_820, 25_560, 16) == (report.states, report.transitions, report.depth)
    assert report.symmetry


@pytest.mark.parametrize("batch", [pytest.param(False, marks=pytest.mark.ci), True])
def test_witnesses_under_symmetry(batch: bool) -> None:
    """A reduced exploration witnesses the same transitions and clauses as a full one."""
    scope = SCOPES["stage-small"]
    full, reduced = run(scope), run(scope, batch=batch, symmetry=True)
    names = {name for name in reduced.witnesses if "#" not in name}

    assert full.witnesses.keys() == names
    assert {n: len(full.witnesses[n]) for n in names} == {
        n: len(reduced.witnesses[n]) for n in names
    }
