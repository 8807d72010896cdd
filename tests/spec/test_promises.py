"""The promises are named once, in explained terms, and include the paper's invariants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qeffect.engine.stage import STATE
from qeffect.relations.columns import CONFIG
from qeffect.spec.document import contract
from qeffect.spec.predicates import Predicate
from qeffect.spec.promises import (
    ASSUMED,
    CHANGES,
    CONFIGURATION,
    LEGAL,
    MEMORY,
    PAPER,
    STEPS,
    WORLD,
)
from qeffect.spec.transitions import TRANSITIONS
from qeffect.spec.world import WORDS
from qeffect.verification.column_reads import ColumnReads
from qeffect.verification.induction import HISTORY, INVARIANTS, LEMMAS
from qeffect.verification.induction.ghosts import GHOSTS
from tests.docs.links import unlinked

PROMISES = [*MEMORY, *WORLD, *STEPS, *CHANGES, *LEGAL]


class _Anything:
    """A column, an argument or a part of one: every entry is a number."""

    def __getitem__(self, index: Any) -> int:
        return 0


class _Columns:
    def __getattr__(self, name: str) -> _Anything:
        return _Anything()


def reads(predicate: Predicate) -> tuple[set[str], set[str]]:
    """The columns of the memory, and the words for the world, that a predicate reads."""
    st, other = ColumnReads(_Columns()), ColumnReads(_Columns())
    key = SimpleNamespace(cell=0, epoch=0, stage=0)
    ref = SimpleNamespace(slot=0, generation=0, incarnation=0)
    names = {name for transition in TRANSITIONS for name in transition.arguments}
    arguments = SimpleNamespace(**{**dict.fromkeys(names, 0), "key": key, "ref": ref})
    variables = dict.fromkeys(predicate.variables, 0)
    if predicate in [*MEMORY, *CONFIGURATION]:
        predicate.function(st, **variables)
    elif predicate in [*WORLD]:
        predicate.function(st, other, **variables)
    else:
        predicate.function(st, other, arguments, **variables)
    if predicate in [*CHANGES]:
        return st.read | other.read, set()
    return st.read, other.read


def test_a_promise_is_named_once() -> None:
    """No two promises have one name, and each says what it promises in a sentence."""
    assert len(PROMISES) == len({predicate.name for predicate in PROMISES})
    for predicate in [*PROMISES, *CONFIGURATION, *ASSUMED]:
        assert predicate.text.endswith((".", ":")), predicate.name


def test_the_words_for_the_world_are_those_that_are_used() -> None:
    """Every word that a promise or an assumption reads is explained, and each is used."""
    used: set[str] = set()
    for predicate in [*PROMISES, *ASSUMED]:
        used |= reads(predicate)[1]

    assert set(WORDS) == used


def test_the_history_tells_every_word() -> None:
    """The proofs' history has a column of each word, indexed by what the word describes."""
    for name, word in WORDS.items():
        assert (word.index,) == GHOSTS[name].indices


def test_promises_read_columns_that_are_in_the_table() -> None:
    """Beside them only the stage that a cell names."""
    for predicate in [*PROMISES, *CONFIGURATION, *ASSUMED]:
        assert reads(predicate)[0] <= {*STATE, *CONFIG, "stage_of", "fill"}, predicate.name


def test_promises_and_lemmas_together_are_what_the_induction_is_about() -> None:
    """Promises and lemmas are disjoint; together they are the invariants."""
    always = {predicate.name for predicate in [*MEMORY, *WORLD]}
    lemmas = {predicate.name for predicate in LEMMAS}

    assert not always & lemmas
    assert {predicate.name for predicate in [*INVARIANTS, *HISTORY]} == always | lemmas


def test_the_papers_invariants_are_made_of_promises() -> None:
    """Each names promises that there are, each once."""
    names = {predicate.name for predicate in PROMISES}
    for invariant in PAPER.values():
        assert set(invariant.promises) <= names, invariant.name
        assert len(invariant.promises) == len(set(invariant.promises))


def test_the_papers_invariants_name_the_parts_that_they_need() -> None:
    """An invariant's needs are the optional parts that its promises speak of."""
    optional = {"version", "order", "arena", "capture", "completion", "reduction"}
    by_name = {predicate.name: predicate for predicate in PROMISES}
    for invariant in PAPER.values():
        needed = {need for name in invariant.promises for need in by_name[name].needs}

        assert needed & optional == set(invariant.needs), invariant.name


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_papers_numbering_is_kept(number: int) -> None:
    """Invariants 1 to 4 of Section III-F are each one of them, and stand so in the text."""
    (invariant,) = (i for i in PAPER.values() if f"III-F, Invariant {number}" in i.place)
    heading = (
        f"### {invariant.title} ({invariant.place})\n\n`{invariant.name}`. **{invariant.says}**"
    )

    assert heading in contract()


@pytest.mark.parametrize("predicate", PROMISES, ids=lambda predicate: predicate.name)
def test_every_promise_stands_in_the_text(predicate: Predicate) -> None:
    """The chapter on promises has each by its name, with what it says."""
    assert f"- `{predicate.name}`" in unlinked(contract())
    assert predicate.text in contract()
