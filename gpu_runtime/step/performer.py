"""
Performers act on memory, streams and other ranks.

The code that asks the contract (`actions.py`, `runtime/epoch.py`) does not touch memory, streams or
other ranks itself. A performer does this. `DevicePerformer` does the real work. A rehearsal checks
a step without device work; the rehearsal's performer does nothing (`ranks/rehearsal.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
from torch import Tensor

from .eager import Executor, StageMemory
from .memory.arena import by_matrix
from .memory.slots import fill
from .plan.order import Kind, Order
from .reductions import Reduction
from .streams import Handoff

__all__ = ["DevicePerformer", "Performer"]


class Performer(Protocol):
    """Acts on memory, streams and other ranks, once the contract has allowed the action."""

    executor: Executor
    """Performs F, dI and dW on a slot, and refreshes a stage's weight caches."""
    handoff: Handoff
    """Orders the graph stream and the caller's stream."""

    def fill(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy an action's inputs into the static buffers of its slot."""

    def gradients(self, memory: StageMemory) -> Mapping[str, Tensor]:
        """
        Return a stage's gradients by parameter name, summed over the microbatches. Called once per
        epoch (optimizer step).
        """

    def forget_gradients(self) -> None:
        """Drop the gradient sums. Called when their epoch (optimizer step) ends or restarts."""

    def reduce(self, send: Callable[[], Reduction | None], *, waited: bool) -> Reduction | None:
        """
        Start a reduction.

        Args:
            send: Starts the reduction. Returns an object to wait for, or None if the reduction has
                already ended.
            waited: Whether the bucket's previous reduction returned an object to wait for.
        """


@attrs.define(eq=False)
class DevicePerformer:
    """
    The performer that does the real work of a process: it runs actions on the device.

    Args:
        executor: Runs the actions, through the backend or by replays of graphs.
        handoff: The graph stream, and the waits between the graph stream and the callers' streams.
        order: The order of the step's actions.
        by_microbatch: Whether to sum gradients in the order of microbatches; if False, in the order
            of dI.
    """

    executor: Executor
    handoff: Handoff
    order: Order
    by_microbatch: bool = False
    _sums: dict[int, Mapping[str, Tensor]] = attrs.field(init=False, factory=dict)

    def fill(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """
        Copy an action's inputs into its slot (a microbatch's buffers), with one operation for all
        if the device supports it.
        """
        fill(buffers, values)

    def gradients(self, memory: StageMemory) -> Mapping[str, Tensor]:
        """Sum a stage's gradients in place; called once per epoch."""
        stage = memory.stage
        found = self._sums.get(stage.index)
        if found is None:
            order = self.order.microbatches(stage.index, Kind.DGRAD)
            total = memory.arena.total(sorted(order) if self.by_microbatch else order)
            named = by_matrix(stage.units, total)
            named.update(zip((p.name for p in stage.non_matrix), memory.summed(), strict=True))
            found = self._sums[stage.index] = named
        return found

    def forget_gradients(self) -> None:
        """Drop the gradient sums; the next epoch computes new sums."""
        self._sums.clear()

    def reduce(self, send: Callable[[], Reduction | None], *, waited: bool) -> Reduction | None:
        """Start the reduction."""
        return send()
