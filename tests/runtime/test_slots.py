"""Slots from the point of view of a receive, of a send, and of the first and last stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError, TensorSpec, parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, same_bits
from qeffect.gpu_runtime.step.memory.slots import Boundary
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import Kind, Order
from qeffect.keys import TapeKey, TapeRef
from qeffect.refusals import Refused

from .helpers import TINY, assert_same, guarded_run, native
from .orders import random_order, table_order

CPU = torch.device("cpu")


class TestRelations:
    @pytest.mark.parametrize(
        "left_out",
        [
            {"order"},
            {"arena"},
            {"capture"},
            {"completion"},
            {"reduction"},
            {"order", "arena", "capture", "completion", "reduction"},
        ],
        ids=lambda names: "+".join(sorted(names)),
    )
    def test_relations_left_out_change_no_bit(
        self, left_out: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backend may leave relations out: nothing is asked of them, the bits are the same."""
        order = random_order(1)
        reference = native(order, 4, "accumulate", torch.bfloat16, 3, TINY)
        kept = ReferenceStage.relations - left_out
        monkeypatch.setattr(ReferenceStage, "relations", kept)

        run = guarded_run(order)
        run.recording = Recording("guarded")
        run.run(3)

        assert not left_out & set(run.runtime.contract.transitions.relations)
        assert_same(reference, run.recording)


class TestReceiveInPlace:
    def test_receiving_in_place_changes_no_bit(self) -> None:
        """Buffers reserved before F and dI and filled in place give the bits of copied inputs."""
        order = random_order(3)
        copied, received = guarded_run(order), guarded_run(order)
        copied.run(2)

        for _ in range(2):
            self.receive_epoch(received)

        live = live_state(received.runtime.domain)
        for name, tensor in live_state(copied.runtime.domain).items():
            assert same_bits(tensor, live[name]), name
        for index, stage in copied.runtime.stages.items():
            other = parameters(received.runtime.stages[index])
            for name, parameter in parameters(stage).items():
                assert same_bits(parameter, other[name]), name

    @staticmethod
    def receive_epoch(run: GuardedRun) -> None:
        """One epoch in which every input arrives in the slot's own buffer, one action early."""
        runtime, actions = run.runtime, run.runtime.actions
        refs: dict[TapeKey, TapeRef] = {}
        refreshed: set[int] = set()
        for kind, index, m in runtime.order.steps:
            key, stage = runtime.key(index, m), runtime.stages[index]
            if kind is Kind.FORWARD:
                actions.reserve(key)
                arrived = run.workload.inputs(stage, key.epoch, m)
                for buffer, value in zip(actions.input_buffers(key), arrived, strict=True):
                    buffer.copy_(value)
                if index not in refreshed:
                    actions.refresh(index)
                    refreshed.add(index)
                refs[key] = actions.forward(key)
                actions.outputs(key, refs[key])
                actions.finish_outputs(key, refs[key])
            elif kind is Kind.DGRAD:
                gradients = run.workload.output_gradients(stage, key.epoch, m)
                for buffer, value in zip(actions.gradient_buffers(key), gradients, strict=True):
                    buffer.copy_(value)
                actions.bind(key)
                actions.dgrad(key, refs[key])
                actions.dgrads(key, refs[key])
                actions.finish_dgrads(key, refs[key])
            else:
                actions.wgrad(key, refs[key])
        runtime.finish(run.optimizer)

    def test_reserved_slot_is_taken(self) -> None:
        """A reserved key holds its slot, and is forwarded into the same one."""
        run = guarded_run(table_order("ScheduleZBVZeroBubble", 1))
        actions, key = run.runtime.actions, run.runtime.key(1, 0)
        reserved = actions.reserve(key)
        with pytest.raises(Refused) as caught:
            actions.reserve(key)
        assert caught.value.clause in ("ownership.key-live", "ownership.slot-busy")
        actions.refresh(1)

        ref = actions.forward(key)

        assert reserved == ref

    def test_buffers_of_a_key_that_owns_nothing(self) -> None:
        """Nobody is given the buffers of a slot that is another key's, or of an action that ran."""
        run = guarded_run(table_order("ScheduleZBVZeroBubble", 1))
        actions, key = run.runtime.actions, run.runtime.key(1, 0)
        with pytest.raises(BackendError, match="owns no slot"):
            actions.input_buffers(key)
        with pytest.raises(BackendError, match="owns no slot"):
            actions.gradient_buffers(key)
        actions.reserve(key)
        with pytest.raises(BackendError, match="its forward has not run"):
            actions.gradient_buffers(key)
        with pytest.raises(BackendError, match="owns no slot"):
            actions.input_buffers(TapeKey(key.epoch + 1, 1, 0))
        for buffer in actions.input_buffers(key):
            buffer.zero_()
        actions.refresh(1)
        actions.forward(key)
        with pytest.raises(BackendError, match="its forward has run"):
            actions.input_buffers(key)

        assert actions.gradient_buffers(key)


class TestSend:
    def test_slot_waits_for_its_reader(self) -> None:
        """A slot whose outputs are still being sent is not free after dW; then it is."""
        order = Order.parse("0F0 0I0 0W0 0F1 0I1 0W1")
        run = guarded_run(order)
        actions, key = run.runtime.actions, run.runtime.key(0, 0)
        actions.refresh(0)
        ref = actions.forward(key, run.workload.inputs(run.runtime.stages[0], 0, 0))
        (sent,) = actions.outputs(key, ref)
        expected = sent.clone()
        actions.bind(key)
        actions.dgrad(key, ref, run.workload.output_gradients(run.runtime.stages[0], 0, 0))
        actions.dgrads(key, ref)
        actions.finish_dgrads(key, ref)
        actions.wgrad(key, ref)
        late = run.runtime.key(0, 1)
        inputs = run.workload.inputs(run.runtime.stages[0], 0, 1)

        with pytest.raises(Refused) as caught:
            actions.forward(late, inputs)

        assert "ownership.slot-busy" == caught.value.clause
        assert same_bits(expected, sent)
        actions.finish_outputs(key, ref)
        assert actions.forward(late, inputs).slot == ref.slot


class TestEnds:
    def test_first_and_last_stage(self) -> None:
        """No input gradient on the first stage, a loss with targets on the last: native's bits."""
        order = Order.parse("0F0 1F0 0F1 1F1 1I0 0I0 1W0 1I1 0W0 0I1 1W1 0W1")

        def stages() -> list[ReferenceStage]:
            domain = ReferenceDomain(4)
            target = TensorSpec((16, 1, 32), torch.bfloat16, CPU, differentiable=False)
            return [
                ReferenceStage(0, domain, TINY, first=True),
                ReferenceStage(1, domain, TINY, loss=squared, extra_inputs=(target,), seed=1),
            ]

        reference = Recording("native")
        own = stages()
        NativeRun(
            own, order, Workload(), "main_grad", torch.bfloat16, Optimizer(own), reference
        ).run(4)
        own = stages()
        runtime = Runtime(own, order, RuntimeConfig(readers=True))
        run = GuardedRun(runtime, Workload(), Optimizer(own), Recording("guarded"))
        run.run(4)
        assert run.recording is not None

        assert_same(reference, run.recording)


def squared(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return torch.nn.functional.mse_loss(y.float(), target.float())


class TestBoundary:
    """What crosses into a stage is compared tensor by tensor, the first and every further one."""

    SPECS = (
        TensorSpec((2, 3), torch.float32, CPU),
        TensorSpec((4,), torch.int64, CPU, differentiable=False),
        TensorSpec((5,), torch.bfloat16, CPU),
    )

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_what_a_stage_takes(self, number: int) -> None:
        """Tensors of the expected forms pass, however many there are."""
        specs = self.SPECS[:number]

        Boundary(7, "inputs", specs).check([spec.buffer() for spec in specs])

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda t: t[:1], "expected shape"),
            (lambda t: t.to(torch.float16), "expected dtype"),
            (lambda t: t.to("meta"), "expected device"),
        ],
        ids=["shape", "dtype", "device"],
    )
    @pytest.mark.parametrize(("number", "wrong"), [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2)])
    def test_the_one_that_is_wrong_is_named(
        self,
        number: int,
        wrong: int,
        change: Callable[[torch.Tensor], torch.Tensor],
        told: str,
    ) -> None:
        """Its place, and what differs; the tensors before it are right."""
        specs = self.SPECS[:number]
        given = [spec.buffer() for spec in specs]
        given[wrong] = change(given[wrong].detach())

        with pytest.raises(BackendError, match=f"stage 7, inputs {wrong}: {told}"):
            Boundary(7, "inputs", specs).check(given)

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_another_number_of_tensors(self, number: int) -> None:
        """Both numbers are said."""
        given = [spec.buffer() for spec in self.SPECS[:number]]

        with pytest.raises(BackendError, match=f"stage 7 takes 2 inputs, found {number}"):
            Boundary(7, "inputs", self.SPECS[:2]).check(given)
