"""
Waits for sends and reductions: each wait comes once, after the operation that it waits for, and no
cycle goes through the waits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import attrs
import pytest

from qeffect.schedule import check as module
from qeffect.schedule.actions import SEND_WAITS, SENDS, Kind, Schedule, ScheduleError
from qeffect.schedule.check import check
from qeffect.schedule.findings import Finding
from qeffect.schedule.grid import grid
from qeffect.schedule.infer import from_actions
from qeffect.schedule.layout import layout
from qeffect.schedule.plan import plan
from qeffect.schedule.ranks import check_ranks
from qeffect.schedule.tables import read_fixture, read_table
from qeffect.schedule.timeline import timeline
from qeffect.schedule.trace import trace
from qeffect.schedule.transport import Transport

from .edits import ZBV_COMMS, Rows, move, rows_of
from .random_schedules import random_schedule, random_shape

TABLE = "ScheduleZBVZeroBubble_pp2_vpp2_m4.comms.csv"
LATEST = Path(__file__).parent / "torch_tables" / "2.15.0"


def edited(edit: Callable[[Rows], object], name: str = TABLE) -> Schedule:
    """A table of torch 2.15 after an edit."""
    rows = rows_of(read_table(LATEST / name))
    edit(rows)
    return from_actions(rows, source=f"edited {name}")


def found(edit: Callable[[Rows], object]) -> list[tuple[str, int | None, int | None, str | None]]:
    """Clause and place of each finding after an edit; before it none was found."""
    assert () == check_ranks(read_table(LATEST / TABLE))
    return [_place(f) for f in check_ranks(edited(edit))]


def _place(finding: Finding) -> tuple[str, int | None, int | None, str | None]:
    return finding.clause.removeprefix("schedule."), finding.rank, finding.step, finding.action


class TestSends:
    def test_without_its_send(self) -> None:
        """A wait for a send that nobody makes, here of the stage behind which nothing comes."""

        def edit(rows: Rows) -> None:
            rows[0].insert(10, "3WAIT_SEND_F0")

        assert [("wait-without-start", 0, 10, "3WAIT_SEND_F0")] == found(edit)

    def test_before_its_send(self) -> None:
        """A wait that stands before its send; it can never end, and the other rank stops too."""

        def edit(rows: Rows) -> None:
            move(rows[0], "0WAIT_SEND_F0", before="0SEND_F0")

        places = found(edit)

        assert ("wait-before-start", 0, 3, "0WAIT_SEND_F0") == places[0]
        assert ["wait-before-start", "deadlock"] == [clause for clause, *_ in places]

    def test_twice(self) -> None:
        """A second wait for the same send, wherever it stands; the first one is shown."""

        def edit(rows: Rows) -> None:
            rows[1].append("2WAIT_SEND_F0")

        last = len(read_table(LATEST / TABLE).rows[1])

        assert [("wait-twice", 1, last, "2WAIT_SEND_F0")] == found(edit)
        assert ["2WAIT_SEND_F0"] == [p.action for p in check_ranks(edited(edit))[0].related]

    @pytest.mark.parametrize("wait", ["0WAIT_SEND_F3", "3WAIT_SEND_B1"])
    def test_missing(self, wait: str) -> None:
        """One send without a wait is refused at the send, since the table awaits the others."""
        send = wait.replace("WAIT_", "")
        step = rows_of(read_table(LATEST / TABLE))[0].index(send)

        assert [("wait-missing", 0, step, send)] == found(lambda rows: rows[0].remove(wait))

    def test_all_missing(self) -> None:
        """A table that awaits no send at all is one of an earlier torch, and is accepted."""

        def edit(rows: Rows) -> None:
            for row in rows:
                row[:] = [entry for entry in row if "WAIT_SEND" not in entry]

        assert [] == found(edit)
        assert not edited(edit).awaits_sends

    def test_on_another_rank(self) -> None:
        """A wait in another rank's row is misplaced, like any action of that stage."""

        def edit(rows: Rows) -> None:
            rows[0].remove("0WAIT_SEND_F0")
            rows[1].append("0WAIT_SEND_F0")

        assert "stage-on-wrong-rank" == found(edit)[0][0]

    def test_in_a_table_of_one_rank(self) -> None:
        """A wait and its send are in one row, so that a single row is checked as well."""
        row = ["1F0", "1SEND_F0", "1B0", "1WAIT_SEND_B0"]
        clauses = [f.clause for f in check_ranks(from_actions([row], complete=False))]

        assert ["schedule.wait-missing", "schedule.wait-without-start"] == clauses


class TestReductions:
    def test_without_its_reduction(self) -> None:
        """A wait for a reduction that the table does not start."""
        row = ["0F0", "0B0", "0WAIT_REDUCE_GRAD"]

        assert [("wait-without-start", 0, 2, "0WAIT_REDUCE_GRAD")] == [
            _place(f) for f in check_ranks(from_actions([row]))
        ]

    def test_before_its_reduction(self) -> None:
        """A wait before the reduction starts."""

        def edit(rows: Rows) -> None:
            move(rows[1], "1WAIT_REDUCE_GRAD", before="1REDUCE_GRAD")

        assert ["wait-before-start"] == [clause for clause, *_ in found(edit)]

    def test_twice(self) -> None:
        """A second wait for one reduction."""
        clauses = [c for c, *_ in found(lambda rows: rows[1].append("2WAIT_REDUCE_GRAD"))]

        assert ["wait-twice"] == clauses

    def test_missing(self) -> None:
        """One reduction without a wait, where others have one."""
        clauses = found(lambda rows: rows[1].remove("2WAIT_REDUCE_GRAD"))

        assert [("wait-missing", 1, "2REDUCE_GRAD")] == [(c, r, a) for c, r, _, a in clauses]

    def test_all_missing(self) -> None:
        """A table that starts reductions and awaits none ends them at the end of the row."""

        def edit(rows: Rows) -> None:
            for row in rows:
                row[:] = [entry for entry in row if "WAIT_REDUCE" not in entry]

        assert "accepted" == check(edited(edit)).verdict


class TestDeadlock:
    FIRST = (
        *("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0WAIT_SEND_F1"),
        *("0RECV_B0", "0B0", "0WAIT_SEND_F0", "0RECV_B1", "0B1"),
    )
    SECOND = (
        *("1RECV_F0", "1F0", "1B0", "1SEND_B0", "1WAIT_SEND_B0"),
        *("1RECV_F1", "1F1", "1B1", "1SEND_B1", "1WAIT_SEND_B1"),
    )

    def test_a_placed_wait_closes_a_cycle(self) -> None:
        """Each rank waits for a receive that the other posts only after its own wait."""
        found = check_ranks(from_actions([list(self.FIRST), list(self.SECOND)]))

        assert ["schedule.deadlock"] == [f.clause for f in found]
        assert (
            "2 ranks wait for each other: rank 0 stops at step 4 (0WAIT_SEND_F1) until rank 1 runs "
            "step 5 (1RECV_F1); rank 1 stops at step 4 (1WAIT_SEND_B0) until rank 0 runs step 5 "
            "(0RECV_B0)" == found[0].message
        )
        assert {"awaited", "waits"} == {place.role for place in found[0].related}

    def test_either_wait_later_breaks_it(self) -> None:
        """With either wait moved behind what the other rank needs, both ranks reach the end."""
        first, second = list(self.FIRST), list(self.SECOND)
        move(first, "0WAIT_SEND_F1", before="0B0")
        move(second, "1WAIT_SEND_B0", before="1F1")

        assert () == check_ranks(from_actions([first, list(self.SECOND)]))
        assert () == check_ranks(from_actions([list(self.FIRST), second]))

    def test_the_cycle_is_the_waits(self) -> None:
        """The same messages without waits do not deadlock."""
        rows = [[c for c in row if "WAIT" not in c] for row in (self.FIRST, self.SECOND)]

        assert () == check_ranks(from_actions(rows))

    def test_in_torchs_table(self) -> None:
        """A wait directly behind its send, before the peer's receive can come, stops ZB-V."""

        def edit(rows: Rows) -> None:
            move(rows[0], "3WAIT_SEND_B0", before="3W0")
            move(rows[1], "2WAIT_SEND_F0", before="2SEND_F1")
            move(rows[1], "1RECV_F2", before="1F2")
            move(rows[0], "0WAIT_SEND_F2", before="3F0")

        finding = check_ranks(edited(edit))[0]

        assert "schedule.deadlock" == finding.clause
        assert "0WAIT_SEND_F2" in finding.message


class TestOwnership:
    def test_a_slot_is_free_at_the_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tape is free when its send is awaited: with fewer slots, a receive is refused."""
        # 3SEND_B is awaited at the end of the row, so that stage 3 needs a slot a microbatch.
        schedule = read_table(LATEST / TABLE)
        planned = plan(schedule)

        class Computing:
            slots = {
                stage.stage: stage.peak_live - stage.held_by_sends
                for rank in planned.ranks
                for stage in rank.stages
            }

            @staticmethod
            def record() -> dict[str, object]:
                return {}

        assert {0: 4, 1: 4, 2: 2, 3: 4} == planned.slots
        assert {0: 4, 1: 3, 2: 2, 3: 1} == Computing.slots
        monkeypatch.setattr(module, "plan", lambda schedule: Computing)
        verdict = check(schedule)

        assert ("ownership.pool-exhausted", 0, "3RECV_F1") == (
            verdict.clause,
            verdict.rank,
            verdict.action,
        )

    def test_waits_are_counted(self) -> None:
        """Every wait of the table goes through the contract."""
        counts = check(read_table(LATEST / TABLE), steps=1).counts

        assert (16, 4, 20) == (counts["send"], counts["reduce"], counts["wait"])

    @pytest.mark.parametrize("seed", range(60))
    def test_random_schedules(self, seed: int) -> None:
        """Random schedules with waits keep the contract with exactly the planned slots."""
        shape = attrs.evolve(random_shape(Random(seed)), comms=True, waits=True)
        schedule = random_schedule(seed, shape)
        verdict = check(schedule)

        assert ("accepted", ()) == (verdict.verdict, verdict.findings)
        if any(a.kind in SENDS for row in schedule.rows for a in row if a is not None):
            assert schedule.awaits_sends
        assert schedule.awaits_reductions


class TestOutstanding:
    @pytest.mark.parametrize("name", sorted(p.name for p in LATEST.glob("*.sends2.comms.csv")))
    def test_torchs_limit_is_kept(self, name: str) -> None:
        """Tables made with `max_outstanding_sends=2` have two outstanding and never three."""
        schedule = read_table(LATEST / name)

        assert {2} == {rank.outstanding_sends for rank in plan(schedule).ranks}
        assert () == check_ranks(schedule, Transport(max_outstanding_sends=2))
        assert {"schedule.outstanding-sends"} == {
            f.clause for f in check_ranks(schedule, Transport(max_outstanding_sends=1))
        }

    @pytest.mark.parametrize("name", sorted(p.name for p in LATEST.glob("*vpp2_m?.comms.csv")))
    def test_the_limit_saves_slots(self, name: str) -> None:
        """With the limit, no stage needs more slots than without, and the pipeline needs fewer."""
        default = plan(read_table(LATEST / name)).slots
        limited = plan(read_table(LATEST / name.replace(".comms", ".sends2.comms"))).slots

        assert all(limited[stage] <= default[stage] for stage in default)
        # All forwards of looped BFS come before all backwards: every microbatch is live anyway.
        assert (sum(limited.values()) < sum(default.values())) is ("LoopedBFS" not in name)

    def test_where_it_is_exceeded(self) -> None:
        """The first send beyond the limit is refused, and the outstanding ones are shown."""
        finding = check_ranks(read_table(LATEST / TABLE), Transport(max_outstanding_sends=2))[0]

        assert ("outstanding-sends", 0, 8, "0SEND_F2") == _place(finding)
        assert ["0SEND_F0", "0SEND_F1"] == [place.action for place in finding.related]
        assert "already outstanding: 0SEND_F0, 0SEND_F1" == finding.found

    def test_none_at_all(self) -> None:
        """A limit of zero refuses every send."""
        finding = check_ranks(read_table(LATEST / TABLE), Transport(max_outstanding_sends=0))[0]

        assert ("outstanding-sends", "0SEND_F0") == (_place(finding)[0], finding.action)
        assert "already outstanding: none" == finding.found

    def test_needs_waits(self) -> None:
        """A limit needs a table that says when its sends end."""
        with pytest.raises(ScheduleError, match="says when its sends end"):
            check(read_fixture(ZBV_COMMS), transport=Transport(max_outstanding_sends=2))

    def test_a_table_without_sends_keeps_any_limit(self) -> None:
        """Where nothing is sent, nothing is outstanding."""
        verdict = check(from_actions([["0F0", "0B0"]]), transport=Transport("pair", 0))

        assert "accepted" == verdict.verdict

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"queues": "ranks"}, "unknown queues 'ranks'; expected one of pair, direction, edge"),
            ({"rendezvous": "pair"}, "unknown rendezvous 'pair'; expected one of queue, rank"),
            ({"max_outstanding_sends": -1}, "non-negative integer, not -1"),
        ],
    )
    def test_no_such_transport(self, arguments: dict[str, object], said: str) -> None:
        """What no runtime can be configured with is refused."""
        with pytest.raises(ScheduleError, match=said):
            Transport(**arguments)  # type: ignore[arg-type]


class TestPictures:
    def test_a_wait_is_a_message_event(self) -> None:
        """In a trace, waits for sends stand with the messages, those for reductions with these."""
        events = [e for e in trace(read_table(LATEST / TABLE))["traceEvents"] if e["ph"] == "X"]
        threads = {
            kind: {e["tid"] for e in events if kind in e["name"]}
            for kind in ("SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")
        }

        assert threads == {"SEND_F": {1}, "WAIT_SEND_B": {1}, "WAIT_REDUCE_GRAD": {2}}

    def test_a_refused_wait_is_marked(self) -> None:
        """Grid and timeline mark a repeated wait and its first occurrence."""
        schedule = edited(lambda rows: rows[0].append("0WAIT_SEND_F0"))
        finding = check_ranks(schedule)[0]

        assert ">0WAIT_SEND_F0<" in grid(schedule, finding, context=None)
        assert "+0WAIT_SEND_F0" in grid(schedule, finding, context=None)
        assert "schedule.wait-twice" in timeline(schedule, finding)

    def test_a_wait_is_drawn_after_the_receive(self) -> None:
        """In the dry run a wait ends no earlier than the receive that it waits for."""
        placed = {(c.rank, str(c.action)): c for c in layout(read_table(LATEST / TABLE)).entries}
        waits = [entry for entry in placed.values() if entry.action.kind in SEND_WAITS]
        homes = read_table(LATEST / TABLE).stage_to_rank

        assert 16 == len(waits)
        for wait in waits:
            forward = wait.action.kind is Kind.WAIT_SEND_F
            peer = wait.action.stage + (1 if forward else -1)
            name = f"{peer}RECV_{'F' if forward else 'B'}{wait.action.microbatch}"
            assert wait.start + wait.length >= placed[homes[peer], name].start
