"""
Dropout by position: the random numbers follow from the position of a counter. With epoch scales,
dropout is by name: the numbers follow from epoch, microbatch and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import attrs
import torch
from torch import Tensor

__all__ = ["RandomNumbers", "stream_of"]

#: Seeds of torch's generators on the CPU are below this number.
_SEEDS = 2**63


def _start() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


def stream_of(seed: int, replica: int, stage: int) -> int:
    """
    Return the stream of random numbers of one process of a job.

    Args:
        seed: The model's seed.
        replica: The process's replica.
        stage: The process's first stage; 0 if the numbers follow from the layer.
    """
    name = f"{seed}/{replica}/{stage}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest()) % _SEEDS


@attrs.define(eq=False)
class RandomNumbers:
    """
    A generator whose numbers follow from their position alone, as Philox gives them on a GPU.

    Args:
        position: How many numbers were drawn; part of the numerical state, changed in place.
        stream: Selects the sequence. Two streams have different numbers at the same position.

    Attributes:
        drawn: The position of each draw since `take`.
    """

    position: Tensor = attrs.field(factory=_start)
    stream: int = 0
    drawn: list[int] = attrs.field(factory=list)

    def drop(self, value: Tensor, probability: float, position: Tensor | None = None) -> Tensor:
        """
        Set elements to zero with a probability, and scale the others up.

        Args:
            value: The tensor.
            probability: Probability that an element is dropped.
            position: Where to draw, advanced by the draw; None draws at the generator's own
                position.
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
        Like `drop`, but draws the numbers by name instead of by position; no position moves.

        Args:
            value: The tensor.
            probability: Probability that an element is dropped.
            name: Epoch, microbatch, layer and branch of the tensor.
        """
        text = "/".join(map(str, (self.stream, *name))).encode()
        seed = int.from_bytes(blake2b(text, digest_size=8).digest()) % _SEEDS
        numbers = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed))
        kept = (numbers >= probability).to(value.device, value.dtype)
        return value * kept / (1.0 - probability)

    def _at(self, position: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.stream + position) % _SEEDS)

    def take(self) -> tuple[int, ...]:
        """Return the positions of the draws since the last call."""
        taken = tuple(self.drawn)
        self.drawn.clear()
        return taken
