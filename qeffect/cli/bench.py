"""
``qeffect bench``: what the guards cost, as medians and ratios of one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from ..config import StageConfig
from ..contract import Contract
from ..keys import TapeKey, TapeRef
from ..refusals import Refused
from .command import Outcome, Progress, Unusable

__all__ = ["Bench", "environment", "write_report"]

MATRICES = ("fc1", "fc2", "proj", "qkv")


class Bench:
    """Measure the kernel, and the layers above it where they are installed."""

    name = "bench"
    help = "measure the guards, the explorer, the proofs and the replayer"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--kernel", action="store_true", help="measure the kernel alone")
        parser.add_argument("--out", type=Path, metavar="F", help="also write the JSON report here")

    def run(self, args: argparse.Namespace, progress: Progress) -> Outcome:
        """Measure and report."""
        data: dict[str, Any] = {"environment": environment()}
        progress("Measuring. the guarded actions")
        data |= actions()
        progress("Measuring. the schedule check and the replayer")
        data |= schedules()
        if not args.kernel:
            for entry in sorted(entry_points(group="qeffect.bench"), key=lambda e: e.name):
                progress(f"Measuring. {entry.name}")
                try:
                    measure = entry.load()
                    data |= measure(progress)
                except ModuleNotFoundError as error:
                    data[f"{entry.name}_not_measured"] = f"{error.name} is not installed"
        if args.out is not None:
            write_report(args.out, data)
        return Outcome("accepted", data, _lines(data))


def write_report(path: Path, data: dict[str, Any]) -> None:
    """
    Write a report as JSON.

    Raises:
        Unusable: The place cannot be written.
    """
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error.strerror}") from error


def environment() -> dict[str, Any]:
    """Name the hardware, the versions and the commit that a report was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    packages = {}
    for name in ("qeffect", "attrs", "z3-solver", "numpy", "hypothesis", "torch"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": packages,
        "commit": commit(),
        "load_1min": os.getloadavg()[0],
    }


def commit() -> str:
    """Return the commit of the checkout this runs from, marked when it has changes."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True
        )
        changes = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def actions(epochs: int = 400, microbatches: int = 8) -> dict[str, Any]:
    """Measure F, dI and dW through the public API, a refusal, and memory."""
    plain = _epochs(8, microbatches, epochs, managed=False)
    managed = _epochs(8, microbatches, epochs, managed=True)
    wide = {
        str(slots): statistics.median(
            t for times in _epochs(slots, 4, epochs // 2, managed=False).values() for t in times
        )
        for slots in (4, 64, 4096)
    }
    every = [t for times in plain.values() for t in times]
    return {
        "guarded_action_us": statistics.median(every),
        "guarded_action_us_by_action": {k: statistics.median(v) for k, v in plain.items()},
        "context_manager_us": statistics.median(t for v in managed.values() for t in v),
        "refusal_us": _refusal(),
        "guarded_action_us_by_slots": wide,
        "slots_4096_over_4": wide["4096"] / wide["4"],
        "bytes_per_live_tape": _bytes_per_tape(),
    }


def _contract(slots: int, microbatches: int) -> Contract:
    return Contract(
        [StageConfig(0, microbatches=microbatches, slots=slots, matrices=MATRICES)],
    )


def _epochs(slots: int, microbatches: int, epochs: int, *, managed: bool) -> dict[str, list[float]]:
    """Run whole epochs; return microseconds an action, one entry per epoch, by action."""
    contract = _contract(slots, microbatches)
    mats = contract.stages[0].matrices
    times: dict[str, list[float]] = {"F": [], "dI": [], "dW": []}
    clock = time.perf_counter
    for epoch in range(epochs):
        keys = [TapeKey(epoch, 0, m) for m in range(microbatches)]
        refs: list[TapeRef] = []
        with contract.refresh(0):
            pass
        began = clock()
        if managed:
            for key in keys:
                with contract.forward(key) as f:
                    pass
                refs.append(f.ref)
        else:
            for key in keys:
                refs.append(contract.commit(contract.check_forward(key)))  # type: ignore[arg-type]
        times["F"].append((clock() - began) / microbatches * 1e6)
        for key in keys:
            contract.bind(key)
        contract.wait()
        pairs = list(zip(keys, refs, strict=True))
        began = clock()
        if managed:
            for key, ref in pairs:
                with contract.dgrad(key, ref) as i:
                    i.queued = mats
        else:
            for key, ref in pairs:
                contract.commit(contract.check_dgrad(key, ref), mats)
        times["dI"].append((clock() - began) / microbatches * 1e6)
        began = clock()
        if managed:
            for key, ref in pairs:
                with contract.wgrad(key, ref) as w:
                    w.covered = mats
        else:
            for key, ref in pairs:
                contract.commit(contract.check_wgrad(key, ref), mats)
        times["dW"].append((clock() - began) / microbatches * 1e6)
        contract.wait()
        contract.finalize(0)
        contract.commit_epoch()
    return times


def _refusal(rounds: int = 200, each: int = 50) -> float:
    """Median microseconds of a refused check, with its explanation, as a caller catches it."""
    contract = _contract(4, 4)
    key = TapeKey(0, 0, 0)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(each):
            try:
                contract.check_forward(key)  # the cache is stale
            except Refused:
                continue
            raise AssertionError("a forward over a stale cache was accepted")
        times.append((time.perf_counter() - began) / each * 1e6)
    return statistics.median(times)


def _bytes_per_tape(tapes: int = 2048) -> float:
    """Bytes allocated a live tape, its key and reference included."""
    contract = _contract(tapes, tapes)
    with contract.refresh(0):
        pass
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = []
    for m in range(tapes):
        key = TapeKey(0, 0, m)
        kept.append((key, contract.commit(contract.check_forward(key))))
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / len(kept)


def _median(function: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def schedules() -> dict[str, Any]:
    """Measure the check of ZB-V at PP=8, M=64, and the replayer."""
    from ..eventlog import Recorder
    from ..replay import replay_lines
    from ..schedule.check import check
    from ..schedule.tables import read_fixture

    table = read_fixture("ScheduleZBVZeroBubble_pp8_vpp2_m64.compute.csv")
    lines = _log(Recorder)
    seconds = _median(lambda: replay_lines(lines), 3)
    return {
        "check_zbv_pp8_m64_s": _median(lambda: check(table)),
        "replay_events_per_s": len(lines) / seconds,
        "replay_events": len(lines),
    }


def _log(recorder_type: Any, epochs: int = 300, microbatches: int = 8) -> list[str]:
    """Record whole epochs of one stage; return the log's lines."""
    contract = _contract(8, microbatches)
    recorder = recorder_type.attach(contract)
    mats = contract.stages[0].matrices
    for epoch in range(epochs):
        keys = [TapeKey(epoch, 0, m) for m in range(microbatches)]
        with contract.refresh(0):
            pass
        refs = [contract.commit(contract.check_forward(key)) for key in keys]
        contract.wait()
        for key, ref in zip(keys, refs, strict=True):
            contract.bind(key)
            contract.commit(contract.check_dgrad(key, ref), mats)  # type: ignore[arg-type]
        for key, ref in zip(keys, refs, strict=True):
            contract.commit(contract.check_wgrad(key, ref), mats)  # type: ignore[arg-type]
        contract.wait()
        contract.finalize(0)
        contract.commit_epoch()
    lines: list[str] = recorder.close()
    return lines


def _lines(data: dict[str, Any]) -> list[str]:
    where = data["environment"]
    lines = [f"{where['cpu']}, {where['cores']} cores, Python {sys.version.split()[0]}"]
    for name, value in data.items():
        if name == "environment":
            continue
        if isinstance(value, float):
            value = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        lines.append(f"  {name:34} {value}")
    return lines
