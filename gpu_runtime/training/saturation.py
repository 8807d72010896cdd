"""
Measure in each step how far gradients exceeded the range of their FP8 scales. The host does not
wait for this measurement.

Delayed scaling casts a gradient with a scale that was computed from earlier amaxes (largest
absolute values). A gradient value outside the range of this scale is clipped to the largest FP8
value. Afterwards the gradient's amax lowers the scale. Therefore the factor by which a scale fell
in a step is the factor by which the gradient exceeded its range. The factor is measured only if the
amax history still contains this amax at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ranks.worker import Worker
from .state import Naming

__all__ = ["SATURATED", "GradientScales"]

SATURATED = 256.0
"""
A gradient is reported as saturated if its scale fell by at least this factor in a step. Scales of
sound runs fall too: in three runs of 150 steps, by a factor of at most 22 in a step.
"""


class GradientScales:
    """
    The FP8 scales of one rank's gradients, and the factor by which each scale fell in each step.

    Args:
        worker: The rank, between two steps.
        naming: How checkpoints name each tensor of the model.

    Attributes:
        names: The name of each scale; empty if the recipe has no scales.
    """

    def __init__(self, worker: Worker, naming: Naming) -> None:
        self.names: list[str] = []
        self._live: list[Tensor] = []
        for stage in worker.runtime.domain.stages:
            for local, tensor in stage.numerical_state().items():
                if local.endswith("backward.scale"):
                    name = naming(stage.index, local)
                    self.names += [f"{name}[{n}]" for n in range(tensor.numel())]
                    self._live.append(tensor)
        self._before = torch.zeros(0)
        self.reset()

    def reset(self) -> None:
        """Forget earlier scales. Call this method after scales were restored."""
        if self._live:
            self._before = _together(self._live)

    def take(self) -> Tensor:
        """
        Compare the scales after a step with the scales before the step. The host does not wait.

        Returns:
            Two float32 numbers on the device: the largest factor by which a scale fell, and the
            index of this scale in `names`. Both are 0 if there are no scales.
        """
        into = torch.zeros(2, device=self._before.device)
        if self._live:
            _compare(into, self._before, self._live)
        return into


def _together(live: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in live])


def _compare(into: Tensor, before: Tensor, live: Sequence[Tensor]) -> None:
    """Queue the comparison on the current stream, after the step."""
    now = _together(live)
    fall, place = (before / now).max(0)
    into[0], into[1] = fall, place
    before.copy_(now)
