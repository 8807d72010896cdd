"""What the ranks run in the tests of step times."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from qeffect.gpu_runtime.ranks import wait_clock
from qeffect.gpu_runtime.step.actions import GuardedActions
from qeffect.gpu_runtime.step.launch_executor import LaunchExecutor
from qeffect.gpu_runtime.training import step_times
from tests.ranks import recorded

from . import language_bodies, launched_bodies


class _HostClock:
    """A host's clock, in seconds, which only F and waits for other ranks advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """The time."""
        return self.now


def slow(case: list[str], rank: int) -> Any:
    """
    Train a run in which every F of one rank takes three times as long, and no wait of this rank is
    long.
    """
    clock, is_slow = _HostClock(), os.environ["RANK"] == str(rank)
    real_forward, real_waiting = GuardedActions.forward, wait_clock.WaitClock.waiting

    def forward(self: GuardedActions, *args: Any, **named: Any) -> Any:
        clock.now += 0.03 if is_slow else 0.01
        return real_forward(self, *args, **named)

    @contextmanager
    def waiting(self: wait_clock.WaitClock, *args: Any) -> Iterator[None]:
        with real_waiting(self, *args):
            clock.now += 0.001 if is_slow else 0.005
            yield

    for module in (step_times, wait_clock):
        module.time = clock  # type: ignore[attr-defined]
    GuardedActions.forward = forward  # type: ignore[method-assign]
    wait_clock.WaitClock.waiting = waiting  # type: ignore[assignment,method-assign]
    return language_bodies.in_turn([case])


class _Clock:
    """A device's clock, which only the device's work advances."""

    def __init__(self) -> None:
        self.now = 0

    def work(self, nanoseconds: int) -> None:
        """Work for so long."""
        self.now += nanoseconds


def slow_launches(path: str, rank: int) -> Any:
    """
    Train a run with launches, in which every dW of one rank takes twice as long as on other ranks.
    """
    launched_bodies.stand_in()
    clock = _Clock()
    kernels: Any = gate_kernel()
    spent = 2_000_000 if os.environ["RANK"] == str(rank) else 1_000_000
    real = LaunchExecutor.wgrad

    def wgrad(self: LaunchExecutor, *given: Any) -> Any:
        found = real(self, *given)
        clock.work(spent)
        return found

    def stamp(ring: Tensor, number: Tensor, place: int) -> None:
        ring[int(number) % len(ring), place] = clock.now

    recorded._recorded(_Clock, "work", posts=False)
    LaunchExecutor.wgrad = wgrad  # type: ignore[method-assign]
    kernels.stamp = stamp
    return launched_bodies.trained(path)


def gate_kernel() -> Any:
    """The stand-in for the gate's kernels."""
    return sys.modules["qeffect.gpu_runtime.ranks.gate_kernel"]
