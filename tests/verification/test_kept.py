"""
What depends on each clause: functions, promises, logs and tests, from code, reports and solver.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qeffect.spec import document
from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES
from qeffect.spec.guards import GUARDS
from qeffect.spec.promises import CHANGES, LEGAL, MEMORY, STEPS, WORLD
from qeffect.spec.ranks import RANK_PROMISES, RANK_STEPS
from qeffect.verification import kept
from qeffect.verification.induction import HISTORY, INVARIANTS, LEMMAS
from qeffect.verification.mutants import sites_with
from tests.docs.blocks import ROOT
from tests.docs.links import inlined, unlinked
from tests.profiles import few

DATA = document.kept()
PAGE = Path(document.__file__).with_name("contract.md")
CONTRACT = unlinked(inlined(PAGE.read_text(encoding="utf-8")))

WIDTHS = "verification/proofs/theorems.py: widths"


def test_the_file_is_current() -> None:
    """Guards, functions, logs, faults, failures and tests; slow tests also run the solver again."""
    assert 0 == kept.main(["--check"])


def test_the_runtime_and_patterns_of_messages_are_read() -> None:
    """The search finds a runtime guard that raises a clause, and a test that escapes its dots."""
    row = kept.places()["ownership.work-not-queued"]

    runtime = "guards/pipelining_evidence.py: StageEvidence.check_split"
    assert [runtime] == row["also_raised_by"]
    assert "tests/kernel/test_tickets.py" in row["tests"]


def test_it_has_every_guard_of_every_transition() -> None:
    """The file lists each clause as often as its transition checks it."""
    found: dict[str, list[str]] = {name: [] for name in GUARDS}
    for row in DATA["guards"]:
        found[row["transition"]].append(row["clause"])

    wanted = {name: sorted(clauses) for name, clauses in GUARDS.items()}
    assert wanted == {name: sorted(clauses) for name, clauses in found.items()}


@pytest.mark.parametrize("clause", [*CLAUSES, *SCHEDULE_CLAUSES])
def test_every_clause_has_a_function_a_reason_and_a_test(clause: str) -> None:
    """Functions raise it, its tests exist, and a promise or lemma fails without its guard."""
    row = DATA["clauses"][clause]
    assert row["raised_by"]
    assert row["tests"]
    assert [] == [path for path in row["tests"] if not (ROOT / path).is_file()]
    guards = [guard for guard in DATA["guards"] if guard["clause"] == clause]
    for guard in guards:
        assert 1 == len({"promises", "lemmas", "otherwise"} & guard.keys())
        assert guard.get("promises") or guard.get("lemmas") or guard.get("otherwise")
        assert set(guard.get("promises", ())) <= kept.PROMISES
        assert not kept.PROMISES & set(guard.get("lemmas", ()))

    assert bool(guards) is any(clause in clauses for clauses in GUARDS.values())

    text = CONTRACT.partition(f"\n`{clause}` (")[2].partition("\n### ")[0].partition("\n## ")[0]
    (line,) = re.findall(r"^- \*Raised by\* (.*)$", text, re.MULTILINE)
    (shown,) = re.findall(r"^- \*Shown by\* (.*)$", text, re.MULTILINE)
    named = {place.rpartition(": ")[2] for place in row["raised_by"]}
    named |= {name for guard in guards for name in guard.get("promises", ())}
    assert [] == [name for name in named if f"`{name}`" not in line]
    assert ("no promise depends on this clause" in line) is not bool(guards)
    killed = f"- *Mutation tests:* `qeffect prove --only {clause}`, and `pytest -m slow "
    assert (killed in text) is bool(guards) is bool(sites_with(clause))
    names = (*row["tests"], *row["failures"], *row["faults"])
    assert [] == [name for name in names if f"`{name}`" not in shown]
    assert [] == [path for path in row["logs"] if f"({path})" not in shown]


@pytest.mark.parametrize("name", sorted({n for g in DATA["guards"] for n in g.get("promises", ())}))
def test_every_promise_names_the_clauses_that_it_needs(name: str) -> None:
    """The contract lists, for each promise, exactly the clauses whose guards it needs."""
    wanted = {guard["clause"] for guard in DATA["guards"] if name in guard.get("promises", ())}
    row = rf"^- `{re.escape(name)}`.* \*Relies on\* the clauses? (.*)\. \*Proved by\* "
    (line,) = re.findall(row, CONTRACT, re.MULTILINE)

    assert wanted == set(line.replace("`", "").split(", "))


def test_every_promise_has_the_obligations_of_its_kind() -> None:
    """Of a promise that always holds these are two kinds; a transition's promise has a step."""
    wanted = {
        **{p.name: {"initial", "inductive"} for p in (*MEMORY, *WORLD, *RANK_PROMISES)},
        **{p.name: {"step"} for p in (*STEPS, *RANK_STEPS)},
        **{p.name: {"change"} for p in CHANGES},
        **{p.name: {"complete"} for p in LEGAL},
    }
    for name, kinds in wanted.items():
        found = {kind for made in DATA["proofs"][name]["obligations"].values() for kind in made}
        assert kinds == found - {"width"}, name

    assert {"width"} <= {*DATA["proofs"]["ownership.right-reference"]["obligations"][WIDTHS]}


def test_a_proof_names_lemmas_and_promises_that_always_hold() -> None:
    """What a proof uses is a lemma of the induction, or an invariant that is promised."""
    always = {p.name for p in (*INVARIANTS, *HISTORY)}
    lemmas = {p.name for p in LEMMAS}
    assert lemmas == DATA["lemmas"].keys()
    for name, row in DATA["proofs"].items():
        assert {*row.get("from", ())} <= always - ({name} - lemmas), name

    assert ["order.scaled-by"] == DATA["proofs"]["order.one-set-of-scales"]["from"]


@pytest.mark.parametrize("clause", few(["arena.duplicate-bind", "arena.spoiled"], (), (0,)))
def test_the_promises_of_a_guard_are_those_that_the_solver_refutes(clause: str) -> None:
    """Checked for bind, whose proofs are fast; the slow tests check all transitions."""
    guards = [s for s in kept.guard_sites() if (s.transition, s.clause) == ("bind", clause)]
    wanted = [r for r in DATA["guards"] if (r["transition"], r["clause"]) == ("bind", clause)]

    assert wanted == kept.rows(guards, kept.predicates_without(guards))
    assert wanted[0]["promises"]


def test_a_guard_that_nothing_is_known_of_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guard without recorded promises is named, and the file is not written."""
    path = tmp_path / "kept.json"
    text = json.dumps({**DATA, "guards": DATA["guards"][1:]})
    path.write_text(text)
    monkeypatch.setattr(kept, "FILE", path)

    assert 1 == kept.main([])
    assert "ownership.pool-exhausted" in capsys.readouterr().out
    assert text == path.read_text()


def test_a_stale_file_is_told_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An outdated list of tests is reported and rewritten; the solver's results are kept."""
    path, whole = tmp_path / "kept.json", kept.FILE.read_text(encoding="utf-8")
    clauses = {**DATA["clauses"], "log.chain": {**DATA["clauses"]["log.chain"], "tests": []}}
    path.write_text(json.dumps({**DATA, "clauses": clauses}))
    monkeypatch.setattr(kept, "FILE", path)

    assert 1 == kept.main(["--check"])
    assert "is out of date; run python -m" in capsys.readouterr().out
    assert 0 == kept.main([])
    assert whole == path.read_text()


def test_an_installed_package_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the tests beside it, an installed package must not rewrite the file."""
    monkeypatch.setattr(kept, "FILE", tmp_path / "kept.json")
    monkeypatch.setattr(kept, "_TESTS", tmp_path / "tests")

    assert 1 == kept.main([])
    assert "run this in a checkout" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
