"""
Promises about accepted actions use the terms of the world, not those of the guards.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qeffect.engine.stage import TRANSITIONS
from qeffect.relations.columns import CONFIG
from qeffect.spec.predicates import Predicate
from qeffect.spec.promises import STEPS
from qeffect.verification.column_reads import ColumnReads
from qeffect.verification.proofs.obligations import Composition
from qeffect.verification.proofs.vocabulary import Vocabulary
from qeffect.verification.symbolic import Encoding


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    """The predicates as terms."""
    return Composition.of((), Encoding.sorted()).vocabulary


@pytest.mark.parametrize("predicate", list(STEPS), ids=lambda predicate: predicate.name)
def test_no_guard_is_restated(predicate: Predicate, words: Vocabulary) -> None:
    """A promise reads history, arguments and configuration, and no state of the contract."""
    enc = words.encoding
    variables = {n: enc.sym(enc.const(n, sort)) for n, sort in predicate.variables.items()}
    for transition in predicate.transitions:
        names = TRANSITIONS[transition]
        given = SimpleNamespace(**dict(zip(names, enc.arguments(transition), strict=True)))
        memory = ColumnReads(words.state(words.before))
        predicate.function(memory, words.history(words.before), given, **variables)

        assert memory.read <= set(CONFIG) | {"stage_of"}
