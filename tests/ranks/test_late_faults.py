"""
A fault that a rank notices late reaches the rank's contract: that epoch cannot commit, and no
checkpoint is saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.job import Job

from . import late_fault_bodies as bodies
from .ranks import launch

ALONE = Job(schedule="gpipe", pp=1, microbatches=2)


def failed(folder: Path, job: Job, fault: str, steps: int) -> list[dict[str, Any]]:
    """What each rank said."""
    said = launch(job.world, folder, bodies.failing, job, str(folder / "kept"), fault, steps)
    assert said.codes == [0] * job.world
    return [said.words[rank] for rank in range(job.world)]


@pytest.mark.parametrize("fault", ["action", "save"])
def test_after_a_device_error_nothing_is_saved(tmp_path: Path, fault: str) -> None:
    """The last update may be what failed, so the weights count as half updated."""
    (said,) = failed(tmp_path, ALONE, fault, 1)

    if fault == "action":
        assert "an injected device error" in said["cause"]["text"]
        assert not said["cause"]["recoverable"]
    else:
        assert "an injected device error" in said["saves"][0]
    assert said["half updated at last"]
    assert len(said["saves"]) == 2  # the second although the device answers again
    assert said["files"] == []


def test_a_weight_that_changed_is_not_saved(tmp_path: Path) -> None:
    """Two runs of a step differ because a weight flipped between them."""
    (said,) = failed(tmp_path, ALONE, "weight", 1)

    assert said["cause"]["kind"] == "differs"
    assert said["half updated"]
    assert len(said["saves"]) == 2
    assert said["files"] == []


def test_a_step_whose_two_runs_differ_is_spoiled(tmp_path: Path) -> None:
    """Its weights are those of the last commit, from which the ranks rebuild."""
    (said,) = failed(tmp_path, ALONE, "gradient", 1)

    assert (said["cause"]["kind"], said["cause"]["recoverable"]) == ("differs", True)
    assert (said["spoiled"], said["half updated"]) == (True, False)
    assert len(said["saves"]) == 2
    assert said["files"] == []


@pytest.mark.ci
def test_the_other_rank_keeps_its_epoch(tmp_path: Path) -> None:
    """Only the rank whose two runs differ has a fault to record."""
    job = Job(schedule="1f1b", pp=2, microbatches=2)
    other, own = failed(tmp_path, job, "gradient", 1)

    assert other["cause"] == own["cause"]
    assert (other["spoiled"], own["spoiled"]) == (False, True)
    assert other["files"] == own["files"] == []
