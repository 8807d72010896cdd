"""What ranks of the tests of a step's times run."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from torch import Tensor

from qeffect.gpu_runtime.step.actions import GuardedActions
from tests.ranks import recorded

from . import language_bodies, launched_bodies


def slow(case: list[str], rank: int) -> Any:
    """A run in which every F of one rank takes 20 ms longer."""
    if os.environ["RANK"] == str(rank):
        real = GuardedActions.forward

        def forward(self: GuardedActions, *args: Any, **named: Any) -> Any:
            time.sleep(0.02)
            return real(self, *args, **named)

        GuardedActions.forward = forward  # type: ignore[method-assign]
    return language_bodies.in_turn([case])


class _Clock:
    """A device's clock, which only the device's work moves."""

    def __init__(self) -> None:
        self.now = 0

    def work(self, nanoseconds: int) -> None:
        """Work for so long."""
        self.now += nanoseconds


def slow_launches(path: str, rank: int) -> Any:
    """A run in launches, in which every dW of one rank takes twice as long as on the others."""
    launched_bodies.stand_in()
    clock = _Clock()
    kernels: Any = gate_kernel()
    spent = 2_000_000 if os.environ["RANK"] == str(rank) else 1_000_000
    real = recorded.RecordingExecutor.wgrad

    def wgrad(self: recorded.RecordingExecutor, *given: Any) -> Any:
        found = real(self, *given)
        clock.work(spent)
        return found

    def stamp(ring: Tensor, number: Tensor, place: int) -> None:
        ring[int(number) % len(ring), place] = clock.now

    recorded._recorded(_Clock, "work", posts=False)
    recorded.RecordingExecutor.wgrad = wgrad  # type: ignore[method-assign]
    kernels.stamp = stamp
    return launched_bodies.trained(path)


def gate_kernel() -> Any:
    """The stand-in for the gate's kernels."""
    return sys.modules["qeffect.gpu_runtime.ranks.gate_kernel"]
