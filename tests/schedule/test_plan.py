"""Plans: peaks, slots, graphs and bytes, compared with the paper's figures and with brute force."""

from __future__ import annotations

import json

import pytest

from qeffect.schedule.actions import SEND_WAITS, SENDS, Kind, Schedule, ScheduleError
from qeffect.schedule.infer import from_actions
from qeffect.schedule.plan import Layers, plan
from qeffect.schedule.tables import read_fixture
from qeffect.schedule.torch_tables import torch_schedule

from .edits import LOOP, ZBV, ZBV_COMMS
from .random_schedules import random_schedule, random_shape


class TestPaper:
    """Section IV, "Static binding and resource cost", and the figure over microbatches."""

    @pytest.mark.parametrize(
        ("microbatches", "graphs", "arena"),
        [(2, 12, 1_258_291_200), (4, 24, None), (8, 48, None), (16, 96, 10_066_329_600)],
    )
    def test_graphs_and_bytes_are_those_of_the_paper(
        self, microbatches: int, graphs: int, arena: int | None
    ) -> None:
        """The paper's 12 to 96 graphs and 1.258 to 10.066 GB a rank, for M = 2 to 16."""
        schedule = torch_schedule("ZBVZeroBubble", pp=2, microbatches=microbatches)
        made = plan(schedule, Layers(hidden=4096, ffn=11008))

        for rank in made.ranks:
            assert graphs == rank.paper.graphs
            assert microbatches * 2 * 314_572_800 == rank.paper.arena_bytes
            if arena is not None:
                assert arena == rank.paper.arena_bytes

    def test_peak_live_saturates_at_four(self) -> None:
        """Rank 0 of ZB-V keeps 3, 4, 4 and 4 tapes live for M = 2 to 16."""
        peaks = [
            plan(torch_schedule("ZBVZeroBubble", pp=2, microbatches=m)).ranks[0].peak_live
            for m in (2, 4, 8, 16)
        ]

        assert [3, 4, 4, 4] == peaks

    def test_live_slots_do_not_grow(self) -> None:
        """Graphs over live slots, and one accumulating destination, do not grow with M."""
        plans = [
            plan(torch_schedule("ZBVZeroBubble", pp=2, microbatches=m), Layers(4096, 11008))
            for m in (4, 8, 16)
        ]

        assert {(17, 5, 629_145_600)} == {
            (r.live_slots.graphs, r.live_slots.tapes, r.live_slots.arena_bytes)
            for p in plans
            for r in p.ranks
        }


class TestPeaks:
    def test_zbv_of_two_ranks_needs_five_slots(self) -> None:
        """ZB-V at PP=2, M=4: four live a rank, three deferred on rank 1, five slots."""
        first, second = plan(read_fixture(ZBV)).ranks

        assert (4, 1, 0, 5) == (first.peak_live, first.peak_deferred, first.delayed, first.slots)
        assert (4, 3, 3, 5) == (
            second.peak_live,
            second.peak_deferred,
            second.delayed,
            second.slots,
        )
        assert {0: 4, 3: 1, 1: 3, 2: 2} == plan(read_fixture(ZBV)).slots

    def test_zbv_of_four(self) -> None:
        """ZB-V at PP=4, M=8: eight live, up to seven deferred."""
        ranks = plan(read_fixture("ScheduleZBVZeroBubble_pp4_vpp2_m8.compute.csv")).ranks

        assert {8} == {r.peak_live for r in ranks}
        assert 7 == max(r.peak_deferred for r in ranks)

    def test_interleaved_1f1b_has_five_and_three_live(self) -> None:
        """Interleaved 1F1B at PP=2, M=4: five and three live."""
        assert [5, 3] == [r.peak_live for r in plan(read_fixture(LOOP)).ranks]

    def test_slots_are_the_sum_of_stage_peaks(self) -> None:
        """Stages that peak at different times need more slots than the rank has tapes live."""
        row = ["0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1"]
        made = plan(from_actions([row], complete=False)).ranks[0]

        assert (2, 4) == (made.peak_live, made.slots)

    def test_sends_keep_a_tape(self) -> None:
        """A tape whose gradient is still to be sent is live, though its weight gradient ran."""
        sends = [["0F0", "0F1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1", "0B0", "0B1"]]
        late = ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1F1", "1B1", "1SEND_B0", "1SEND_B1"]
        prompt = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]

        assert 2 == plan(from_actions([*sends, late])).ranks[1].peak_live
        assert 1 == plan(from_actions([*sends, prompt])).ranks[1].peak_live

    def test_awaited_sends_keep_a_tape(self) -> None:
        """Where a table awaits its sends, a tape is live until the wait, not until the send."""
        end = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]
        first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
        late = [*end, "1WAIT_SEND_B0", "1WAIT_SEND_B1"]
        early = [*end[:4], "1WAIT_SEND_B0", *end[4:], "1WAIT_SEND_B1"]
        waits = ["0WAIT_SEND_F0", "0WAIT_SEND_F1"]
        for row, live, held, outstanding in ((end, 1, 0, None), (late, 2, 1, 2), (early, 1, 0, 1)):
            awaited = [] if outstanding is None else waits
            made = plan(from_actions([[*first, *awaited], row])).ranks[1]

            assert (live, held) == (made.peak_live, made.stages[0].held_by_sends)
            assert outstanding == made.outstanding_sends

    def test_messages_change_no_peak(self) -> None:
        """torch sends at once, so messages change no peak."""
        assert plan(read_fixture(ZBV)).slots == plan(read_fixture(ZBV_COMMS)).slots

    @pytest.mark.parametrize("seed", range(50))
    def test_peaks_are_those_of_sets_kept_step_by_step(self, seed: int) -> None:
        """Peaks are those of sets kept step by step, and never above the generator's bound."""
        from random import Random

        shape = random_shape(Random(seed))
        schedule = random_schedule(seed)
        made = plan(schedule)
        for rank in made.ranks:
            live, deferred = _sets(schedule, rank.rank)
            assert max(map(len, live)) == rank.peak_live
            assert max(map(len, deferred)) == rank.peak_deferred
            for stage in rank.stages:
                peak = max(sum(s == stage.stage for s, _ in tapes) for tapes in live)
                assert peak == stage.peak_live
                assert stage.peak_live <= shape.slots[stage.stage]
                assert schedule.num_microbatches == stage.forwards


def _sets(schedule: Schedule, rank: int) -> tuple[list[set[tuple[int, int]]], ...]:
    atoms = schedule.atoms[rank]
    ends = {Kind.WGRAD, *(SEND_WAITS if schedule.awaits_sends else SENDS)}
    live: list[set[tuple[int, int]]] = [set()]
    deferred: list[set[tuple[int, int]]] = [set()]
    for i, atom in enumerate(atoms):
        tape = (atom.stage, atom.microbatch)
        now, work = set(live[-1]), set(deferred[-1])
        if atom.kind is Kind.FORWARD:
            now.add(tape)
        elif atom.kind is Kind.DGRAD:
            work.add(tape)
        elif atom.kind is Kind.WGRAD:
            work.discard(tape)
        if atom.kind in ends:
            rest = {(a.kind, a.stage, a.microbatch) for a in atoms[i + 1 :]}
            if not any((k, *tape) in rest for k in ends):
                now.discard(tape)
        live.append(now)
        deferred.append(work)
    return live, deferred


class TestLayers:
    def test_fused_qkv_has_four_matrices_a_layer(self) -> None:
        """Fused QKV: four matrices a layer."""
        assert {"qkv": 12, "proj": 4, "fc1": 10, "fc2": 10} == Layers(2, 5).matrices

    @pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
    def test_bytes_are_elements_times_layers_times_size(self, dtype: str, size: int) -> None:
        """Elements times layers times the type's size."""
        assert 36 * 3 * size == Layers(2, 5, per_stage=3, dtype=dtype).bytes_per_stage

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"hidden": 0, "ffn": 1}, "hidden must be at least 1, not 0"),
            ({"hidden": 1, "ffn": -1}, "ffn must be at least 1"),
            ({"hidden": 1, "ffn": 1, "per_stage": 0}, "layers must be at least 1"),
            (
                {"hidden": 1, "ffn": 1, "dtype": "int3"},
                "expected one of bf16, fp16, fp32, found 'int3'",
            ),
        ],
    )
    def test_dimensions_without_a_size_are_refused(
        self, arguments: dict[str, object], said: str
    ) -> None:
        """Dimensions without a size are refused."""
        with pytest.raises(ScheduleError, match=said):
            Layers(**arguments)  # type: ignore[arg-type]

    def test_without_layers_there_are_graphs_and_no_bytes(self) -> None:
        """Without layers the plan has graphs, but no byte counts."""
        rank = plan(read_fixture(ZBV)).ranks[0]

        assert rank.paper.arena_bytes is None
        assert rank.live_slots.arena_bytes is None
        assert 24 == rank.paper.graphs

    def test_record_is_json(self) -> None:
        """A plan is plain data."""
        record = json.loads(json.dumps(plan(read_fixture(ZBV), Layers(8, 8)).record()))

        assert 4 == record["ranks"][0]["stages"][0]["peak_live"]
