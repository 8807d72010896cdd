"""
What must not happen between the steps of a guarded run: the tests cause each such event on purpose,
and each is noticed.
"""

from __future__ import annotations

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import parameters
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.lab.comparisons.recording import Recording, compare

from .helpers import guarded_run
from .orders import table_order


@pytest.fixture
def run() -> GuardedRun:
    """A guarded run after one step."""
    made = guarded_run(table_order("ScheduleZBVZeroBubble", 1))
    made.step()
    return made


def mismatched(recording: Recording, category: str) -> tuple[str, ...]:
    """What is not as required in a category."""
    return compare(Recording("reference"), recording, categories=[category])[category].first


def test_a_quiet_run_has_nothing(run: GuardedRun) -> None:
    """Steps that only train move nothing, keep nothing and grow nothing."""
    run.upkeep.count()
    run.recording = recording = Recording("quiet")
    run.run(2)
    run.upkeep.record_growth(recording)

    for category in ("addresses", "retained work", "growth"):
        assert () == mismatched(recording, category)
        assert recording.values[category]


def test_a_parameter_that_moved_is_named(run: GuardedRun) -> None:
    """An optimizer that replaces a parameter's memory would leave graphs with the old one."""
    name, parameter = next(iter(parameters(run.runtime.stages[1]).items()))
    parameter.data = parameter.data.clone()

    run.upkeep.after_step(1, recording := Recording("moved"))

    assert (f"step 1 stage 1 parameter:{name}",) == mismatched(recording, "addresses")


def test_a_destination_that_moved_is_named(run: GuardedRun) -> None:
    """So would a gradient that is written elsewhere."""
    buffers = run.runtime.memories[1].arena.buffers(0)
    assert buffers is not None
    tensor = next(iter(buffers.values()))
    tensor.data = tensor.data.clone()

    run.upkeep.after_step(1, recording := Recording("moved"))

    assert any("gradient:" in label for label in mismatched(recording, "addresses"))


def test_work_that_is_left_over_is_counted(run: GuardedRun) -> None:
    """A tape in mid-epoch is live, retains its outputs and withholds a checkpoint."""
    run.begin()
    run.advance(run.runtime.order.steps[0])

    run.upkeep.after_step(1, recording := Recording("unfinished"))

    wanted = ("live tapes", "retained outputs", "checkpoints withheld")
    assert tuple(f"step 1 {name}" for name in wanted) == mismatched(recording, "retained work")


def test_a_tensor_that_is_kept_is_growth(run: GuardedRun) -> None:
    """One tensor more than when it was counted."""
    run.upkeep.count()
    kept = [torch.zeros(1)]

    run.upkeep.record_growth(recording := Recording("grown"))

    assert kept
    assert ("tensors",) == mismatched(recording, "growth")


def test_growth_has_a_beginning(run: GuardedRun) -> None:
    """Without one there is nothing to compare with."""
    with pytest.raises(ValueError, match="call `count` before"):
        run.upkeep.record_growth(Recording("lost"))
