"""
The search for calls that distinguish mutants from the contract: each mutant is searched alone.
"""

from __future__ import annotations

from functools import cache

import pytest

from qeffect.verification.mutants import corpus as search
from qeffect.verification.mutants import run, sites, sites_with
from qeffect.verification.mutants.corpus import Corpus, legal_schedules

#: The transition whose mutants are looked at, and others whose mutants are tried beside them.
ALONE, BESIDE = ("bind",), ("join", "bind", "wait")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One legal schedule, which is enough for these mutants."""
    one = legal_schedules()[:1]
    monkeypatch.setattr(search, "legal_schedules", lambda omit=(): one)


def searched(transitions: tuple[str, ...]) -> Corpus:
    """A fresh search for the mutants of some transitions."""
    found: Corpus = search.corpus.__wrapped__((), transitions)
    return found


@pytest.mark.ci
@pytest.mark.usefixtures("short")
def test_calls_found_for_a_mutant_do_not_depend_on_the_other_mutants() -> None:
    """The same calls in the same order, whether or not other transitions are searched too."""
    alone, beside = searched(ALONE), searched(BESIDE)
    others = {site for site in beside.harmful if site.transition not in ALONE}

    assert others
    for site in sites():
        if site.transition in ALONE:
            assert alone.harmful.get(site) == beside.harmful.get(site)
            assert alone.renamed.get(site) == beside.renamed.get(site)
    assert alone.harmful.keys() == beside.harmful.keys() - others


@pytest.mark.ci
@pytest.mark.usefixtures("short")
def test_the_search_tells_its_progress() -> None:
    """A line for each schedule that is tried, and none once the run has ended."""
    lines: list[str] = []
    search.corpus.cache_clear()
    run(lines.append, among=ALONE)
    search.corpus.cache_clear()

    assert "Mutants: trying them in reachable states: 0 of 1 schedules" in lines
    assert search.TELL.get() is None


@pytest.mark.parametrize(
    ("text", "updates"),
    [
        ("draws-again", {"order.commit_forward_writes: update `st.drawn[d] = draws`"}),
        # The guard reads the column by a name: `moving = st.moving[slot]`.
        (
            "read-not-begun",
            {"ownership.finish_read_writes: update `st.moving[slot] = moving & ~bit`"},
        ),
        # The update writes the whole column.
        ("not-final", {"epoch.next_walk_writes: update `st.fill(st.final, NEVER)`"}),
        # F writes the column that dI reads, and this clause guards dI.
        ("wrong-draws", set()),
    ],
)
def test_a_clause_chooses_its_guards_and_their_updates(text: str, updates: set[str]) -> None:
    """The updates of what its guards read, where they guard; an update names no clause itself."""
    chosen = sites_with(text)

    assert updates == {str(site) for site in chosen if site.kind == "update"}
    assert {text} == {site.clause.partition(".")[2] for site in chosen if site.kind != "update"}


def test_other_texts_choose_only_the_lines_that_contain_them() -> None:
    for text in ("submit_writes", "check_dgrad", ""):
        assert sites_with(text) == [site for site in sites() if text in str(site)]


@pytest.mark.ci
def test_a_part_of_the_sweep_runs_the_mutants_of_its_transitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`among` chooses the mutants, and the search covers only these."""
    asked = []

    def remember(omit: tuple[str, ...], transitions: tuple[str, ...]) -> Corpus:
        asked.append((omit, transitions))
        return searched(transitions)

    one = legal_schedules()[:1]
    monkeypatch.setattr(search, "legal_schedules", lambda omit=(): one)
    monkeypatch.setattr("qeffect.verification.mutants.verdicts.corpus", cache(remember))
    report = run(among=ALONE)

    assert ((), ALONE) in asked
    assert {ALONE} == {searching for _, searching in asked}  # where relations are left out too
    assert {verdict.mutant.site for verdict in report.verdicts} == {
        site for site in sites() if site.transition in ALONE
    }
    assert [] == report.survivors
