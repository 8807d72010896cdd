"""
Count three kinds of events that must not happen between the steps of a guarded run: memory that
moves, work that is retained, and resources that grow.

A library's own full backward has no slots, graphs or tapes to compare with, so a comparison
requires each count to be zero.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from qeffect.refusals import Refused

from ...runtime import Runtime
from .recording import Recording

__all__ = ["SETTLED", "Upkeep"]

#: The step after which a run must not grow, because optimizer state and workspaces exist by then.
SETTLED = 1


@attrs.define(eq=False)
class Upkeep:
    """
    A runtime's addresses, retained work and resources, counted after every step.

    Args:
        runtime: The runtime, before its first step.
    """

    runtime: Runtime
    _addresses: dict[str, int] = attrs.field(init=False)
    _resources: dict[str, int] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._addresses = dict(self._named())

    def after_step(self, number: int, recording: Recording | None) -> None:
        """
        Count moved addresses and retained work after a committed step.

        Args:
            number: Number of the step.
            recording: Recording that receives the counts, or None to record nothing.
        """
        if recording is not None:
            where = f"step {number}"
            now = dict(self._named())
            for name in dict.fromkeys((*self._addresses, *now)):
                moved = int(self._addresses.get(name) != now.get(name))
                recording.add("addresses", f"{where} {name}", moved)
            for name, count in self._retained().items():
                recording.add("retained work", f"{where} {name}", count)

    def count(self) -> None:
        """Count the process's resources now; `record_growth` later compares with this count."""
        self._resources = self._counted()

    def record_growth(self, recording: Recording) -> None:
        """Record the growth of each resource since `count`."""
        if self._resources is None:
            raise ValueError(
                "expected an earlier `count`, found none; call `count` before `record_growth`"
            )
        for name, count in self._counted().items():
            recording.add("growth", name, max(0, count - self._resources[name]))

    def _named(self) -> Iterator[tuple[str, int]]:
        for index, memory in self.runtime.memories.items():
            for name, address in memory.addresses().items():
                # An eager library may move its quantized weights.
                if self.runtime.config.replays_graphs or not name.startswith("cache:"):
                    yield f"stage {index} {name}", address
            if memory.arena.direct:
                for microbatch in range(self.runtime.order.num_microbatches):
                    for name, tensor in (memory.arena.destinations(microbatch) or {}).items():
                        yield f"stage {index} gradient:{microbatch} {name}", tensor.data_ptr()
        for slot, graphs in getattr(self.runtime.executor, "slots", {}).items():
            if (static := getattr(graphs, "static", None)) is None:
                continue  # the actions of a launch have no graphs of their own
            for kind in ("outputs", "dgrads", "non_matrix"):
                for n, tensor in enumerate(getattr(static, kind)):
                    yield f"graph:slot {slot} {kind} {n}", tensor.data_ptr()

    def _retained(self) -> dict[str, int]:
        """
        The numbers of live tapes, of deferred products, and of other things that make the contract
        refuse a checkpoint.
        """
        runtime = self.runtime
        tapes = [slot.tape for memory in runtime.memories.values() for slot in memory.table]
        runtime.drain()
        try:
            runtime.contract.checkpoint()
            withheld = 0
        except Refused:
            withheld = 1
        return {
            "live tapes": len(runtime.contract.live()),
            "deferred products": sum(len(tape.work) for tape in tapes),
            "retained outputs": sum(len(tape.outputs) for tape in tapes),
            "checkpoints withheld": withheld,
        }

    def _counted(self) -> dict[str, int]:
        """
        Resources of a process: tensors (on a device, the bytes that they requested), graphs and
        slots.

        The allocator's blocks are not counted: the allocator does not always split a block that is
        too large, so the same tensors may occupy different amounts in different steps.
        """
        runtime = self.runtime
        while gc.collect():
            pass  # what one pass frees may hold what the next one finds
        found = {
            "slots": sum(1 for memory in runtime.memories.values() for _ in memory.table),
            "graphs": getattr(getattr(runtime.executor, "report", None), "num_graphs", 0),
            "tickets": len(runtime.contract.live()),
        }
        if runtime.domain.device.type == "cuda":
            torch.cuda.synchronize(runtime.domain.device)
            stats = torch.cuda.memory_stats(runtime.domain.device)
            found["requested bytes"] = stats["requested_bytes.all.current"]
        else:
            found["tensors"] = sum(1 for held in gc.get_objects() if issubclass(type(held), Tensor))
        return found
