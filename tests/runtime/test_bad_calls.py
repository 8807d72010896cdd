"""
Unusable input to the runtime is refused in one clear line, before the contract kernel is asked, and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.refusals import Refused

from .helpers import TINY, guarded_run, reference_stages
from .injection import ORDER
from .orders import table_order


class TestBadCalls:
    """Unusable input is a clear line before the kernel is asked, and touches nothing."""

    @pytest.mark.parametrize(
        ("inputs", "says"),
        [
            ([], "takes 1 inputs, found 0"),
            ([torch.zeros(16, 1, 31).bfloat16()], "expected shape .16, 1, 32., found .16, 1, 31."),
            ([torch.zeros(16, 1, 32)], "expected dtype torch.bfloat16, found torch.float32"),
            (
                [torch.zeros(16, 1, 32, device="meta").bfloat16()],
                "expected device cpu, found meta",
            ),
            (5, "expected a sequence of tensors as inputs, found 5"),
            ("x", "expected a sequence of tensors as inputs, found 'x'"),
            ([[1.0]], "expected a sequence of tensors as inputs, found "),
            ({"x": 1}, "expected a sequence of tensors as inputs, found "),
            (iter([torch.zeros(16, 1, 32)]), "expected a sequence of tensors as inputs, found "),
        ],
    )
    def test_wrong_inputs_of_a_forward_are_named(self, inputs: Any, says: str) -> None:
        """Wrong number, shape, dtype or device of what F takes."""
        run = guarded_run(ORDER)
        run.runtime.actions.refresh(1)

        with pytest.raises(BackendError, match=says):
            run.runtime.actions.forward(run.runtime.key(1, 0), inputs)

        assert {} == run.runtime.contract.live()

    def test_a_microbatch_that_was_never_configured_is_an_unknown_key(self) -> None:
        """A microbatch that was never configured is an unknown key."""
        run = guarded_run(ORDER)
        run.runtime.actions.refresh(1)
        inputs = Workload().inputs(run.runtime.stages[1], 0, 0)

        with pytest.raises(Refused) as caught:
            run.runtime.actions.forward(run.runtime.key(1, 9), inputs)

        assert "ownership.unknown-key" == caught.value.clause

    def test_a_stage_of_another_process_is_named(self) -> None:
        """A stage of another process is named with those that there are."""
        run = guarded_run(ORDER)

        with pytest.raises(BackendError, match=r"no stage 5 in this process; it has \[1, 2\]"):
            run.runtime.actions.refresh(5)

    def test_other_stages_than_the_order(self) -> None:
        """Stages that the order does not run are refused when the runtime is made."""
        other = table_order("ScheduleZBVZeroBubble", 0)

        with pytest.raises(BackendError, match=r"the order runs stages \[0, 3\]"):
            Runtime(reference_stages(ORDER, 4, TINY), other)

    def test_half_a_domain(self) -> None:
        """A runtime over half of a state domain would let the other half roll its scales."""
        stages = reference_stages(ORDER, 4, TINY)

        with pytest.raises(BackendError, match="the state domain has 2 stages"):
            Runtime(stages[:1], Order.parse("1F0 1I0 1W0"))

    @pytest.mark.parametrize(
        ("cells", "says"),
        [
            ("0F0 0F0 0I0 0W0", "the order repeats 0F0"),
            ("0F0 0I0 0W0 0W0", "the order repeats 0W0"),
            ("0F0 0I0", "the order lacks 0W0; expected F, dI and dW of microbatches 0 to 0"),
            ("0F1 0I1 0W1", "the order lacks 0W0; expected F, dI and dW of microbatches 0 to 1"),
            ("0F0 0B0 1F0 1B0 1F1 1B1", "the order lacks 0W1"),
            ("0I0 0F0 0W0", "the order has 0I0 without 0F0 before it"),
            ("0F0 0W0 0I0", "the order has 0W0 without 0I0 before it"),
        ],
    )
    def test_an_order_that_is_not_whole(self, cells: str, says: str) -> None:
        """Said when the runtime is made, and not as an index that is out of range."""
        order = Order.parse(cells)
        with pytest.raises(BackendError, match=says):
            Runtime(reference_stages(order, 4, TINY), order)

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: LayerConfig(hidden=32.0), "hidden must be an int, got 32.0"),  # type: ignore
            (lambda: LayerConfig(heads=True), "heads must be an int, got True"),
            (lambda: LayerConfig(sequence=0), "sequence is 0; expected at least 1"),
            (lambda: ReferenceDomain(0), "history_length must be an int of at least 1, got 0"),
            (lambda: ReferenceDomain("4"), "must be an int of at least 1, got '4'"),  # type: ignore
            (lambda: ReferenceDomain(tape_scales="kept"), "'carried' or 'live', got 'kept'"),
        ],
    )
    def test_dimensions_that_are_none(self, make: Callable[[], object], says: str) -> None:
        """Said where they are given, and not where a tensor of them is made."""
        with pytest.raises((TypeError, ValueError), match=says):
            make()

    def test_what_is_no_order_and_no_stage(self) -> None:
        """One line that says what was expected."""
        with pytest.raises(BackendError, match=r"expected an Order, such as .*, found '0F0 0I0'"):
            Runtime(reference_stages(ORDER, 4, TINY), "0F0 0I0")  # type: ignore[arg-type]
        with pytest.raises(BackendError, match="expected stages of a backend, found Linear"):
            Runtime([torch.nn.Linear(1, 1)], ORDER)  # type: ignore[list-item]

    def test_a_restore_from_what_is_no_checkpoint_changes_nothing(self) -> None:
        """Both halves are checked before a tape is dropped."""
        run = guarded_run(ORDER)
        runtime = run.runtime
        held = runtime.checkpoint()
        runtime.actions.refresh(1)
        runtime.actions.forward(runtime.key(1, 0), Workload().inputs(runtime.stages[1], 0, 0))
        live = runtime.contract.live()
        for given in ((held, None), (held[0], None), (None, held[1])):
            with pytest.raises(TypeError, match=r"restore\(\*runtime\.checkpoint\(\)\)"):
                runtime.restore(*given)  # type: ignore[arg-type]
        assert live == runtime.contract.live()
        assert 1 == len(live)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda _: torch.zeros(3), r"of torch.bfloat16, found \(3,\) of torch.float32"),
            (lambda saved: saved.double(), "of torch.float64; load what this model's optimizer"),
            (lambda _: None, "expected a tensor, found None"),
        ],
    )
    def test_an_optimizer_of_another_model_loads_nothing(
        self, change: Callable[[torch.Tensor], Any], says: str
    ) -> None:
        """All tensors are checked before the first one is copied."""
        stages = reference_stages(ORDER, 4, TINY)
        optimizer = Optimizer(stages)
        for stage in stages:
            for parameter in parameters(stage).values():
                parameter.grad = torch.ones_like(parameter)
        optimizer.adamw.step()
        before = {name: value.clone() for name, value in optimizer.state_tensors().items()}
        state: dict[str, Any] = {name: value + 1 for name, value in before.items()}
        last = [name for name in state if name.endswith(".exp_avg")][-1]
        with pytest.raises(BackendError, match=says):
            optimizer.load_state({**state, last: change(state[last])})
        after = optimizer.state_tensors()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        optimizer.load_state(state)
        assert all(torch.equal(after[name], value) for name, value in state.items())

    def test_capture_without_cuda(self) -> None:
        """Capturing on a CPU is refused with the reason."""
        with pytest.raises(BackendError, match="cannot capture: device cpu has no CUDA graphs"):
            Runtime(reference_stages(ORDER, 4, TINY), ORDER, RuntimeConfig(mode="replays"))
