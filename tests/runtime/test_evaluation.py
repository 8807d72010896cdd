"""Evaluations in the middle of training are guarded, and leave the bits of training unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.gpu_runtime.step.evaluation import evaluated
from qeffect.keys import TapeKey, TapeRef
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused

from .helpers import TINY, assert_same, guarded, guarded_run
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)


@attrs.define(eq=False)
class EvaluatedRun(GuardedRun):
    """A guarded run that evaluates after every F and dI, and before every update."""

    seen: list[Tensor] = attrs.field(factory=list)

    def evaluate(self) -> None:
        """Evaluate every stage on fixed inputs."""
        for index, stage in self.runtime.stages.items():
            generator = torch.Generator().manual_seed(index)
            inputs = [
                torch.randn(spec.shape, generator=generator).to(spec.dtype) for spec in stage.inputs
            ]
            self.seen += self.runtime.actions.evaluate(index, inputs)

    def after_forward(self, key: TapeKey, step: object, outputs: Sequence[Tensor]) -> None:
        super().after_forward(key, step, outputs)  # type: ignore[arg-type]
        self.evaluate()

    def after_dgrad(
        self, key: TapeKey, ref: TapeRef, step: object, gradients: Sequence[Tensor]
    ) -> None:
        super().after_dgrad(key, ref, step, gradients)  # type: ignore[arg-type]
        self.evaluate()

    def finish(self) -> None:
        self.evaluate()
        super().finish()


def evaluated_run(**options: object) -> EvaluatedRun:
    """A fresh run that evaluates."""
    run = guarded_run(ORDER, **options)  # type: ignore[arg-type]
    return EvaluatedRun(run.runtime, run.workload, run.optimizer)


def test_training_with_evaluations_has_the_bits_of_training_without() -> None:
    """Outputs, gradients, weights, optimizer and scaling state, over two steps."""
    plain = guarded(ORDER, 4, "accumulate", torch.bfloat16, 2, TINY)
    run = evaluated_run()
    run.recording = Recording("with evaluations")

    run.run(2)

    assert_same(plain, run.recording)
    assert len(run.seen) > 8


def test_an_evaluation_sees_the_weights_of_now() -> None:
    """With a stale cache, after an update, the weights are quantized for the evaluation."""
    run = evaluated_run()
    stage = next(iter(run.runtime.stages))
    run.evaluate()
    first = run.seen[0]
    run.run(1)
    run.seen.clear()
    run.evaluate()

    assert not torch.equal(first, run.seen[0])
    assert run.runtime.contract.memory.cache_epoch[stage] != run.runtime.epoch


def test_the_log_of_a_run_with_evaluations_replays() -> None:
    """Each of them is a pair of lines."""
    run = evaluated_run(event_log=True)
    run.run(1)
    run.runtime.close()

    assert run.runtime.recorder is not None
    lines = run.runtime.recorder.lines
    assert replay_lines(lines).clause is None
    assert sum('"commit_evaluation"' in line for line in lines) == len(run.seen)


def test_an_evaluation_that_changes_scales_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a backend keeps scaling state elsewhere, the evaluation cannot restore it, and the kernel
    refuses the evaluation."""
    run = evaluated_run()
    stage = next(iter(run.runtime.stages.values()))
    native = type(stage).native_forward

    def moves(self: object, inputs: object, *, first: bool) -> object:
        result = native(self, inputs, first=first)  # type: ignore[arg-type]
        scaling = self._scaled[0].forward_scaling  # type: ignore[attr-defined]
        scaling.scale = scaling.scale * 2
        return result

    monkeypatch.setattr(type(stage), "native_forward", moves)
    with pytest.raises(Refused, match=r"order\.scaling-updates"):
        run.evaluate()
    with pytest.raises(Refused, match=r"order\.poisoned"):
        run.run(1)


def test_inputs_of_another_shape_change_nothing() -> None:
    """The refusal comes before the kernel is asked."""
    run = evaluated_run()
    before = run.runtime.contract.snapshot()
    stage = next(iter(run.runtime.stages))

    with pytest.raises(BackendError, match="shape"):
        run.runtime.actions.evaluate(stage, [torch.zeros(1)])

    assert run.runtime.contract.snapshot() == before


def test_a_failed_evaluation_spoils_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling state may be half updated; a rebuild restores the last commit's."""
    run = evaluated_run()
    stage = next(iter(run.runtime.stages.values()))

    def fails(*_: object, **__: object) -> object:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(stage), "native_forward", fails)
        with pytest.raises(MemoryError):
            run.evaluate()
    with pytest.raises(Refused, match=r"order\.poisoned"):
        run.evaluate()
    run.runtime.rebuild()
    run.evaluate()
    assert run.seen


def test_what_it_filled_is_put_back() -> None:
    """The cache of a stale stage has its former content, and nothing was reported as filled."""
    run = guarded_run(ORDER)
    memory = next(iter(run.runtime.memories.values()))
    before = {name: held.clone() for name, held in memory.stage.cached_weights().items()}
    inputs = [torch.ones(spec.shape, dtype=spec.dtype) for spec in memory.stage.inputs]

    _, effects = evaluated(memory, run.runtime.memories.values(), inputs, cached=False)

    assert effects.updates == 0
    assert not effects.filled
    after = memory.stage.cached_weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
