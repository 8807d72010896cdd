"""
The explorer: exact counts, events that must sometimes happen, and detection of a broken kernel.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import combinations, compress, product
from math import comb, perm

import pytest
from attrs import evolve

from qeffect.engine.stage import OPTIONAL, TRANSITIONS, transitions
from qeffect.verification.explorer import Scope, pool_scope, run, standard_scopes, unwitnessed
from qeffect.verification.explorer.space import Space

from .explorations import NAMES, Reports, explored, walk, walk_plainly

#: States, accepted moves, refused moves, depth.
COUNTS = {
    "pool-2-2-2": (153, 864, 5_796, 6),
    "pool-3-3-2": (3_753, 33_048, 272_646, 9),
    "stage-epochs": (980, 6_860, 36_644, 16),
    "stage-faults": (2_324, 19_764, 92_712, 18),
    "stage-walks": (1_172, 7_560, 47_456, 25),
    "stage-reuse": (3_640, 24_240, 215_956, 20),
    "stage-small": (12_632, 88_572, 1_164_060, 19),
    "stage-tickets": (19_436, 137_220, 2_520_744, 28),
    "stage-readers": (3_912, 30_746, 230_958, 22),
    "domains-readers": (289, 2_142, 11_866, 12),
    "stage-messages": (218, 588, 12_280, 15),
    "domains-messages": (196, 1_596, 8_260, 10),
    "callers-messages": (6_148, 54_768, 188_000, 17),
    "callers-copies": (1_684, 14_344, 30_380, 16),
    "stages-fed": (406, 1_448, 25_146, 12),
    "stages-exchange": (608, 2_624, 59_166, 24),
    "stage-buckets": (127, 731, 2_534, 13),
    "callers-update": (1_684, 17_234, 35_442, 22),
    "callers-weights": (4_578, 40_766, 90_092, 23),
    "callers-gradients": (1_545, 17_356, 78_968, 21),
    "stage-gradients": (94, 420, 3_294, 24),
    "stage-skips": (10_580, 23_009, 486_912, 29),
    "stage-skips-epochs": (857, 2_636, 48_787, 31),
    "stage-skips-declared": (71, 103, 2_972, 10),
    "stage-evaluated": (932, 5_828, 46_916, 20),
    "stage-evaluated-reports": (21, 44, 592, 6),
    "domains-evaluated": (320, 2_528, 7_200, 10),
    "stages-tied": (1_324, 9_281, 46_733, 17),
    "stages-shared": (9_330, 30_991, 1_070_813, 32),
    "stages-shared-streams": (167, 676, 1_620, 14),
    "domains-buckets": (223, 1_396, 8_040, 19),
    "stage-shared-pool": (11_672, 81_516, 1_061_780, 19),
    "stage-declared": (6_080, 43_216, 549_032, 19),
    "stages-two": (46_380, 372_518, 5_755_234, 30),
    "stages-refreshed-in-pool": (5_304, 42_974, 444_512, 22),
    "stages-declared": (12_232, 98_520, 1_031_024, 21),
    "stage-reports": (1_342, 9_044, 151_144, 11),
    "callers-reports": (4_560, 40_752, 139_448, 22),
    "stages-draws": (2_260, 16_950, 191_788, 13),
    "stage-weights": (352, 1_999, 19_460, 11),
    "stage-epoch-scales": (290, 1_221, 14_731, 19),
    "domains-epoch-scales": (2_358, 15_777, 186_171, 39),
    "stages-live": (2_130, 15_922, 162_866, 14),
    "stage-groups": (12_425, 37_407, 212_475, 21),
    "stage-groups-scales": (580, 1_220, 47_188, 14),
    "stage-groups-apart": (313, 692, 25_890, 14),
    "stage-groups-faults": (16_583, 66_594, 2_088_435, 46),
    "domains-groups": (47_856, 469_060, 9_017_316, 25),
    "domains-two": (1_836, 22_260, 166_804, 17),
}


SUBSETS = [
    names for count in range(len(OPTIONAL) + 1) for names in combinations(sorted(OPTIONAL), count)
]


def design() -> list[tuple[str, ...]]:
    """A quarter of them, in which any three relations are left out and kept in all eight ways."""
    rows = ((a, b, c, d, a ^ b ^ c, b ^ c ^ d) for a, b, c, d in product((False, True), repeat=4))
    return [tuple(compress(sorted(OPTIONAL), row)) for row in rows]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The reports of this run's workers."""
    return Reports.of_run(tmp_path_factory)


@pytest.mark.parametrize("name", NAMES)
def test_every_scope_has_exactly_these_states_and_moves(name: str, reports: Reports) -> None:
    """Every standard scope has exactly these states and moves, and breaks no invariant."""
    found = explored(name)
    reports.of(name)

    assert found.tally.broken is None
    assert COUNTS[name] == (
        len(found.seen),
        found.tally.accepted.total(),
        found.tally.refused.total(),
        found.depth,
    )


@pytest.mark.parametrize(
    ("slots", "keys", "generations"), [(2, 2, 2), (3, 3, 2), (2, 3, 3), (1, 4, 2)]
)
def test_pool_states_by_counting(slots: int, keys: int, generations: int) -> None:
    """The pool has exactly as many states as there are ways to place keys."""
    live = [
        comb(slots, k)
        * perm(keys, k)
        * (3 * generations) ** k  # reserved, or waiting for dI and dW, or for dW; generation
        * (generations + 1) ** (slots - k)
        for k in range(min(slots, keys) + 1)
    ]

    assert sum(live) == len(walk(Space(pool_scope(slots, keys, generations))).seen)


@pytest.mark.ci  # explores again what another worker has not yet reported
def test_everything_sometimes_happens(reports: Reports) -> None:
    """Over the standard scopes witnesses show each transition accepted, each clause refusing."""
    everything = [reports.of(name) for name in NAMES]

    assert [] == unwitnessed(everything)
    assert all(all(report.witnesses.values()) for report in everything)


def test_what_never_happens_is_named() -> None:
    """If a scope lacks something, the report names it as never witnessed."""
    missing = unwitnessed([run(standard_scopes()["pool-2-2-2"])])

    assert "commit_update" in missing
    assert "check_forward: order.token" in missing
    assert "check_wgrad" not in missing


def test_report_is_plain_data() -> None:
    """A report holds the figures that the command prints, by clause and by transition."""
    row = run(standard_scopes()["pool-2-2-2"]).asdict()

    assert ("pool-2-2-2", False, 153) == (
        row["scope"],
        row["symmetry"],
        row["states"],
    )
    assert 864 == row["transitions"] == sum(row["by_transition"].values())
    assert 5_796 == row["refused"] == sum(row["by_clause"].values())
    assert row["rate"] > 0
    assert row["cpu_rate"] > 0
    assert row["violation"] is None
    assert row["witnesses"]["check_dgrad: ownership.duplicate-dgrad"] == [
        "forward(key e0.s0.c0, slot 0, token 0, link 0, refresh 0, filled 0, fill_epoch 0, "
        "updates 0, draws 0)",
        "dgrad(key e0.s0.c0, ref slot 0 generation 0 incarnation 0, token 0, link 0, "
        "queued 1, updates 0, scales 0, draws 0, weight 0, parts 0)",
        "dgrad(key e0.s0.c0, ref slot 0 generation 0 incarnation 0, token 0, link 0, "
        "queued 1, updates 0, scales 0, draws 0, weight 0, parts 0)",
    ]


def test_progress_is_a_line() -> None:
    """Long explorations print progress lines."""
    lines: list[str] = []
    run(pool_scope(3, 3, 2), progress=lines.append, witnesses=False)

    assert lines
    assert all(line.startswith("Exploring: states=") for line in lines)
    assert "transitions=" in lines[0]
    assert "depth=" in lines[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"slots": (0,)}, "slots"),
        ({"slots": (1, 1)}, "2 stages have slots"),
        ({"omit": ("ownership",)}, "unknown ownership"),
        ({"only": ("forward",)}, "unknown forward"),
        ({"domains": (1,)}, "numbered from 0"),
        ({"readers": 3}, "bits of OUT_BIT | GRAD_BIT"),
        ({"fresh_keys": True}, "fresh keys need"),
        ({"tied": True, "accumulate": False}, "only destinations that accumulate are tied"),
        ({"slots": (1, 1), "cells": (2, 1), "feeds": True}, "scope x: .*microbatches"),
        ({"slots": (1, 1), "cells": (1, 1), "tied": True, "domains": (0, 1)}, "scope x: .*domain"),
        ({"reduces": True, "omit": ("reduction",)}, "scope x: reduces=True needs the relation"),
        ({"slots": (1,), "declared": True}, "scope x: .*cannot run to its end"),
    ],
)
def test_a_scope_that_means_nothing_is_refused(options: dict[str, object], told: str) -> None:
    """An impossible scope is refused with one line that says why."""
    with pytest.raises((TypeError, ValueError), match=told.replace("|", r"\|")):
        Scope("x", **options)  # type: ignore[arg-type]


def test_any_three_relations_meet_in_the_design() -> None:
    """All eight ways to keep and leave them out, in 16 compositions; ci runs every fourth one."""
    assert len(OPTIONAL) == 6
    assert len(set(design())) == 16
    for three in combinations(OPTIONAL, 3):
        assert len({tuple(name in row for name in three) for row in design()}) == 8, three


@pytest.mark.parametrize(
    "omit",
    [
        pytest.param(
            names,
            marks=()
            if names in design()[9:10]
            else pytest.mark.ci
            if names in design()[::4]
            else pytest.mark.nightly,
        )
        for names in SUBSETS
    ],
    ids=lambda names: "+".join(names) or "nothing",
)
def test_no_invariant_breaks_in_any_composition(omit: tuple[str, ...]) -> None:
    """Whichever relations are left out, no invariant breaks, and no ticket in flight is refused."""
    space = Space(Scope("x", slots=(1,), cells=(1,), generation_max=1, tickets=True, omit=omit))
    found, checked = walk(space), walk_plainly(space)

    assert found.tally.broken is None
    assert checked.violation is None
    assert (found.tally.accepted, found.tally.refused) == (checked.accepted, checked.refused)
    assert len(found.seen) == len(checked.parents)
    accepted = {space.moves[index].label for index in found.tally.accepted}
    updates = {"check_update", "commit_update", "abort_update"}
    assert {"commit_wgrad", "abort_wgrad", "finalize", *updates, "restore"} <= accepted


# A kernel with something taken out


def _without(function: str, marker: str) -> dict[str, ast.FunctionDef]:
    """Return a half without the statements whose source contains a marker."""
    from qeffect.engine.compose import half_source
    from qeffect.engine.stage import RELATIONS

    module, name = function.split(".")
    node = half_source(getattr(RELATIONS[module], name))
    kept = [s for s in node.body if marker not in ast.unparse(s)]
    assert len(kept) < len(node.body)
    changed = ast.FunctionDef(
        name=node.name, args=node.args, body=kept or [ast.Pass()], decorator_list=[]
    )
    return {function: changed}


@pytest.mark.parametrize(
    ("function", "marker", "scope", "broken"),
    [
        (
            "ownership.check_forward_guards",
            "slot-busy",
            pool_scope(2, 2, 2),
            "ownership.",
        ),
        (
            "ownership.check_forward_guards",
            "key-live",
            pool_scope(2, 2, 2),
            "ownership.slot-names-its-cell, by forward(key e0.s0.c0, slot 0, token 0, link 0, ",
        ),
        (
            "ownership.check_forward_guards",
            "generation-exhausted",
            pool_scope(2, 2, 2),
            "ownership.generation-bounded",
        ),
        (
            "ownership.check_forward_writes",
            "st.slot_of[c]",
            pool_scope(2, 2, 2),
            "ownership.slot-names-its-cell",
        ),
        (
            "ownership.check_forward_writes",
            "st.held[slot]",
            pool_scope(2, 2, 2),
            "commit_forward refused (ownership.unknown-ticket) after its check was accepted",
        ),
        (
            "ownership.require_reference",
            "ownership.in-flight",
            standard_scopes()["stage-tickets"],
            "",
        ),
        pytest.param(
            "order.check_dgrad_guards",
            "order.in-flight",
            standard_scopes()["stage-tickets"],
            "order.busy-with-forward-or-dgrad",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_removed_guard_is_found(function: str, marker: str, scope: Scope, broken: str) -> None:
    """Without a guard or an update some state breaks an invariant, and the schedule is printed."""
    composed = transitions(scope.omit, replaced=_without(function, marker))
    report = run(scope, composed=composed)
    checked = walk_plainly(Space(scope, composed)).violation

    assert report.violation is not None
    assert report.violation.startswith(broken)
    assert re.search(r"forward( fails)?\(", report.violation)
    assert checked is not None
    assert checked[0].startswith(broken.partition(", by ")[0])
    assert len(checked[1]) == report.violation.partition(", by ")[2].count("; ") + 1


def test_a_shortest_violation() -> None:
    """The printed violation is a shortest one: two forwards into one slot need two moves."""
    scope = pool_scope(1, 2, 2)
    composed = transitions(
        scope.omit, replaced=_without("ownership.check_forward_guards", "slot-busy")
    )
    violation = run(scope, composed=composed).violation
    checked = walk_plainly(Space(scope, composed)).violation

    assert violation is not None
    assert 2 == violation.count("(key")
    assert checked is not None
    assert 2 == len(checked[1])


def test_a_refusal_that_writes_is_found() -> None:
    """A transition that changes the state and then refuses is reported."""
    scope = pool_scope(1, 1, 1)
    composed = transitions(scope.omit)
    broken = type(composed)(
        composed.relations, {**composed.functions, "drop": _drop_that_writes_first}
    )
    violation = run(scope, composed=broken).violation
    checked = walk_plainly(Space(scope, broken)).violation

    assert violation is not None
    assert checked is not None
    for told in (violation, checked[0]):
        assert "drop refused (ownership.in-flight) but changed the state" in told


def _drop_that_writes_first(st, key, ref):  # type: ignore[no-untyped-def]
    from qeffect.refusals import Refused

    st.generation[ref.slot] = st.generation[ref.slot] + 1
    if st.held[ref.slot] == 0:
        raise Refused("ownership.in-flight")


def test_moves_follow_from_parameters() -> None:
    """Every transition is called with right arguments and, if it has any, with wrong arguments."""
    space = Space(
        evolve(
            standard_scopes()["stage-tickets"],
            reduces=True,
            walks=2,
            skips=True,
            epoch_scales=True,
            groups=True,
            only=tuple(TRANSITIONS),
        )
    )
    right = Counter(move.label for move in space.moves if move.right)
    wrong = Counter(move.label for move in space.moves if not move.right)

    assert set(space.transitions.functions) == set(right)
    assert {"invalidate", "submit", "join", "wait", "drain", "checkpoint"} <= right.keys()
    assert {
        name
        for name in space.transitions.functions
        if name.startswith(("check_f", "check_d", "check_w", "commit_", "abort_"))
    } <= wrong.keys()
