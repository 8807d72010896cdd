"""
The random numbers that Transformer Engine's dropout draws on the device.

The library draws from the device's default generator, which other code of the process also uses.
Therefore the generator is set to the domain's own seed and position before F, and reset to its
former seed and position after F. On a GPU the numbers depend only on seed and position (Philox). A
captured graph reads seed and position when it is replayed. Therefore a replay of F draws the same
numbers as an eager F at the same position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from ..devices import generator_of
from ..random_streams import named_seed

__all__ = ["DeviceNumbers"]


@attrs.define(eq=False)
class DeviceNumbers:
    """
    A domain's own random numbers, drawn from the default generator of its device.

    Args:
        device: The CUDA device.
        stream: The seed of the generator, which selects the sequence.

    Attributes:
        position: The generator's offset after the last draw: an int64 tensor of shape `(1,)` on the
            host. It is part of the numerical state and changed in place.
    """

    device: torch.device
    stream: int = 0
    position: Tensor = attrs.field(init=False)
    _drawing: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.position = torch.zeros(1, dtype=torch.int64)

    @contextmanager
    def drawing(self) -> Iterator[int]:
        """
        A context in which code draws at the domain's position and advances the position.

        A capture draws no numbers; only the replays draw. Therefore the context leaves the
        generator and the position unchanged during a capture. A nested context also leaves both
        unchanged, because the outer context changes them.

        Returns:
            The position at which the code in the context begins to draw.
        """
        begun = int(self.position)
        if self._drawing or _capturing():
            yield begun
            return
        self._drawing = True
        try:
            with self._at(self.stream, begun) as generator:
                yield begun
                self.position.fill_(generator.get_offset())
        finally:
            self._drawing = False

    @contextmanager
    def drawing_by_name(self, name: Sequence[int]) -> Iterator[None]:
        """
        A context in which code draws random numbers that depend on a name. The domain's position
        stays unchanged.

        Args:
            name: Epoch, microbatch and layer.
        """
        with self._at(named_seed(self.stream, name), 0):
            yield

    @contextmanager
    def _at(self, seed: int, offset: int) -> Iterator[Any]:
        generator = generator_of(self.device)
        before = generator.initial_seed(), generator.get_offset()
        _place(generator, seed, offset)
        try:
            yield generator
        finally:
            _place(generator, *before)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _place(generator: Any, seed: int, offset: int) -> None:
    generator.manual_seed(seed)  # sets the offset to 0
    generator.set_offset(offset)
