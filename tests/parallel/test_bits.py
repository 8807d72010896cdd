"""The guarded pipeline computes torch's own pipeline's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.parallel.model import Job
from tests.parallel import bodies
from tests.parallel.ranks import launch

STEPS = 5  # over a rollover of an amax history of 4
CASES = {
    "two ranks": [
        Job(schedule="il", pp=2),
        Job(schedule="izb", pp=2),
        Job(schedule="zbv", pp=2),
    ],
    "four ranks": [
        Job(schedule="il", pp=4, microbatches=8),
        Job(schedule="izb", pp=4, microbatches=8),
        Job(schedule="zbv", pp=4, microbatches=8),
    ],
    "other destinations and slots": [
        Job(schedule="zbv", pp=2, rule="copied"),
        Job(schedule="il", pp=2, rule="per_microbatch", provisioning="static"),
        Job(schedule="izb", pp=2, vpp=3, microbatches=6, provisioning="static"),
    ],
    "other schedules": [
        Job(schedule="dualpipev", pp=2),
        Job(schedule="1f1b", pp=2),
        Job(schedule="gpipe", pp=2),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_the_guarded_pipeline_has_the_bits_of_torchs(case: str, tmp_path: Path) -> None:
    """Losses, what flows both ways, gradients, parameters, AdamW, scales and histories."""
    jobs = CASES[case]
    pp = jobs[0].pp
    said = launch(pp, tmp_path, bodies.exact, jobs, STEPS)
    assert said.codes == [0] * pp
    for n, job in enumerate(jobs):
        ranks = [said.words[rank][n] for rank in range(pp)]
        for rank in ranks:
            assert rank["first"] == []
            assert rank["losses"] == rank["native losses"]
        for category in bodies.CATEGORIES:
            assert sum(rank["compared"].get(category, 0) for rank in ranks) > 0
        (losses,) = [rank["losses"] for rank in ranks if rank["losses"][0]]
        assert len(losses) == STEPS
        assert len(losses[0]) == job.microbatches
