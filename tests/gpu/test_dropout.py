"""Dropout in Transformer Engine's layers: the device's random numbers in eager F and in replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch

from qeffect.gpu_runtime.backends.devices import generator_of
from qeffect.gpu_runtime.backends.te.device_numbers import DeviceNumbers
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.step.memory.numerical_state import Snapshot, live_state
from qeffect.refusals import Refused

from ..runtime.injection import FINAL, NUM_STEPS
from .helpers import SMALL, final_of, guarded_run, native_final

DROPPING = attrs.evolve(SMALL, dropout=0.1, num_layers=2)


def random_of(run: GuardedRun) -> DeviceNumbers:
    """The random numbers of a run."""
    domain = run.runtime.domain
    assert isinstance(domain, TransformerEngineDomain)
    return domain.random


def final(run: GuardedRun) -> Recording:
    """What training left."""
    return final_of(list(run.runtime.stages.values()), run.optimizer)


@pytest.mark.parametrize("captured", [False, True])
def test_dropout_has_the_bits_of_native(captured: bool) -> None:
    """Weights, caches, scaling state, optimizer, and where the last F drew."""
    oracle = native_final(DROPPING)
    run = guarded_run(DROPPING, captured=captured)
    generator = generator_of(random_of(run).device)
    before = generator.initial_seed(), generator.get_offset()
    run.run(NUM_STEPS)
    torch.cuda.synchronize()

    assert "domain.generator.position" in live_state(run.runtime.domain)
    result = compare(oracle, final(run), categories=FINAL)
    assert result.compared > 0
    assert result.mismatched == 0, str(result)
    assert before == (generator.initial_seed(), generator.get_offset())
    assert all(config.reports_draws for config in run.runtime.contract.stages)
    assert int(random_of(run).position) > run.runtime.contract.memory.drawn[0] > 0


def test_dropout_drops() -> None:
    """The comparison is not blind: without dropout the bits are others."""
    oracle = native_final(DROPPING)
    run = guarded_run(attrs.evolve(DROPPING, dropout=0.0))
    run.run(NUM_STEPS)

    assert compare(oracle, final(run), categories=("parameters",)).mismatched > 0


def stuck(self: DeviceNumbers) -> Iterator[int]:
    """Draw at the place of the first draw, as a graph whose generator is not moved on."""
    with self._at(self.stream, 0):
        yield 0


def test_replays_that_draw_the_same_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second replay would drop the elements of the first."""
    run = guarded_run(DROPPING)
    monkeypatch.setattr(DeviceNumbers, "drawing", contextmanager(stuck))
    with pytest.raises(Refused, match=r"^order\.draws-again in commit_forward"):
        run.run(1)


@pytest.mark.parametrize("same", [True, False])
def test_the_position_decides_which_elements_a_replay_drops(same: bool) -> None:
    """Two replays of one F: equal outputs from one position, others from another."""
    run = guarded_run(DROPPING)
    memory = next(iter(run.runtime.memories.values()))
    slot = next(iter(memory.table))
    numbers, found = random_of(run), []
    before = Snapshot(list(live_state(run.runtime.domain).values()))
    for position in (0, 0 if same else 4096):
        numbers.position.fill_(position)
        for given in slot.inputs:  # a norm maps a constant to zero, which dropout cannot change
            rising = torch.linspace(-1, 1, given.numel(), device=given.device)
            given.detach().copy_(rising.view(given.shape))
        ran = run.runtime.executor.forward(memory, slot)
        found.append(slot.outputs[0].clone())
        before.restore()  # F moves scales, so that a second F has other outputs
        torch.cuda.synchronize()
        assert ran.draws == position

    assert torch.equal(*found) is same


def test_an_evaluation_drops_nothing() -> None:
    """Two evaluations of one input are equal, and leave the position where it was."""
    run = guarded_run(DROPPING)
    run.run(1)
    stage = next(iter(run.runtime.stages.values()))
    assert isinstance(stage, TransformerEngineStage)
    spec = stage.inputs[0].buffer()
    x = torch.linspace(-1, 1, spec.numel(), device=spec.device).view(spec.shape).to(spec.dtype)
    before = int(random_of(run).position)
    first, again = (run.runtime.actions.evaluate(stage.index, [x])[0] for _ in range(2))

    assert torch.equal(first, again)
    assert before == int(random_of(run).position)
