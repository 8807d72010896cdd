"""
Evaluations: forwards of the backend that do not change the training state.

An eager forward updates the scaling state, as every F does. Therefore `evaluated` restores the
state after the forward, and compares it with the state before the forward. The contract gets the
result of this comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from torch import Tensor

from .eager import StageMemory
from .effects import Effects
from .memory.numerical_state import NumericalState, Snapshot, live_state

__all__ = ["evaluated"]


def evaluated(
    memory: StageMemory,
    others: Iterable[StageMemory],
    inputs: Sequence[Tensor],
    *,
    cached: bool,
) -> tuple[tuple[Tensor, ...], Effects]:
    """
    Run a stage's forward in separate memory, and restore the state that the forward changed.

    Args:
        memory: All memory that the runtime holds for the stage.
        others: The memory of every stage of the process. The reports of all these stages must
            ignore this forward.
        inputs: The stage's inputs, with the shapes and types of training.
        cached: Whether the weight cache is current. If not, the weights are quantized for this
            forward, and the former content of the cache is restored afterwards.

    Returns:
        The outputs, detached, and the effects that remain after the restore. These effects contain
        no cache fill. They contain scaling updates only if the restored state differs from the
        state before the forward.
    """
    stage = memory.stage
    reports = [(other.reports, other.reports.updates()) for other in others]
    count = memory.reports.updates()
    before = NumericalState.of(stage.domain)
    caches = () if cached else tuple(stage.cached_weights().values())
    kept = Snapshot((*live_state(stage.domain).values(), *caches))
    try:
        if not cached:
            stage.refresh_cache()
            memory.reports.take_filled()
        with getattr(stage.domain, "without_dropout", nullcontext)():
            outputs = stage.native_forward(_taken(memory, inputs), first=False)
        found = tuple(output.detach() for output in outputs)
        filled = memory.reports.take_filled()
    finally:
        kept.restore()
        updates = memory.reports.since(count)
        for report, before_it in reports:
            report.skip(before_it)
    if updates is not None:
        changed = NumericalState.of(stage.domain).differences(before)
        updates = max(1, updates) if changed else 0
    return found, Effects(filled, updates)


def _taken(memory: StageMemory, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Detach the inputs from the caller's autograd graph, because a library may check whether they
    need gradients."""
    specs = memory.stage.inputs
    apart = [given.detach() for given in inputs]
    return [
        given.requires_grad_() if spec.differentiable else given
        for given, spec in zip(apart, specs, strict=True)
    ]
