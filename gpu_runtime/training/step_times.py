"""
Measure the times of a step on one rank: how long the rank computed, and how long it waited for
other ranks.

The measurement never makes a step wait for the device. On a CPU the host measures both times. On a
GPU, device events around F, dI and dW are recorded in every 32nd guarded step. The host reads these
events later, when the device has passed them. A launch is one graph, in which the device also waits
for messages, so two events around the launch measure the sum of both times. Therefore the device
also records the start and end of one dW of each stage, because a dW waits for no rank
(`qeffect.gpu_runtime.ranks.launch_stamps`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import attrs
import torch

from ..ranks.worker import Worker

__all__ = ["SlowestRank", "StepTimes", "Stopwatch"]

#: On a GPU, the actions of one guarded step in this many are timed.
_TIMED_EVERY: Final = 32
#: Number of steps whose mean determines the slowest rank, and the minimum number.
_WINDOW, _LEAST = 10, 3
#: A rank that takes at least this many times the median is named.
_SLOW: Final = 1.5
_TIMED = ("refresh", "forward", "dgrad", "wgrad")


@attrs.define
class StepTimes:
    """
    The times of a step on one rank, in milliseconds.

    Args:
        wait: The host's wait for other ranks. With a launch, it is the host's wait for the result
            of the previous step.
        compute: On a CPU, the time of the step without `wait`. On a GPU, the device's time in F, dI
            and dW. NaN if it was not measured or has not been read yet.
        launch: The device's time in a launch, including its waits for messages; NaN otherwise.
        weights: In a launch, the device's time in one dW of each stage, summed over the stages.
            Otherwise NaN.
        pairs: Pairs of events on the device around the timed work.
    """

    wait: float
    compute: float = math.nan
    launch: float = math.nan
    weights: float = math.nan
    pairs: list[tuple[Any, Any]] = attrs.Factory(list)
    launched: bool = False

    @property
    def spent(self) -> tuple[float, ...]:
        """Return the four times in this order: compute, wait, launch, weights."""
        return self.compute, self.wait, self.launch, self.weights

    def read(self) -> StepTimes:
        """
        Set the device's times if the device has passed the events. Return this object.
        """
        if self.pairs and all(end.query() for _, end in self.pairs):
            spent = math.fsum(begin.elapsed_time(end) for begin, end in self.pairs)
            if self.launched:
                self.launch = spent
            else:
                self.compute = spent
            self.pairs = []
        return self


class Stopwatch:
    """
    Measures the times of a rank's steps.

    Args:
        worker: The worker (the pipeline of this rank) whose steps are timed.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.device = worker.member.device.type == "cuda"
        self.taken = StepTimes(0.0)

    @contextmanager
    def step(self, epoch: int) -> Iterator[None]:
        """A context that measures a guarded step. Afterwards `taken` contains the step's times."""
        waits, pairs = self.worker.waits, list[tuple[Any, Any]]()
        before, began = waits.seconds, time.perf_counter()
        timed = self.device and epoch % _TIMED_EVERY == 0
        with self._timed(pairs) if timed else nullcontext():
            yield
        spent, waited = time.perf_counter() - began, waits.seconds - before
        compute = math.nan if self.device else (spent - waited) * 1e3
        self.taken = StepTimes(waited * 1e3, compute, pairs=pairs)

    @contextmanager
    def launch(self) -> Iterator[None]:
        """
        A context that measures a launch on the current stream. Afterwards `taken` contains the
        launch's times, without `wait`.
        """
        pairs = [(_event(), _event())] if self.device else []
        for begin, _ in pairs:
            begin.record()
        yield
        for _, end in pairs:
            end.record()
        self.taken = StepTimes(0.0, pairs=pairs, launched=True)

    def _timed(self, pairs: list[tuple[Any, Any]]) -> AbstractContextManager[None]:
        runtime = self.worker.runtime
        performer: Any = runtime.performer
        return runtime.performed_by(
            attrs.evolve(performer, executor=_TimedExecutor(performer.executor, pairs))
        )


class _TimedExecutor:
    """An executor that also records an event before and after each action."""

    def __init__(self, executor: Any, pairs: list[tuple[Any, Any]]) -> None:
        self._executor, self._pairs = executor, pairs

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._executor, name)
        if name not in _TIMED:
            return found

        def timed(*args: Any) -> Any:
            begin, end = _event(), _event()
            begin.record()
            result = found(*args)
            end.record()
            self._pairs.append((begin, end))
            return result

        return timed


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class SlowestRank:
    """
    Finds the rank that computes longest. It is reported only if its time is at least 1.5 times the
    median of all ranks.

    The comparison uses the mean of the last ten timed steps. With an even number of ranks, the
    median is the lower of the two middle values. The first step is not counted, because it also
    contains setup and warm-up.
    """

    def __init__(self) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._began = False

    def take(self, compute: Sequence[float]) -> tuple[int, float] | None:
        """
        Record the times of a step by rank. Return the slowest rank, and its time divided by the
        median; None if no rank is slow.

        Args:
            compute: Milliseconds by rank; NaN for a rank on which the step was not timed.

        >>> slowest = SlowestRank()
        >>> [slowest.take(times) for times in [(9, 9, 9), (1, 1, 3), (1, 1, 3)]]
        [None, None, None]
        >>> slowest.take((1, 1, 3))
        (2, 3.0)
        """
        if len(compute) < 2 or not all(map(math.isfinite, compute)):
            return None
        if not self._began:
            self._began = True
            return None
        self._steps.append(compute)
        if len(self._steps) < _LEAST:
            return None
        sums = [math.fsum(times) for times in zip(*self._steps, strict=True)]
        longest = max(sums)
        factor = longest / max(statistics.median_low(sums), 1e-9)
        return (sums.index(longest), factor) if factor >= _SLOW else None
