"""
The runtime's actions without guards, to measure what guards cost.

The physical work is the same as in `qeffect.gpu_runtime.step.actions`: the handoff to the graph
stream and back, the copies into static buffers, the replay. The contract kernel, the comparison of
destinations with their descriptors and the check of recorded addresses are left out. Only the
benchmark uses this module.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import attrs
from torch import Tensor

from qeffect.keys import TapeKey, TapeRef

from ...runtime import Runtime
from ...step.eager import StageMemory
from ...step.memory.slots import Slot, fill


class NullContract:
    """A stand-in for the contract at the boundaries of an epoch, which accepts everything."""

    counts_awaited = False

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def enter(self, link: int) -> None:
        """Accept the call."""

    def join(self, link: int) -> None:
        """Accept the call."""

    def wait(self, link: int) -> None:
        """Accept the call."""

    def finalize(self, stage: int, link: int) -> None:
        """Accept the call."""

    @contextmanager
    def update(self, *, caller: Hashable, counted: object = None) -> Iterator[None]:
        """Count the epoch; accept the update."""
        yield
        self.epoch += 1

    def outstanding(self) -> tuple[()]:
        """Return nothing, because no resource is reserved."""
        return ()


def remove_contract(runtime: Runtime) -> None:
    """Replace a runtime's contract by a stand-in that accepts everything."""
    nothing = cast(Any, NullContract(runtime.contract.epoch))
    runtime.contract = nothing
    runtime.actions.contract = nothing


@attrs.define(eq=False)
class UnguardedActions:
    """
    The actions F, dI, dW and refresh, without guards.

    Args:
        runtime: The runtime whose memory, plan, executor and streams are used.
    """

    runtime: Runtime

    @contextmanager
    def _on_graph_stream(self, *, after_copies: bool = False) -> Iterator[None]:
        handoff = self.runtime.handoff
        handoff.wait_for_caller()
        with handoff.scope():
            yield
            # As in guarded actions: a graph has marked its own tail.
            if after_copies or not self.runtime.executor.marks_tail:
                handoff.record_tail()
        handoff.caller_waits()

    def _slot(self, key: TapeKey) -> tuple[StageMemory, Slot]:
        memory = self.runtime.memories[key.stage]
        return memory, memory.table[memory.slot_of[key.microbatch]]

    def refresh(self, stage: int) -> None:
        """Refresh a stage's weight cache in place."""
        executor = self.runtime.executor
        graphs = getattr(executor, "refreshes", None)
        with self._on_graph_stream():
            if graphs is None:
                executor.refresh(self.runtime.memories[stage])
            else:
                graphs[stage].replay()

    def forward(self, key: TapeKey, inputs: Sequence[Tensor] | None = None) -> TapeRef:
        """Run F without guards."""
        memory, slot = self._slot(key)
        with self._on_graph_stream():
            if inputs is not None:
                fill(slot.input_views, inputs)
            self.runtime.executor.forward(memory, slot)
        return TapeRef(slot.index, 0)

    def bind(self, key: TapeKey) -> None:
        """Compare nothing."""

    def dgrad(
        self, key: TapeKey, ref: TapeRef, output_gradients: Sequence[Tensor] | None = None
    ) -> None:
        """Run dI without guards."""
        memory, slot = self._slot(key)
        variant = memory.variants[key.microbatch]
        with self._on_graph_stream():
            if output_gradients is not None:
                fill(slot.output_gradients, output_gradients)
            self.runtime.executor.dgrad(memory, slot, variant)

    def wgrad(
        self, key: TapeKey, ref: TapeRef, *, group: Sequence[tuple[TapeKey, TapeRef]] = ()
    ) -> None:
        """Run dW without guards."""
        memory, slot = self._slot(key)
        variant = memory.variants[key.microbatch]
        others = [self._slot(other)[1] for other, _ in group]
        with self._on_graph_stream(after_copies=not memory.arena.direct):
            self.runtime.executor.wgrad(memory, slot, variant, others)
            if not memory.arena.direct:
                memory.arena.keep_copies(key.microbatch, slot.wgrads)

    def outputs(self, key: TapeKey, ref: TapeRef) -> Sequence[Tensor]:
        """The outputs of F."""
        return self._slot(key)[1].outputs

    def finish_outputs(self, key: TapeKey, ref: TapeRef) -> None:
        """Do nothing: readers are not counted."""

    def dgrads(self, key: TapeKey, ref: TapeRef) -> Sequence[Tensor]:
        """The input gradients of dI."""
        return self._slot(key)[1].dgrads

    def finish_dgrads(self, key: TapeKey, ref: TapeRef) -> None:
        """Do nothing: readers are not counted."""
