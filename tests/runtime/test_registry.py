"""
Several runtimes in one process: with a common registry, no runtime writes another runtime's
gradient destinations.
"""

from __future__ import annotations

from typing import Any

import pytest

from qeffect import DestinationRegistry, Refused
from qeffect.gpu_runtime.runtime import Runtime, RuntimeConfig
from qeffect.gpu_runtime.step.memory.arena import Arena
from qeffect.gpu_runtime.step.plan.order import Order

from .helpers import TINY, reference_stages

ORDER = Order.parse("0F0 0F1 0I0 0I1 0W0 0W1")


def made(registry: DestinationRegistry | None) -> Runtime:
    """A runtime over stages of its own."""
    return Runtime(reference_stages(ORDER, 4, TINY), ORDER, RuntimeConfig(), registry=registry)


def test_runtimes_with_memory_of_their_own_share_a_registry() -> None:
    """Each holds its destinations until it is closed."""
    registry = DestinationRegistry()
    runtimes = [made(registry), made(registry)]

    assert len(registry) == 2
    for runtime in runtimes:
        runtime.close()
    assert len(registry) == 0


def test_a_runtime_over_anothers_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the registry, or after the first runtime's end, it is made."""
    arenas: dict[int, Arena] = {}
    allocate = Arena.for_stage

    def again(stage: Any, *given: Any) -> Arena:
        return arenas.setdefault(stage.index, allocate(stage, *given))

    monkeypatch.setattr(Arena, "for_stage", again)
    registry = DestinationRegistry()
    first = made(registry)
    with pytest.raises(Refused, match=r"arena\.overlapping-destinations in configure"):
        made(registry)

    assert made(None).epoch == 0
    first.close()
    assert made(registry).epoch == 0
