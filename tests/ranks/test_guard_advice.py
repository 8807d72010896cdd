"""
The advice of the guards: cause and remedy are written for a person who trains with the guarded
framework.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType

import pytest
import torch.distributed as dist

from qeffect import Contract
from qeffect.engine.compose import source
from qeffect.engine.stage import transitions
from qeffect.guards import deepspeed, megatron, pipelining
from qeffect.guards.advice import (
    DEEPSPEED_ADVICE,
    MEGATRON_ADVICE,
    PIPELINING_ADVICE,
    Advice,
    AdviceTable,
    advised,
)
from qeffect.guards.judging import Judge
from qeffect.guards.reports import Reports, Violation
from qeffect.guards.torchtitan import guard_of, guarded
from qeffect.refusals import Refused, refused
from qeffect.spec.clauses import CLAUSES, SCHEDULE_CLAUSES
from tests.deepspeed import faults as deepspeed_faults
from tests.deepspeed import test_guard as deepspeed_runs
from tests.deepspeed.rank import put_under
from tests.docs.blocks import ROOT
from tests.megatron import faults as megatron_faults
from tests.megatron import test_guard as megatron_runs
from tests.megatron.stand_in import StandIn, installed
from tests.ranks.guard_bodies import Run, edit_row, leave_out
from tests.ranks.test_guard_evidence import BACKWARD, IL, ZBV
from tests.torchtitan import faults as torchtitan_faults
from tests.torchtitan import test_guard as torchtitan_runs
from tests.torchtitan.stand_in import Training, spec_of

TABLES: Mapping[str, AdviceTable] = {
    "megatron": MEGATRON_ADVICE,
    "deepspeed": DEEPSPEED_ADVICE,
    "pipelining": PIPELINING_ADVICE,
}
#: Faults of the stand-ins, one for each clause.
MEGATRON = {f.clause: n for n, f in megatron_faults.FAULTS.items()}
DEEPSPEED = {f.clause: n for n, f in deepspeed_runs.ALONE.items()}
TORCHTITAN = {clause: put for put, clause, _ in torchtitan_runs.FAULTS}
#: The clauses that the fault tests of each guard name.
NAMED = {
    "megatron": {
        *(f.clause for f in megatron_faults.FAULTS.values()),
        *(f.clause for f in megatron_faults.WIDE_FAULTS.values()),
        "order.scaling-updates",
    },
    "deepspeed": {*(f.clause for f in deepspeed_faults.FAULTS.values()), "epoch.not-final"},
    "pipelining": {
        *(f.clause for f in torchtitan_faults.FAULTS.values()),
        *TORCHTITAN,
        *("ownership.work-not-queued", "ownership.stale-reference"),
        *("order.incomplete", "order.reordered", "reduction.incomplete", "reduction.missing"),
    },
}
#: What the guards leave out of their contracts, at least.
OMITTED = ("arena", "capture", "completion")
#: The contract's transitions that the guards run.
ASKED = (
    *("reserve", "post_receive", "finish_receive", "read", "finish_read"),
    *("check_forward", "commit_forward", "abort_forward"),
    *("check_dgrad", "commit_dgrad", "abort_dgrad"),
    *("check_wgrad", "commit_wgrad", "abort_wgrad"),
    *("finalize", "start_reduction", "finish_reduction", "next_walk"),
    *("check_update", "commit_update", "abort_update", "checkpoint"),
)

each_table = pytest.mark.parametrize("name", TABLES)


def reached() -> set[str]:
    """The clauses that the transitions of a guard's contract can refuse by."""
    functions = transitions(OMITTED).functions
    texts = [source(functions[name]) for name in ASKED]
    return {c for text in texts for c in re.findall(r"['\"]([a-z]+\.[a-z-]+)['\"]", text)}


def raised() -> set[str]:
    """The clauses that the guards' own code names."""
    found = set[str]()
    for path in sorted((ROOT / "gpu_runtime" / "guards").glob("*.py")):
        if path.name != "advice.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} & set(CLAUSES)
    return found


class TestTable:
    """Each guard has advice for every clause that it can refuse by."""

    @each_table
    def test_every_clause_has_advice(self, name: str) -> None:
        """Those of the fault tests, of the guards' own code, and of the contract's transitions."""
        wanted = NAMED[name] | raised() | reached() | set(SCHEDULE_CLAUSES)
        assert len(wanted) > 100

        assert set() == wanted - set(TABLES[name])
        assert set() == set(TABLES[name]) - set(CLAUSES) - set(SCHEDULE_CLAUSES)

    @each_table
    def test_a_clause_of_a_fault_has_advice_of_its_own(self, name: str) -> None:
        """Neither the contract's advice nor the advice for a guard that is at fault itself."""
        lost = TABLES[name]["ownership.unknown-ticket"]
        for clause in NAMED[name] & set(CLAUSES):
            advice = TABLES[name][clause]
            assert advice != lost
            assert advice.cause != CLAUSES[clause].cause
            assert advice.remedy != CLAUSES[clause].remedy

    @each_table
    def test_no_advice_names_a_call_of_the_contract(self, name: str) -> None:
        """The person calls the framework; the words `tape` and `dI` are the contract's, too."""
        calls = {n for n in dir(Contract) if not n.startswith("_")}
        assert {"first_writer", "check_forward", "commit_epoch", "update"} <= calls
        wrong = []
        for clause, advice in TABLES[name].items():
            if clause in SCHEDULE_CLAUSES:
                continue  # about a table of actions, not about a call
            for text in (advice.cause, advice.remedy):
                quoted = re.findall(r"`([^`]*)`", text)
                named = {re.split(r"[.(]", each.split("(")[0])[-1] for each in quoted}
                named |= set(re.findall(r"\w+_\w+", text))
                if named & calls or re.search(r"\b(contract|tapes?|slots?|dI|dW)\b", text):
                    wrong.append((clause, text))

        assert [] == wrong

    @each_table
    def test_texts_are_whole_sentences(self, name: str) -> None:
        """No place for a word is left open."""
        for advice in TABLES[name].values():
            for text in (advice.cause, advice.remedy):
                assert re.fullmatch(r"[A-Z`][^{}]*\.", text), text
                assert "  " not in text

    def test_megatrons_advice_names_its_calls(self) -> None:
        """The refusals that a person of Megatron-core sees name what this person can call."""
        for clause, call in (
            ("arena.stale-accumulation", "zero_grad_buffer()"),
            ("arena.overwrite", "zero_grad_buffer()"),
            ("ownership.key-live", "forward_only=True"),
            ("completion.weights-in-use", "schedule_async_request()"),
            ("reduction.missing", "finalize_model_grads"),
        ):
            assert call in MEGATRON_ADVICE[clause].remedy


def refuse_wrong_key() -> None:
    raise refused("ownership.wrong-key", "check_dgrad", "a", "b")


class TestJudge:
    """The judge puts the advice on a refusal, in both manners."""

    table: Mapping[str, Advice] = {"ownership.wrong-key": Advice("A hook.", "Remove the hook.")}

    def judge(self, reports: Reports | None) -> Judge:
        return Judge(reports, lambda: 1, lambda: None, self.table)

    def test_a_refusal(self) -> None:
        with pytest.raises(Refused, match=r"Likely cause: A hook\. What to do: Remove") as caught:
            self.judge(None)("B", refuse_wrong_key)

        assert "Remove the hook." == caught.value.record().remedy

    def test_a_report(self) -> None:
        judge = self.judge(Reports())
        judge("B", refuse_wrong_key)

        (violation,) = judge.violations
        assert ("A hook.", "Remove the hook.") == (violation.cause, violation.remedy)
        assert str(violation) == (
            "ownership.wrong-key on pipeline rank 1, step 0, at B: found a; expected b. "
            "Likely cause: A hook. What to do: Remove the hook."
        )

    def test_a_refusal_keeps_its_own_advice(self) -> None:
        """Where the guard knows a more exact remedy, this remedy stays."""

        def refuse() -> None:
            raise refused("ownership.wrong-key", "f", "a", "b").advise("Mine.", "This.")

        with pytest.raises(Refused, match=r"Likely cause: Mine\. What to do: This\."):
            self.judge(None)("B", refuse)

    def test_a_clause_without_advice(self) -> None:
        """The message is about the guard, not about the contract."""
        record = advised(refused("epoch.not-begun", "f", "a", "b"), self.table).record()

        assert PIPELINING_ADVICE["ownership.unknown-ticket"].remedy == record.remedy

    def test_a_violation_without_cause_and_remedy(self) -> None:
        violation = Violation("order.token", 0, 1, "F", "a", "b")

        assert ("", "") == (violation.cause, violation.remedy)
        assert str(violation).endswith("found a; expected b")

    def test_a_refusal_of_the_contract_is_as_before(self) -> None:
        """Outside of a guard the clause's own cause and remedy are shown."""
        clause = CLAUSES["ownership.wrong-key"]
        with pytest.raises(Refused) as caught:
            refuse_wrong_key()

        assert str(caught.value).endswith(
            f"Likely cause: {clause.cause} What to do: {clause.remedy}"
        )


def check_text(text: str, clause: str, table: AdviceTable) -> None:
    """Check that a message ends with the guard's advice, and has nothing of the contract's."""
    advice = table[clause]
    assert text.endswith(f". Likely cause: {advice.cause} What to do: {advice.remedy}")
    if clause in CLAUSES:
        assert CLAUSES[clause].remedy not in text


def check_message(
    manner: str,
    clause: str,
    table: AdviceTable,
    train: Callable[[], object],
    violations: Callable[[], Sequence[Violation]],
) -> None:
    """
    Check what a person reads of a fault: the refusal, or the first violation that is reported.

    Args:
        manner: The guard's manner.
        clause: The clause that the fault breaks.
        table: The guard's advice.
        train: Trains until the fault has happened.
        violations: Returns what was reported.
    """
    if manner == "refuse":
        with pytest.raises(Refused) as caught:
            train()
        assert clause == caught.value.clause
        text = str(caught.value)
    else:
        train()
        text = str(violations()[0])
    check_text(text, clause, table)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The stand-in for Megatron-core."""
    yield installed(monkeypatch)
    for each in list(megatron._active):
        each.remove()


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, which is the whole pipeline."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestMessages:
    """What a person reads when a fault is refused or reported: one fault for each clause."""

    @pytest.mark.parametrize("clause", MEGATRON)
    def test_megatron(self, clause: str, made: dict[str, ModuleType]) -> None:
        name = MEGATRON[clause]
        fault = megatron_faults.FAULTS[name]
        for manner in ("refuse", "report"):
            run = StandIn(made, megatron_faults.CASES[fault.case], fault.ranks[0])
            with megatron_runs.put(name, run, manner=manner) as guard:
                check_message(
                    manner,
                    clause,
                    MEGATRON_ADVICE,
                    partial(megatron_runs.steps, run),
                    partial(getattr, guard, "violations"),
                )

    @pytest.mark.parametrize("clause", DEEPSPEED)
    def test_deepspeed(self, clause: str) -> None:
        name = DEEPSPEED[clause]
        fault = deepspeed_faults.FAULTS[name]
        for manner in ("refuse", "report"):
            engine = deepspeed_runs.engine_of(name, fault.ranks[0])
            guard = deepspeed.guard(engine, manner=manner)  # type: ignore[arg-type]
            put_under(guard, engine, fault.put)
            check_message(
                manner,
                clause,
                DEEPSPEED_ADVICE,
                partial(deepspeed_runs.steps, engine),
                partial(getattr, guard, "violations"),
            )

    @pytest.mark.parametrize("clause", TORCHTITAN)
    def test_torchtitan(self, clause: str, alone: None) -> None:
        put: Callable[[Training], None] = TORCHTITAN[clause]
        for manner in ("refuse", "report"):
            own = Training(
                guarded(spec_of(IL), manner=manner),  # type: ignore[arg-type]
                walks=2,
                optimizer="foreach",
            )
            torchtitan_runs._faulty(own, put)
            check_message(
                manner,
                clause,
                PIPELINING_ADVICE,
                partial(torchtitan_runs._two_steps, own),
                partial(getattr, guard_of(own), "violations"),
            )

    def test_pipelining(self, alone: None, caplog: pytest.LogCaptureFixture) -> None:
        for manner in ("refuse", "report"):
            run = Run(ZBV, ranks=1)
            guard = pipelining.guard(run.schedule, manner=manner)  # type: ignore[arg-type]
            leave_out(run, BACKWARD)
            check_message(
                manner,
                "epoch.device-count",
                PIPELINING_ADVICE,
                partial(run.step, 0),
                partial(getattr, guard, "violations"),
            )
        assert PIPELINING_ADVICE["epoch.device-count"].remedy in caplog.text

    def test_a_wrong_table(self, alone: None) -> None:
        """The report says what was expected, and in its own place what to do."""
        run = Run(ZBV, ranks=1)
        edit_row(run, lambda row: row.remove("1W3"))
        (violation,) = pipelining.guard(run.schedule, manner="report").violations

        assert "schedule.microbatch-missing" == violation.clause
        assert SCHEDULE_CLAUSES[violation.clause].remedy == violation.remedy
        assert violation.remedy not in violation.expected
        check_text(str(violation), violation.clause, PIPELINING_ADVICE)
