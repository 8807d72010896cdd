"""
Guards deleted from the contract: the random machine or the explorer finds each within its budget.

Both take their expected refusals from the specification, so they notice that a deleted guard does
not refuse. If they read the source instead, the deletion would also remove the expectation.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

import qeffect
import qeffect.contract
from qeffect.engine.stage import Transitions, transitions
from qeffect.verification.coverage import COVERED
from qeffect.verification.explorer import run as explore
from qeffect.verification.explorer import standard_scopes, unwitnessed
from qeffect.verification.explorer.packing import OutOfRangeError
from qeffect.verification.mutants import Site, sites
from qeffect.verification.mutants.sites import Mutant
from qeffect.verification.walks import machine
from tests.profiles import few

#: Random schedules that a deleted guard must be found within.
BUDGET = 300

GUARDS = [site for site in sites() if site.kind == "guard"]

#: Guards that an earlier one always precedes where all relations are in force; the mutants show
#: where they are needed.
ALWAYS = {(entry.transition, entry.clause) for entry in COVERED if not entry.condition}

#: One guard of each relation, and one whose clause other transitions keep.
SAMPLE = [
    ("check_dgrad", "ownership.stale-reference"),
    ("read", "ownership.read-duplicate"),
    ("check_forward", "version.stale-cache"),
    ("check_dgrad", "order.token"),
    ("check_wgrad", "arena.in-flight"),
    ("check_wgrad", "completion.caller-to-graph"),
    ("start_reduction", "reduction.incomplete"),
    ("check_update", "epoch.not-final"),
    ("checkpoint", "persistence.live-tape"),
    ("abort_wgrad", "ownership.unknown-ticket"),
]


def without(site: Site, omit: tuple[str, ...] = ()) -> Transitions:
    """The transitions, with one guard deleted in one of them."""
    own = transitions(omit)
    if site.relation in omit:
        return own
    changed = transitions(omit, replaced=Mutant((site,)).replaced)
    return evolve(
        own, functions={**own.functions, site.transition: changed.functions[site.transition]}
    )


def found_at_random(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    """The random machine's report on a contract without a guard; empty if it finds nothing."""

    @cache
    def faulty(omit: frozenset[str]) -> Transitions:
        return without(site, tuple(sorted(omit)))

    monkeypatch.setattr(qeffect.contract, "transitions", lambda omit: faulty(frozenset(omit)))
    report = machine.run(BUDGET, seed=0, shrink=False)
    return report.failure.partition("\n")[0] or "; ".join(report.uncovered)


def found_by_exploring(site: Site) -> str:
    """The explorer's report on transitions without a guard; empty if it finds nothing."""
    reports = []
    for scope in standard_scopes().values():
        try:
            report = explore(scope, composed=without(site, scope.omit), witnesses=True)
        except OutOfRangeError as left:  # with every guard, each scope stays in its range
            return str(left)
        if report.violation is not None:
            return report.violation
        reports.append(report)
    return "; ".join(unwitnessed(reports))


def test_the_sample_is_of_guards() -> None:
    """Every guard of the sample exists exactly once."""
    for wanted in SAMPLE:
        assert 1 == [(site.transition, site.clause) for site in GUARDS].count(wanted)


def test_some_state_comes_to_every_guard() -> None:
    """A guard that an earlier guard always precedes is needed if some relation is left out."""
    assert {("check_refresh", "epoch.in-flight")} == ALWAYS
    reasons = [entry.why for entry in COVERED if not entry.condition]
    assert all("needed without the relation" in why for why in reasons)


@pytest.mark.parametrize(("transition", "clause"), few(SAMPLE, range(0, len(SAMPLE), 3)))
def test_the_random_machine_misses_a_deleted_guard(
    transition: str, clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a guard the machine misses an expected refusal, and names its clause."""
    (site,) = (s for s in GUARDS if (s.transition, s.clause) == (transition, clause))

    assert clause in found_at_random(site, monkeypatch)


def test_the_explorer_misses_a_deleted_guard() -> None:
    """A refusal that one transition no longer gives is named, even if other transitions give it."""
    site = next(s for s in GUARDS if (s.transition, s.clause) == ("bind", "version.wrong-epoch"))
    scope = standard_scopes()["stage-epochs"]
    whole, broken = explore(scope), explore(scope, composed=without(site))
    missing = set(unwitnessed([broken])) - set(unwitnessed([whole]))

    assert broken.violation is not None or "bind: version.wrong-epoch" in missing


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize(
    "site",
    [site for site in GUARDS if (site.transition, site.clause) not in ALWAYS],
    ids=lambda s: f"{s.transition}-{s.clause}",
)
def test_every_deleted_guard_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each deleted guard, the random machine finds the fault, or else the explorer."""
    assert found_at_random(site, monkeypatch) or found_by_exploring(site)


def delete_clause(folder: Path, clause: str) -> int:
    """Delete every guard of a clause from the kernel's files; return how many there were."""
    deleted = 0
    for room in ("relations", "engine"):
        for file in (folder / room).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    kept = [s for s in node.body if not _refuses(s, clause)]
                    deleted += len(node.body) - len(kept)
                    node.body = kept or [ast.Pass()]
            if deleted:
                file.write_text(ast.unparse(tree), encoding="utf-8")
    return deleted


def _refuses(statement: ast.stmt, clause: str) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Constant) and node.value == clause
        for inner in statement.body
        if isinstance(inner, ast.Raise)
        for node in ast.walk(inner)
    )


@pytest.mark.parametrize("clause", few(["ownership.stale-reference", "order.token"], (0,)))
def test_a_guard_deleted_in_the_source_fails_the_command(clause: str, tmp_path: Path) -> None:
    """``qeffect check --random`` on such a tree ends with exit code 1 and names the clause."""
    copied = tmp_path / "qeffect"
    ignored = shutil.ignore_patterns("__pycache__", "reports")
    shutil.copytree(Path(qeffect.__file__).parent, copied, ignore=ignored)
    assert delete_clause(copied, clause) > 0
    program = (
        "from qeffect.verification.walks import machine\n"
        "import qeffect; print(qeffect.__file__)\n"
        "machine._SHRINKING_SECONDS = 1.0\n"
        "import sys; from qeffect.cli import main; sys.exit(main(['check', '--random', '300']))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert str(copied) in ran.stdout, ran.stderr
    assert 1 == ran.returncode, ran.stderr
    assert clause in ran.stdout
