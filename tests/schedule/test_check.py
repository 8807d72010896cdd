"""
Verdicts: every action of a schedule goes through the contract, whose refusals become the verdict.
"""

from __future__ import annotations

import json

import pytest

from qeffect.schedule import check as module
from qeffect.schedule.actions import ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.pairing import DISCIPLINES
from qeffect.schedule.plan import plan
from qeffect.schedule.tables import fixture_names, read_fixture
from qeffect.schedule.te_order import te_order

from .edits import LOOP, ZBV, ZBV_COMMS, edited
from .faults import random_illegal
from .pairing_oracle import first_on_each_rank
from .pool_oracle import out_of_order
from .random_schedules import random_schedule


@pytest.mark.parametrize("name", fixture_names())
def test_torchs_tables_are_accepted(name: str) -> None:
    """Every shipped table keeps the whole contract, for two optimizer steps."""
    schedule = read_fixture(name)
    verdict = check(schedule)
    stages, microbatches = schedule.num_stages, schedule.num_microbatches

    assert ("accepted", ()) == (verdict.verdict, verdict.findings)
    assert 2 * 3 * stages * microbatches == verdict.actions
    assert 2 * stages == verdict.counts["refresh"] == verdict.counts["finalize"]
    assert 2 * schedule.num_ranks == verdict.counts["commit"] == verdict.counts["checkpoint"]


def test_stages_of_a_rank_feed_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of ZB-V holds stages 1 and 2: each rank's contract knows what a stage feeds there."""
    made = []
    own = module.Contract
    monkeypatch.setattr(module, "Contract", lambda stages: made.append(stages) or own(stages))
    check(read_fixture(ZBV))

    assert [{0: None, 3: None}, {1: 2, 2: None}] == [
        {config.stage: config.feeds for config in stages} for stages in made
    ]


class TestBinding:
    def test_latest_is_refused_by_the_contract(self) -> None:
        """The reference that `latest` presents is refused as another tape's, on rank 1."""
        verdict = check(read_fixture(ZBV), "latest")

        assert ("refused", "ownership.wrong-key", 1, 22, "1W2") == (
            verdict.verdict,
            verdict.clause,
            verdict.rank,
            verdict.step,
            verdict.action,
        )
        assert verdict.finding is not None
        assert [("1I2", "owner"), ("1I3", "picked")] == [
            (p.action, p.role) for p in verdict.finding.related
        ]
        assert "the reference of 1I2" in verdict.finding.expected
        assert "the reference of 1I3" in verdict.finding.found

    def test_one_queue_a_rank_is_refused_in_zbv_of_four_ranks(self) -> None:
        """One queue a rank is refused in ZB-V at PP=4, M=8, and not at PP=2, M=4."""
        larger = check(read_fixture("ScheduleZBVZeroBubble_pp4_vpp2_m8.compute.csv"), "global")

        assert ("ownership.wrong-key", 1, "1W5") == (larger.clause, larger.rank, larger.action)
        assert "accepted" == check(read_fixture(ZBV), "global").verdict

    @pytest.mark.parametrize("name", [n for n in fixture_names() if "_m64" not in n])
    def test_fifo_never_on_torchs_tables(self, name: str) -> None:
        """A queue a stage is right for every table of torch."""
        assert "accepted" == check(read_fixture(name), "fifo").verdict

    @pytest.mark.parametrize("pairing", sorted(DISCIPLINES))
    def test_agrees_with_the_oracle(self, pairing: str) -> None:
        """On every rank the contract refuses the first dW that the oracle says is mispaired."""
        refused = 0
        for seed in range(80):
            schedule = random_schedule(seed)
            verdict = check(schedule, pairing)
            wrong = first_on_each_rank(schedule, pairing)
            refused += verdict.verdict == "refused"

            assert [(m.rank, m.step, m.action) for m in wrong] == [
                (f.rank, f.step, f.action) for f in verdict.findings
            ]
            for mispaired, found in zip(wrong, verdict.findings, strict=True):
                (stage, own), (other, given) = mispaired.own, mispaired.given
                assert f"reference of {other}I{given} instead of {stage}I{own}" in found.message
                assert found.clause.startswith("ownership.")
        assert (refused > 0) is (pairing != "contract")

    def test_an_order_list_is_checked_as_one_rank(self) -> None:
        """An order list is checked as one rank."""
        order = "1,1,-1,-1,-1.5,-1.5"

        assert "accepted" == check(te_order(order)).verdict
        assert "ownership.wrong-key" == check(te_order(order), "latest").clause

    def test_an_unknown_discipline_is_refused_before_anything_runs(self) -> None:
        """An unknown pairing is refused before anything runs."""
        with pytest.raises(ScheduleError, match="unknown pairing 'x'"):
            check(read_fixture(ZBV), "x")


class TestCapture:
    @pytest.mark.parametrize("name", [n for n in fixture_names() if "_m64" not in n])
    def test_a_shared_pool_is_refused_where_the_oracle_says(self, name: str) -> None:
        """On torch's tables, ZB-V among them, a shared pool is refused at the oracle's places."""
        schedule = read_fixture(name)
        found = check(schedule, shared_pool=True, steps=1).findings

        assert [(f.rank, f.step) for f in found] == [
            (wrong.rank, wrong.step) for wrong in out_of_order(schedule)
        ]
        assert {f.clause for f in found} <= {"capture.out-of-order"}
        assert found or name != ZBV

    @pytest.mark.parametrize("seed", range(40))
    def test_agrees_with_the_oracle(self, seed: int) -> None:
        """On random schedules too, rank by rank, with messages and without."""
        schedule = random_schedule(seed)
        found = check(schedule, shared_pool=True).findings

        assert [(f.rank, f.step, f.action) for f in found] == [
            (wrong.rank, wrong.step, wrong.action) for wrong in out_of_order(schedule)
        ]


class TestTables:
    @pytest.mark.parametrize("seed", range(40))
    def test_legal_schedules_are_accepted_and_faulty_ones_refused(self, seed: int) -> None:
        """Random legal schedules are accepted; with one fault they are refused by its clause."""
        illegal = random_illegal(seed)

        assert "accepted" == check(illegal.original).verdict
        assert illegal.clause == check(illegal.schedule).clause

    def test_refused_table_runs_nothing(self) -> None:
        """A table that is wrong as such is not run."""
        verdict = check(edited(ZBV, lambda rows: rows[0].remove("3W2")))

        assert ("refused", "schedule.microbatch-missing", {}) == (
            verdict.verdict,
            verdict.clause,
            verdict.counts,
        )
        assert verdict.plan is None
        assert (0, None, None) == (verdict.rank, verdict.step, verdict.action)
        assert "unknown" == verdict.slots_text

    def test_reductions_and_sends_go_through(self) -> None:
        """Messages are readers and reductions are reductions."""
        counts = check(read_fixture(ZBV_COMMS), steps=1).counts

        assert (16, 4, 4) == (counts["send"], counts["reduce"], counts["finalize"])

    def test_a_rank_without_stages_has_no_contract(self) -> None:
        """A rank without stages has no contract."""
        verdict = check(edited(LOOP, lambda rows: rows.append([""])))

        assert "accepted" == verdict.verdict
        assert 4 == verdict.counts["commit"]

    def test_as_many_steps_are_taken_as_are_asked_for(self) -> None:
        """The number of optimizer steps is what is asked for, and at least one."""
        assert 3 * 2 == check(read_fixture(ZBV), steps=3).counts["commit"]
        with pytest.raises(ScheduleError, match="steps must be at least 1"):
            check(read_fixture(ZBV), steps=0)

    def test_too_few_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The plan's slots are just enough: with one less, a forward finds no free slot."""
        schedule = read_fixture(ZBV)
        planned = plan(schedule)
        for stage, slots in planned.slots.items():
            if slots == 1:
                continue

            class Short:
                slots = {**planned.slots, stage: planned.slots[stage] - 1}

                @staticmethod
                def record() -> dict[str, object]:
                    return {}

            monkeypatch.setattr(module, "plan", lambda schedule, short=Short: short)
            verdict = check(schedule)

            assert "ownership.pool-exhausted" == verdict.clause
            assert str(verdict.action).startswith(f"{stage}F")


class TestRecord:
    def test_the_record_of_an_accepted_schedule_has_its_plan(self) -> None:
        """The record of an accepted schedule is JSON with its plan."""
        record = json.loads(json.dumps(check(read_fixture(ZBV)).record()))

        assert "accepted" == record["verdict"]
        assert record["clause"] is None
        assert 2 == len(record["plan"]["ranks"])

    def test_the_record_of_a_refusal_has_its_place(self) -> None:
        """The record of a refusal has clause, rank, step and action at the top."""
        record = json.loads(json.dumps(check(read_fixture(ZBV), "latest").record()))

        assert ("refused", "ownership.wrong-key", 1, 22, "1W2", "latest") == tuple(
            record[k] for k in ("verdict", "clause", "rank", "step", "action", "pairing")
        )
        assert 1 == record["num_findings"]

    def test_is_the_same_every_time(self) -> None:
        """Nothing random of a contract gets into a pairing's record."""
        first, second = (check(read_fixture(ZBV), "latest").record() for _ in range(2))

        assert first == second

    def test_slots_are_listed_stage_by_stage(self) -> None:
        """Slots are listed stage by stage."""
        assert "0: 4, 1: 3, 2: 2, 3: 1" == check(read_fixture(ZBV)).slots_text
