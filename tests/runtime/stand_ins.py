"""
Stand-in graphs: capture and replay on a CPU.

A stand-in runs its action again and leaves the results where the capture left them, as a graph's
replay does. All code except the device's own capture therefore runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.reference import ReferenceDomain
from qeffect.gpu_runtime.step import captures
from qeffect.gpu_runtime.step import graphs as capture
from qeffect.gpu_runtime.step.eager import EagerExecutor, StageMemory
from qeffect.gpu_runtime.step.effects import Effects
from qeffect.gpu_runtime.step.memory.slots import Slot
from qeffect.gpu_runtime.step.streams import HostHandoff


class StandInGraph:
    """A graph whose replay runs the captured action again."""

    def __init__(self, pool: Any, action: Callable[[], None]) -> None:
        self.pool = pool
        self.replay = action


class InPlace:
    """An executor that leaves every result of a slot in the memory of its first result."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], Sequence[Tensor]] = {}

    def keep(self, slot: Slot, name: str, fresh: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy fresh results into the slot's static ones."""
        static = self.held.setdefault((slot.index, name), fresh)
        for a, b in zip(static, fresh, strict=True):
            a.copy_(b)
        return tuple(static)


def install(monkeypatch: pytest.MonkeyPatch) -> list[StandInGraph]:
    """Replace a device's graphs by stand-ins; return every graph that is made."""
    made: list[StandInGraph] = []
    pools = itertools.count()
    place = InPlace()
    forward, dgrad = EagerExecutor.forward, EagerExecutor.dgrad

    def static_forward(self: EagerExecutor, memory: StageMemory, slot: Slot) -> Effects:
        effects = forward(self, memory, slot)
        slot.outputs = place.keep(slot, "outputs", slot.outputs)
        return effects

    def static_dgrad(self: EagerExecutor, memory: StageMemory, slot: Slot, variant: Any) -> Any:
        queued = dgrad(self, memory, slot, variant)
        slot.dgrads = place.keep(slot, "dx", slot.dgrads)
        slot.non_matrix = place.keep(slot, "non-matrix", slot.non_matrix)
        return queued

    def static_work(
        memory: StageMemory, slot: Slot, variant: Any, others: Sequence[Slot] = (), *, keep: bool
    ) -> Any:
        result = work(memory, slot, variant, others, keep=keep)
        names = list(slot.wgrads)
        kept = place.keep(slot, "dW", list(slot.wgrads.values()))
        slot.wgrads = dict(zip(names, kept, strict=True))
        return result

    def record(self: Any, _: str, pool: Any, action: Callable[[], None]) -> StandInGraph:
        action()
        made.append(StandInGraph(pool, action))
        self.report.num_graphs += 1
        return made[-1]

    work = EagerExecutor.run_work
    monkeypatch.setattr(EagerExecutor, "forward", static_forward)
    monkeypatch.setattr(EagerExecutor, "dgrad", static_dgrad)
    monkeypatch.setattr(EagerExecutor, "run_work", staticmethod(static_work))
    monkeypatch.setattr(capture._Recorder, "record", record)
    monkeypatch.setattr(captures, "GraphStream", HostHandoff)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(ReferenceDomain, "capture_obstacles", lambda _: ())
    return made
