"""
The random numbers that the library's dropout draws on the device.

The library draws from the device's default generator, which other code of the process uses too. So
F draws with the generator at the domain's own seed and position, and afterwards the generator gets
its former seed and position again. On a GPU the numbers follow from seed and position alone
(Philox). A captured graph reads both when it is replayed, so a replay of F draws the numbers that
an eager F would draw there.
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
        stream: Selects the sequence: the seed of the draws.

    Attributes:
        position: The generator's offset behind the last draw, int64 of shape `(1,)` on the host;
            part of the numerical state, changed in place.
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
        Let a block draw at the domain's position, and advance the position.

        The capture of a graph draws nothing; its replays draw. So a block in a capture leaves the
        generator and the position unchanged. A nested block leaves both to the outer block.

        Returns:
            The position at which the block begins to draw.
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
        Let a block draw random numbers that follow from a name; no position changes.

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
