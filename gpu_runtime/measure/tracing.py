"""
What the device did in some steps, from torch's profiler: kernel times and copies with their sizes.

The profiler's Chrome trace is read, because it alone carries the bytes of a copy. A matrix-gradient
copy is a device-to-device copy of exactly the bytes of one unit of deferred work; a graph's copy
nodes show up like any other. Kernels whose name says that they copy are listed beside them, since a
copy can also be a kernel, which carries no size.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest
from pathlib import Path
from typing import Any

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def summarize(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """
    Sum up a Chrome trace.

    Args:
        events: The trace's events.
        steps: How many steps it covers; counts and times are of all of them.

    Returns:
        Plain data: `device_us` and `device_events` over kernels, copies and fills; `copies` by
        name and bytes; `copy_kernels` by name; `top` the longest kernels by name.
    """
    device_us = 0.0
    device_events = 0
    copies: Counter[tuple[str, int]] = Counter()
    copy_us: defaultdict[tuple[str, int], float] = defaultdict(float)
    kernels: Counter[str] = Counter()
    kernel_us: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in DEVICE_CATEGORIES:
            continue
        duration = float(event.get("dur", 0.0))
        name = str(event["name"])
        device_us += duration
        device_events += 1
        if event["cat"] == "gpu_memcpy":
            key = (name, int(event.get("args", {}).get("bytes", -1)))
            copies[key] += 1
            copy_us[key] += duration
        else:
            kernels[name] += 1
            kernel_us[name] += duration
    return {
        "steps": steps,
        "device_us": round(device_us, 3),
        "device_events": device_events,
        "copies": [
            {"name": name, "bytes": size, "count": count, "us": round(copy_us[name, size], 3)}
            for (name, size), count in sorted(copies.items())
        ],
        "copy_kernels": [
            {"name": name[:160], "count": count, "us": round(kernel_us[name], 3)}
            for name, count in sorted(kernels.items())
            if "copy" in name.lower()
        ],
        "top": [
            {"name": name[:160], "count": kernels[name], "us": round(us, 3)}
            for name, us in nlargest(12, kernel_us.items(), key=lambda item: item[1])
        ],
    }


def profile_steps(step: Callable[[], None], synchronize: Callable[[], None], steps: int) -> Any:
    """
    Run some steps under the profiler with device activities alone, and sum up their trace.

    Raises:
        RuntimeError: The profiler saw nothing on the device.
    """
    return summarize(_trace(step, synchronize, steps), steps)


def busy(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """
    What a device's streams were busy with, in milliseconds a step.

    Args:
        events: The events of a Chrome trace.
        steps: How many steps it covers.

    Returns:
        `kernels`, `copies` (fills too) and `messages`: those of NCCL, whose kernels run for as long
        as they wait for the other rank.
    """
    found = {"kernels": 0.0, "copies": 0.0, "messages": 0.0}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in DEVICE_CATEGORIES:
            continue
        what = "kernels" if event["cat"] == "kernel" else "copies"
        if "nccl" in str(event["name"]).lower():
            what = "messages"
        found[what] += float(event.get("dur", 0.0))
    return {what: round(us / steps / 1e3, 4) for what, us in found.items()}


def profiled(
    step: Callable[[], object], synchronize: Callable[[], None], steps: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """
    Run some steps under the profiler; what `busy` and `summarize` say of them.

    Raises:
        RuntimeError: The profiler saw nothing on the device.
    """
    events = _trace(step, synchronize, steps)
    return busy(events, steps), summarize(events, steps)


def _trace(step: Callable[[], object], synchronize: Callable[[], None], steps: int) -> Any:
    from torch.profiler import ProfilerActivity, profile

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


def device_copies(trace: Mapping[str, Any]) -> float:
    """Milliseconds that a step of a trace spends in device-to-device copies, of any size."""
    us = sum(float(c["us"]) for c in trace["copies"] if "DtoD" in c["name"])
    return us / float(trace["steps"]) / 1e3


def matrix_copies(trace: Mapping[str, Any], unit_bytes: Iterable[int]) -> dict[str, Any]:
    """
    The copies of a trace that are copies of matrix gradients.

    Args:
        trace: What `summarize` returned.
        unit_bytes: Bytes of the gradient of each unit of deferred work.

    Returns:
        Copies, bytes and microseconds for each step, and copies whose trace has no size.
    """
    sizes = set(unit_bytes)
    steps = trace["steps"]
    device = [c for c in trace["copies"] if "DtoD" in c["name"]]
    ours = [c for c in device if c["bytes"] in sizes]
    return {
        "per_step": sum(c["count"] for c in ours) / steps,
        "bytes_per_step": sum(c["count"] * c["bytes"] for c in ours) / steps,
        "us_per_step": round(sum(c["us"] for c in ours) / steps, 3),
        "without_size": sum(c["count"] for c in device if c["bytes"] < 0),
    }
