"""
One FP8 scaling state for all replicas of a process's stages, instead of one state per replica.

The replicas combine their states once per epoch (optimizer step), after the last F and dI. Each
amax entry becomes its maximum over all replicas, and each scale becomes its minimum. All replicas
shift their amax histories at the same actions, in the same order. Therefore an entry belongs to the
same action on each replica. A scale is a constant divided by the largest amax in a history.
Therefore the smallest scale belongs to the largest amax of all replicas.

There are two exceptions. First, a replica keeps its earlier scale if its history has no amax, or an
amax that is not finite. The minimum includes this scale. Second, Transformer Engine skips entries
of exactly zero. If it does so on only one replica, that replica's other entries of the epoch are
shifted by one index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ...backends.protocol import BackendError

__all__ = ["AMAX", "SharedScaling"]

AMAX = "replica", "replicas"
"""Source of a scale's amax: the replica itself, or all replicas."""

_MAGNITUDE = 0x7FFFFFFF


class Collective(Protocol):
    """A collective operation that has been started."""

    def wait(self) -> object:
        """Make the current stream, or the host, wait until the collective is done."""


class SharedScaling:
    """
    The scaling state of one process as int32 numbers. A collective maximum combines the numbers of
    all replicas.

    The bits of non-negative floats, read as integers, have the same order as the floats, and NaN is
    above all others. Therefore all replicas get the same bits, in whatever order the library
    compares.

    Args:
        live: The live float32 tensors by name; names of scales end in ``scale``, and all other
            tensors are amaxes. Their addresses must not change.

    Raises:
        BackendError: `live` is empty, or a tensor has another type than float32.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        if not live:
            raise BackendError(
                "amax='replicas' shares amax histories, but this recipe has none; use "
                "amax='replica'"
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
        self._under_way: Collective | None = None

    def start(self, largest: Callable[[Tensor], Collective]) -> SharedScaling:
        """
        Start to combine the replicas' scaling states.

        Args:
            largest: Starts a collective that replaces each int32 number by its maximum over the
                replicas.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._held, self.live)
            self._words.bitwise_and_(_MAGNITUDE)
            self._turn()
        self._under_way = largest(self._words)
        return self

    def wait(self) -> None:
        """Wait for the collective, then store its result; if the wait fails, nothing changes."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        under_way.wait()
        with torch.no_grad():
            self._turn()
            torch._foreach_copy_(self.live, self._held)

    def _turn(self) -> None:
        """
        Invert the order of the scales, so that a maximum finds the smallest scale. A second call
        restores the order.
        """
        self._scales.neg_().add_(_MAGNITUDE)
