"""
Training that stops and goes on in other processes ends in the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.parallel.model import Job
from tests.parallel.ranks import launch
from tests.training import bodies


@pytest.mark.parametrize("schedule", ["il", "zbv"])
@pytest.mark.parametrize("dp", [1, 2])
def test_save_at_3_resume_to_8_is_the_uninterrupted_run(
    tmp_path: Path, schedule: str, dp: int
) -> None:
    """Losses, weights, AdamW, histories and scales, on every rank."""
    job = Job(schedule=schedule, pp=2, dp=dp, microbatches=4 // dp)
    where = [tmp_path / name for name in ("whole", "resumed", "checkpoints")]
    for folder in where:
        folder.mkdir()
    ranks = job.world
    whole = launch(ranks, where[0], bodies.train_saving, job, str(where[2]), 8, (3,))
    assert whole.codes == [0] * ranks
    resumed = launch(ranks, where[1], bodies.train_on, job, str(where[2]), 8)
    assert resumed.codes == [0] * ranks
    for rank in range(ranks):
        a, b = whole.words[rank], resumed.words[rank]
        assert (b["began"], b["epoch"], b["free"]) == (3, 8, {"position": 21})
        assert b["first"] == a["saved"]["3"]
        assert b["first"] != a["last"]
        assert len(b["last"]) > 50
        assert b["last"] == a["last"]
        assert b["losses"] == {step: a["losses"][step] for step in ("3", "4", "5", "6", "7")}
        assert b["changed"] == []
    assert any(resumed.words[rank]["losses"]["7"] for rank in range(ranks))
