"""
Every public failure in the list has the outcome that its row states.

A refusal counts as evidence only if the same run without the reported step is accepted, and if the
refusal disappears with its guard. A failure may be listed as not caught only if the faulty run is
really accepted.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from attrs import evolve

from qeffect.cli import main
from qeffect.engine.compose import half_source
from qeffect.engine.stage import RELATIONS, Transitions, transitions
from qeffect.log.recorder import Recorder
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused
from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES
from qeffect.verification.failures import catalogue
from qeffect.verification.failures.catalogue import FAILURES
from qeffect.verification.failures.command import counts
from qeffect.verification.failures.failure import KINDS, Failure, FailureOutcome, Rows, run
from qeffect.verification.failures.history import History

BY_NAME = {failure.name: failure for failure in FAILURES}
REFUSED = [f.name for f in FAILURES if f.verdict == "refused"]
#: Refused by the contract, call by call, and not by the check of a table.
GUARDED = [n for n in REFUSED if not BY_NAME[n].clause.startswith("schedule.")]
ACCEPTED = [f.name for f in FAILURES if f.verdict != "refused" and f.enact is not None]
#: The counts that the README gives; a change of one is a change of what is claimed.
COUNTS = {
    "failures": 118,
    "refused": 96,
    "given_a_report": 60,
    "not_caught": 19,
    "unexplained": 3,
    "guessed": 29,
    "refused_by_guess": 2,
}
REFERENCE = re.compile(r"[\w-]+/[\w.-]+(#\d+|!\d+|@[0-9a-f]{8})")


def outcome(name: str) -> FailureOutcome:
    """What running a row gives."""
    return run(BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_a_failure_comes_out_as_its_row_states(name: str) -> None:
    """Running a row gives the verdict, the clause and the action that it states."""
    failure, found = BY_NAME[name], outcome(name)

    assert "" == found.problem
    assert (failure.verdict, failure.clause, failure.at) == (
        found.verdict,
        found.clause,
        found.at,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_the_mended_run_is_accepted(name: str) -> None:
    """With the reported step corrected, another run is accepted to its end."""
    found = outcome(name)

    assert found.legal is True
    assert found.difference()
    assert found.found != found.expected


@pytest.mark.parametrize("name", GUARDED)
def test_the_refused_call_changes_nothing(name: str) -> None:
    """The whole state is the same before and after, but for a tape that its own evidence aborts."""
    assert outcome(name).unchanged is True


@pytest.mark.parametrize("name", GUARDED)
def test_the_mended_run_ends_with_the_optimizer(name: str) -> None:
    """What is accepted is a whole optimizer step, not the beginning of one."""
    assert outcome(name).legal_steps[-1].endswith("optimizer")


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_not_caught_is_accepted(name: str) -> None:
    """The faulty run of what is not caught differs from the mended one and reaches its end."""
    found = outcome(name)

    assert "not caught" == found.verdict
    assert found.legal is True
    assert found.difference()
    assert found.steps[-1].endswith("optimizer")


@pytest.mark.parametrize("name", BY_NAME)
def test_a_row_says_where_and_why(name: str) -> None:
    """A row has well-formed references, and says what refuses it or why nothing does."""
    failure = BY_NAME[name]

    assert all(REFERENCE.fullmatch(known) for known in failure.references)
    assert all((failure.what, failure.cause, failure.consequence, failure.fix, failure.state))
    if failure.verdict == "refused":
        assert failure.clause in {**CLAUSES, **SCHEDULE_CLAUSES}
        assert not failure.kind
        assert not failure.why
    else:
        assert failure.kind in KINDS
        assert failure.why
        assert not failure.at


#: How a history notes what a runtime may leave out: what dW writes and where, what the device did,
#: a stream that is not the stage's own or the caller of all.
OPTIONAL = re.compile(
    r"overwrites|accumulates|writes to|on stream|scaling updates|scales of|drew from|"
    r"with weight|fills|"
    r"await an event"
)


@pytest.mark.parametrize("name", GUARDED)
def test_a_row_that_hangs_on_a_report_says_so(name: str) -> None:
    """A fault that only an optional argument shows is caught given that report only."""
    differs = any(OPTIONAL.search(line) for line in outcome(name).difference())

    assert bool(BY_NAME[name].reports) or not differs


def test_so_many_are_refused_not_caught_and_unexplained() -> None:
    """So many of the list are refused, not caught, and never explained."""
    found = counts((failure, run(failure)) for failure in FAILURES)

    assert found == {**found, **COUNTS}
    assert len(BY_NAME) == len(FAILURES)
    references = Counter(known for failure in FAILURES for known in failure.references)
    assert {1} == set(references.values())


def without(clause: str, transition: str) -> dict[str, ast.FunctionDef]:
    """Halves and helpers of a transition in which no statement refuses with a clause."""
    replaced = {}
    for relation, module in RELATIONS.items():
        for name, function in vars(module).items():
            of_it = name.startswith(transition) or name.startswith("require")
            if not of_it or getattr(function, "__module__", None) != module.__name__:
                continue
            source = deepcopy(half_source(function))
            kept = [s for s in source.body if f"'{clause}'" not in ast.unparse(s)]
            if len(kept) != len(source.body):
                source.body = kept
                replaced[f"{relation}.{name}"] = source
    return replaced


@cache
def lacks(clause: str, transition: str) -> Transitions:
    """The composed transitions without the guards of one clause in one transition."""
    replaced = without(clause, transition)
    assert replaced
    return transitions((), replaced)


@pytest.mark.parametrize("name", GUARDED)
def test_a_refusal_hangs_on_its_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard that a row names, the row no longer comes out as it states."""
    failure = BY_NAME[name]
    lacking = lacks(failure.clause, failure.at.split(" ")[0])
    module = import_module("qeffect.contract")
    monkeypatch.setattr(module, "transitions", lambda omit=(): lacking)

    found = run(failure)

    assert found.problem
    assert (failure.clause, failure.at) != (found.clause, found.at)


class Recorded(History):
    """A run whose calls are recorded."""

    recorder: Recorder

    def process(self, *stages: Any, **options: Any) -> None:
        super().process(*stages, **options)
        self.recorder = Recorder(self.contract)


@pytest.mark.parametrize("name", [*GUARDED, *ACCEPTED])
def test_the_log_of_a_run_is_accepted_so_far(name: str) -> None:
    """The event log of a run, faulty or mended, replays up to where the contract refused."""
    for faulty in (False, True):
        history = Recorded(faulty=faulty)
        enact = BY_NAME[name].enact
        assert enact is not None
        with suppress(Refused) if faulty else nullcontext():
            enact(history)
        history.recorder.close()
        report = replay_lines(history.recorder.lines)

        assert "accepted" == report.verdict
        assert report.events >= (1 if faulty else 10)


#: What a row must say in words, where a test makes one.
STORY = dict.fromkeys(("state", "what", "cause", "consequence", "fix"), "told")


class TestRun:
    """The instrument itself."""

    def test_another_clause_is_not_as_stated(self) -> None:
        """A row that states another clause, or another action, has a problem."""
        row = BY_NAME["megatron-lm-4047"]

        for wrong in (
            evolve(row, clause="ownership.key-live"),
            evolve(row, at="check_forward 0F0"),
            evolve(row, clause="", at="", kind="values", why="none"),
        ):
            assert "ownership.slot-busy" in run(wrong).problem

    def test_a_fault_that_is_not_there_is_not_as_stated(self) -> None:
        """A row whose faulty run is its legal one is found out, refused or not."""
        rows = Rows("ownership")

        @rows.enacted("none", clause="ownership.slot-busy", at="check_forward 0F1", **STORY)
        def nothing(h: History) -> None:
            h.process(microbatches=1)
            h.whole_step()

        (row,) = rows.rows

        assert "but its run gave not caught" in run(row).problem
        assert (
            "the faulty run makes the same calls as the corrected run"
            in run(evolve(row, clause="", at="", kind="values")).problem
        )

    def test_a_mended_run_that_is_refused_is_not_as_stated(self) -> None:
        """If the contract refuses both the faulty and the corrected run, the re-enactment proves
        nothing and reports this."""
        rows = Rows("ownership")

        @rows.enacted("both", clause="version.stale-cache", at="check_forward 0F0", **STORY)
        def both(h: History) -> None:
            h.process(microbatches=1)
            h.forward(0)

        found = run(rows.rows[0])

        assert "the corrected run is refused" in found.problem
        assert found.legal is False


class TestCommand:
    """``qeffect failures``."""

    def test_every_failure_has_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Every failure has a line with its reference and its outcome."""
        assert 0 == main(["failures"])
        out = capsys.readouterr().out

        for failure in FAILURES:
            (line,) = (x for x in out.splitlines() if x.startswith(f"  {failure.name} "))
            assert failure.references[0] in line
            assert f"refused by {failure.clause} at {failure.at}" in line or failure.why in line

    def test_json_has_a_row_for_each_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One object, with a row for each failure that was asked for and how many came out how."""
        assert 0 == main(["failures", "epoch", "NVIDIA/Megatron-LM#4047", "--json"])
        data = json.loads(capsys.readouterr().out)

        assert 6 == len(data["rows"]) == data["counts"]["failures"]
        row = data["rows"][0]
        assert ("megatron-lm-4047", "ownership.slot-busy") == (row["name"], row["clause"])
        assert ["- 0WAIT_SEND_F0"] == row["difference"]
        assert row["unchanged"]
        assert row["legal"]

    def test_one_in_full(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A failure that the command line names is shown with its cause, its guesses and the
        actions of the faulty run."""
        assert 0 == main(["failures", "megatron-lm-422"])
        out = capsys.readouterr().out

        row = BY_NAME["megatron-lm-422"]
        assert all(part in out for part in (row.cause, row.guessed, row.fix, "+ 0F1 in slot 0"))

    def test_one_that_is_not_as_stated_exits_with_1(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row that comes out otherwise is a violation, and is named."""
        wrong: Failure = evolve(BY_NAME["megatron-lm-4047"], clause="order.token")
        monkeypatch.setattr(catalogue, "FAILURES", (wrong,))

        assert 1 == main(["failures", "--json"])
        data = json.loads(capsys.readouterr().out)
        assert ("refused", "ownership.slot-busy") == (data["verdict"], data["clause"])
        assert "states refused by order.token" in data["rows"][0]["problem"]
        assert 1 == main(["failures"])
        assert "differs from its entry: megatron-lm-4047" in capsys.readouterr().out

    def test_an_unknown_name_exits_with_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        """An unknown name gives one line with similar names."""
        assert 2 == main(["failures", "deepspeed-28"])
        err = capsys.readouterr().err

        assert "no failure is named 'deepspeed-28'; did you mean deepspeed-2800?" in err
        assert 1 == len(err.splitlines())
