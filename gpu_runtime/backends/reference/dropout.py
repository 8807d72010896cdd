"""
Dropout by position: the random numbers depend on the position of a counter. With epoch scales,
dropout is by name: the numbers depend on epoch, microbatch and layer.
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
    A generator whose numbers depend only on their position in the sequence, as with Philox on a
    GPU.

    Args:
        position: Count of the numbers drawn so far, a tensor; part of the numerical state, changed
            in place.
        stream: Selects the sequence. Two streams have different numbers at the same position.

    Attributes:
        drawn: The position of each draw since `take`.
    """

    position: Tensor = attrs.field(factory=_start)
    stream: int = 0
    drawn: list[int] = attrs.field(factory=list)

    def drop(self, value: Tensor, probability: float, position: Tensor | None = None) -> Tensor:
        """
        Set elements to zero with a probability, and scale all other elements up.

        Args:
            value: The tensor.
            probability: Probability that an element is dropped.
            position: The position at which to draw, which the draw advances; None draws at the
                generator's own position.
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
        Like `drop`, but draws the numbers by name instead of by position; no position changes.

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
