"""
Gradient accumulation over several passes (walks) of one order: the bits of one larger step, and its
limits.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError, StageBackend, parameters
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.lab.sides.step_loop import StepLoop
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, same_bits
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused

from .helpers import TINY, optimizer_for, reference_stages

#: dW of the second microbatch comes first, so another dW than F's first opens the gradients.
ORDER = "0F0 0F1 0I0 0I1 0W1 0W0"
#: The same order twice, over twice as many microbatches.
TWICE = ORDER + " 0F2 0F3 0I2 0I3 0W3 0W2"


@attrs.frozen(eq=False)
class _Shifted(Workload):
    """The data of later microbatches in later walks."""

    shift: int = 0

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> tuple[Tensor, ...]:
        return super().inputs(stage, step, microbatch + self.shift)

    def output_gradients(
        self, stage: StageBackend, step: int, microbatch: int
    ) -> tuple[Tensor, ...]:
        return super().output_gradients(stage, step, microbatch + self.shift)


class _WalkedLoop(StepLoop):
    """The step loop, with several walks over the order in a step."""

    def steps(self, num_steps: int, walks: int) -> None:
        for _ in range(num_steps):
            self.begin()
            for walk in range(walks):
                if walk:
                    assert walk == self.runtime.next_walk()
                self.workload = _Shifted(shift=2 * walk)
                for step in self.runtime.order.steps:
                    self.advance(step)
            self.finish()


def walked(walks: int, dtype: torch.dtype = torch.float32, **options: object) -> _WalkedLoop:
    """A loop over a fresh runtime of that many walks."""
    order = Order.parse(ORDER)
    stages = reference_stages(order, 4, TINY)
    config = RuntimeConfig(walks=walks, dtype=dtype, **options)  # type: ignore[arg-type]
    runtime = Runtime(stages, order, config, event_log=True)
    return _WalkedLoop(runtime, _Shifted(), optimizer_for(stages, dtype))


def weights(stage: StageBackend) -> list[Tensor]:
    """Every parameter of a stage."""
    return [parameter.detach() for parameter in parameters(stage).values()]


class TestBits:
    """What accumulation over walks computes."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_two_walks_have_the_bits_of_one_larger_native_step(self, dtype: torch.dtype) -> None:
        """Parameters and numerical state after three steps, each of two walks."""
        loop = walked(2, dtype)
        loop.steps(3, 2)

        larger = Order.parse(TWICE)
        stages = reference_stages(larger, 4, TINY)
        rule = rule_for(larger, "accumulate", dtype)
        optimizer = optimizer_for(stages, dtype)
        NativeRun(stages, larger, Workload(), rule, dtype, optimizer).run(3)

        ours, native = loop.runtime.stages[0], stages[0]
        assert weights(native)
        assert all(map(same_bits, weights(ours), weights(native)))
        mine, theirs = live_state(loop.runtime.domain), live_state(native.domain)
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[name], theirs[name]) for name in mine)

    def test_a_step_may_have_fewer_walks(self) -> None:
        """The last step of an epoch of data: one walk has the bits of a runtime of one walk."""
        one, two = walked(1), walked(2)
        one.steps(2, 1)
        two.steps(2, 1)
        pairs = zip(weights(one.runtime.stages[0]), weights(two.runtime.stages[0]), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)

    def test_its_log_replays(self) -> None:
        """Every walk is in the event log, and a replay accepts it."""
        loop = walked(3)
        loop.steps(2, 3)
        recorder = loop.runtime.recorder
        assert recorder is not None
        loop.runtime.close()
        report = replay_lines(recorder.lines)
        assert report.clause is None, report.summary()
        assert 4 == sum('"next_walk"' in line for line in recorder.lines)


class TestLimits:
    """What is refused."""

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"walks": 0}, "walks is 0; expected a positive integer"),
            ({"walks": True}, "walks is True; expected a positive integer"),
            ({"walks": 2, "rule": "per_microbatch"}, "set rule='accumulate'"),
            ({"walks": 2, "rule": "copied"}, "set rule='accumulate'"),
            ({"walks": 2, "mode": "one launch"}, "set mode='replays'"),
        ],
    )
    def test_a_configuration_that_cannot_accumulate(
        self, options: dict[str, object], told: str
    ) -> None:
        """Each with what to change."""
        with pytest.raises(BackendError, match=told):
            RuntimeConfig(**options)  # type: ignore[arg-type]

    def test_more_walks_than_the_runtime_was_made_for(self) -> None:
        """Its dW has no graph that adds."""
        loop = walked(1)
        loop.actions()
        with pytest.raises(BackendError, match=r"make it with RuntimeConfig\(walks=2\)"):
            loop.runtime.next_walk()

    def test_a_walk_that_lacks_an_action(self) -> None:
        """Neither the next walk begins nor the epoch ends; a rebuild begins its first walk."""
        loop = walked(2)
        loop.begin()
        for step in loop.runtime.order.steps[:-1]:
            loop.advance(step)
        with pytest.raises(Refused, match=r"^arena\.incomplete"):
            loop.runtime.next_walk()
        loop.runtime.abort()
        loop.runtime.rebuild()
        loop.steps(1, 2)
        assert 1 == loop.runtime.epoch

    def test_a_rebuild_in_a_later_walk_begins_with_the_first(self) -> None:
        """The gradients of the walks before are not in the numerical state."""
        loop, whole = walked(2), walked(2)
        loop.actions()
        loop.runtime.next_walk()
        loop.runtime.abort()
        loop.runtime.rebuild()
        loop.steps(1, 2)
        whole.steps(1, 2)
        pairs = zip(weights(loop.runtime.stages[0]), weights(whole.runtime.stages[0]), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)
