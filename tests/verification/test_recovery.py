"""
Recovery: aborts, failed reductions, drains and then a restore are never refused.
"""

from __future__ import annotations

import pytest

from qeffect.verification.proofs.goals import Obligation
from qeffect.verification.proofs.obligations import (
    COMPOSITIONS,
    Composition,
    composition_name,
)
from qeffect.verification.proofs.recovery import ENDED, recovery
from qeffect.verification.proofs.solvers import Z3
from qeffect.verification.symbolic import Encoding
from tests.profiles import few

from .strengthened import with_guard


def _proved(composition: Composition, timeout: int = 5_000) -> list[Obligation]:
    return list(Z3(composition, timeout=timeout).prove(recovery(composition)))


@pytest.mark.parametrize(
    "omit", few([(omit,) for omit in COMPOSITIONS], (0,), (1, 2, 5)), ids=composition_name
)
def test_the_way_back_is_always_open(omit: tuple[str, ...]) -> None:
    """Every recovery step is accepted, ends its action and begins none, in every composition."""
    found = _proved(Composition.of(omit, Encoding.sorted()))

    assert [] == [obligation for obligation in found if not obligation.proved]
    names = {obligation.name for obligation in found}
    assert {"a recovery step is accepted", "a recovery step ends its action"} <= names
    assert "a restore is accepted at last" in names
    assert set(ENDED) | {"abort", "restore"} == {obligation.transition for obligation in found}


#: A half, a test that an added guard makes, and the transition whose obligation then fails.
STRONGER = [
    ("persistence.restore_guards", "not st.every(st.weight_epoch, epoch)", "restore"),
    ("ownership.restore_guards", "not st.every(st.consumers, 0)", "restore"),
    ("reduction.restore_guards", "not st.every(st.poisoned, 0)", "restore"),
    ("ownership.abort_forward_guards", "st.generation[slot] == 0", "abort"),
    ("ownership.abort_dgrad_guards", "st.spoiled[st.slot_stage[slot]] == 0", "abort"),
    (
        "ownership.abort_wgrad_guards",
        "st.undrained[st.domain_of[st.slot_stage[slot]]] == 0",
        "abort",
    ),
    ("version.abort_refresh_guards", "st.poisoned[st.domain_of[stage]] != 0", "abort_refresh"),
    ("reduction.fail_reduction_guards", "st.spoiled[st.stage_at[bucket]] == 0", "fail_reduction"),
]


@pytest.mark.ci
@pytest.mark.parametrize(("half", "test", "transition"), few(STRONGER, (1,), ()))
def test_a_guard_that_could_shut_it_is_found(half: str, test: str, transition: str) -> None:
    """With a guard too many on a recovery step, only that step's obligation is not proved."""
    found = _proved(with_guard(half, test), 1_000)
    accepted = {"a recovery step is accepted", "a restore is accepted at last"}

    assert {(o.transition, o.name in accepted) for o in found if not o.proved} == {
        (transition, True)
    }
