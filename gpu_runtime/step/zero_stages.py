"""
A check for stages of a rank whose gradients are all zero. The check runs on the device, so the host
does not wait, and a graph can contain the check. A gradient norm also shows such stages; this
module is for steps without a norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["ZeroStages"]


class ZeroStages:
    """
    For each stage of one rank: whether all its gradients are zero.

    Args:
        stages: The rank's stages.
        device: Where the gradients are.
        elsewhere: Stage and name of each gradient to leave out, because another copy of the same
            weight is checked.

    Attributes:
        stages: The stages, in order.
        values: Float32 tensor with one number per stage: 1 if the stage's gradients are all zero,
            else 0. Each `take` overwrites these numbers.

    >>> kept = ZeroStages([0, 1], torch.device("cpu"))
    >>> kept.take({0: {"w": torch.zeros(2)}, 1: {"w": torch.tensor([0.0, -1.0])}})
    >>> kept.values.tolist()
    [1.0, 0.0]
    """

    def __init__(
        self,
        stages: Sequence[int],
        device: torch.device,
        elsewhere: Collection[tuple[int, str]] = (),
    ) -> None:
        self.stages = tuple(sorted(stages))
        self.values = torch.zeros(len(self.stages), device=device)
        self._elsewhere = frozenset(elsewhere)

    def take(self, gradients: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Queue the check of a step's finalized and reduced gradients on the current stream."""
        largest = []
        for stage in self.stages:
            named = gradients[stage].items()
            own = [gradient for name, gradient in named if (stage, name) not in self._elsewhere]
            each = torch._foreach_norm(own, torch.inf)
            largest.append(torch.stack([one.float() for one in each]).max())
        self.values.copy_(torch.stack(largest) == 0)
