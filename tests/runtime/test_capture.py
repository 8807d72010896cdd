"""
Capture and replay with stand-in graphs on a CPU: what is captured, and which graph each replay
uses.

A stand-in graph runs its action again and leaves the results where the capture left them, as a real
graph's replay does. All code in `qeffect.gpu_runtime.step.graphs` therefore runs, except the
device's own capture: which graphs a plan needs, pools, evidence, static results, checks of
addresses, and the survival of graphs after a rebuild. `python -m qeffect.gpu_runtime compare`
compares real graphs with native on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.backends.reference.scaling import QuantizedTensor
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.eager import EagerExecutor, StageMemory
from qeffect.gpu_runtime.step.graphs import GraphExecutor
from qeffect.gpu_runtime.step.launch_executor import LaunchExecutor
from qeffect.gpu_runtime.step.memory.arena import RULES, Rule
from qeffect.gpu_runtime.step.memory.numerical_state import NumericalState
from qeffect.gpu_runtime.step.memory.slots import Slot
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.gpu_runtime.step.plan.slots import PROVISIONINGS, Provisioning
from qeffect.refusals import Refused
from tests.profiles import few

from .helpers import TINY, assert_same, native, optimizer_for, reference_stages
from .orders import random_order, table_order
from .stand_ins import StandInGraph, install

ORDER = table_order("ScheduleZBVZeroBubble", 1)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[StandInGraph]:
    """Put stand-ins where a device's graphs would be; give every graph that is made."""
    return install(monkeypatch)


def captured_run(
    order: Order = ORDER, rule: Rule = "accumulate", provisioning: Provisioning = "live"
) -> GuardedRun:
    """A guarded runtime that replays stand-in graphs."""
    stages = reference_stages(order, 4, TINY)
    config = RuntimeConfig(rule=rule, provisioning=provisioning, mode="replays", readers=True)
    return GuardedRun(Runtime(stages, order, config), Workload(), optimizer_for(stages, BF16))


def executor_of(run: GuardedRun) -> GraphExecutor:
    """The executor that replays."""
    assert isinstance(run.runtime.executor, GraphExecutor)
    return run.runtime.executor


#: Orders, slots and destinations; the profile dev takes every second, in which all of them occur.
SAME_BITS = [
    pytest.param(
        *(order, provisioning, rule),
        id=f"{name}-{provisioning}-{rule}",
        marks=() if (i + j + k) % 2 else pytest.mark.nightly,
    )
    for i, (name, order) in enumerate({"ZB-V": ORDER, "random": random_order(3)}.items())
    for j, provisioning in enumerate(PROVISIONINGS)
    for k, rule in enumerate(RULES)
]


class TestSameBits:
    @pytest.mark.parametrize(("order", "provisioning", "rule"), SAME_BITS)
    def test_every_replay_gives_the_bits_of_native(
        self, order: Order, rule: Rule, provisioning: Provisioning
    ) -> None:
        """Every replay picks its slot's graph and its microbatch's variant: native's bits."""
        run = captured_run(order, rule, provisioning)
        run.recording = Recording("captured")
        run.run(4)

        assert_same(native(order, 4, rule, BF16, 4, TINY), run.recording)

    def test_after_a_rebuild(self) -> None:
        """Graphs live through a rebuild, and the epochs after it have native's bits."""
        run = captured_run()
        run.step()
        run.runtime.actions.refresh(1)
        for step in ORDER.steps[:3]:
            if step.stage == 2 and step.microbatch == 0:
                run.runtime.actions.refresh(2)
            run.act(step)
        run.runtime.rebuild()
        run.recording = Recording("rebuilt")
        run.run(3)
        reference = native(ORDER, 4, "accumulate", BF16, 4, TINY)
        for held in reference.values.values():
            for label in [label for label in held if label.startswith("step 0 ")]:
                del held[label]

        assert_same(reference, run.recording)


class TestWhatIsCaptured:
    def test_one_pool_a_slot(self, graphs: list[StandInGraph]) -> None:
        """F, dI and dW of a slot share a pool with each other and with nobody else."""
        run = captured_run()
        slots = sum(run.runtime.plan.num_slots.values())

        pools = [graph.pool for graph in graphs]

        assert slots + len(ORDER.stages) == len(set(pools))
        wgrads = executor_of(run).wgrads
        for index, slot in executor_of(run).slots.items():
            own: list[Any] = [slot.forward, slot.dgrad]
            own += [w.graph for product, w in wgrads.items() if product.slots == (index,)]
            assert 1 == len({graph.pool for graph in own})

    def test_only_the_first_writer_has_two(self, graphs: list[StandInGraph]) -> None:
        """One F, one dI and one dW a slot, a refresh a stage, an overwriting dW a stage."""
        run = captured_run()
        slots = sum(run.runtime.plan.num_slots.values())

        assert 3 * slots + 2 * len(ORDER.stages) == len(graphs)
        assert len(graphs) == executor_of(run).report.num_graphs

    @pytest.mark.parametrize(("rule", "kinds"), [("accumulate", 2), ("per_microbatch", 1)])
    def test_each_kind_of_work_is_warm(
        self, rule: Rule, kinds: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Warmup runs dW once overwriting and once adding, if any does; not once a buffer."""
        ran: list[bool] = []
        work = EagerExecutor.run_work

        def counted(
            memory: StageMemory, slot: Slot, variant: Any, others: Any = (), *, keep: bool
        ) -> Any:
            ran.append(variant.accumulate)
            return work(memory, slot, variant, others, keep=keep)

        monkeypatch.setattr(EagerExecutor, "run_work", staticmethod(counted))
        run = captured_run(Order.parse("1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"), rule)
        variants = {"accumulate": 2, "per_microbatch": 3}[rule]

        assert kinds == len(set(ran))
        assert kinds + variants == len(ran)
        assert 0.0 < executor_of(run).report.phases["warmup dW"]

    def test_a_slot_each_microbatch_has_the_graphs_of_the_paper(
        self, graphs: list[StandInGraph]
    ) -> None:
        """One slot a microbatch has the paper's 3 M L graphs, and a refresh a stage."""
        captured_run(provisioning="static")

        assert 3 * ORDER.num_microbatches * len(ORDER.stages) + len(ORDER.stages) == len(graphs)

    def test_state_is_left_alone(self) -> None:
        """Warmup and capture leave numerical state, destinations and sums as they were."""
        fresh = NumericalState.of(reference_stages(ORDER, 4, TINY)[0].domain)

        run = captured_run()

        assert [] == NumericalState.of(run.runtime.domain).differences(fresh)
        for memory in run.runtime.memories.values():
            assert not any(t.any() for t in memory.arena.written(0).values())

    def test_domain_is_frozen(self) -> None:
        """A stage that appears after capture is refused."""
        run = captured_run()
        assert run.runtime.domain.frozen

        with pytest.raises(BackendError, match="joins a frozen state domain"):
            reference_stages_in(run.runtime.domain)


def reference_stages_in(domain: Any) -> None:
    """Try to add a stage."""
    from qeffect.gpu_runtime.backends.reference import ReferenceStage

    ReferenceStage(9, domain, TINY)


class TestAddresses:
    @pytest.mark.parametrize("what", few(["parameter", "cache", "state"], (1,), (2,)))
    def test_what_moved_is_named_before_a_replay(self, what: str) -> None:
        """A parameter, cache or scale that moved is named at the next refresh, before a replay."""
        run = captured_run()
        run.step()
        stage: Any = run.runtime.stages[1]
        moved = {
            "parameter": stage.layers[0].fc1.weight,
            "cache": stage.layers[0].fc1.cache.data,
            "state": stage.layers[0].forward_scaling.scale,
        }[what]
        replays = executor_of(run).num_replays

        moved.data = moved.data.clone()

        with pytest.raises(BackendError, match=f"{what}:.* was at"):
            run.runtime.actions.refresh(1)
        assert replays == executor_of(run).num_replays

    @pytest.mark.parametrize(
        "what", few(["parameter", "cache", "state", "buffer", "sum", "module"], (0, 3, 5), ())
    )
    def test_what_was_replaced_is_found_too(self, what: str) -> None:
        """What was replaced by another object is found as well as what moved."""
        run = captured_run()
        run.step()
        stage: Any = run.runtime.stages[1]
        memory = run.runtime.memories[1]
        layer = stage.layers[0]
        if what == "parameter":
            layer.fc1.weight = torch.nn.Parameter(layer.fc1.weight.detach().clone())
        elif what == "cache":
            layer.fc1.cache = QuantizedTensor(
                layer.fc1.cache.data.clone(), layer.fc1.cache.scale_inv
            )
        elif what == "state":
            layer.backward_scaling.history = layer.backward_scaling.history.clone()
        elif what == "buffer":
            slot = next(iter(memory.table))
            slot.inputs = tuple(tensor.detach().clone() for tensor in slot.inputs)
        elif what == "sum":
            memory.sums[0] = memory.sums[0].clone()
        else:
            layer.norm1 = torch.nn.LayerNorm(TINY.hidden, dtype=BF16)
        named = {"module": "parameter"}.get(what, what)

        with pytest.raises(BackendError, match=f"{named}:.* was at"):
            run.runtime.actions.refresh(1)

    def test_a_newcomer_is_found(self) -> None:
        """A parameter that a module gains after capture is named."""
        run = captured_run()
        stage: Any = run.runtime.stages[1]
        stage.layers[0].norm1.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))

        with pytest.raises(BackendError, match=r"parameter:.*gain was at None"):
            run.runtime.actions.refresh(1)

    def test_names_are_walked_only_where_something_differs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step looks by the probe alone; a change of no address is looked into once."""
        run = captured_run()
        walked: list[int] = []
        addresses = StageMemory.addresses

        def counted(memory: StageMemory) -> dict[str, int]:
            walked.append(memory.stage.index)
            return addresses(memory)

        monkeypatch.setattr(StageMemory, "addresses", counted)
        run.step()
        assert [] == walked
        stage: Any = run.runtime.stages[1]
        stage.layers[0].add_module("empty", torch.nn.Identity())

        run.run(2)

        assert [1] == walked

    def test_update_in_place_is_fine(self) -> None:
        """Optimizer steps keep every address: thirty steps replay the same graphs."""
        run = captured_run(Order.parse("1F0 2F0 2I0 2W0 1I0 1W0"))
        replays = executor_of(run).num_replays

        run.run(30)

        assert 30 * 8 == executor_of(run).num_replays - replays


def launch_run() -> GuardedRun:
    """A guarded runtime for launches, whose actions call the backend."""
    stages = reference_stages(ORDER, 4, TINY)
    config = RuntimeConfig(mode="one launch", readers=True)
    return GuardedRun(Runtime(stages, ORDER, config), Workload(), optimizer_for(stages, BF16))


class TestReplayActions:
    """The return from launches to graphs of single actions."""

    def test_steps_before_and_after_have_the_bits_of_native(
        self, graphs: list[StandInGraph]
    ) -> None:
        """The device's counts go on, although the warm-up runs every action."""
        run = launch_run()
        run.recording = Recording("launch")
        run.run(2)
        assert not graphs
        run.runtime.replay_actions()
        run.run(2)

        assert executor_of(run).num_replays > 0
        assert_same(native(ORDER, 4, "accumulate", BF16, 4, TINY), run.recording)

    def test_what_each_action_reported_is_kept(self) -> None:
        """By slot, by dW and by stage, for the rehearsals of later steps."""
        run = launch_run()
        run.step()
        runtime, executor = run.runtime, run.runtime.executor
        assert isinstance(executor, LaunchExecutor)

        slots = {slot.index for memory in runtime.memories.values() for slot in memory.table}
        assert executor.slots.keys() == slots
        assert executor.refreshed.keys() == runtime.stages.keys()
        for memory in runtime.memories.values():
            for slot in memory.table:
                assert executor.slots[slot.index].queued[0] == memory.all_matrices
        assert {each.covered for each in executor.wgrads.values()} == {
            memory.all_matrices for memory in runtime.memories.values()
        }

    def test_not_with_a_live_tape(self) -> None:
        """The tape would be lost."""
        run = launch_run()
        run.runtime.actions.refresh(1)
        run.act(ORDER.steps[0])

        with pytest.raises(Refused) as caught:
            run.runtime.replay_actions()
        assert caught.value.clause.startswith("persistence.")
        assert isinstance(run.runtime.executor, LaunchExecutor)

    def test_only_in_mode_one_launch(self) -> None:
        with pytest.raises(BackendError, match="mode is 'replays', expected 'one launch'"):
            captured_run().runtime.replay_actions()
