"""
Counters in device memory: the device's own record of the actions that it ran.

One small counting kernel runs with every F, dI, dW and refresh, and is part of the same captured
graph. The kernel adds one to the counter of the stage and the kind of action. It also combines a
number of the action with the state domain's digest, so the digest depends on the order of actions
(`qeffect.counts`). Therefore the device counts every replay of a graph, whatever code launches it.
The host reads the counters back once per step, into pinned memory. The device can also compare the
counters with the counts that the contract expects. If they differ, the device skips the update. The
host does not wait for this comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from qeffect.counts import COUNTED, MULTIPLIER, DeviceCounts, mark, ways_of
from qeffect.relations.constants import OVERWRITES


class DeviceCounters:
    """
    The counters of one state domain (stages whose FP8 scales are updated together).

    Args:
        places: The stage and slot (set of buffers) of every slot of the domain, by the slot's index
            in the process.
        device: Device of the counters; on a CPU nothing is asynchronous.
        destinations: By slot, the number of destinations (memory for gradients) to which its dW may
            write; by default one.
    """

    def __init__(
        self,
        places: Iterable[tuple[int, int]],
        device: torch.device,
        destinations: Mapping[int, int] | None = None,
    ) -> None:
        slots, into = list(places), destinations or {}
        self.stages = tuple(dict.fromkeys(stage for stage, _ in slots))
        size = 1 + len(COUNTED) * len(self.stages)
        # The digest is multiplied before its mark is added; a counter is multiplied by one.
        self._factors = torch.ones(size, dtype=torch.int64, device=device)
        self._factors[0] = MULTIPLIER
        self.values = torch.zeros(size, dtype=torch.int64, device=device)
        marked = [("refresh", stage, stage, OVERWRITES, 0) for stage in self.stages]
        marked += [
            (action, stage, slot, writes, where)
            for stage, slot in slots
            for action in COUNTED[1:]
            for writes in ways_of(action)
            for where in range(into.get(slot, 1) if action == "dW" else 1)
        ]
        # An even length gives every row the same alignment. Otherwise another variant of the kernel
        # would have to be compiled in the middle of a capture.
        rows = torch.zeros((len(marked), size + size % 2), dtype=torch.int64)
        for n, (action, stage, place, writes, where) in enumerate(marked):
            rows[n, 0] = mark(action, place, writes, where)
            rows[n, self._at(stage, action)] = 1
        held = rows.to(device)
        self._terms = {
            (action, place, writes, where): held[n, :size]
            for n, (action, _, place, writes, where) in enumerate(marked)
        }
        pinned = device.type == "cuda"
        self._read = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._done: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._given = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        self._kernels = _kernels() if pinned else None

    def _at(self, stage: int, action: str) -> int:
        return 1 + len(COUNTED) * self.stages.index(stage) + COUNTED.index(action)

    def ran(self, action: str, place: int, writes: int = OVERWRITES, destination: int = 0) -> None:
        """
        Queue the counting of an action on the current stream; during a capture, it becomes part of
        the graph.

        Args:
            action: One of `qeffect.counts.COUNTED`.
            place: For an F, dI or dW: the index of its slot (set of buffers) in the process's pool.
                For a refresh: the stage.
            writes: Whether a dW overwrites or adds, as a value for `qeffect.counts.mark`.
            destination: Number of the memory to which a dW writes (`qeffect.counts.located`).
        """
        term = self._terms[action, place, writes, destination]
        if self._kernels is not None:
            self._kernels.count(self.values, term, self._factors)
        else:
            torch.addcmul(term, self._factors, self.values, out=self.values)

    def zero(self) -> None:
        """
        Set all counts to zero on the current stream, as the contract does with its counts at a
        restore.
        """
        self.values.zero_()

    def warm(self) -> None:
        """Run the kernels once, because a capture cannot load them. Then set all counts to zero."""
        self.ran(*next(iter(self._terms)))
        self.gate(DeviceCounts(0, {stage: (0,) * len(COUNTED) for stage in self.stages}))
        self.zero()

    def gate(self, expected: DeviceCounts) -> torch.Tensor:
        """
        Compare the counters on the device with expected counts, after all queued work of the
        current stream. The host does not wait.

        The device also copies the compared counts to the host. Read these counts with `taken`
        before the next call.

        Args:
            expected: The counts that the device must have.

        Returns:
            Float32 scalar on the device: 1 if the counters differ, else 0. The next call overwrites
            this scalar.
        """
        self._given.copy_(torch.tensor(self.numbers_of(expected), dtype=torch.int64))
        if self._kernels is None:
            self._skip.copy_(torch.any(self.values != self._given.to(self.values.device)))
            self.read()
            return self._skip
        self._kernels.compare(self.values, self._given, self._read, self._skip)
        self._done.record()
        return self._skip

    def read(self) -> None:
        """
        Copy the counters to the host, after all work of the current stream; the host does not wait.
        """
        self._read.copy_(self.values, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def taken(self) -> DeviceCounts:
        """Wait for the latest `read`, and return its counts."""
        if self._done is not None:
            self._done.synchronize()
        return self.counts_of(self._read.tolist())

    def numbers_of(self, counts: DeviceCounts) -> list[int]:
        """
        Convert counts to numbers in the order of `values`: the digest, then each stage's counters.
        """
        return [counts.digest, *(n for stage in self.stages for n in counts.stages[stage])]

    def counts_of(self, numbers: Sequence[int]) -> DeviceCounts:
        """Convert numbers in the order of `values` to counts."""
        (digest, *counted), width = numbers, len(COUNTED)
        return DeviceCounts(
            digest,
            {
                stage: tuple(counted[n * width : (n + 1) * width])
                for n, stage in enumerate(self.stages)
            },
        )


def _kernels() -> ModuleType | None:
    """
    Return the functions that count and compare: kernels with one launch each, or torch operations
    if the kernels cannot be compiled.
    """
    try:
        from . import counters_kernel
    except ImportError:
        return None
    return counters_kernel
