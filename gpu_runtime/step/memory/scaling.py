"""
Scaling state that all replicas of a process's stages share: one of it instead of one each.

Brought together once an epoch, behind its last F and dI: of every amax entry the largest of all
replicas, of every scale the smallest. All replicas roll at the same actions, in the same order, so
that an entry means the same action on each; and a scale is a constant over the largest amax of a
window, so that the smallest is what the last update would have given of the largest amax. (Where
one replica's window has no amax, or one that is not finite, its update keeps the scale of before:
the smallest of that and the others' is taken. Where Transformer Engine passes over an entry of
exactly zero in one replica alone, its other entries of that epoch stand a place off.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...backends.protocol import BackendError

__all__ = ["AMAX", "SharedScaling"]

AMAX = "replica", "replicas"
"""Whose amax a scale is made of: the replica's own, or that of all replicas."""

_MAGNITUDE = 0x7FFFFFFF


class Ended(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Make the current stream, or the host, wait until it is done."""


class SharedScaling:
    """
    The scaling state of one process, as words of which a collective takes the largest.

    Bits of floats that are not negative are ordered as the floats are, with NaN above all: so what
    replicas get is the same bits whatever order a library compares in.

    Args:
        live: The live tensors by name, of float32; names of scales end in ``scale``, all others are
            amaxes. Their addresses must not change.

    Raises:
        BackendError: There is none, or one is of another type.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        if not live:
            raise BackendError(
                "amax='replicas' shares amax histories, and this recipe has none; leave it out"
            )
        for name, tensor in live.items():
            if tensor.dtype != torch.float32:
                raise BackendError(f"{name}: expected torch.float32, found {tensor.dtype}")
        amaxes = [tensor for name, tensor in live.items() if not name.endswith("scale")]
        scales = [tensor for name, tensor in live.items() if name.endswith("scale")]
        self.live = [*amaxes, *scales]
        first = sum(tensor.numel() for tensor in amaxes)
        held = first + sum(tensor.numel() for tensor in scales)
        self._values = torch.empty(held, device=self.live[0].device)
        self._words = self._values.view(torch.int32)
        self._scales = self._words[first:]
        places = torch.split(self._values, [tensor.numel() for tensor in self.live])
        self._held = [p.view(t.shape) for p, t in zip(places, self.live, strict=True)]
        self._under_way: Ended | None = None

    def start(self, largest: Callable[[Tensor], Ended]) -> SharedScaling:
        """
        Begin to bring it together.

        Args:
            largest: Starts to replace int32 words of all replicas by the largest of each.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._held, self.live)
            self._words.bitwise_and_(_MAGNITUDE)
            self._turn()
        self._under_way = largest(self._words)
        return self

    def wait(self) -> None:
        """Wait for it, and take it over in place; what fails before that moves nothing."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        under_way.wait()
        with torch.no_grad():
            self._turn()
            torch._foreach_copy_(self.live, self._held)

    def _turn(self) -> None:
        """The largest of what is turned over is the smallest; twice is once back."""
        self._scales.neg_().add_(_MAGNITUDE)
