"""
Dropout by position, or by name. By position, the random numbers depend on a counter of the numbers
drawn so far. By name, which is used with epoch scales, they depend on epoch, microbatch and layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ..random_streams import SEEDS, named_seed

__all__ = ["RandomNumbers"]


def _start() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


@attrs.define(eq=False)
class RandomNumbers:
    """
    A random generator whose numbers depend only on their position in the sequence, like Philox on a
    GPU.

    Args:
        position: Tensor with the count of the numbers drawn so far. The tensor is part of the
            numerical state and changed in place.
        stream: Selects the sequence. Two streams have different numbers at the same position.

    Attributes:
        drawn: The position of each draw since `take`.
    """

    position: Tensor = attrs.field(factory=_start)
    stream: int = 0
    drawn: list[int] = attrs.field(factory=list)

    def drop(self, value: Tensor, probability: float, position: Tensor | None = None) -> Tensor:
        """
        Set each element to zero with a probability, and scale up all other elements.

        Args:
            value: The tensor.
            probability: Probability that an element is dropped.
            position: Tensor with the position at which to draw; the draw advances it. With None the
                generator's own position is used.
        """
        at = self.position if position is None else position
        first = int(at)
        self.drawn.append(first)
        numbers = torch.rand(value.shape, generator=self._at(first))
        at += value.numel()
        kept = (numbers >= probability).to(value.device, value.dtype)
        return value * kept / (1.0 - probability)

    def drop_named(self, value: Tensor, probability: float, name: Sequence[int]) -> Tensor:
        """
        Do the same as `drop`, but draw the numbers by name. No position changes.

        Args:
            value: The tensor.
            probability: Probability that an element is dropped.
            name: Epoch, microbatch, layer and branch of the tensor.
        """
        generator = torch.Generator().manual_seed(named_seed(self.stream, name))
        numbers = torch.rand(value.shape, generator=generator)
        kept = (numbers >= probability).to(value.device, value.dtype)
        return value * kept / (1.0 - probability)

    def _at(self, position: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.stream + position) % SEEDS)

    def take(self) -> tuple[int, ...]:
        """Return the positions of the draws since the last call."""
        taken = tuple(self.drawn)
        self.drawn.clear()
        return taken
