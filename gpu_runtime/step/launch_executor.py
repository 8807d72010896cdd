"""
Run the actions of a step that is one launch, that is, one CUDA graph.

The graph contains all actions of the step, in the order in which they are replayed
(`ranks/step_capture.py`). Therefore the actions call the backend, both in the guarded step before
the capture and in the capture. The graph's one memory pool reuses memory as soon as a tensor is
freed, as in an eager step. Graphs of single actions could not share memory, because they may be
replayed in different orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ..backends.protocol import StateDomain
from .captures import CapturedExecutor, CaptureReport, warmed
from .eager import EagerExecutor, StageMemory
from .effects import UNREPORTED, Effects
from .graphs import Product, product_of
from .memory.counters import DeviceCounters
from .memory.slots import Slot
from .plan.slots import WgradVariant
from .streams import Handoff

__all__ = ["LaunchExecutor", "launch_executor"]


@attrs.define
class _SlotEvidence:
    """
    What the last F and dI of a slot (one microbatch's buffers) reported.

    Args:
        ran: The effects of F.
        queued: The matrices whose dW was queued by dI, and the effects of dI.
    """

    ran: Effects = UNREPORTED
    queued: tuple[tuple[str, ...], Effects] = ((), UNREPORTED)


@attrs.frozen
class _WgradEvidence:
    """The matrices that a dW covered."""

    covered: tuple[str, ...]


class LaunchExecutor(EagerExecutor, CapturedExecutor):
    """
    An executor that calls the backend, and keeps what each action reported. Rehearsals of later
    steps (the contract's checks without device work) use these reports.

    Args:
        domain: The state domain (stages whose scales are updated together). No module may be added
            to the domain.
        report: Times of the warm-up. This executor captures nothing.
        counters: Counters that the device increments with every action; None counts nothing.
    """

    def __init__(
        self, domain: StateDomain, report: CaptureReport, counters: DeviceCounters | None = None
    ) -> None:
        EagerExecutor.__init__(self, counters)
        CapturedExecutor.__init__(self, domain, report)
        self.slots: dict[int, _SlotEvidence] = {}
        self.wgrads: dict[Product, _WgradEvidence] = {}
        self.refreshed: dict[int, Effects] = {}

    def _of(self, slot: Slot) -> _SlotEvidence:
        return self.slots.setdefault(slot.index, _SlotEvidence())

    def refresh(self, memory: StageMemory) -> Effects:
        """
        Check that every captured address is unchanged, then refresh.

        Raises:
            BackendError: A parameter, a scale or a cache has moved to another address, or a module
                was added.
        """
        self.check_addresses(memory)
        found = self.refreshed[memory.stage.index] = super().refresh(memory)
        return found

    def forward(self, memory: StageMemory, slot: Slot) -> Effects:
        """Run F."""
        found = self._of(slot).ran = super().forward(memory, slot)
        return found

    def dgrad(
        self, memory: StageMemory, slot: Slot, variant: WgradVariant
    ) -> tuple[tuple[str, ...], Effects]:
        """Set the memory to which dW will write, then run dI."""
        found = self._of(slot).queued = super().dgrad(memory, slot, variant)
        return found

    def wgrad(
        self,
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
    ) -> tuple[str, ...]:
        """Run dW."""
        found = super().wgrad(memory, slot, variant, others)
        self.wgrads[product_of(slot, variant, others)] = _WgradEvidence(found)
        return found


def launch_executor(
    domain: StateDomain,
    memories: Mapping[int, StageMemory],
    handoff: Handoff,
    counters: DeviceCounters | None = None,
) -> LaunchExecutor:
    """
    Warm up every stage, and make the executor of steps that are one launch.

    Args:
        domain: The state domain (stages whose scales are updated together). From now on, no module
            may be added to the domain.
        memories: Physical memory by stage.
        handoff: The stream on which the step is captured and runs.
        counters: Counters that every action increments.

    Raises:
        BackendError: The domain or a stage cannot be captured; all reasons are listed.
    """
    with warmed(domain, memories, handoff, counters) as report:
        executor = LaunchExecutor(domain, report, counters)
    executor.bake(memories)
    return executor
