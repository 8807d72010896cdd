"""
The random machine: it covers everything, agrees with the kernel, and finds and shrinks faults.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import qeffect.contract
from qeffect import Contract, Refused
from qeffect.engine.compose import half_source
from qeffect.engine.stage import RELATIONS, TRANSITIONS, Transitions, transitions
from qeffect.spec.clauses import CLAUSES, DEVICE
from qeffect.spec.predicates import Register
from qeffect.verification import calls, explorer, walks
from qeffect.verification.coverage import CLAUSE_IDS, COVERED, TARGETS, TRANSITION_NAMES
from qeffect.verification.process import Process
from qeffect.verification.walks import driver, entities, machine, oracle, shadow
from qeffect.verification.walks.processes import PROCESSES
from tests.profiles import PROFILE, by_profile

#: Under ci nearly always enough for every transition and clause but one of the rarest; dev asks for
#: agreement alone.
SCHEDULES = by_profile(dev=30, ci=300)
#: How many runs may be made until nothing but the rarest is missed.
RUNS = 5
#: What takes two thousand schedules, as `make check` draws; deleting these guards is noticed apart.
RARE = {
    "clause completion.transfer-to-graph in check_forward",
    "clause completion.transfer-to-graph in check_dgrad",
    "clause completion.slot-not-awaited in post_receive",
    "clause version.wrong-fill in commit_forward",
}


@pytest.fixture(scope="module")
def report() -> machine.RandomReport:
    """One run, long enough to exercise everything."""
    return machine.run(SCHEDULES, seed=0)


class TestRun:
    def test_agrees_with_the_kernel(self, report: machine.RandomReport) -> None:
        """No legal call was refused, no illegal call accepted, and no refusal changed the state."""
        assert report.failure == ""
        assert report.schedules == SCHEDULES

    @pytest.mark.ci  # `make check` asks it of 2,000 schedules
    def test_reaches_every_clause(self, report: machine.RandomReport) -> None:
        """Every transition was accepted, and every clause refused in each of its transitions."""
        assert set(TRANSITIONS) == set(report.accepted)
        assert set(CLAUSE_IDS) == set(report.refused)
        missed = set(report.uncovered) - RARE
        never = {clause for clause, count in report.refused.items() if count == 0}
        idle = {name for name, count in report.accepted.items() if count == 0}
        assert len(missed) < 10
        if PROFILE != "nightly":  # one seed, which may leave a few out
            assert idle == set()
            assert len(never) < 4
            return

        for seed in range(1, RUNS):
            if missed or never or idle:
                again = machine.run(SCHEDULES, seed=seed)
                missed &= set(again.uncovered)
                never &= {clause for clause, count in again.refused.items() if count == 0}
                idle &= {name for name, count in again.accepted.items() if count == 0}

        assert missed == never == idle == set()

    @pytest.mark.ci
    def test_a_seed_draws_the_same_whatever_is_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The constants of a module that happens to be loaded change no schedule."""
        schedules = by_profile(dev=8, ci=20)
        before = machine.run(schedules, seed=3)
        (tmp_path / "constants_of_another.py").write_text(
            "NUMBERS = [" + ", ".join(str(n * n) for n in range(200, 300)) + "]\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "constants_of_another", raising=False)
        importlib.import_module("constants_of_another")
        after = machine.run(schedules, seed=3)

        assert (before.actions, before.accepted, before.refused) == (
            after.actions,
            after.accepted,
            after.refused,
        )

    def test_counts_add_up(self, report: machine.RandomReport) -> None:
        """Every call was accepted or refused; no check was accepted less often than its end."""
        assert report.actions > 100 * SCHEDULES
        for kind in ("refresh", "forward", "dgrad", "wgrad"):
            ends = report.accepted[f"commit_{kind}"] + report.accepted[f"abort_{kind}"]
            assert ends <= report.accepted[f"check_{kind}"]

    def test_report_is_plain(self, report: machine.RandomReport) -> None:
        """The report is JSON."""
        data = json.loads(json.dumps(report.asdict()))

        assert {
            "schedules",
            "actions",
            "accepted",
            "refused",
            "uncovered",
            "seconds",
            "actions_per_second",
            "failure",
        } == set(data)
        assert data["actions_per_second"] == pytest.approx(report.actions / report.seconds)

    def test_a_seed_names_a_run(self) -> None:
        """The same seed makes the same calls; another seed makes other calls."""
        schedules = by_profile(dev=6, ci=20)
        first, again, other = (machine.run(schedules, seed=seed) for seed in (3, 3, 4))

        assert (first.actions, first.refused) == (again.actions, again.refused)
        assert (first.actions, first.refused) != (other.actions, other.refused)

    def test_too_few_schedules(self) -> None:
        """A run that leaves something unexercised names it, and does not count as a check."""
        report = machine.run(1)

        assert report.failure == ""
        assert any(name.startswith("transition ") for name in report.uncovered)
        assert "clause order.reordered in check_forward" in report.uncovered

    def test_progress_is_told_schedule_by_schedule(self) -> None:
        """Progress is reported after each schedule."""
        told: list[str] = []
        machine.run(5, progress=told.append)

        assert len(told) == 5
        assert told[-1].startswith("Checking: 5 of 5 random schedules: ")


class TestTargets:
    def test_name_clauses_and_transitions_of_the_specification(self) -> None:
        """Every target is a clause and a transition of the specification."""
        assert {clause for _, clause in TARGETS} == set(CLAUSE_IDS) <= set(CLAUSES)
        never_refused = {"submit", "join", "wait", "drain"}
        assert {name for name, _ in TARGETS} == set(TRANSITION_NAMES) - never_refused
        assert len(TARGETS) == len(set(TARGETS)) > 140

    def test_leave_out_what_no_state_can_meet_and_nothing_else(self) -> None:
        """Every refusal in the specification is a target, unless no composition reaches it."""
        promised = {
            (name, clause.id)
            for clause in CLAUSES.values()
            for name in clause.transitions
            if name in TRANSITION_NAMES and clause.id not in DEVICE
        }

        assert promised - set(TARGETS) == {
            (entry.transition, entry.clause) for entry in COVERED if not entry.condition
        }

    @pytest.mark.parametrize("package", [walks, explorer], ids=lambda p: p.__name__)
    def test_no_search_reads_the_source_for_its_targets(self, package: Any) -> None:
        """Neither the machine nor the explorer takes its targets from the functions under test."""
        folder = Path(package.__file__).parent
        files = [*folder.glob("*.py")] if package is walks else [folder / "witnesses.py"]
        for file in files:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            assert not imported & {"ast", "inspect", "dependence", "half_source"}, file


class TestStateMachine:
    def test_rules_are_the_transitions(self) -> None:
        """The state machine has a rule for every transition, made from the table of transitions."""
        rules = {rule.function.__name__ for rule in machine.ContractMachine().rules}

        assert {*TRANSITIONS, "agree"} == rules


TestContractMachine = machine.ContractMachine.TestCase
# Each example is a run of many calls, so half of the examples of a profile are drawn here.
TestContractMachine.settings = settings(max_examples=max(25, settings.default.max_examples // 2))


class TestOracle:
    @pytest.mark.parametrize("module", [calls, entities, oracle, shadow])
    def test_asks_nothing_of_the_contract(self, module: Any) -> None:
        """The oracle and its shadow import no relation and read no memory of the contract."""
        tree = ast.parse(inspect.getsource(module))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

        assert not imported & {"Contract", "Memory", "transitions", *RELATIONS}
        assert not attributes & {"memory", "transitions", "snapshot"}

    def test_every_transition_has_a_rule(self) -> None:
        """The oracle judges every transition, including purge."""
        assert {*TRANSITIONS, "purge"} == set(oracle._RULES)


def _without(relation: str, half: str, text: str) -> dict[str, ast.FunctionDef]:
    """A relation's half without the statements that contain a text."""
    tree = copy.deepcopy(half_source(getattr(RELATIONS[relation], half)))
    kept = [node for node in tree.body if text not in ast.unparse(node)]
    assert len(kept) < len(tree.body)
    tree.body = kept
    return {f"{relation}.{half}": tree}


def _broken(monkeypatch: pytest.MonkeyPatch, relation: str, half: str, text: str) -> None:
    replaced = _without(relation, half, text)

    @cache
    def faulty(omit: frozenset[str]) -> Transitions:
        return transitions(omit, replaced=replaced)

    monkeypatch.setattr(qeffect.contract, "transitions", lambda omit: faulty(frozenset(omit)))


class TestFaults:
    """Kernels without some guard or write: the machine must find the fault in a few calls."""

    @pytest.mark.parametrize(
        ("relation", "half", "text", "message", "longest"),
        [
            (
                "ownership",
                "require_reference",
                "stale-reference",
                "ownership.stale-reference",
                10,
            ),
            (
                "order",
                "check_forward_guards",
                "order.token",
                "an illegal call was accepted; it breaks order.token",
                10,
            ),
            ("completion", "wait_writes", "waited", "a legal call was refused: completion.gr", 12),
            (
                "order",
                "commit_dgrad_writes",
                "busy",
                "a legal call was refused: order.in-flight",
                20,
            ),
            pytest.param(
                "reduction",
                "start_reduction_before_completion_guards",
                "reduction.duplicate",
                "reduction.duplicate",
                60,
                marks=pytest.mark.ci,
            ),
        ],
    )
    def test_found_and_shrunk(
        self,
        monkeypatch: pytest.MonkeyPatch,
        relation: str,
        half: str,
        text: str,
        message: str,
        longest: int,
    ) -> None:
        """A removed guard or write is found, and the failure is printed as a short schedule."""
        _broken(monkeypatch, relation, half, text)
        failure = machine.run(250, seed=1).failure
        calls = [line for line in failure.splitlines() if " -> " in line]

        assert message in failure.partition("\n")[0]
        assert len(calls) <= longest, failure
        assert "Schedule over " in failure
        assert "step " in failure
        assert re.search(r"^slot \d of stage \d \|", failure, re.MULTILINE)

    def test_a_refusal_that_changes_something(self) -> None:
        """A contract whose refusals change the state is found."""

        class Leaky(Contract):
            def finalize(self, stage: int, link: int = 0) -> None:
                try:
                    super().finalize(stage, link)
                except Refused:
                    self.memory.serial[0] += 1
                    raise

        def make(process: Process) -> Callable[..., Contract]:
            return lambda observer: Leaky(
                process.stages,
                omit=process.omit,
                callers=process.callers,
                capture_order=process.capture_order,
                declared=process.declared,
                generation_max=process.generation_max,
                observer=observer,
            )

        failure = machine.run(50, make=make).failure

        assert failure.startswith("the refused call changed the state")
        assert re.search(r"finalize\(stage=\d, link=\d\)  -> refused: ", failure)

    def test_an_invariant_that_breaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The specification's invariants are checked against the memory while schedules run."""
        impossible = Register()

        @impossible("ownership.nothing-lives", s="slot")
        def nothing_lives(st: Any, s: Any) -> Any:
            """No slot is ever used."""
            return st.consumers[s] == 0

        monkeypatch.setattr(driver, "INVARIANTS", impossible)
        failure = machine.run(40).failure

        told = re.match(
            r"the invariant ownership\.nothing-lives of \((\d+),\) does not hold\n", failure
        )
        assert told is not None
        used = re.findall(r"-> (?:ticket \d+ in )?slot (\d+)", failure)
        assert {told[1]} == {*used}  # the first tape or reservation, and the slot it was given


class TestProcesses:
    def test_every_mode_is_configured(self) -> None:
        """Together the processes leave out every optional relation and use every option."""
        stages = [config for process in PROCESSES for config in process.stages]

        assert {"version", "order", "arena", "capture", "completion", "reduction"} == {
            relation for process in PROCESSES for relation in process.omit
        }
        for option in ("sends_output", "sends_gradient", "reduces", "pool", "destinations"):
            assert any(getattr(config, option) for config in stages), option
        assert any(process.declared for process in PROCESSES)
        assert any(process.capture_order for process in PROCESSES)
        assert any(len(process.callers) > 1 for process in PROCESSES)
        assert any(len({c.domain for c in process.stages}) > 1 for process in PROCESSES)
        assert any(process.generation_max < 9 for process in PROCESSES)
