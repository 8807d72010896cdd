"""
Counters in device memory: what the device itself says that it ran.

One elementwise multiply-and-add on a few integers goes with every F, dI, dW and refresh, in the
same captured graph: it adds one to the counter of the stage and the kind of action, and folds the
action's mark into the digest of the state domain (`qeffect.counts`). So a graph counts whoever
replays it; in a graph the count is a branch beside the action, not behind it. A step reads the
counters back once, into pinned memory. The device can also compare them itself with what the
contract expects, so that it skips the update where they differ and no host has to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qeffect.counts import COUNTED, MULTIPLIER, DeviceCounts, mark


class DeviceCounters:
    """
    The counters of one state domain.

    Args:
        places: (stage, slot) of every slot of the domain, by the process's index.
        device: Where they live; on a CPU nothing is asynchronous.
    """

    def __init__(self, places: Iterable[tuple[int, int]], device: torch.device) -> None:
        slots = list(places)
        self.stages = tuple(dict.fromkeys(stage for stage, _ in slots))
        size = 1 + len(COUNTED) * len(self.stages)
        # The digest is multiplied before its mark is added; a counter is kept as it is.
        self._factors = torch.ones(size, dtype=torch.int64, device=device)
        self._factors[0] = MULTIPLIER
        self.values = torch.zeros(size, dtype=torch.int64, device=device)
        marked = [("refresh", stage, stage) for stage in self.stages]
        marked += [(action, stage, slot) for stage, slot in slots for action in COUNTED[1:]]
        rows = torch.zeros((len(marked), size), dtype=torch.int64)
        for n, (action, stage, place) in enumerate(marked):
            rows[n, 0] = mark(action, place)
            rows[n, self._at(stage, action)] = 1
        held = rows.to(device)
        self._terms = {(action, place): held[n] for n, (action, _, place) in enumerate(marked)}
        pinned = device.type == "cuda"
        self._read = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._done: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._given = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._expected = torch.zeros(size, dtype=torch.int64, device=device)
        self._differs = torch.zeros((), dtype=torch.bool, device=device)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._beside: Any = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        self._begun: Any = None

    def _at(self, stage: int, action: str) -> int:
        return 1 + len(COUNTED) * self.stages.index(stage) + COUNTED.index(action)

    def ran(self, action: str, place: int) -> None:
        """
        Count an action, on the current stream; inside a capture this becomes a node of the graph.

        Args:
            action: One of `qeffect.counts.COUNTED`.
            place: The slot of an F, dI or dW in the process's pool; the stage of a refresh.
        """
        if self._begun is None:
            self._count(action, place)
            return
        caller = torch.cuda.current_stream()
        self._beside.wait_event(self._begun)
        with torch.cuda.stream(self._beside):
            self._count(action, place)
        caller.wait_stream(self._beside)

    def _count(self, action: str, place: int) -> None:
        torch.addcmul(self._terms[action, place], self._factors, self.values, out=self.values)

    @contextmanager
    def branching(self) -> Iterator[None]:
        """
        From here to `ran` a capture on the current stream makes the count a branch of its own.

        A small kernel between two others costs a few microseconds of the device's time; one beside
        them costs none.
        """
        if self._beside is None:
            yield
            return
        self._begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._begun.record()
        try:
            yield
        finally:
            self._begun = None

    def zero(self) -> None:
        """Begin again, on the current stream, as the contract does at a restore."""
        self.values.zero_()

    def warm(self) -> None:
        """Run the kernel once, so that no capture has to load it, and begin at zero."""
        self.ran(*next(iter(self._terms)))
        self.zero()

    def gate(self, expected: DeviceCounts) -> torch.Tensor:
        """
        Compare on the device, behind everything that the current stream was given; do not wait.

        Then `read`, so that the host learns of it later. `taken` before the next call.

        Args:
            expected: What the device must have counted.

        Returns:
            Scalar of float32 on the device: 1 where the counters differ, else 0. It is overwritten
            by the next call.
        """
        numbers = [expected.digest]
        for stage in self.stages:
            numbers.extend(expected.stages[stage])
        self._given.copy_(torch.tensor(numbers, dtype=torch.int64))
        self._expected.copy_(self._given, non_blocking=True)
        torch.any(torch.ne(self.values, self._expected), out=self._differs)
        self._skip.copy_(self._differs)
        self.read()
        return self._skip

    def read(self) -> None:
        """Copy the counters behind everything that the current stream was given; do not wait."""
        self._read.copy_(self.values, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def taken(self) -> DeviceCounts:
        """Wait for the latest `read`, and return what it read."""
        if self._done is not None:
            self._done.synchronize()
        digest, *numbers = self._read.tolist()
        width = len(COUNTED)
        return DeviceCounts(
            digest,
            {
                stage: tuple(numbers[n * width : (n + 1) * width])
                for n, stage in enumerate(self.stages)
            },
        )
