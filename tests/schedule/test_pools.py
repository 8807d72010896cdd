"""
Capture memory according to an oracle: a shared pool breaks on ZB-V, and a pool for each slot never
breaks.

`test_check` compares `check --shared-pool` with the same oracle.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from qeffect.schedule.actions import Kind, Schedule, ScheduleError
from qeffect.schedule.infer import from_actions
from qeffect.schedule.tables import fixture_names, read_fixture

from .edits import ZBV
from .pool_oracle import (
    ORDERS,
    POOLS,
    TAPES,
    Graph,
    Replay,
    capture_ranks,
    graph_name,
    out_of_order,
    replays,
    some_order,
)
from .random_schedules import Shape, random_schedule


class TestZbv:
    def test_shared_pool_breaks(self) -> None:
        """With live slots in one pool, both ranks replay out of capture order."""
        found = out_of_order(read_fixture(ZBV))

        assert [(1, "1F1"), (0, "3F1")] == [(f.rank, f.action) for f in found]
        assert (
            "1F1 replays F of stage 1, tape 1 (capture 1) after F of stage 2, tape 0 (capture 3) "
            "while 2 tapes are live in their pool" == str(found[0])
        )

    @pytest.mark.parametrize("order", ORDERS)
    def test_no_order_helps(self, order: str) -> None:
        """No capture order at all is right for live slots in one pool."""
        schedule = read_fixture(ZBV)

        assert out_of_order(schedule, order=order)
        assert some_order(schedule, 0) is None
        assert some_order(schedule, 1) is None

    def test_a_tape_for_every_microbatch_can_be_ordered(self) -> None:
        """With every graph replayed once a step, the order of first use is right."""
        schedule = read_fixture(ZBV)

        assert () == out_of_order(schedule, tapes="microbatches", order="first-use")
        assert out_of_order(schedule, tapes="microbatches", order="kind")


@pytest.mark.parametrize("order", ["kind", "tape", "first-use"])
@pytest.mark.parametrize("name", [n for n in fixture_names() if "_m64" not in n])
def test_a_pool_for_every_slot_is_always_right(name: str, order: str) -> None:
    """With one pool per slot no table of torch breaks the order."""
    assert () == out_of_order(read_fixture(name), pool="slot", order=order)


@pytest.mark.parametrize("seed", range(60))
def test_a_pool_for_every_slot_on_random_schedules(seed: int) -> None:
    """Nor does any random schedule; a shared pool breaks on nearly all of them."""
    schedule = random_schedule(seed)

    assert () == out_of_order(schedule, pool="slot")
    for rank in range(schedule.num_ranks):
        assert some_order(schedule, rank, pool="slot") is not None


def _keeps(steps: list[Replay], order: tuple[Graph, ...]) -> bool:
    """The rule itself: within a pool, positions rise while any tape is live."""
    position = {graph: i for i, graph in enumerate(order)}
    latest: dict[tuple[int, ...], int] = {}
    for step in steps:
        now = position[step.graph]
        if step.live and now <= latest.get(step.pool, -1):
            return False
        latest[step.pool] = now
    return True


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("pool", POOLS)
def test_some_order_against_all_orders(seed: int, pool: str) -> None:
    """`some_order` finds an order exactly when some permutation of the graphs is one."""
    # Six graphs: one stage with two slots, or two stages with one.
    stages = 1 + seed % 2
    shape = Shape((0,) * stages, 3, (3 - stages,) * stages, full=0.0, overlap=0.0)
    schedule = random_schedule(seed, shape)
    steps = list(replays(schedule, 0, pool=pool))
    graphs = tuple(dict.fromkeys(step.graph for step in steps))
    found = some_order(schedule, 0, pool=pool)

    assert any(_keeps(steps, order) for order in permutations(graphs)) is (found is not None)
    assert found is None or _keeps(steps, found)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_out_of_order_is_the_rule(seed: int, order: str) -> None:
    """It names exactly the ranks whose replays break the rule."""
    schedule = random_schedule(seed)
    named = {f.rank for f in out_of_order(schedule, order=order)}
    for rank in range(schedule.num_ranks):
        steps = list(replays(schedule, rank))
        position = capture_ranks(steps, order)
        listed = tuple(sorted(position, key=position.__getitem__))

        assert _keeps(steps, listed) is (rank not in named)


class TestReplays:
    def test_slots_are_reused(self) -> None:
        """The lowest free slot is taken, and free again after its weight gradient."""
        row = ["0F0", "0F1", "0I0", "0W0", "0F2", "0B1", "0B2"]
        steps = list(replays(from_actions([row]), 0))

        assert [0, 1, 0, 0, 0, 1, 1, 0, 0] == [step.graph[2] for step in steps]
        assert [0, 1, 2, 2, 1, 2, 2, 1, 1] == [step.live for step in steps]

    def test_microbatches_are_not(self) -> None:
        """A tape for every microbatch is that microbatch's."""
        row = ["0F0", "0B0", "0F1", "0B1"]
        steps = replays(from_actions([row]), 0, tapes="microbatches")

        assert [0, 0, 0, 1, 1, 1] == [step.graph[2] for step in steps]

    def test_messages_replay_nothing(self) -> None:
        """Only F, dI and dW are graphs."""
        steps = replays(read_fixture(ZBV.replace("compute", "comms")), 0)

        assert 24 == len(list(steps))

    def test_repeated_graph_is_said(self) -> None:
        """A finding says when the same graph comes again."""
        schedule: Schedule = from_actions([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]])
        found = out_of_order(schedule, order="first-use")

        assert 1 == len(found)
        assert "0F2" == found[0].action

    def test_graphs_have_readable_names(self) -> None:
        """Graphs have readable names."""
        assert "dW of stage 2, tape 1" == graph_name((Kind.WGRAD, 2, 1))

    @pytest.mark.parametrize(
        ("argument", "known"), [("tapes", TAPES), ("pool", POOLS), ("order", ORDERS)]
    )
    def test_an_unknown_choice_is_refused_with_the_known_ones(
        self, argument: str, known: tuple[str, ...]
    ) -> None:
        """An unknown choice is refused with the known ones."""
        with pytest.raises(
            ScheduleError, match=f"unknown {argument} 'x'; expected one of {known[0]}"
        ):
            out_of_order(read_fixture(ZBV), **{argument: "x"})
