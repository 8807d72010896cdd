"""
Checks across ranks and within them: each clause refuses its own fault, and only that check does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest

from qeffect.schedule import ranks
from qeffect.schedule.actions import Schedule
from qeffect.schedule.check import check
from qeffect.schedule.findings import SCHEDULE_CLAUSES
from qeffect.schedule.infer import from_actions
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.tables import fixture_names, parse_table, read_fixture
from qeffect.schedule.transport import Transport

from .edits import LOOP, ZBV, ZBV_COMMS, Rows, findings_after, move
from .faults import FAULTS, random_illegal
from .random_schedules import random_schedule

#: What breaks the clauses that no single edit of a random schedule breaks.
BY_HAND: Mapping[str, tuple[Schedule, Transport | None]] = {
    "schedule.stage-missing": (parse_table("0F0,0I0,0W0\n", num_stages=2), None),
    "schedule.action-after-reduction": (
        from_actions([["0F0", "0B0", "0REDUCE_GRAD", "0F1", "0B1"]]),
        None,
    ),
    "schedule.outstanding-sends": (
        from_actions(
            [
                ["0F0", "0SEND_F0", "0WAIT_SEND_F0", "0RECV_B0", "0B0"],
                ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1WAIT_SEND_B0"],
            ]
        ),
        Transport(max_outstanding_sends=0),
    ),
}


@pytest.mark.parametrize("name", fixture_names())
def test_torchs_tables_have_no_findings(name: str) -> None:
    """Every shipped table is fine."""
    assert () == check_ranks(read_fixture(name))


def first(
    name: str, edit: Callable[[Rows], object]
) -> tuple[str, int | None, int | None, str | None]:
    """Clause and place of the first finding after an edit."""
    found = findings_after(name, edit)[0]
    return found.clause.removeprefix("schedule."), found.rank, found.step, found.action


class TestPlaces:
    def test_stage_out_of_range(self) -> None:
        """A stage that the pipeline does not have."""

        def edit(rows: Rows) -> None:
            rows[1][5] = "9F1"

        assert ("stage-out-of-range", 1, 5, "9F1") == first(ZBV, edit)

    def test_stage_on_wrong_rank(self) -> None:
        """An action in another rank's row gives one finding; its absence at home gives none."""

        def edit(rows: Rows) -> None:
            rows[1].append(rows[0].pop())

        found = findings_after(ZBV, edit)

        assert ["schedule.stage-on-wrong-rank"] == [f.clause for f in found]
        assert "lives on rank 0" in found[0].message

    def test_full_backward_on_wrong_rank_is_one_finding(self) -> None:
        """B is two steps in one entry, and one finding."""

        def edit(rows: Rows) -> None:
            rows[1].append(rows[0].pop())

        assert 1 == len(findings_after(LOOP, edit))

    def test_microbatch_out_of_range(self) -> None:
        """A microbatch past the others' number."""

        def edit(rows: Rows) -> None:
            rows[0][1] = "0F77"

        assert ("microbatch-out-of-range", 0, 1, "0F77") == first(ZBV, edit)


class TestMicrobatches:
    def test_a_missing_wgrad_is_named_with_its_rank(self) -> None:
        """A missing weight gradient is named, with its rank and without a step."""
        found = findings_after(ZBV, lambda rows: rows[0].remove("3W2"))

        assert 1 == len(found)
        assert ("schedule.microbatch-missing", 0, None) == (
            found[0].clause,
            found[0].rank,
            found[0].step,
        )
        assert "stage 3 has no weight gradient of microbatch 2" == found[0].message

    def test_many_missing_are_one_finding(self) -> None:
        """A stated number of microbatches that a table does not reach is said once a kind."""
        found = check_ranks(parse_table("0F0,0I0,0W0\n", num_microbatches=100_000))

        assert 3 == len(found)
        assert found[0].message.endswith("microbatches 1, 2, 3, 4, 5, 6, 7, 8 and 99991 more")

    def test_a_stage_that_computes_nowhere_is_named(self) -> None:
        """A stated stage that computes nowhere."""
        found = check_ranks(parse_table("0F0,0I0,0W0\n", num_stages=2))

        assert ["schedule.stage-missing"] == [f.clause for f in found]

    def test_missing_stage_between(self) -> None:
        """A gap in the stages is found without being told their number."""
        found = check_ranks(from_actions([["0F0", "0B0"], ["2F0", "2B0"]]))

        assert ["schedule.stage-missing"] == [f.clause for f in found]

    @pytest.mark.parametrize("entry", ["3F1", "3I1", "3W1"])
    def test_a_computation_that_occurs_twice_is_named(self, entry: str) -> None:
        """Any computation twice, wherever it stood first."""
        found = findings_after(ZBV, lambda rows: rows[0].append(entry))

        assert ("schedule.duplicate-action", 0, 24, entry) == (
            found[0].clause,
            found[0].rank,
            found[0].step,
            found[0].action,
        )
        assert entry == found[0].related[0].action

    def test_duplicate_of_a_part_of_b(self) -> None:
        """B contains the weight gradient."""
        found = findings_after(LOOP, lambda rows: rows[0].append("2W1"))

        assert "schedule.duplicate-action" == found[0].clause
        assert "(2B1)" in found[0].message

    def test_torch_misses_duplicates(self) -> None:
        """torch's own validator counts in sets and accepts the same table."""
        from torch.distributed.pipelining.schedules import _Action, _validate_schedule

        rows = [[str(a) for a in row if a] for row in read_fixture(ZBV).rows]
        rows[0].append("3F1")
        actions = {
            rank: [_Action.from_str(entry) for entry in row] for rank, row in enumerate(rows)
        }

        assert {0: 0, 1: 1, 2: 1, 3: 0} == _validate_schedule(actions, 2, 4, 4)
        assert "schedule.duplicate-action" == check_ranks(from_actions(rows))[0].clause


class TestOrder:
    def test_dgrad_before_forward(self) -> None:
        """An input gradient before its own forward."""

        def edit(rows: Rows) -> None:
            move(rows[0], "3I2", before="3F2")

        assert ("dgrad-before-forward", 0, 12, "3I2") == first(ZBV, edit)

    def test_wgrad_before_dgrad(self) -> None:
        """A weight gradient before its own input gradient, though another one's was done."""

        def edit(rows: Rows) -> None:
            move(rows[1], "1W2", before="1I2")

        assert ("wgrad-before-dgrad", 1, 19, "1W2") == first(ZBV, edit)

    def test_parts_of_an_overlap_run_in_order(self) -> None:
        """The parts of an overlap run in order."""
        entry = "({};{})OVERLAP_F_B"

        assert () == check_ranks(from_actions([[entry.format("0F0", "0B0")]]))
        assert "schedule.dgrad-before-forward" == (
            check_ranks(from_actions([[entry.format("0B0", "0F0")]]))[0].clause
        )


class TestMessages:
    def test_receive_after_use(self) -> None:
        """A receive behind the computation that needs it."""

        def edit(rows: Rows) -> None:
            move(rows[1], "1F1", before="1RECV_F2")
            rows[1].remove("1RECV_F1")
            rows[1].insert(rows[1].index("1F1") + 1, "1RECV_F1")

        clause, rank, _, action = first(ZBV_COMMS, edit)

        assert ("use-before-receive", 1, "1F1") == (clause, rank, action)

    def test_a_use_without_its_message_is_refused(self) -> None:
        """Without send and receive, the use is refused."""

        def edit(rows: Rows) -> None:
            rows[0].remove("0SEND_F2")
            rows[1].remove("1RECV_F2")

        found = findings_after(ZBV_COMMS, edit)

        assert ["schedule.use-before-receive"] == [f.clause for f in found]
        assert "1RECV_F2 is missing" == found[0].found

    def test_stages_of_one_rank_hand_over_without_a_message(self) -> None:
        """Stages on one rank hand over without a message, in order all the same."""

        def edit(rows: Rows) -> None:
            move(rows[1], "2F3", before="1F3")

        assert ("use-before-receive", 1, 13, "2F3") == first(ZBV, edit)

    def test_gradients_within_a_rank_need_no_message(self) -> None:
        """Gradients between stages of one rank likewise."""

        def edit(rows: Rows) -> None:
            move(rows[1], "1I0", before="2I0")

        assert ("use-before-receive", 1, 5, "1I0") == first(ZBV, edit)

    def test_send_without_receive(self) -> None:
        """A send that nobody receives."""

        def edit(rows: Rows) -> None:
            rows[1].remove("1RECV_F2")

        assert ("send-without-receive", 0, 8, "0SEND_F2") == first(ZBV_COMMS, edit)

    def test_receive_without_send(self) -> None:
        """A receive without a send; no deadlock is reported beside it."""

        def edit(rows: Rows) -> None:
            rows[0].remove("0SEND_F2")

        assert ["schedule.receive-without-send"] == [
            f.clause for f in findings_after(ZBV_COMMS, edit)
        ]

    def test_send_before_compute(self) -> None:
        """A send of what is not computed yet."""

        def edit(rows: Rows) -> None:
            move(rows[0], "0SEND_F0", before="0F0")

        assert ("send-before-compute", 0, 2, "0SEND_F0") == first(ZBV_COMMS, edit)

    @pytest.mark.parametrize(
        ("rank", "entry", "reason"),
        [(0, "0RECV_F0", "no neighbour"), (0, "3SEND_F0", "no neighbour"), (1, "1SEND_F0", "same")],
    )
    def test_messages_that_lead_nowhere_are_refused(
        self, rank: int, entry: str, reason: str
    ) -> None:
        """Messages at the ends of the pipeline, or to a stage on the same rank."""
        found = findings_after(ZBV_COMMS, lambda rows: rows[rank].append(entry))

        assert ["schedule.message-misplaced"] == [f.clause for f in found]
        assert reason in found[0].message

    def test_receives_stand_in_the_order_of_their_sends(self) -> None:
        """Two receives in the other order than their sends."""

        def edit(rows: Rows) -> None:
            move(rows[0], "0RECV_B3", before="0RECV_B2")

        found = findings_after(ZBV_COMMS, edit)

        assert "schedule.message-order" in {f.clause for f in found}

    def test_a_message_is_received_once(self) -> None:
        """A message received twice."""

        def edit(rows: Rows) -> None:
            rows[1].append("1RECV_F0")

        assert ("duplicate-action", 1, 46, "1RECV_F0") == first(ZBV_COMMS, edit)


class TestReductions:
    def test_before_the_last_wgrad(self) -> None:
        """A reduction while a weight gradient is to come, and that gradient after it."""

        def edit(rows: Rows) -> None:
            move(rows[1], "1REDUCE_GRAD", before="1W3")

        found = findings_after(ZBV_COMMS, edit)

        assert ["schedule.reduction-before-settled", "schedule.action-after-reduction"] == [
            f.clause for f in found
        ]
        assert ["1REDUCE_GRAD", "1W3"] == [f.action for f in found]

    def test_in_a_compute_table(self) -> None:
        """A compute-only table may show reductions, and then they are checked."""
        row = ["0F0", "0I0", "0REDUCE_GRAD", "0W0"]

        assert "schedule.reduction-before-settled" == check_ranks(from_actions([row]))[0].clause

    def test_only_some_stages(self) -> None:
        """If one stage is reduced by the table, all are."""
        found = findings_after(ZBV_COMMS, lambda rows: rows[1].remove("2REDUCE_GRAD"))

        assert ["schedule.reduction-missing"] == [f.clause for f in found]

    def test_a_stage_is_reduced_once(self) -> None:
        """A stage is reduced once."""
        found = findings_after(ZBV_COMMS, lambda rows: rows[1].append("2REDUCE_GRAD"))

        assert ["schedule.duplicate-action"] == [f.clause for f in found]

    def test_forward_after_reduction(self) -> None:
        """Nothing of the stage runs after its reduction, whatever it is."""
        row = ["0F0", "0B0", "0REDUCE_GRAD", "0F1", "0B1"]
        found = check_ranks(from_actions([row]))

        assert ("schedule.action-after-reduction", "0F1") in {(f.clause, f.action) for f in found}


class TestSharding:
    def test_compute_while_resharded(self) -> None:
        """A stage computes only while its parameters are whole."""
        found = findings_after(ZBV_COMMS, lambda rows: rows[0].remove("3UNSHARD"))

        # Without any UNSHARD the stage is not sharded by this table, but its RESHARD is left over.
        assert ["schedule.sharding-order"] == [f.clause for f in found]

    def test_an_unshard_behind_the_first_use_is_named_once(self) -> None:
        """An UNSHARD behind the first use; said once a stage, not once a use."""
        found = findings_after(ZBV_COMMS, lambda rows: move(rows[0], "3UNSHARD", before="3I0"))

        assert "schedule.use-while-resharded" == found[0].clause
        assert "3F0" == found[0].action
        assert 1 == sum(f.clause == "schedule.use-while-resharded" for f in found)

    def test_unshard_and_reshard_take_turns(self) -> None:
        """UNSHARD and RESHARD take turns."""
        found = findings_after(ZBV_COMMS, lambda rows: rows[0].insert(0, "3UNSHARD"))

        assert ["schedule.sharding-order"] == [f.clause for f in found]


class TestFindings:
    @pytest.mark.parametrize("fault", sorted(FAULTS))
    @pytest.mark.parametrize("seed", range(15))
    def test_every_fault_is_named_first(self, fault: str, seed: int) -> None:
        """A random edit of a random schedule is refused by its own clause, before any other."""
        illegal = random_illegal(seed, fault)
        found = check_ranks(illegal.schedule)

        assert () == check_ranks(illegal.original)
        assert illegal.clause == found[0].clause

    @pytest.mark.parametrize("fault", sorted(FAULTS))
    def test_records_are_complete(self, fault: str) -> None:
        """Every finding says what, where, what was expected and found, and what to do."""
        for found in check_ranks(random_illegal(1, fault).schedule):
            assert found.clause in SCHEDULE_CLAUSES
            assert found.message
            assert found.expected
            assert found.found
            assert SCHEDULE_CLAUSES[found.clause].remedy == found.remedy
            assert "\n" not in str(found)
            assert found.clause in str(found)
            assert (found.step is None) is (found.action is None)
            assert found.record()["clause"] == found.clause

    @pytest.mark.parametrize("clause", SCHEDULE_CLAUSES)
    def test_no_clause_is_out_of_a_check_s_reach(self, clause: str) -> None:
        """What the specification says that `check` refuses, `check` does refuse by that name."""
        faults = [name for name, (broken, _) in FAULTS.items() if clause == f"schedule.{broken}"]
        schedule, transport = (
            (random_illegal(0, faults[0]).schedule, None) if faults else BY_HAND[clause]
        )
        verdict = check(schedule, transport=transport)

        assert "refused" == verdict.verdict
        assert clause in {found.clause for found in verdict.findings}
        assert bool(faults) is (clause not in BY_HAND)

    @pytest.mark.parametrize(
        ("check", "fault"),
        [
            ("check_places", "wrong-rank"),
            ("check_repeats", "repeat"),
            ("check_missing", "drop-compute"),
            ("check_order", "wgrad-early"),
            ("check_messages", "send-early"),
            ("check_inputs", "receive-late"),
            ("_check_deadlock", "wait-in-a-circle"),
            ("check_message_order", "swap-receives"),
            ("check_send_waits", "wait-for-nothing"),
            ("check_reduction_waits", "wait-early"),
            ("check_reductions", "reduce-early"),
            ("check_sharding", "unshard-twice"),
        ],
    )
    def test_every_check_is_needed(
        self, check: str, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With one check taken out, some faulty schedule is accepted altogether."""
        removed: Any = getattr(ranks, check)
        kept = tuple(tuple(c for c in phase if c is not removed) for phase in ranks._PHASES)
        assert kept != ranks._PHASES
        monkeypatch.setattr(ranks, "_PHASES", kept)

        accepted = [s for s in range(60) if not check_ranks(random_illegal(s, fault).schedule)]

        assert accepted

    @pytest.mark.parametrize("seed", range(100))
    def test_legal_schedules_have_no_findings(self, seed: int) -> None:
        """Random legal schedules are accepted, whatever their order."""
        assert () == check_ranks(random_schedule(seed))


def _calls(schedule: Schedule) -> int:
    """How many Python and C functions a check calls: a measure of work without a clock."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        check_ranks(schedule)
    finally:
        sys.setprofile(None)
    return count


def test_work_is_linear() -> None:
    """Eight times the actions cost about eight times the work, also with findings."""
    from qeffect.schedule.torch_tables import torch_schedule

    small, large = (
        torch_schedule("ZBVZeroBubble", pp=4, microbatches=m, comms=True) for m in (16, 128)
    )
    ratio = large.num_actions / small.num_actions

    assert _calls(large) / _calls(small) < 1.15 * ratio
    torn = [parse_table("\n".join(["0F0," * n, "1F0," * n])) for n in (100, 800)]
    assert _calls(torn[1]) / _calls(torn[0]) < 1.15 * 8
