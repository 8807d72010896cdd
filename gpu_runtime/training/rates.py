"""The learning rate of each step: a linear warm-up, then half a cosine."""

from __future__ import annotations

import math
from ctypes import c_float

import attrs

__all__ = ["Rate"]


@attrs.frozen(kw_only=True)
class Rate:
    """
    The learning rate of each step, rounded to float32, so that the rates on host and device are
    equal.

    Args:
        peak: The highest rate, reached at the end of the warm-up.
        warmup: Number of steps of the warm-up; the first step has the rate `peak / warmup`, not
            zero.
        steps: Number of steps, including the warm-up, until the rate reaches `least`. With 0 the
            rate stays at `peak`.
        least: The rate after `steps` steps.

    >>> rate = Rate(peak=1.0, warmup=2, steps=6, least=0.1)
    >>> [round(rate.at(step), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    >>> rate.at(7)  # 0.1 in float32
    0.10000000149011612
    """

    peak: float = 1e-3
    warmup: int = 0
    steps: int = 0
    least: float = 0.0

    def at(self, step: int) -> float:
        """Return the rate of a step; steps count from 0."""
        return c_float(self._at(step)).value

    def _at(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.steps <= self.warmup:
            return self.peak
        passed = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.least + (self.peak - self.least) * (1 + math.cos(math.pi * passed)) / 2
