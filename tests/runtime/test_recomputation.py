"""Recomputed activations: inside dI, under torch's non-reentrant checkpoint, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.reference.linear import QuantizedTensor
from qeffect.gpu_runtime.backends.reference.stage import ReferenceLayer
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording
from qeffect.refusals import Refused

from .helpers import TINY, assert_same, guarded_run, native
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)


def recomputing(**options: object) -> GuardedRun:
    """A guarded run whose stages recompute their activations in dI."""
    run = guarded_run(ORDER, num_layers=2, **options)  # type: ignore[arg-type]
    for stage in run.runtime.stages.values():
        assert isinstance(stage, ReferenceStage)
        stage.recompute = True
    return run


def test_recomputed_training_has_the_bits_of_training_that_keeps_activations() -> None:
    """Native full backward without recomputation, against guarded F, dI and dW with it."""
    plain = native(ORDER, 4, "accumulate", torch.bfloat16, 3, TINY, num_layers=2)
    run = recomputing()
    run.recording = Recording("recomputed")

    run.run(3)

    assert_same(plain, run.recording)


def test_activations_are_really_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of each microbatch runs twice: in F, and in dI."""
    ran = {True: 0, False: 0}
    forward = ReferenceLayer.forward

    def counted(self: ReferenceLayer, x: torch.Tensor) -> torch.Tensor:
        ran[self.qkv.domain.in_forward] += 1
        return forward(self, x)

    run = recomputing()
    monkeypatch.setattr(ReferenceLayer, "forward", counted)
    run.run(1)

    assert ran[True] == ran[False] > 0


def test_the_same_against_native_that_recomputes() -> None:
    """The full backward of torch recomputes with the scales of its F too."""
    domain = ReferenceDomain(4)
    outputs = []
    for recompute in (False, True):
        domain = ReferenceDomain(4)
        stage = ReferenceStage(0, domain, TINY, num_layers=2, recompute=recompute)
        stage.refresh_cache()
        spec = stage.inputs[0]
        x = torch.linspace(-1, 1, spec.buffer().numel()).reshape(spec.shape).to(spec.dtype)
        for _ in range(3):
            x = x.detach().requires_grad_()
            (y,) = stage.native_forward([x], first=False)
            y.sum().backward()
        outputs.append([y.detach(), *(p.grad for p in stage.parameters()), x.grad])
        outputs[-1] += list(stage.numerical_state().values())
    kept, recomputed = outputs
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def naive(stage: ReferenceStage, layer: ReferenceLayer, hidden: torch.Tensor) -> torch.Tensor:
    """Checkpoint a layer as it is: recomputation quantizes with the scales of that moment."""
    result: torch.Tensor = checkpoint(layer, hidden, use_reentrant=False)
    return result


def rolling(stage: ReferenceStage, layer: ReferenceLayer, hidden: torch.Tensor) -> torch.Tensor:
    """Checkpoint a layer with its autocast region: recomputation updates the scales again."""

    def region(x: torch.Tensor) -> torch.Tensor:
        if stage.domain.in_forward:
            return layer(x)  # type: ignore[no-any-return]
        with stage.domain.forward_interval():
            return layer(x)  # type: ignore[no-any-return]

    result: torch.Tensor = checkpoint(region, hidden, use_reentrant=False)
    return result


@pytest.mark.parametrize(
    ("through", "clause"), [(naive, "order.wrong-scales"), (rolling, "order.scaling-updates")]
)
def test_recomputation_that_moves_scales_is_refused(
    through: Callable[..., torch.Tensor], clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend reports what dI used and how often scales moved; the epoch cannot end."""
    run = recomputing()
    monkeypatch.setattr(ReferenceStage, "_through", through)
    with pytest.raises(Refused) as caught:
        run.run(1)
    assert caught.value.clause == clause


def test_recomputation_needs_carried_scales() -> None:
    """Live scales are those of the latest F when dI runs."""
    with pytest.raises(ValueError, match="tape_scales='carried'"):
        ReferenceStage(0, ReferenceDomain(4, tape_scales="live"), TINY, recompute=True)


def test_a_requantized_tensor_records_nothing() -> None:
    """The histories stay as they are, whatever the tensor's amax."""
    state = ReferenceDomain(4).scaling(forward=True, tensors=1)
    first = state.quantize(torch.ones(2), 0)
    history = state.history.clone()
    again = state.requantize(torch.ones(2) * 100, 0, state.scale)
    assert torch.equal(state.history, history)
    assert isinstance(again, QuantizedTensor)
    assert torch.equal(first.scale_inv, again.scale_inv)
