"""Deadlock: the cycle is shown, and two other simulations get stuck at the same actions."""

from __future__ import annotations

from collections import deque
from random import Random

import attrs
import pytest

from qeffect.schedule.actions import COMPUTE, RECEIVES, SENDS, Kind, Schedule
from qeffect.schedule.infer import from_actions
from qeffect.schedule.ranks import check_ranks

from .edits import LOOP, LOOP_COMMS, Rows, findings_after, move
from .faults import inject, random_illegal
from .random_schedules import random_schedule, random_shape


class TestDeadlock:
    def test_cycle_is_shown(self) -> None:
        """Two ranks that wait for each other are both named, with their entries."""

        def edit(rows: Rows) -> None:
            move(rows[0], "2RECV_B0", before="0SEND_F1")

        found = findings_after(LOOP_COMMS, edit)[0]

        assert "schedule.deadlock" == found.clause
        assert (
            "2 ranks wait for each other: rank 1 stops at step 5 (1RECV_F1) until rank 0 runs "
            "step 7 (0SEND_F1); rank 0 stops at step 6 (2RECV_B0) until rank 1 runs step 12 "
            "(3SEND_B0)" == found.message
        )
        assert {"awaited", "waits"} == {other.role for other in found.related}

    def test_in_a_compute_table(self) -> None:
        """Without messages the data itself is waited for."""

        def edit(rows: Rows) -> None:
            move(rows[0], "2F0", before="0F0")

        found = findings_after(LOOP, edit)[0]

        assert ("schedule.deadlock", 0, 0, "2F0") == (
            found.clause,
            found.rank,
            found.step,
            found.action,
        )

    def test_a_cycle_through_three_ranks_has_three_legs(self) -> None:
        """A cycle through three ranks has three legs."""
        found = check_ranks(
            from_actions(
                [
                    ["3F0", "0F0", "3B0", "0B0"],
                    ["1F0", "4F0", "4B0", "1B0"],
                    ["2F0", "5F0", "5B0", "2B0"],
                ]
            )
        )

        assert ["schedule.deadlock"] == [f.clause for f in found]
        assert found[0].message.startswith("3 ranks wait for each other")
        assert 3 == found[0].message.count(" stops at ")

    def test_one_rank_of_a_pipeline_cannot_deadlock(self) -> None:
        """What other ranks do is unknown, so it is not waited for."""
        found = check_ranks(from_actions(["3F0", "0F0", "0B0", "3B0"], complete=False))
        whole = check_ranks(
            from_actions([["3F0", "0F0", "0B0", "3B0"], ["1F0", "2F0", "2B0", "1B0"]])
        )

        assert () == found
        assert "schedule.deadlock" == whole[0].clause

    @pytest.mark.parametrize("seed", range(40))
    def test_agrees_with_torchs_simulator(
        self,
        seed: int,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """torch's own simulator gets stuck on the faulty schedule and ends on the legal one."""
        # Its printer fails on a run that stops within fewer steps than there are ranks.
        monkeypatch.setattr(
            "torch.distributed.pipelining.schedules._format_pipeline_order", lambda *_: ""
        )
        rng = Random(seed)
        illegal = None
        while illegal is None:
            # torch's simulator knows no overlaps.
            shape = attrs.evolve(random_shape(rng), comms=True, overlap=0.0)
            illegal = inject(rng, random_schedule(rng, shape), "wait-in-a-circle")

        assert _torch_runs(illegal.original)
        assert not _torch_runs(illegal.schedule)
        assert "schedule.deadlock" == check_ranks(illegal.schedule)[0].clause
        capsys.readouterr()

    @pytest.mark.parametrize("seed", range(60))
    def test_agrees_with_a_naive_simulation(self, seed: int) -> None:
        """Retrying every rank until nothing moves finds the same, in the same places."""
        illegal = random_illegal(seed, "wait-in-a-circle")

        assert all(_naively_stuck(illegal.original)) is False
        stuck = _naively_stuck(illegal.schedule)
        found = check_ranks(illegal.schedule)[0]

        assert "schedule.deadlock" == found.clause
        assert found.rank is not None
        assert stuck[found.rank] == found.action


def _torch_runs(schedule: Schedule) -> bool:
    from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

    order = {
        rank: [
            _Action.from_str(str(a))
            for a in row
            if a is not None and a.kind in COMPUTE | SENDS | RECEIVES
        ]
        for rank, row in enumerate(schedule.rows)
    }
    try:
        _simulate_comms_compute(order, lambda s: schedule.stage_to_rank[s], schedule.num_stages)
    except ValueError as error:
        if "not progressing" in str(error):
            return False
        raise
    return True


def _naively_stuck(schedule: Schedule) -> list[str | None]:
    """The entry at which each rank stops, by brute force."""
    rows = [deque(atoms) for atoms in schedule.atoms]
    done: set[tuple[Kind, int, int]] = set()
    home = schedule.stage_to_rank
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row:
                atom = row[0]
                wanted = None
                if atom.kind is Kind.RECV_F:
                    wanted = (Kind.SEND_F, atom.stage - 1)
                elif atom.kind is Kind.RECV_B:
                    wanted = (Kind.SEND_B, atom.stage + 1)
                elif atom.kind is Kind.WAIT_SEND_F:
                    wanted = (Kind.RECV_F, atom.stage + 1)
                elif atom.kind is Kind.WAIT_SEND_B:
                    wanted = (Kind.RECV_B, atom.stage - 1)
                elif not schedule.has_comms and atom.kind is Kind.FORWARD and atom.stage:
                    wanted = (atom.kind, atom.stage - 1)
                elif not schedule.has_comms and atom.kind is Kind.DGRAD:
                    wanted = (atom.kind, atom.stage + 1)
                if wanted and home.get(wanted[1], rank) != rank:
                    if (*wanted, atom.microbatch) not in done:
                        break
                done.add((atom.kind, atom.stage, atom.microbatch))
                row.popleft()
                moved = True
    return [str(row[0].action) if row else None for row in rows]
