"""
Read the device's work from a Chrome trace: kernel times, and copies with their sizes.

The profiler's Chrome trace is read, because only this trace has the bytes of a copy. A
matrix-gradient copy is a device-to-device copy whose size is exactly that of the gradient of one
weight matrix; the copy nodes of a graph appear in the trace like other copies. Kernels whose name
contains a word for copying are listed separately, because a kernel can also copy, and its number of
bytes is unknown.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest
from itertools import chain
from typing import Any, Final

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

KINDS: Final = {
    "messages": r"nccl",
    "attention": r"sdpa|flash|fmha|fused_attn|cudnn::fusion",
    "FP8 products": r"nvjet_sm\d+_[qr]{2}|gemm.*(e4m3|e5m2)",
    "other products": r"nvjet|gemm|cutlass|splitk",
    "loss": r"cross_entropy|online_softmax|element_mul_kernel|multi_tensor_scale",
    "norms": r"normalization|rms_?norm|layer_?norm",
    "activations": r"gated_act|silu|swiglu|gelu",
    "rotary positions": r"rope",
    "optimizer": r"FusedOptimizer|adam",
    "copies": r"copy|memcpy|memset",
    "quantization": r"cast_|transpose|amax|quantize|scaling_recipe|fp8",
    "other elementwise": r"elementwise|reduce|multi_tensor|embedding|index",
}
"""
For each kind of device work, a pattern of kernel names (upper and lower case are equal); the first
pattern that matches decides. A kernel that both computes and quantizes an activation counts as an
activation.
"""
OTHER: Final = "other"


def _on_device(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Kernels, copies and fills of a trace, without annotations and host calls."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES:
            yield event


def _is_message(event: Mapping[str, Any]) -> bool:
    """
    Whether a kernel belongs to NCCL. Such kernels also run while they wait for the other rank.
    """
    return "nccl" in str(event["name"]).lower()


def summarize(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """
    Summarize a Chrome trace.

    Args:
        events: The trace's events.
        steps: Number of steps in the trace; counts and times are totals over these steps.

    Returns:
        Plain data: `device_us` and `device_events` over kernels, copies and fills; `copies` by name
        and bytes; `copy_kernels` by name; and `top`, the longest kernels by name.
    """
    device_us = 0.0
    device_events = 0
    copies: Counter[tuple[str, int]] = Counter()
    copy_us: defaultdict[tuple[str, int], float] = defaultdict(float)
    kernels: Counter[str] = Counter()
    kernel_us: defaultdict[str, float] = defaultdict(float)
    for event in _on_device(events):
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


def busy_times(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """
    Busy time of a device's streams by kind, in milliseconds per step.

    Args:
        events: The events of a Chrome trace.
        steps: Number of steps in the trace.

    Returns:
        `kernels`, `copies` (with fills) and `messages`: NCCL's kernels, which also run while they
        wait for the other rank.
    """
    found = {"kernels": 0.0, "copies": 0.0, "messages": 0.0}
    for event in _on_device(events):
        what = "kernels" if event["cat"] == "kernel" else "copies"
        if _is_message(event):
            what = "messages"
        found[what] += float(event.get("dur", 0.0))
    return {what: round(us / steps / 1e3, 4) for what, us in found.items()}


def kind_of(name: str) -> str:
    """
    The kind of device work, from `KINDS`, or `OTHER`.

    Args:
        name: The name of a kernel, copy or fill.

    >>> kind_of("nvjet_sm90_qrtst_64x64_128x13_2x1_v_bz_algo2_TNT"), kind_of("unknown")
    ('FP8 products', 'other')
    """
    found = (kind for kind, names in KINDS.items() if re.search(names, name, re.IGNORECASE))
    return next(found, OTHER)


def times_by_name(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """
    Time of a device's kernels, copies and fills by name, longest first.

    Args:
        events: The events of a Chrome trace.
        steps: Number of steps in the trace.

    Returns:
        Milliseconds per step by the first 200 characters of a name; work that overlaps counts
        twice.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for event in _on_device(events):
        found[str(event["name"])[:200]] += float(event.get("dur", 0.0)) / steps / 1e3
    order = sorted(found, key=found.__getitem__, reverse=True)
    return {name: round(found[name], 4) for name in order}


def times_by_kind(by_name: Mapping[str, float]) -> dict[str, float]:
    """
    Add up the times of `times_by_name` for each kind (`kind_of`), longest first; rounded to 0.0001
    ms.

    >>> times_by_kind({"sdpa_bprop": 2.0, "nvjet_sm90_qqtst": 4.0, "sdpa_fprop": 1.0})
    {'FP8 products': 4.0, 'attention': 3.0}
    """
    found: defaultdict[str, float] = defaultdict(float)
    for name, ms in by_name.items():
        found[kind_of(name)] += ms
    order = sorted(found, key=found.__getitem__, reverse=True)
    return {kind: round(found[kind], 4) for kind in order}


def launch_shares(events: Iterable[Mapping[str, Any]], launches: int) -> dict[str, float]:
    """
    Shares of a device's time in a step that is one launch.

    Args:
        events: The events of a Chrome trace of such steps, back to back.
        launches: Number of steps in the trace, at least two: the first step only marks where the
            second begins.

    Returns:
        Milliseconds per step: `busy`, in which work other than messages runs; `awaited`, in which
        only messages run; `between`, in which nothing runs; and `step`, the sum of these three.
        `beside` is the part of `busy` in which a message runs too.

    Raises:
        RuntimeError: The trace has fewer launches than expected.
    """
    spans: dict[Any, list[tuple[float, float, bool]]] = defaultdict(list)
    for event in _on_device(events):
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        launch = event.get("args", {}).get("correlation")
        spans[launch].append((start, end, _is_message(event)))
    whole = nlargest(launches, spans.values(), key=len)
    if launches < 2 or len(whole) < launches:
        raise RuntimeError(f"expected {max(launches, 2)} launches in the trace, found {len(whole)}")
    ends = sorted(max(end for _, end, _ in own) for own in whole)
    begin, finish = ends[0], ends[-1]
    marks: list[tuple[float, int, int]] = []  # when, how many more of which
    for start, end, message in chain(*spans.values()):
        start, end = max(start, begin), min(end, finish)
        if start < end:
            marks += [(start, 1, int(message)), (end, -1, int(message))]
    running, at = [0, 0], begin
    found = {"busy": 0.0, "beside": 0.0, "awaited": 0.0, "between": 0.0}
    for when, more, which in [*sorted(marks), (finish, 0, 0)]:
        others, messages = running
        share = "busy" if others else "awaited" if messages else "between"
        found[share] += when - at
        if others and messages:
            found["beside"] += when - at
        running[which] += more
        at = when
    found["step"] = finish - begin
    return {share: round(us / (launches - 1) / 1e3, 4) for share, us in found.items()}


def device_copies(trace: Mapping[str, Any]) -> float:
    """Time of all device-to-device copies, of any size, in milliseconds per step."""
    us = sum(float(c["us"]) for c in trace["copies"] if "DtoD" in c["name"])
    return us / float(trace["steps"]) / 1e3


def matrix_copies(trace: Mapping[str, Any], unit_bytes: Iterable[int]) -> dict[str, Any]:
    """
    Count the copies on the device in a trace that are as large as a matrix's gradient.

    Args:
        trace: The result of `summarize`.
        unit_bytes: For each weight matrix (a unit of deferred work), the bytes of its gradient.

    Returns:
        Copies, bytes and microseconds per step, and the number of copies whose size the trace does
            not state.
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
