"""
Times of a rank's own work in a launch. The device itself records these times.

In a launch, which is one graph, the device also waits for other ranks. Therefore the time of a
launch is the same on all ranks, and does not show which rank is slow. A dW reads neither messages
nor reduced sums, so the device does not wait for another rank during a dW. For one dW of each
stage, two nodes of the graph record the device's clock before and after the dW. The time between
the two stamps shows a slow device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LaunchStamps"]

#: Writes the device's clock. Arguments: the stamps (one row per step), the step's number, and the
#: index within the step's row.
Stamp = Callable[[Tensor, Tensor, int], None]


class LaunchStamps:
    """
    The device's clock before and after the first dW of each stage, for the last launches.

    Args:
        stamp: Function that writes the device's clock in nanoseconds, such as `gate_kernel.stamp`.
        number: The number of the launch, int64 on the device.
        stages: The rank's stages.
        rows: Number of launches whose stamps are kept; older stamps are overwritten.
    """

    def __init__(self, stamp: Stamp, number: Tensor, stages: Sequence[int], rows: int) -> None:
        self._stamp, self._number = stamp, number
        self.stages = tuple(stages)
        width = 2 * len(self.stages)
        self.ring = torch.full((rows, width), -1, dtype=torch.int64, pin_memory=number.is_cuda)

    def mark(self, place: int) -> None:
        """
        Queue a time stamp on the current stream. During a capture, the stamp becomes a node of the
        graph.
        """
        self._stamp(self.ring, self._number, place)

    def warm(self) -> None:
        """Stamp every place once outside a capture, because a capture cannot load a kernel."""
        for place in range(self.ring.shape[1]):
            self.mark(place)

    def clear(self) -> None:
        """Forget all stamps; no launch may be running."""
        self.ring.fill_(-1)

    def around(self, executor: Any) -> Any:
        """
        Return an executor for one step that records the clock before and after the first dW of each
        stage.

        Args:
            executor: The executor that runs the step's actions.
        """
        return _StampedExecutor(executor, self)

    def take(self, step: int) -> float:
        """
        Return the milliseconds that a launch's measured dW took, and forget its time stamps.

        Args:
            step: The launch's number, from 0; the device has finished it.

        Returns:
            The sum over the stages; NaN if the launch has no stamps.
        """
        row = self.ring[step % len(self.ring)]
        times = row.tolist()
        row.fill_(-1)
        spans = list(zip(times[::2], times[1::2], strict=True))
        if not spans or any(begin < 0 or end < begin for begin, end in spans):
            return math.nan
        return math.fsum(end - begin for begin, end in spans) / 1e6


class _StampedExecutor:
    """Stamps around the first dW of each stage; the wrapped executor does everything else."""

    def __init__(self, executor: Any, stamps: LaunchStamps) -> None:
        self._executor, self._stamps = executor, stamps
        self._places = {stage: 2 * n for n, stage in enumerate(stamps.stages)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def wgrad(self, memory: Any, *given: Any) -> Any:
        """Run dW between two stamps if it is the first of its stage."""
        place = self._places.pop(memory.stage.index, None)
        if place is None:
            return self._executor.wgrad(memory, *given)
        self._stamps.mark(place)
        found = self._executor.wgrad(memory, *given)
        self._stamps.mark(place + 1)
        return found
