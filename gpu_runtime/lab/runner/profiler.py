"""
Steps under torch's profiler, and what the trace of them says.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..statistics.traces import DEVICE_CATEGORIES, busy, summarize

__all__ = ["profile_steps", "profiled", "traced"]


def profile_steps(step: Callable[[], None], synchronize: Callable[[], None], steps: int) -> Any:
    """
    Run some steps under the profiler with device activities alone, and sum up their trace.

    Raises:
        RuntimeError: The profiler saw nothing on the device.
    """
    return summarize(traced(step, synchronize, steps), steps)


def profiled(
    step: Callable[[], object], synchronize: Callable[[], None], steps: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """
    Run some steps under the profiler; what `busy` and `summarize` say of them.

    Raises:
        RuntimeError: The profiler saw nothing on the device.
    """
    events = traced(step, synchronize, steps)
    return busy(events, steps), summarize(events, steps)


def traced(step: Callable[[], object], synchronize: Callable[[], None], steps: int) -> Any:
    """
    The events of the Chrome trace of some steps, of the device alone.

    The library under the profiler is let go behind it. Left attached, it makes the host look at
    every node of every graph that is launched later, and what is timed then is not what users have.

    Raises:
        RuntimeError: The profiler saw nothing on the device.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ["TEARDOWN_CUPTI"] = "1"  # what Kineto asks for where it ends a trace
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    if not any(event.get("cat") in DEVICE_CATEGORIES for event in events):
        raise RuntimeError("the profiler recorded nothing on the device; is another one attached?")
    return events
