"""
Run steps under torch's profiler. Processes that time steps never import this module.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..statistics.traces import DEVICE_CATEGORIES

__all__ = ["trace_steps"]


def trace_steps(step: Callable[[], object], synchronize: Callable[[], None], steps: int) -> Any:
    """
    Return the device's events in a Chrome trace of some steps.

    The profiler's library is released after the trace, because this library makes the host visit
    every node of every graph that is launched later. Some of this cost may remain, so time no steps
    in the same process afterwards.

    Raises:
        RuntimeError: The profiler recorded no event on the device.
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
        raise RuntimeError(
            "expected events of the device, found none in the profiler's trace; detach any other "
            "profiler"
        )
    return events
