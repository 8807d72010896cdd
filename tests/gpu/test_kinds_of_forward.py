"""
Kinds of F over Transformer Engine: recomputed by `te.checkpoint`, and evaluated during training.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.te.domain import library
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import compare
from qeffect.keys import TapeKey, TapeRef

from ..runtime.injection import FINAL, NUM_STEPS
from .helpers import final_of, guarded_run, native_final


def recomputed(
    self: TransformerEngineStage, inputs: Sequence[Tensor], *, first: bool
) -> tuple[Tensor, ...]:
    """F of a stage of layers whose activations the library's checkpoint recomputes in dI."""
    (hidden,) = inputs
    with self.domain.autocast():
        for layer in self.layers:
            hidden = library().te.checkpoint(
                layer, hidden, use_reentrant=False, is_first_microbatch=first
            )
    return (hidden,)


def assert_trained_as_native(run: GuardedRun) -> None:
    """Weights, caches, scaling state and optimizer have the bits of the native full backward."""
    found = final_of(list(run.runtime.stages.values()), run.optimizer)
    result = compare(native_final(), found, categories=FINAL)
    assert result.compared > 0
    assert result.mismatched == 0, str(result)


@attrs.define(eq=False)
class EvaluatedRun(GuardedRun):
    """A guarded run that evaluates each stage after every dI and before every update."""

    evaluations: int = 0

    def evaluate(self) -> None:
        """Evaluate every stage on ones."""
        for index, stage in self.runtime.stages.items():
            inputs = [torch.ones_like(spec.buffer()) for spec in stage.inputs]
            (output,) = self.runtime.actions.evaluate(index, inputs)
            assert bool(torch.isfinite(output).all())
            self.evaluations += 1

    def after_dgrad(
        self, key: TapeKey, ref: TapeRef, step: object, gradients: Sequence[Tensor]
    ) -> None:
        super().after_dgrad(key, ref, step, gradients)  # type: ignore[arg-type]
        self.evaluate()

    def finish(self) -> None:
        self.evaluate()
        super().finish()


@pytest.mark.parametrize("captured", [False, True])
def test_training_with_evaluations_has_native_bits(captured: bool) -> None:
    """Eager forwards between the actions of a step, also while graphs are live."""
    made = guarded_run(captured=captured)
    run = EvaluatedRun(made.runtime, made.workload, made.optimizer)

    run.run(NUM_STEPS)

    assert run.evaluations > NUM_STEPS
    assert_trained_as_native(run)


def test_recomputed_training_has_native_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """`te.checkpoint` recomputes inside dI, with the scales of its F."""
    run = guarded_run(captured=False)
    monkeypatch.setattr(TransformerEngineStage, "_run", recomputed)

    run.run(NUM_STEPS)
    monkeypatch.undo()

    assert_trained_as_native(run)
