"""
Passes (walks) with fewer microbatches than the order has: native's bits over the remaining
microbatches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.lab.sides.step_loop import StepLoop
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.numerical_state import live_state, same_bits
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused

from .helpers import TINY, optimizer_for, reference_stages

#: Three microbatches of two stages; dW of the first comes first.
ORDER = "0F0 1F0 0F1 1F1 1I0 0I0 0F2 1F2 1W0 0W0 1I1 0I1 1I2 0I2 0W1 1W1 0W2 1W2"


def shorter(order: Order, microbatches: int) -> Order:
    """The order without the actions of the other microbatches."""
    return Order.parse(" ".join(str(s) for s in order.steps if s.microbatch < microbatches))


class _ShortLoop(StepLoop):
    """The step loop, over some of the order's microbatches."""

    def take(self, microbatches: int) -> None:
        """One step of that many microbatches."""
        self.begin()
        self.walk(microbatches)
        self.finish()

    def walk(self, microbatches: int) -> None:
        if microbatches < self.runtime.order.num_microbatches:
            self.runtime.shorten_walk(microbatches)
        for step in shorter(self.runtime.order, microbatches).steps:
            self.advance(step)


def looped(dtype: torch.dtype = torch.float32, order: str = ORDER, **options: Any) -> _ShortLoop:
    """A loop over a fresh runtime that declares no order."""
    parsed = Order.parse(order)
    stages = reference_stages(parsed, 4, TINY)
    config = RuntimeConfig(**{"rule": "accumulate", "declared": False, "dtype": dtype, **options})
    runtime = Runtime(stages, parsed, config, event_log=True)
    return _ShortLoop(runtime, Workload(), optimizer_for(stages, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("taken", [(3, 2, 3, 1), (1, 1, 3)])
def test_native_bits(dtype: torch.dtype, taken: tuple[int, ...]) -> None:
    """Parameters and numerical state after steps of different sizes."""
    loop = looped(dtype)
    whole = Order.parse(ORDER)
    stages = reference_stages(whole, 4, TINY)
    rule = rule_for(whole, "accumulate", dtype)
    native = NativeRun(stages, whole, Workload(), rule, dtype, optimizer_for(stages, dtype))
    for number, microbatches in enumerate(taken):
        loop.take(microbatches)
        native.order = shorter(whole, microbatches)
        native.step(number)

    assert len(taken) == loop.runtime.epoch
    for stage in stages:
        ours = parameters(loop.runtime.stages[stage.index])
        assert ours
        for name, own in parameters(stage).items():
            assert same_bits(ours[name].detach(), own.detach()), (stage.index, name)
    mine, theirs = live_state(loop.runtime.domain), live_state(stages[0].domain)
    assert mine.keys() == theirs.keys()
    assert all(same_bits(mine[name], theirs[name]) for name in mine)


def test_its_log_replays_and_a_forged_one_does_not() -> None:
    """A line for each key that is left out; without one of them the log is refused."""
    loop = looped()
    loop.take(2)
    loop.take(3)
    recorder = loop.runtime.recorder
    assert recorder is not None
    loop.runtime.close()
    report = replay_lines(recorder.lines)
    assert report.clause is None, report.summary()
    skips = [n for n, line in enumerate(recorder.lines) if '"transition":"skip"' in line]
    assert len(skips) == 2  # one for each stage

    forged = [line for n, line in enumerate(recorder.lines) if n != skips[0]]
    assert replay_lines(forged).clause is not None


def test_a_last_short_walk_of_several() -> None:
    """Gradients of three microbatches and then of two accumulate."""
    loop = looped(walks=2)
    loop.begin()
    loop.walk(3)
    loop.runtime.next_walk()
    loop.walk(2)
    loop.finish()
    assert 1 == loop.runtime.epoch


def test_an_action_beyond_and_one_within_that_is_missing() -> None:
    """The contract refuses both."""
    loop = looped()
    loop.begin()
    loop.runtime.shorten_walk(2)
    steps = shorter(loop.runtime.order, 2).steps
    for step in steps[:-1]:
        loop.advance(step)
    late = next(s for s in loop.runtime.order.steps if str(s) == "0F2")
    with pytest.raises(Refused, match=r"^ownership\.skipped"):
        loop.advance(late)
    with pytest.raises(Refused, match=r"^arena\.incomplete"):
        loop.finish()
    assert 0 == loop.runtime.epoch


def test_in_mid_walk() -> None:
    """After the first F the walk keeps its size."""
    loop = looped()
    loop.begin()
    loop.advance(loop.runtime.order.steps[0])
    with pytest.raises(Refused, match=r"^ownership\.walk-begun"):
        loop.runtime.shorten_walk(2)


def test_a_rebuilt_epoch_is_shortened_again() -> None:
    """A rebuild forgets what the walk left out."""
    loop, other = looped(), looped()
    loop.begin()
    loop.runtime.shorten_walk(1)
    loop.advance(loop.runtime.order.steps[0])
    loop.runtime.abort()
    loop.runtime.rebuild()
    loop.take(2)
    other.take(2)
    for index, stage in loop.runtime.stages.items():
        own = parameters(other.runtime.stages[index])
        for name, parameter in parameters(stage).items():
            assert same_bits(parameter.detach(), own[name].detach())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"declared": True}, "set declared=False"),
        ({"rule": "per_microbatch"}, "set rule='accumulate'"),
        ({"rule": "copied"}, "set rule='accumulate'"),
        (
            {"order": "0F0 0F1 0I0 0I1 0W1 0W0"},
            "the first dW of stage 0 .* belongs to microbatch 1",
        ),
    ],
)
def test_what_cannot_be_shortened(options: dict[str, Any], told: str) -> None:
    """The message names the option to set."""
    with pytest.raises(BackendError, match=told):
        looped(**options).runtime.shorten_walk(1)


@pytest.mark.parametrize("microbatches", [0, 4])
def test_a_number_out_of_range(microbatches: int) -> None:
    """From one to all microbatches of the order."""
    with pytest.raises((ValueError, BackendError), match="expected 1 to 3"):
        looped().runtime.shorten_walk(microbatches)
