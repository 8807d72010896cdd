"""Dropout: each F draws new random numbers and says where, bit for bit with native."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.reference.dropout import RandomNumbers
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare
from qeffect.log.replayer import replay_lines
from qeffect.refusals import Refused

from .helpers import TINY, assert_same, guarded_run, native
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)
DROPOUT = 0.25


def dropping(monkeypatch: pytest.MonkeyPatch, *, recompute: bool = False) -> GuardedRun:
    """A guarded run over stages that drop elements."""
    with monkeypatch.context() as patched:
        if recompute:
            made = ReferenceStage.__init__

            def recomputing(self: ReferenceStage, *args: object, **options: object) -> None:
                made(self, *args, recompute=True, **options)  # type: ignore[arg-type]

            patched.setattr(ReferenceStage, "__init__", recomputing)
        run = guarded_run(ORDER, num_layers=2, dropout=DROPOUT)
    run.recording = Recording("dropping")
    return run


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_has_the_bits_of_native(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native full backward that keeps its activations, against guarded F, dI and dW."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 3, TINY, num_layers=2, dropout=DROPOUT)
    run = dropping(monkeypatch, recompute=recompute)
    run.run(3)

    assert run.recording is not None
    assert_same(plain, run.recording)
    assert [recompute] * 2 == [c.recomputes_draws for c in run.runtime.contract.stages]
    drawn = run.runtime.contract.memory.drawn
    assert drawn[0] > 0


def test_dropout_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not blind: without dropout the bits are others."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 1, TINY, num_layers=2)
    run = dropping(monkeypatch)
    run.run(1)

    assert run.recording is not None
    assert compare(plain, run.recording).mismatched > 0


def test_a_generator_that_does_not_advance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph that replays the offset of its capture: the second F drops the same elements."""
    run = dropping(monkeypatch)
    drop = RandomNumbers.drop

    def baked(self: RandomNumbers, value: Tensor, p: float, at: Tensor | None = None) -> Tensor:
        return drop(self, value, p, self.position.clone())

    monkeypatch.setattr(RandomNumbers, "drop", baked)
    with pytest.raises(Refused) as caught:
        run.run(1)

    assert "order.draws-again" == caught.value.clause
    assert "random numbers drawn from position 0" == caught.value.found


def test_a_recomputation_with_fresh_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As activation checkpointing that does not keep the generator's state."""
    run = dropping(monkeypatch, recompute=True)

    def fresh(self: ReferenceDomain, value: Tensor, probability: float) -> Tensor:
        return self.random.drop(value, probability)

    monkeypatch.setattr(ReferenceDomain, "drop", fresh)
    with pytest.raises(Refused, match=r"^order\.wrong-draws in commit_dgrad"):
        run.run(1)


def test_an_evaluation_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations of one input are equal, and leave the generator where it was."""
    run = dropping(monkeypatch)
    run.run(1)
    runtime = run.runtime
    stage = next(iter(runtime.stages.values()))
    assert isinstance(stage, ReferenceStage)
    spec = stage.inputs[0]
    x = torch.linspace(-1, 1, spec.buffer().numel()).reshape(spec.shape).to(spec.dtype)
    before = stage.domain.random.position.clone()
    first, again = (runtime.actions.evaluate(stage.index, [x])[0] for _ in range(2))

    assert torch.equal(first, again)
    assert torch.equal(before, stage.domain.random.position)


def test_the_position_is_numerical_state() -> None:
    """A restore puts the generator back, so that a repeated epoch drops the same elements."""
    domain = ReferenceDomain(4)
    assert {} == domain.extra_state()
    ReferenceStage(0, domain, TINY, dropout=DROPOUT)

    assert domain.extra_state() == {"generator.position": domain.random.position}
    assert ("dropout of the reference backend draws on the host",) == domain.capture_obstacles()


def test_a_repeated_epoch_drops_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild puts the generator back, and the contract forgets where the lost epoch drew."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 2, TINY, num_layers=2, dropout=DROPOUT)
    run = dropping(monkeypatch)
    run.run(1)
    run.recording, kept = None, run.recording
    run.actions()
    run.runtime.rebuild()
    run.recording = kept
    run.run(1)

    assert kept is not None
    assert_same(plain, kept)


def test_a_log_has_the_positions() -> None:
    """The event log of such a run names where each F drew, and replays."""
    run = guarded_run(ORDER, dropout=DROPOUT, event_log=True)
    run.run(1)
    run.runtime.close()
    assert run.runtime.recorder is not None
    lines = run.runtime.recorder.lines

    assert '"reports_draws":true' in lines[0]
    assert '"draws":0,' in "".join(lines)
    assert "accepted" == replay_lines(lines).verdict


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_is_a_probability_below_one(dropout: float) -> None:
    """A stage that drops everything computes nothing."""
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1"):
        ReferenceStage(0, ReferenceDomain(4), TINY, dropout=dropout)
