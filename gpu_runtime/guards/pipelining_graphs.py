"""
Evidence that a stage's own graphs ran: what TorchTitan's GraphPP keeps of each action.

GraphPP computes with graphs, not with autograd, and accumulates gradients in lists of its stages.
It writes `.grad` only after the last action of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .works import Event

__all__ = ["keeps_records", "recorded"]

#: The attribute of GraphPP's stages with what each dI leaves for its dW, by microbatch.
_DEFERRED = "saved_values_for_backward_weight_cache"
#: The attribute of GraphPP's stages with the outputs of each F, by microbatch.
_OUTPUTS = "fwd_cache"
#: The attribute of a stage's graphs that says whether they split a backward into dI and dW.
_SPLITS = "supports_backward_input_weight_split"


def keeps_records(stage: Any) -> bool:
    """Whether a stage keeps the records of TorchTitan's `GraphPipelineStage`."""
    state = getattr(stage, "state", None)
    kept = hasattr(stage, _DEFERRED) and hasattr(stage, _OUTPUTS)
    return kept and hasattr(state, "unsharded_param_grads")


def recorded(stage: Any, event: Event) -> Callable[[], bool]:
    """
    Watch an action of a stage that keeps records.

    Args:
        stage: The stage.
        event: The action: F, dI, dW, a full backward or the reduction of gradients.

    Returns:
        A function that tells whether the action has left its record: the outputs of F, the values
        that dI leaves for dW, a written gradient of dW and of a full backward, and the list of
        reduced gradients.
    """
    kind, _, microbatch = event
    if kind == "F":
        return _kept(stage, _OUTPUTS, microbatch)
    if kind == "I":
        left = _kept(stage, _DEFERRED, microbatch)
        # GraphPP skips the dI of a stage whose backward cannot be split; dW runs all of it.
        return lambda: left() or not getattr(stage.graphs, _SPLITS, True)
    if kind == "REDUCE_GRAD":
        reduced = stage.state.sharded_param_grads
        return lambda: stage.state.sharded_param_grads is not reduced
    before = _gradients(stage)
    return lambda: (now := _gradients(stage)) != before or not now


def _kept(stage: Any, name: str, microbatch: int) -> Callable[[], bool]:
    """Watch whether a dictionary of a stage gets another entry for a microbatch."""
    before = getattr(stage, name).get(microbatch)

    def seen() -> bool:
        now = getattr(stage, name).get(microbatch)
        return now is not None and now is not before

    return seen


def _gradients(stage: Any) -> list[tuple[int, int]]:
    """Return the identity and the version of each accumulated gradient, but keep no gradient."""
    return [(id(each), getattr(each, "_version", -1)) for each in stage.state.unsharded_param_grads]
