"""
Recomputed activations in the library's layers, with a stand-in for the library.

`tests/gpu/test_recomputation.py` tests the library itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.epoch_scales import SCALES, Scales
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.native import NativeRun, rule_for
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.gpu_runtime.lab.comparisons.workload import Workload
from qeffect.gpu_runtime.runtime import Mode, Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.numerical_state import preserving
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.gpu_runtime.step.plan.order import Order
from qeffect.schedule.actions import Kind

from . import fake_te
from .helpers import assert_same
from .stand_ins import install as install_graphs
from .test_te import CPU, FUSED, ORDER, install

BF16 = torch.bfloat16
# dI of a stage in another order than its F: scales of F may not come from a queue.
CROSSED = Order.parse("1F0 2F0 1F1 2F1 2I1 1I1 2W1 2I0 1I0 2W0 1W0 1W1")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the stand-in where the library would be."""
    install(monkeypatch)
    monkeypatch.setattr(TransformerEngineDomain, "_device_obstacles", lambda _: ())
    yield
    te.library.cache_clear()


def stages_of(scales: Scales, recompute: Sequence[int]) -> list[TransformerEngineStage]:
    """Fresh stages of two layers in a fresh domain."""
    te.reset_process()
    domain = TransformerEngineDomain("delayed", 4, CPU, scales)
    return [
        TransformerEngineStage(
            n,
            domain,
            FUSED,
            num_layers=2,
            seed=n,
            fuse_wgrad_accumulation=True,
            recompute=n in recompute,
        )
        for n in ORDER.stages
    ]


def native(scales: Scales, recompute: Sequence[int] = ()) -> Recording:
    """Three steps of the library's full backward."""
    stages = stages_of(scales, recompute)
    with preserving(stages[0].domain):
        for stage in stages:
            stage.warm()
    recording = Recording("native")
    sums = rule_for(ORDER, "accumulate", BF16)
    NativeRun(stages, ORDER, Workload(), sums, BF16, Optimizer(stages), recording).run(3)
    return recording


def guarded(
    scales: Scales, order: Order = ORDER, mode: Mode = "eager", *, recompute: bool = True
) -> Recording:
    """Three recorded steps of a guarded run in which every stage recomputes, or none does."""
    stages = stages_of(scales, order.stages if recompute else ())
    config = RuntimeConfig(rule="accumulate", dtype=BF16, readers=True, mode=mode)
    run = GuardedRun(
        Runtime(stages, order, config), Workload(), Optimizer(stages), Recording("guarded")
    )
    run.run(3)
    assert run.recording is not None
    return run.recording


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("mode", ["eager", "replays"])
def test_recomputed_training_has_the_bits_of_training_that_keeps_activations(
    scales: Scales, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of native full backward without recomputation; the state after each F and dI included."""
    install_graphs(monkeypatch)

    assert_same(native(scales), guarded(scales, mode=mode))


def test_each_dgrad_uses_the_scales_of_its_own_forward() -> None:
    """Also if dI runs in another order than F."""
    assert_same(guarded("action", CROSSED, recompute=False), guarded("action", CROSSED))


def test_native_that_recomputes_has_the_same_bits() -> None:
    """In the step's first F, which fills the caches, too."""
    assert_same(native("action"), native("action", recompute=ORDER.stages))


@contextmanager
def _current_scales(
    self: TransformerEngineDomain, states: Sequence[Any], scales: Sequence[Tensor]
) -> Iterator[None]:
    with self._gathering():
        yield


def test_without_the_copied_scales_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales that move at every action; scales that stand still need no copy."""
    monkeypatch.setattr(TransformerEngineDomain, "_recompute", _current_scales)

    assert compare(native("action"), guarded("action")).mismatched > 0
    assert_same(native("epoch"), guarded("epoch"))


def test_only_the_chosen_stages_run_their_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of each microbatch: once in F, once more in dI if its stage recomputes."""
    ran: list[int] = []
    forward = fake_te.TransformerLayer.forward

    def counted(self: fake_te.TransformerLayer, x: Tensor, **options: Any) -> Tensor:
        ran.append(id(self))
        return forward(self, x, **options)

    first, last = ORDER.stages[0], ORDER.stages[-1]
    stages = stages_of("action", [last])
    run = GuardedRun(
        Runtime(stages, ORDER, RuntimeConfig(rule="accumulate", dtype=BF16)),
        Workload(),
        Optimizer(stages),
    )
    monkeypatch.setattr(fake_te.TransformerLayer, "forward", counted)
    run.run(1)

    times = {stage.index: {ran.count(id(layer)) for layer in stage.layers} for stage in stages}
    once = len(ORDER.microbatches(first, Kind.FORWARD))
    assert times[first] == {once}
    assert times[last] == {2 * once}


def test_an_evaluation_recomputes_nothing() -> None:
    """Without gradients no dI follows, so F runs as without recomputation."""
    (stage, *_) = stages_of("action", ORDER.stages)
    with preserving(stage.domain):
        stage.warm()
    with torch.no_grad():
        (output,) = stage.native_forward([stage.inputs[0].buffer()], first=False)
    assert output.grad_fn is None


def test_dropout_is_refused() -> None:
    """The library's generator draws where it is; dI cannot draw the same numbers again."""
    domain = TransformerEngineDomain("delayed", 4, CPU)
    with pytest.raises(ValueError, match=r"recompute=True needs dropout=0.0.* found dropout=0.5"):
        TransformerEngineStage(0, domain, FUSED, recompute=True, dropout=0.5)
