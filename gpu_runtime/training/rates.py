"""The learning rate of each step: a linear warm-up, then half a cosine."""

from __future__ import annotations

import math
from ctypes import c_float

import attrs

__all__ = ["Rate"]


@attrs.frozen(kw_only=True)
class Rate:
    """
    A learning rate by step, a number of float32: the same where a device holds it.

    Args:
        peak: The rate after the warm-up.
        warmup: Steps of the warm-up; the first step's rate is a part of the peak, not zero.
        steps: Steps until the least rate is reached, the warm-up among them; 0 keeps the peak.
        least: The rate at the end and after it.

    >>> rate = Rate(peak=1.0, warmup=2, steps=6, least=0.1)
    >>> [round(rate.at(step), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    >>> rate.at(7)  # of float32
    0.10000000149011612
    """

    peak: float = 1e-3
    warmup: int = 0
    steps: int = 0
    least: float = 0.0

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        return c_float(self._at(step)).value

    def _at(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.steps <= self.warmup:
            return self.peak
        passed = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.least + (self.peak - self.least) * (1 + math.cos(math.pi * passed)) / 2
