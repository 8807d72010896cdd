"""TorchTitan 0.3's GraphPP on the torch of the tests."""

from __future__ import annotations

from typing import Any

__all__ = ["KeptOutputs", "keep_outputs"]


class KeptOutputs(dict[int, Any]):
    """
    The outputs of a stage's forwards, by microbatch, where GraphPP and torch 2.15 look for them.

    GraphPP of TorchTitan 0.3 keeps outputs in the attribute ``fwd_cache`` of a stage. torch 2.14
    has this attribute. torch 2.15 sends the outputs that are in ``_forward_chunk_states``.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self._stage = stage

    def __setitem__(self, microbatch: int, kept: Any) -> None:
        super().__setitem__(microbatch, kept)
        outputs, _ = kept
        state = self._stage._make_forward_chunk_state(outputs, [])
        self._stage._forward_chunk_states[microbatch] = state

    def pop(self, microbatch: int, *default: Any) -> Any:
        self._stage._forward_chunk_states.pop(microbatch, None)
        return super().pop(microbatch, *default)


def keep_outputs(stages: list[Any]) -> None:
    """Give stages the attribute that GraphPP expects, if this release of torch lacks it."""
    for stage in stages:
        if not hasattr(stage, "fwd_cache"):
            stage.fwd_cache = KeptOutputs(stage)
