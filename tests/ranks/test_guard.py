"""
`guard(schedule)`: torch's schedules over ordinary modules run as before, and faulty schedules are
named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from qeffect.guards.pipelining import guard
from qeffect.refusals import Refused
from qeffect.schedule.actions import ScheduleError
from tests.docs.code import blocks
from tests.ranks import guard_bodies as bodies
from tests.ranks.ranks import launch
from tests.torch_release import NEEDS_DEFERRED

INTERLEAVED, ZERO_BUBBLE, ZBV = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)
NAMES = (INTERLEAVED, ZERO_BUBBLE, ZBV, "Schedule1F1B", "ScheduleGPipe")


class TestTwoRanks:
    """Two processes over gloo."""

    def test_a_step_begun_again_has_its_own_losses(self, tmp_path: Path) -> None:
        """torch keeps those of a failed step, and computes the next one's gradients of them."""
        names = ["ScheduleGPipe"]
        for name, found in launch(1, tmp_path, bodies.begun_again, names, 4).words[0].items():
            right, rebuilt, left = found
            assert right == rebuilt, name
            assert right != left, name

    def test_a_guard_changes_no_bit(self, tmp_path: Path) -> None:
        """Losses, outputs, gradients and parameters of three steps are those without a guard."""
        said = launch(2, tmp_path, bodies.accepted, [*NAMES, "ScheduleDualPipeV"], 3).words

        assert [0, 1] == sorted(said)
        for rank, found in said.items():
            for name, run in found.items():
                assert run["plain"] == run["guarded"], (rank, name)
                assert "none" not in run["plain"][0]
                assert len(set(map(tuple, run["plain"]))) == 3  # it does train
                assert (3 if name in bodies.V else 4) == run["epoch"]
                assert 0 == run["tapes"]

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        ("fault", "clauses", "at"),
        [
            ("doubled", {"ownership.key-live"}, "0F1"),
            ("missing", {"epoch.incomplete", "order.incomplete"}, "0REDUCE_GRAD"),
            ("reordered", {"order.reordered"}, "0F1"),
        ],
    )
    def test_what_torch_lets_pass_is_refused_where_it_happens(
        self, name: str, fault: str, clauses: set[str], at: str, tmp_path: Path
    ) -> None:
        """Without the guard the step ends and nobody knows; with it rank 0 names the action."""
        said = launch(2, tmp_path, bodies.faulted, name, fault).words

        assert [{"passed": True}] * 2 == [said[0][0], said[1][0]]
        refused = said[0][1]
        assert refused["refused"] in clauses, refused
        assert (at, 1) == (refused["at"], refused["epoch"])
        assert refused["notes"][0].startswith("at pipeline rank 0")
        assert refused["notes"][0].endswith(at)
        assert "refused" not in said[1][1]

    def test_the_example_runs(self, tmp_path: Path) -> None:
        """The example of the README trains for a guarded step, in ten lines and imports."""
        text = blocks("README.md", "python")[2].text
        lines = [line for line in text.splitlines() if line and "import" not in line]
        said = launch(2, tmp_path, bodies.example, text).words

        assert len(lines) <= 10
        assert {0: {"epoch": 1}, 1: {"epoch": 1}} == said


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of two whose messages go nowhere: what it does is all there is to see."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


def _edited(name: str, entry: int, change: str, with_guard: bool) -> dict[str, Any]:
    run = bodies.Run(name).alone()
    guarded = guard(run.schedule) if with_guard else None

    def edit(row: list[str]) -> None:
        if change == "doubled":
            row.insert(entry, row[entry])
        else:
            del row[entry]

    bodies.edit_row(run, edit)
    return bodies.outcome(run, guarded)


class TestOneRank:
    """Every entry of a rank's row, and the calls of `guard` itself."""

    @NEEDS_DEFERRED
    def test_stages_say_how_messages_are_carried(self, rank: int) -> None:
        """Deferred receives are right where gradients have a group of their own (torch 2.14)."""
        run = bodies.Run(ZBV).alone()
        schedule: Any = run.schedule
        schedule.pipeline_order_with_comms = torch_schedules._defer_recv_ops(
            schedule.pipeline_order_with_comms,
            lambda stage: schedule.stage_index_to_group_rank[stage],
        )
        for attribute in (None, "p2p_per_edge"):  # an edge carries both in one queue
            for stage in run.stages if attribute else ():
                setattr(stage, attribute, True)
            with pytest.raises(ScheduleError, match="message-order"):
                guard(schedule)
        for stage in run.stages:
            del stage.p2p_per_edge
            stage.p2p_per_direction = True

        assert 0 == guard(schedule).contract.epoch

    @pytest.mark.parametrize("name", [INTERLEAVED, ZBV])
    def test_every_entry_matters(self, rank: int, name: str) -> None:
        """Whichever entry is left out or stands twice, a clause names it; torch passes some by."""
        row = list(map(str, bodies.Run(name).schedule.pipeline_order_with_comms[rank]))
        places = [n for n, entry in enumerate(row) if "SHARD" not in entry]
        passed = owned = 0
        for number, place in enumerate(places[::3]):
            change = ("doubled", "missing")[number % 2]
            found = _edited(name, place, change, True)
            # A send that nobody waits for is an error of torch's own from 2.15 on.
            own = "sends have no matching wait" in found.get("failed", "")
            assert own or "." in found.get("refused", ""), (row[place], change, found)
            owned += own
            passed += "passed" in _edited(name, place, change, False)

        assert passed >= 1
        assert passed + owned >= 2

    def test_a_refused_step_can_be_run_again(self, rank: int) -> None:
        """After a refusal `rebuild` begins the same epoch again; without it the step is refused."""
        run = bodies.Run(ZERO_BUBBLE).alone()
        guarded = guard(run.schedule)
        table = run.schedule.pipeline_order_with_comms
        whole = table[rank]
        run.step(0)
        first = next(str(action) for action in whole if str(action)[1] == "F")
        bodies.edit_row(run, lambda row: row.insert(row.index(first), first))
        with pytest.raises(Refused, match="ownership") as caught:
            run.step(1)
        assert first == guarded.at in caught.value.__notes__[0]
        table[rank] = whole
        with pytest.raises(Refused, match="ownership"):
            run.step(1)
        guarded.rebuild(alone=True)
        run.step(1)

        assert 2 == guarded.contract.epoch

    @pytest.mark.parametrize("entry", [0, 2, 5])
    def test_a_note_names_rank_step_and_action(self, rank: int, entry: int) -> None:
        """Where the walk stands: the second of two equal entries, by its place in the row."""
        run = bodies.Run(INTERLEAVED).alone()
        guard(run.schedule)
        row = list(map(str, run.schedule.pipeline_order_with_comms[rank]))
        at = [n for n, action in enumerate(row) if action[1] == "F"][entry // 2]
        bodies.edit_row(run, lambda row: row.insert(at, row[at]))
        with pytest.raises(Refused, match="ownership") as caught:
            run.step(0)

        said = f"at pipeline rank {rank}, step {at + 1} of its row: {row[at]}"
        assert [said] == caught.value.__notes__

    def test_a_note_names_rank_and_action_of_a_class_without_a_table(self, rank: int) -> None:
        """1F1B walks no table: its loop calls the stage, and the action is all that is known."""
        run = bodies.Run("Schedule1F1B").alone()
        guard(run.schedule)
        (stage,) = run.stages
        forward = stage.forward_one_chunk
        stage.forward_one_chunk = lambda *args, **kwargs: [
            forward(*args, **kwargs) for _ in range(2)
        ]

        with pytest.raises(Refused, match="ownership") as caught:
            run.step(0)

        assert [f"at pipeline rank {rank}: {rank}F0"] == caught.value.__notes__

    def test_a_failing_module_spoils_the_epoch(self, rank: int) -> None:
        """What a module raises goes through; the epoch cannot commit until it is rebuilt."""
        run = bodies.Run("Schedule1F1B").alone()
        guarded = guard(run.schedule)
        broken = run.blocks[0].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="failed to run forward"):
            run.step(0)
        broken.remove()
        assert () == guarded.contract.outstanding()
        with pytest.raises(Refused):
            run.step(0)
        guarded.rebuild(alone=True)
        run.step(0)

        assert 1 == guarded.contract.epoch

    def test_a_registered_function_is_guarded_as_its_action(self, rank: int) -> None:
        """A function in torch's place is checked and committed like the action, if it computed."""
        run = bodies.Run(ZBV).alone()
        guarded = guard(run.schedule)
        seen: list[str] = []
        kind = bodies.torch_schedules._ComputationType.BACKWARD_WEIGHT

        def weight(action: Any, _: Any) -> None:
            seen.append(str(action))
            stage = next(s for s in run.stages if s.stage_index == action.stage_index)
            bodies.Stage.backward_weight_one_chunk(stage, action.microbatch_index)

        run.schedule.register_custom_function(kind, weight)
        row = list(map(str, run.schedule.pipeline_order_with_comms[rank]))
        run.step(0)
        assert [entry for entry in row if re.fullmatch(r"\d+W\d+", entry)] == seen
        assert 1 == guarded.contract.epoch
        bodies.edit_row(run, lambda row: row.insert(row.index(seen[0]), seen[0]))
        seen.clear()
        with pytest.raises(Refused, match="ownership"):
            run.step(1)

        assert 1 == len(seen)

    def test_remove_leaves_nothing(self, rank: int) -> None:
        """After `remove` the schedule and its stages are as they were, and can be guarded again."""
        run = bodies.Run("Schedule1F1B").alone()
        before = [dict(vars(run.schedule)), *(dict(vars(stage)) for stage in run.stages)]
        guarded = guard(run.schedule)
        with pytest.raises(ValueError, match="guarded already"):
            guard(run.schedule)
        guarded.remove()
        assert before == [dict(vars(run.schedule)), *(dict(vars(s)) for s in run.stages)]
        run.step(0)
        assert 0 == guarded.contract.epoch
        guarded = guard(run.schedule)
        run.step(0)

        assert 1 == guarded.contract.epoch

    def test_stages_of_two_schedules_have_one_guard(self, rank: int) -> None:
        """Two would each count what the other's schedule runs, and refuse what is right."""
        run = bodies.Run(ZBV).alone()
        guarded = guard(run.schedule)
        other = type(run.schedule)(run.stages, 4, loss_fn=run.schedule._loss_fn)
        with pytest.raises(
            ValueError, match=r"is guarded already, as part of a ScheduleZBVZero.*remove\("
        ):
            guard(other)
        run.step(0)
        assert 1 == guarded.contract.epoch
        guarded.remove()
        assert 0 == guard(other).contract.epoch

    def test_a_wrong_table_is_never_begun(self, rank: int) -> None:
        """What `qeffect check` refuses is refused before a step, on every rank."""
        run = bodies.Run(ZBV).alone()
        bodies.edit_row(run, lambda row: row.remove("1RECV_F0" if rank else "0RECV_B0"), rank)

        with pytest.raises(ScheduleError, match="rank"):
            guard(run.schedule)

    def test_what_is_no_schedule(self, rank: int) -> None:
        """Something else, and a schedule without a backward, end in one sentence."""
        with pytest.raises(TypeError, match="expects a schedule of torch"):
            guard(object())
        run = bodies.Run(ZBV).alone()
        with pytest.raises(TypeError, match="transport must be a Transport or None, got 5"):
            guard(run.schedule, transport=5)  # type: ignore[arg-type]
        run.schedule._has_backward = False
        with pytest.raises(ValueError, match="give loss_fn on every rank"):
            guard(run.schedule)
