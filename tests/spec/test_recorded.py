"""Each promise about a step in one call names a proof or existing tests."""

from __future__ import annotations

import ast

import pytest

from qeffect.spec.document import contract
from qeffect.spec.promises import CHANGES, LEGAL, MEMORY, STEPS, WORLD
from qeffect.spec.recorded import STEP_PROMISES, StepPromise
from qeffect.verification.proofs.recurring import NAME
from tests.docs.blocks import ROOT
from tests.docs.links import unlinked


@pytest.mark.parametrize("promise", STEP_PROMISES, ids=lambda promise: promise.name)
def test_what_shows_a_promise_is_there(promise: StepPromise) -> None:
    """Each test is a function of its file; the contract has the promise and what shows it."""
    assert promise.tests
    for one in promise.tests:
        file, _, test = one.partition(": ")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = unlinked(contract()).splitlines()
    (line,) = [x for x in lines if x.startswith(f"- `{promise.name}`: ")]
    assert promise.text in line


def test_the_proved_promise_is_the_name_of_its_obligations() -> None:
    """No other promise of a step in one call has obligations."""
    (proved,) = [promise for promise in STEP_PROMISES if promise.proof]

    assert NAME == proved.name
    assert (ROOT / proved.proof).is_file()


def test_no_other_promise_has_such_a_name() -> None:
    """The names are new, and each is there once."""
    names = [promise.name for promise in STEP_PROMISES]
    others = {p.name for register in (MEMORY, WORLD, STEPS, CHANGES, LEGAL) for p in register}

    assert len(names) == len({*names})
    assert not {*names} & others
