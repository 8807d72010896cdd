"""
Run one column (a way to run a step) in its own process.

The parent process sends one request and waits for its result before it sends the next request, so
that only one column uses the device at a time.
"""

from __future__ import annotations

import gc
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

import attrs

from ..sides.cells import BenchCell
from ..sides.columns import ColumnSpec, Settings
from ..sides.side import Column
from ..statistics.traces import summarize
from .processes import ChildProcess, answer
from .rank_process import forbid_profiler
from .step_seconds import back_to_back_s, single_step_s

HOST_STEPS = 5
"""
Number of steps at the end of a round for which the host's enqueueing time is measured, step by
step.
"""


@attrs.define(eq=False)
class ColumnSession:
    """
    The column inside its own process, where requests of the parent process call the methods.

    Args:
        spec: The column to run: name, family and factory of one way to run a step.
        cell: The layer dimensions and the order of actions to run.
        settings: Rounds, steps and device.
    """

    spec: ColumnSpec
    cell: BenchCell
    settings: Settings
    _column: Column | None = attrs.field(default=None, init=False)

    @property
    def on_device(self) -> bool:
        """Whether the column runs on a CUDA device."""
        return self.settings.device == "cuda"

    def _synchronize(self) -> None:
        if self.on_device:
            import torch

            torch.cuda.synchronize()

    def _the_column(self) -> Column:
        if self._column is None:
            raise RuntimeError("the column is not built; call `build` first")
        return self._column

    def prepare(self) -> dict[str, Any]:
        """
        Load the libraries that every column's first step needs, so that no column's set-up time
        includes the loading.
        """
        started = time.perf_counter()
        if self.on_device:
            import torch

            from ...backends.te.baselines import load_libraries

            load_libraries(self.cell.config)
            torch.cuda.reset_peak_memory_stats()
        else:
            import torch

            # Sums in a product depend on the number of threads.
            torch.set_num_threads(1)
        return {"prepare_s": time.perf_counter() - started}

    def build(self) -> dict[str, Any]:
        """Build the column, warm it up, and run its first steps."""
        before = self._device_used()
        started = time.perf_counter()
        self._column = self.spec.make(self.cell, self.settings)
        self._column.build()
        self._synchronize()
        built = time.perf_counter()
        self._column.warm()
        self._synchronize()
        warm = time.perf_counter()
        self._column.step()
        self._synchronize()
        first = time.perf_counter()
        for _ in range(self.settings.warm_steps):
            self._column.step()
        self._synchronize()
        return {
            "build_s": built - started,
            "warm_s": warm - built,
            "first_step_s": first - warm,
            "memory": {
                "device_before": before,
                "device_after": self._device_used(),
                **self.memory(peaks=True),
            },
            "facts": dict(self._column.facts()),
        }

    def turn(self, steps: int, warm_steps: int) -> dict[str, Any]:
        """
        Run untimed steps, then steps between two synchronizations, then steps timed on the host.
        """
        column = self._the_column()
        for _ in range(warm_steps):
            column.step()
        self._synchronize()
        return {
            "steps": steps,
            "warm_steps": warm_steps,
            "wall_s": back_to_back_s(column.step, self._synchronize, steps),
            "host_s": [single_step_s(column.step, self._synchronize)[0] for _ in range(HOST_STEPS)],
        }

    def trace(self, steps: int) -> dict[str, Any] | None:
        """Profile some steps; the result is None on a CPU."""
        if not self.on_device:
            return None
        from .profiler import trace_steps

        events = trace_steps(self._the_column().step, self._synchronize, steps)
        return summarize(events, steps)

    def host_actions(self, steps: int) -> dict[str, Any]:
        """
        Host time of single actions; empty for columns without such actions. No step may run
        afterwards.
        """
        measure = getattr(self._the_column(), "host_actions", None)
        return {} if measure is None else dict(measure(steps, self._synchronize))

    def memory(self, *, peaks: bool = False) -> dict[str, int | None]:
        """The allocator's memory figures in bytes; the result is None on a CPU."""
        if not self.on_device:
            names = ("allocated", "reserved") + (
                ("allocated_peak", "reserved_peak") if peaks else ()
            )
            return dict.fromkeys(names)
        import torch

        gc.collect()
        found: dict[str, int | None] = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        if peaks:
            found["allocated_peak"] = torch.cuda.max_memory_allocated()
            found["reserved_peak"] = torch.cuda.max_memory_reserved()
        return found

    def _device_used(self) -> int | None:
        if not self.on_device:
            return None
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def close(self) -> dict[str, Any]:
        """Close the column."""
        if self._column is not None:
            self._column.close()
            self._column = None
        return {}


class ColumnHandle(Protocol):
    """
    The parent's handle of a column: starts a method of the column's session in another process, and
    collects the method's result.
    """

    def post(self, method: str, **arguments: Any) -> None:
        """Start a method of the column's session."""

    def collect(self, timeout_s: float) -> dict[str, Any]:
        """
        The result of the started method.

        Raises:
            ChildError: The method raised an error, the column's process has ended, or the time
                limit has passed.
        """

    def end(self) -> None:
        """End the column, even while a method runs."""


class ColumnProcess:
    """
    A column's session in a fresh process, which ends when this process ends.

    Args:
        spec: The column to run: name, family and factory of one way to run a step.
        cell: The layer dimensions and the order of actions to run.
        settings: Rounds, steps and device.
        profiles: Whether the process may use the profiler; such a process times nothing.
    """

    def __init__(
        self, spec: ColumnSpec, cell: BenchCell, settings: Settings, *, profiles: bool = False
    ) -> None:
        self._process = ChildProcess(_serve, spec, cell, settings, profiles)

    def post(self, method: str, **arguments: Any) -> None:
        """Send the method's name and arguments."""
        self._process.send((method, arguments))

    def collect(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the result of the started method."""
        result: dict[str, Any] = self._process.receive(timeout_s)
        return result

    def end(self) -> None:
        """End the process."""
        self._process.end()


def _serve(
    pipe: Connection, spec: ColumnSpec, cell: BenchCell, settings: Settings, profiles: bool
) -> None:
    if not profiles:
        forbid_profiler()
    session = ColumnSession(spec, cell, settings)
    while True:
        try:
            method, arguments = pipe.recv()
            answer(pipe, getattr(session, method), **arguments)
        except (EOFError, OSError):
            return
