"""
Restart: the contents of a checkpoint are enough to continue, bit for bit, in a new object.

Numerical state, parameters, optimizer state and the contract's checkpoint are carried over;
references, slots, caches, destinations and tokens are made anew.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from qeffect.checkpoint import Checkpoint
from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.step.memory.numerical_state import NumericalState, live_state, same_bits
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.refusals import Refused

from .helpers import guarded_run
from .orders import random_order, table_order

SAVE_AT, END = 3, 8


@attrs.frozen(eq=False)
class Saved:
    """Everything that a fresh process would load."""

    checkpoint: Checkpoint
    state: NumericalState
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def save(run: GuardedRun) -> Saved:
    """Checkpoint a run."""
    checkpoint, state = run.runtime.checkpoint()
    weights = {
        f"{stage.index} {name}": parameter.detach().clone()
        for stage in run.runtime.stages.values()
        for name, parameter in parameters(stage).items()
    }
    held = {name: tensor.clone() for name, tensor in run.optimizer.state_tensors().items()}
    return Saved(checkpoint, state, weights, held)


def load(run: GuardedRun, saved: Saved) -> None:
    """Continue in another run from what was saved."""
    with torch.no_grad():
        for stage in run.runtime.stages.values():
            for name, parameter in parameters(stage).items():
                parameter.copy_(saved.weights[f"{stage.index} {name}"])
    run.optimizer.load_state(saved.optimizer)
    run.runtime.restore(saved.checkpoint, saved.state)


def spoilt(order: Order, **options: Any) -> GuardedRun:
    """A fresh run whose every tensor is something else than the checkpoint's."""
    run = guarded_run(order, **options)
    with torch.no_grad():
        for stage in run.runtime.stages.values():
            for parameter in parameters(stage).values():
                parameter.add_(1.0)
    for tensor in live_state(run.runtime.domain).values():
        tensor.fill_(3.0)
    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "order", [table_order("ScheduleInterleaved1F1B", 0), table_order("ScheduleZBVZeroBubble", 1)]
)
@pytest.mark.parametrize("history", [4, 64])
def test_continues_bit_for_bit(order: Order, history: int, dtype: torch.dtype) -> None:
    """Save at step 3, continue to step 8 in a fresh runtime: every recorded value is the same."""
    options: dict[str, Any] = {"history": history, "dtype": dtype}
    whole = guarded_run(order, **options)
    whole.run(SAVE_AT)
    saved = save(whole)
    whole.recording = Recording("uninterrupted")
    whole.run(END - SAVE_AT)

    fresh = spoilt(order, **options)
    load(fresh, saved)
    fresh.recording = Recording("restarted")
    fresh.run(END - SAVE_AT)

    result = compare(whole.recording, fresh.recording)
    assert result.mismatched == 0, str(result)
    assert END == fresh.runtime.epoch


def test_another_provisioning_is_another_configuration() -> None:
    """A checkpoint of other slots is refused whole: the numerical state stays as it was."""
    order = random_order(1)
    run, other = guarded_run(order), guarded_run(order, provisioning="static")
    run.run(1)
    saved = save(run)
    before = NumericalState.of(other.runtime.domain)

    with pytest.raises(Refused) as caught:
        other.runtime.restore(saved.checkpoint, saved.state)

    assert "persistence.configuration" == caught.value.clause
    assert [] == NumericalState.of(other.runtime.domain).differences(before)


def test_restored_cache_is_stale() -> None:
    """After a restore the first F wants a refresh: caches never cross."""
    order = random_order(1)
    run = guarded_run(order)
    run.run(1)
    load(run, save(run))
    first = order.steps[0]

    with pytest.raises(Refused) as caught:
        run.act(first)

    assert "version.stale-cache" == caught.value.clause


def test_same_checkpoint_twice() -> None:
    """Restoring one checkpoint twice gives two incarnations; references do not cross."""
    order = table_order("ScheduleZBVZeroBubble", 1)
    run = guarded_run(order)
    run.run(1)
    saved = save(run)
    load(run, saved)
    run.runtime.actions.refresh(1)
    run.act(order.steps[0])
    key = run.runtime.key(1, 0)
    old = run._refs[key]

    load(run, saved)
    run.runtime.actions.refresh(1)
    run.act(order.steps[0])

    with pytest.raises(Refused) as caught:
        run.runtime.actions.dgrad(key, old)
    assert "ownership.foreign-incarnation" == caught.value.clause


def test_optimizer_state_of_other_stages() -> None:
    """Optimizer state with other names is refused before anything is loaded."""
    run = guarded_run(random_order(1))
    run.run(1)
    held = dict(run.optimizer.state_tensors())
    before = {name: tensor.clone() for name, tensor in held.items()}
    held.pop(next(iter(held)))

    with pytest.raises(BackendError, match="state and this optimizer differ in 1 names"):
        run.optimizer.load_state(held)

    now = run.optimizer.state_tensors()
    assert all(same_bits(before[name], now[name]) for name in before)


def test_checkpoint_says_recipe() -> None:
    """The recipe crosses with the state, and another history length is refused."""
    order = random_order(1)
    run, other = guarded_run(order, history=4), guarded_run(order, history=16)
    saved = save(run)
    assert 4 == saved.checkpoint.recipe["amax_history_len"]

    with pytest.raises(BackendError, match="restore under the recipe of the checkpoint"):
        other.runtime.restore(saved.checkpoint, saved.state)
