"""
How the proofs run: in parallel parts, with bounded queries only for suspect obligations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from attrs import evolve

from qeffect.engine.stage import OPTIONAL
from qeffect.verification.mutants import Mutant, sites
from qeffect.verification.proofs import prove
from qeffect.verification.proofs.bounded import SCOPE, Unrolling
from qeffect.verification.proofs.obligations import Composition, obligations
from qeffect.verification.proofs.parallel import run_parallel
from qeffect.verification.proofs.solvers import Z3, Proved
from qeffect.verification.symbolic import Encoding
from qeffect.verification.symbolic.solver import Kind, new_solver

#: Transition and clause of a guard that `version.one-fill` needs.
GUARD = ("check_forward", "version.late-refresh")

Tell = Callable[[str], None]


def test_parts_give_what_they_find() -> None:
    """
    Results come under their names in the order asked. Progress of the parts is passed on, but a
    part that tells much is not stopped by a pipe that nobody reads.
    """
    told: list[str] = []

    def much(tell: Tell) -> list[int]:
        for _ in range(3_000):
            tell("a line that is long enough to fill a pipe that nobody reads")
        return list(range(50_000))

    def little(tell: Tell) -> str:
        tell("little")
        return "little"

    found = run_parallel({"much": much, "little": little}, told.append)

    assert ["much", "little"] == list(found)
    assert list(range(50_000)) == found["much"].found
    assert "little" == found["little"].found
    assert {"a line that is long enough to fill a pipe that nobody reads", "little"} == {*told}
    assert len(told) < 3_001
    assert all(result.cpu >= 0.0 and result.seconds > 0.0 for result in found.values())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux forks parts")
@pytest.mark.parametrize(("cores", "others"), [(1, 0), (2, 1), (3, 2), (8, 3)])
def test_a_process_for_each_further_core(
    cores: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer cores than parts, some parts run one after another in one process."""
    monkeypatch.setattr("qeffect.verification.proofs.parallel._cores", lambda: cores)

    found = run_parallel(dict.fromkeys("abcd", lambda _: os.getpid()), lambda _: None)
    processes = {result.found for result in found.values()}

    assert list("abcd") == list(found)
    assert os.getpid() == found["d"].found
    assert others == len(processes - {os.getpid()})


def test_an_error_in_a_part_is_raised() -> None:
    """An error in a part is raised, whether the part runs in this process or another."""

    def fails(tell: Tell) -> NoReturn:
        raise ValueError("no such scope")

    def works(tell: Tell) -> int:
        return 1

    for parts in ({"one": fails, "two": works}, {"one": works, "two": fails}):
        with pytest.raises(ValueError, match="no such scope"):
            run_parallel(parts, lambda line: None)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux forks parts")
def test_a_part_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends without a result raises an error that names the part; nothing hangs."""
    monkeypatch.setattr("qeffect.verification.proofs.parallel._cores", lambda: 2)

    def dies(tell: Tell) -> NoReturn:
        os._exit(3)

    with pytest.raises(RuntimeError, match="dying"):
        run_parallel({"dying": dies, "other": lambda tell: 1}, lambda line: None)


#: A transition, a guard or an update of it, and how many steps a violation takes without that.
BROKEN = [
    ("check_forward", "guard", "order.token", 1),
    pytest.param(
        *("commit_forward", "update", "st.token[d] = st.token[d] + 1", 2), marks=pytest.mark.nightly
    ),
]


@pytest.mark.ci
@pytest.mark.parametrize(("transition", "kind", "what", "steps"), BROKEN)
def test_a_bounded_search_finds_what_a_line_kept_out(
    transition: str, kind: str, what: str, steps: int
) -> None:
    """A search that asks only about suspects finds a deleted line at the expected depth."""
    lines = [
        site
        for site in sites()
        if (site.transition, site.kind) == (transition, kind) and what in (site.clause, site.text)
    ]
    assert lines
    functions = Mutant(tuple(lines)).functions
    unrolling = Unrolling(Composition((), Encoding.finite(SCOPE), functions))
    verdicts = []
    for _ in range(steps):
        unrolling.extend()
        verdicts.append(unrolling.check())

    assert [*["unsat"] * (steps - 1), "sat"] == verdicts


@pytest.mark.nightly
def test_what_one_step_cannot_break_is_no_suspect() -> None:
    """Fewer than a quarter of the possible violations need a search from the initial state."""
    unrolling = Unrolling(Composition.of((), Encoding.finite(SCOPE)))
    unrolling.extend()

    assert 0 < 4 * len(unrolling.suspects) < len(unrolling.violation().children())


@pytest.mark.parametrize("seed", [0, 2])
def test_a_search_that_got_lost_begins_afresh(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all other attempts fail, three fresh solvers are tried, each with its own seed."""
    bare = Composition.of(tuple(sorted(OPTIONAL)), Encoding.sorted())
    goal = next(iter(obligations(bare)))
    lost = "unknown", 0.0
    monkeypatch.setattr(Z3, "_attempt", lambda self, goals, *_: [lost for _ in goals])
    for name in ("_again", "_told", "_with_all", "_instantiated"):
        monkeypatch.setattr(Z3, name, lambda self, goal, **_: lost)
    seeds: list[int] = []
    answers = iter(["unknown", "unknown", "unsat"])

    def made(kind: Kind, *, seed: int, timeout: int, effort: int) -> Any:
        seeds.append(seed)
        return new_solver(kind, seed=seed, timeout=timeout, effort=effort)

    monkeypatch.setattr("qeffect.verification.proofs.solvers.new_solver", made)
    monkeypatch.setattr(Z3, "_refute", lambda *_: next(answers))

    assert ["unsat"] == [one.verdict for one in Z3(bare, seed=seed).prove([goal])]
    assert seeds == [1000 * (seed + 1) + number for number in range(3)]
    monkeypatch.setattr("qeffect.verification.proofs.solvers.FRESH", 0)
    assert ["unknown"] == [one.verdict for one in Z3(bare, seed=seed).prove([goal])]


def test_a_fresh_solver_remembers_what_its_proof_used() -> None:
    """The proof can be reused for the same goal, but not for the goal without its facts."""
    bare = Composition.of(tuple(sorted(OPTIONAL)), Encoding.sorted())
    proved = Proved()
    solver = Z3(bare, proved=proved)
    goals = (goal for goal in obligations(bare) if goal.facts)
    found = ((goal, solver._afresh(goal, seed)[0]) for goal in goals for seed in range(3))
    goal = next(goal for goal, verdict in found if verdict == "unsat")

    assert proved.covers(goal, bare.lemmas_of(goal.relations))
    assert not proved.covers(evolve(goal, facts=()), bare.lemmas_of(goal.relations))


def test_one_promise_is_proved_alone() -> None:
    """With the same questions as in the whole run with all relations."""
    full = Composition.of((), Encoding.sorted())
    expected = [goal for goal in obligations(full) if goal.name == "version.one-fill"]

    found, names = prove.named("version.one-fill")

    assert all(one.proved for one in found)
    steps = [(one.kind, one.transition, one.path) for one in found if one.kind != "initial"]
    assert steps == [(goal.kind, goal.transition, goal.path) for goal in expected]
    assert len(expected) > 5
    assert {"version.one-fill", "steps.moved-alike", "a legal check is accepted"} <= {*names}


@pytest.mark.nightly
def test_a_promise_is_not_proved_alone_without_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is about the guards: deleting one of them leaves it open."""
    (site,) = (s for s in sites() if (s.transition, s.clause) == GUARD and s.kind == "guard")
    broken = Composition((), Encoding.sorted(), Mutant((site,)).functions)
    monkeypatch.setattr(Composition, "of", lambda *_: broken)

    found, _ = prove.named("version.one-fill")

    assert {"check_forward"} == {one.transition for one in found if not one.proved}
