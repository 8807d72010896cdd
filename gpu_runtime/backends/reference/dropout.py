"""
Dropout by position: random numbers of a counter, whose position says which were drawn.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

__all__ = ["RandomNumbers"]


def _start() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


@attrs.define(eq=False)
class RandomNumbers:
    """
    A generator whose numbers follow from their position alone, as Philox gives them on a GPU.

    Args:
        position: How many numbers were drawn; part of the numerical state, changed in place.

    Attributes:
        drawn: The position of each draw since `take`.
    """

    position: Tensor = attrs.field(factory=_start)
    drawn: list[int] = attrs.field(factory=list)

    def drop(self, value: Tensor, probability: float, position: Tensor | None = None) -> Tensor:
        """
        Set elements to zero with a probability, and scale the others up.

        Args:
            value: The tensor.
            probability: Probability of an element to be dropped.
            position: Where to draw, moved on; None draws at the generator's own position.
        """
        at = self.position if position is None else position
        first = int(at)
        self.drawn.append(first)
        numbers = torch.rand(value.shape, generator=torch.Generator().manual_seed(first))
        at += value.numel()
        kept = (numbers >= probability).to(value.device, value.dtype)
        return value * kept / (1.0 - probability)

    def take(self) -> tuple[int, ...]:
        """Return the positions of the draws since the last call."""
        taken = tuple(self.drawn)
        self.drawn.clear()
        return taken
