"""
Counters in device memory: what the device itself says that it ran.

One elementwise multiply-and-add on a few integers goes with every F, dI, dW and refresh, in the
same captured graph: it adds one to the counter of the stage and the kind of action, and folds the
action's mark into the digest of the state domain (`qeffect.counts`). So a graph counts whoever
replays it. A step reads the counters back once, behind its last action, into pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def _at(self, stage: int, action: str) -> int:
        return 1 + len(COUNTED) * self.stages.index(stage) + COUNTED.index(action)

    def ran(self, action: str, place: int) -> None:
        """
        Count an action, on the current stream; inside a capture this becomes a node of the graph.

        Args:
            action: One of `qeffect.counts.COUNTED`.
            place: The slot of an F, dI or dW in the process's pool; the stage of a refresh.
        """
        torch.addcmul(self._terms[action, place], self._factors, self.values, out=self.values)

    def zero(self) -> None:
        """Begin again, on the current stream, as the contract does at a restore."""
        self.values.zero_()

    def warm(self) -> None:
        """Run the kernel once, so that no capture has to load it, and begin at zero."""
        self.ran(*next(iter(self._terms)))
        self.zero()

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
