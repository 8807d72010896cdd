"""Unusable input to the runtime: a clear line before the kernel is asked, and nothing touched."""

from __future__ import annotations

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.measure.workload import Workload
from qeffect.gpu_runtime.plan.order import Order
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
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
        ],
    )
    def test_wrong_inputs_of_a_forward_are_named(
        self, inputs: list[torch.Tensor], says: str
    ) -> None:
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

    def test_capture_without_cuda(self) -> None:
        """Capturing on a CPU is refused with the reason."""
        with pytest.raises(BackendError, match="cannot capture: device cpu has no CUDA graphs"):
            Runtime(reference_stages(ORDER, 4, TINY), ORDER, RuntimeConfig(captured=True))
