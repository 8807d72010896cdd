"""Both halves of the handoff on a device without streams, and what they tell the kernel."""

from __future__ import annotations

import torch

from qeffect.gpu_runtime.execute.streams import HostHandoff, handoff_for

from .helpers import guarded_run
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)


def test_a_cpu_has_the_no_op() -> None:
    """A CPU's handoff does nothing, but it is there."""
    assert isinstance(handoff_for(torch.device("cpu")), HostHandoff)


def test_every_action_crosses_twice() -> None:
    """Each action waits for its caller before, and its caller waits after: two handoffs each."""
    run = guarded_run(ORDER)
    before = run.runtime.handoff.handoffs

    run.step()

    # Every F, dI and dW, a refresh for each stage, finalize, update.
    actions = len(ORDER.steps) + len(ORDER.stages) + 2
    assert 2 * actions == run.runtime.handoff.handoffs - before


def test_the_kernel_hears_of_both_halves() -> None:
    """After a step neither stream has anything that the other did not wait for."""
    run = guarded_run(ORDER)

    run.step()

    memory = run.runtime.contract.memory
    assert list(memory.submitted) == list(memory.joined)
    assert list(memory.waited) == list(memory.replays)
    assert memory.replays[0] == len(ORDER.steps) + len(ORDER.stages)
