"""
Every guard, every operand of a guard and every state update is needed; the sweep shows it.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.engine.compose import source
from qeffect.engine.stage import TRANSITIONS, Transitions, transitions
from qeffect.verification import mutants
from qeffect.verification.concrete_run import ConcreteRun
from qeffect.verification.mutants import Mutant, MutantReport, MutantVerdict, Site, sites
from qeffect.verification.mutants.corpus import legal_schedules

pytestmark = pytest.mark.slow(minutes=5)


#: Deleted in turn, and all killed: change these when the contract changes, after reading what
#: survives. The failing test prints the new numbers.
MUTANTS = {"guard": 285, "operand": 279, "update": 300, "condition": 28}
#: In how many tests the legal schedules run; counting them would take long at each collection.
PARTS = 16
#: In how many parts the sweep runs: each searches the same states, for the mutants of some
#: transitions.
SWEEPS = 32
#: A transition with a mutant of each class of kills.
CLASSES = {
    "state": "commit_forward",
    "history": "check_forward",
    "step": "check_dgrad",
    "legal": "check_forward",
    "clause": "check_wgrad",
}

ROOT = Path(__file__).parents[2]


def shares(number: int) -> list[tuple[str, ...]]:
    """All transitions in a number of groups with about as many mutants each, the largest first."""
    sizes = Counter(site.transition for site in sites())
    groups: list[list[str]] = [[] for _ in range(number)]
    for transition, _ in sizes.most_common():
        min(groups, key=lambda group: sum(sizes[name] for name in group)).append(transition)
    return [tuple(group) for group in groups]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(share, marks=pytest.mark.xdist_group(f"sweep-{share[0]}"), id=share[0])
        for share in shares(SWEEPS)
    ],
)
def share(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The transitions of one part of the sweep."""
    chosen: tuple[str, ...] = request.param
    return chosen


@pytest.fixture(scope="module")
def report(share: tuple[str, ...]) -> MutantReport:
    """The report of one part of the sweep, made once."""
    return mutants.run(among=share)


def run(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process, in another folder."""
    path = tmp_path / "counterexample.py"
    path.write_text(program)
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)


# What is deleted


def test_as_many_as_pinned() -> None:
    """The number of mutants of each kind is as pinned here."""
    assert MUTANTS == Counter(site.kind for site in sites())


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_nothing_is_left_out(transition: str) -> None:
    """Every refusal and every write of the composed function can be deleted."""
    source = inspect.getsource(transitions().functions[transition])
    tree = list(ast.walk(ast.parse(source)))
    raises = [node for node in tree if isinstance(node, ast.Raise)]
    stored = [
        node
        for node in tree
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    ]
    filled = [
        node
        for node in tree
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "fill"
    ]
    ours = [site for site in sites() if site.transition == transition]

    assert len(raises) == sum(site.kind == "guard" for site in ours)
    assert len(stored) + len(filled) == sum(site.kind == "update" for site in ours)


def test_every_mutant_is_another_function() -> None:
    """Each deletion changes the source of exactly one half."""
    own = transitions()
    for site in sites():
        mutant = Mutant((site,))

        assert [site.half] == list(mutant.source())
        assert source(mutant.function) != source(own.functions[site.transition]), str(site)


# What became of them


def test_every_transition_is_in_one_part() -> None:
    """Together the parts cover the whole sweep."""
    assert sorted(TRANSITIONS) == sorted(name for group in shares(SWEEPS) for name in group)


def test_every_mutant_is_killed(report: MutantReport, share: tuple[str, ...]) -> None:
    """Every mutant of these transitions is killed."""
    expected = sum(site.transition in share for site in sites())

    assert [] == report.survivors
    assert expected == report.mutants == report.killed == sum(report.by_class.values())


def test_every_kill_is_concrete(report: MutantReport) -> None:
    """Every mutant is killed by a call in a reachable state."""
    assert not [verdict for verdict in report.verdicts if verdict.kind == "induction"]
    assert all(verdict.probe is not None for verdict in report.verdicts)


def test_none_is_equivalent(report: MutantReport) -> None:
    """
    No mutant is equivalent to the contract: guards that were proved superfluous are deleted.

    Deleted were: the weight epoch in dI and dW, since a live tape has the current epoch; a busy
    domain in commit, checkpoint and restore, since it has a live tape or a refresh in flight; F in
    finalize, since every dI had an F; the stage's own buffer in dW, since the shared buffer is
    written with it.
    """
    assert [] == [str(verdict.mutant.site) for verdict in report.equivalent]


def test_report_is_plain(report: MutantReport) -> None:
    """The report as a dictionary has the same figures."""
    data = report.asdict()

    assert (report.mutants, report.killed) == (data["mutants"], data["killed"])
    assert report.mutants == len(data["verdicts"])
    assert {"half", "kind", "deleted", "clause", "verdict", "by"} <= data["verdicts"][0].keys()


def test_every_class_of_kills_is_met(report: MutantReport, share: tuple[str, ...]) -> None:
    """Each class has mutants of the transition named for it."""
    met = {(verdict.kind, verdict.mutant.site.transition) for verdict in report.verdicts}

    assert {(kind, name) for kind, name in CLASSES.items() if name in share} <= met


def by_class(report: MutantReport) -> dict[str, list[MutantVerdict]]:
    """The verdicts of each class."""
    found: dict[str, list[MutantVerdict]] = {}
    for verdict in report.verdicts:
        found.setdefault(verdict.kind, []).append(verdict)
    return found


def test_counterexamples_of_each_class_run_as_programs(
    report: MutantReport, tmp_path: Path
) -> None:
    """The counterexamples of each class are programs that show the stated fault."""
    for found in by_class(report).values():
        done = run(mutants.program(found[len(found) // 2]), tmp_path)

        assert 0 == done.returncode, done.stderr
        assert "the contract: " in done.stdout


def test_every_counterexample_shows_what_it_says(report: MutantReport) -> None:
    """Each program runs to its end: the contract breaks nothing there, and the mutant does."""
    for verdict in report.verdicts:
        program = mutants.program(verdict)
        with redirect_stdout(StringIO()) as printed:
            exec(compile(program, str(verdict.mutant.site), "exec"), {})

        assert "the mutant: " in printed.getvalue()


def test_counterexamples_fail_without_the_fault(report: MutantReport, tmp_path: Path) -> None:
    """The same programs fail when the contract stands in the mutant's place."""
    for verdict, *_ in by_class(report).values():
        program = mutants.program(verdict)
        begin, end = program.index("BROKEN = {"), program.index("contract = ")
        done = run(program[:begin] + "BROKEN = {}\n" + program[end:], tmp_path)

        assert 1 == done.returncode
        assert "AssertionError" in done.stderr


# That the sweep can fail


class Harmless(Mutant):
    """A mutant that equals the contract."""

    @property
    def function(self) -> Callable[..., Any]:  # type: ignore[override]
        """The contract's own transition."""
        return transitions(self.omit).functions[self.site.transition]

    @property
    def functions(self) -> Transitions:  # type: ignore[override]
        """The contract's own transitions."""
        return transitions(self.omit)


def test_a_guard_that_nobody_needs_survives() -> None:
    """A deletion that changes nothing is proved equivalent, so the guard is not justified."""
    site = Site("submit", "completion.submit_guards", "guard", "no")
    verdict = mutants.judge(Harmless((site,)), ("submit",))

    assert ("equivalent", False) == (verdict.kind, verdict.justified)
    assert [verdict] == MutantReport([verdict]).survivors


def test_a_survivor_is_reported() -> None:
    """A mutant that nothing distinguishes is reported as a survivor, with the reason."""
    verdict = MutantVerdict(
        Mutant((sites()[0],)), "survived", "no difference from the contract was found"
    )

    assert [verdict] == MutantReport([verdict]).survivors
    assert 0 == MutantReport([verdict]).killed


# What the kills rest on


@pytest.mark.parametrize("part", range(PARTS))
def test_legal_schedules_keep_every_promise(part: int) -> None:
    """The contract accepts every legal schedule, and no promise fails on the way."""
    chosen = legal_schedules()[part::PARTS]
    assert chosen
    for process, actions in chosen:
        functions = transitions()
        run = ConcreteRun(process, relations=frozenset(functions.relations))

        for name, arguments in actions:
            assert [] == list(run.broken_steps(name, arguments)), (name, arguments)
            run.take(name, functions.functions[name], arguments)
            assert [] == list(run.broken_invariants()), (name, arguments)


def test_legal_schedules_make_every_call() -> None:
    """The legal schedules use every transition."""
    made = {name for _, actions in legal_schedules() for name, _ in actions}

    assert set(TRANSITIONS) == made


# The command


def test_the_command_counts_and_writes_a_program_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``qeffect prove --only`` counts its mutants and writes a program for each, without proofs."""
    programs = tmp_path / "programs"
    argv = ["prove", "--only", "submit_writes", "--programs", str(programs), "--json"]
    code = main(argv)
    data = json.loads(capsys.readouterr().out)
    expected = mutants.run(only="submit_writes").verdicts

    assert 0 == code
    assert 0 < len(expected) == data["mutants"] == data["killed"] == len(list(programs.iterdir()))
    assert [v.kind for v in expected] == [v["verdict"] for v in data["mutant_report"]["verdicts"]]
    assert "obligations" not in data
