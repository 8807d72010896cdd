"""
The timing that every round uses: some steps back to back, and one step that starts on an idle
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["back_to_back_s", "single_step_s"]


def back_to_back_s(
    step: Callable[[], object], synchronize: Callable[[], object], steps: int
) -> float:
    """
    Seconds until the device has finished some steps.

    Args:
        step: Function that enqueues one step. The device must be idle before the first step.
        synchronize: Function that waits until the device is idle.
        steps: Number of steps.
    """
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - began


def single_step_s(
    step: Callable[[], object], synchronize: Callable[[], object]
) -> tuple[float, float]:
    """
    Seconds until one step is enqueued, and until the device has finished it.

    The device must be idle before the call, so that the host never waits for a full launch queue.
    """
    began = time.perf_counter()
    step()
    enqueued = time.perf_counter()
    synchronize()
    return enqueued - began, time.perf_counter() - began
