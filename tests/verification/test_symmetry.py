"""
Symmetry: one state represents its orbit, and every orbit is represented.
"""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from attrs import evolve

from qeffect.verification.explorer import Scope, pool_scope, run, standard_scopes, symmetry
from qeffect.verification.explorer.exploration import explore
from qeffect.verification.explorer.packing import Packing, Words
from qeffect.verification.explorer.space import Space
from qeffect.verification.explorer.symmetry import Family, canonical_words, families
from qeffect.verification.explorer.tally import Tally
from qeffect.verification.explorer.witnesses import Schedules, occurrences
from tests.profiles import few

from .explorations import NAMES, explored

SCOPES = {
    scope.name: scope
    for scope in (
        pool_scope(3, 3, 2),
        standard_scopes()["stage-small"],
        standard_scopes()["stage-tickets"],
        standard_scopes()["stage-declared"],
        evolve(standard_scopes()["stage-small"], name="buffers", accumulate=False),
    )
}
#: States, and orbits.
COUNTS = {
    "pool-3-3-2": (3_753, 165),
    "stage-small": (12_632, 3_960),
    "stage-tickets": (19_436, 5_816),
    "stage-declared": (6_080, 6_080),
    "buffers": (12_808, 3_960),
}


Columns = dict[str, list[int]]


def _tuples(words: Words) -> list[tuple[int, ...]]:
    return [tuple(state) for state in words.T.tolist()]


def _columns(packing: Packing, words: Words) -> list[Columns]:
    """The columns of packed states."""
    entries = packing.unpack(words)
    rows = {key: np.broadcast_to(value, words.shape[1]).tolist() for key, value in entries.items()}
    return [
        {name: [rows[name, i][state] for i in range(n)] for name, n in packing.layout.items()}
        for state in range(words.shape[1])
    ]


def _images(family: Family, columns: Columns) -> list[Columns]:
    """All images of a state under permutations of the family's slots and cells."""
    found = []
    slots, cells = family.slots, family.cells
    for some, others in product(
        permutations(slots) if family.swaps_slots else [slots],
        permutations(cells) if family.swaps_cells else [cells],
    ):
        to_slot, to_cell = (
            dict(zip(a, b, strict=True)) for a, b in ((slots, some), (cells, others))
        )
        image = {name: list(column) for name, column in columns.items()}
        for name in family.slot_columns:
            for slot in slots:
                image[name][to_slot[slot]] = columns[name][slot]
        for name in family.cell_columns:
            for cell in cells:
                image[name][to_cell[cell]] = columns[name][cell]
        for slot in slots:
            held = columns["cell_at"][slot]
            image["cell_at"][to_slot[slot]] = to_cell.get(held, held)
        for cell in cells:
            home = columns["slot_of"][cell]
            image["slot_of"][to_cell[cell]] = to_slot.get(home, home)
        found.append(image)
    return found


@pytest.mark.parametrize("name", few(SCOPES, (0, 3)))
def test_every_orbit_is_represented(name: str) -> None:
    """The representatives of all states are exactly the states that the reduced exploration
    visits, and each represents itself."""
    space = Space(SCOPES[name])
    found = explored(name) if name in NAMES else explore(space)
    canonical = canonical_words(found.engine.packing)
    full, reduced = found.seen.words, explore(space, symmetry=True).seen.words
    representatives = canonical(full)

    assert _tuples(representatives) == _tuples(canonical(representatives))
    assert set(_tuples(representatives)) == set(_tuples(reduced))
    assert COUNTS[name] == (full.shape[1], reduced.shape[1])


@pytest.mark.parametrize(
    "scope",
    [
        *SCOPES.values(),
        Scope("two", slots=(2, 1), cells=(1, 2), generation_max=1, omit=("completion", "order")),
    ],
    ids=lambda scope: scope.name,
)
def test_an_orbit_has_one_representative(scope: Scope) -> None:
    """All permutations of slots and cells lead to one representative, for some 200 states."""
    space = Space(scope)
    found = explored(scope.name) if scope.name in NAMES else explore(space)
    packing, words = found.engine.packing, found.seen.words
    some = np.ascontiguousarray(words[:, :: max(1, words.shape[1] // 200)])
    canonical, seen = canonical_words(packing), set(_tuples(words))
    for columns, expected in zip(_columns(packing, some), _tuples(canonical(some)), strict=True):
        images = [columns]
        for family in families(scope, space.kept):
            images = [image for one in images for image in _images(family, one)]
        orbit = np.array([packing.pack(image) for image in images], np.int64).T

        assert set(_tuples(orbit)) <= seen
        assert {expected} == set(_tuples(canonical(np.ascontiguousarray(orbit))))
        assert expected in _tuples(orbit)


def test_wide_rows_are_sorted_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows too wide for one number are replaced by their ranks; the orbits stay the same."""
    scope = SCOPES["stage-small"]
    monkeypatch.setattr(symmetry, "_WIDEST", 1 << 10)

    assert COUNTS["stage-small"][1] == run(scope, symmetry=True, witnesses=False).states


def test_the_pool_of_four() -> None:
    """4 slots, 4 keys and 3 generations: a slot has 13 possible states, so C(16, 4) orbits."""
    report = run(pool_scope(4, 4, 3), symmetry=True)

    assert (1_820, 25_560, 16) == (report.states, report.transitions, report.depth)
    assert report.symmetry


def test_witnesses_under_symmetry() -> None:
    """A reduced exploration witnesses the same transitions and clauses as a full one."""
    scope = SCOPES["stage-small"]
    full, reduced = run(scope).witnesses, run(scope, symmetry=True).witnesses

    assert full.keys() == reduced.keys()
    assert {n: len(full[n]) for n in full} == {n: len(reduced[n]) for n in reduced}


def test_witnesses_under_symmetry_are_schedules() -> None:
    """Each move of a schedule leads from one of its states to the next."""
    found = explore(Space(SCOPES["stage-small"]), symmetry=True)
    named = occurrences(found)
    schedules = Schedules(found, tuple(named.values()))
    engine = found.engine
    for seen in named.values():
        moves, states = schedules.moves(seen)
        assert states[0] == _tuples(engine.initial())[0]
        for index, before, after in zip(moves, states, states[1:], strict=False):
            words = np.array([before], np.int64).T
            (arrival,) = engine.expand(words, Tally(), check=False, moves=[index])
            assert [after] == _tuples(arrival.words)
