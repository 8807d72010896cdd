"""The guarded pipeline computes torch's own pipeline's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect.gpu_runtime.parallel.model import Job
from tests.parallel import bodies
from tests.parallel.ranks import launch

STEPS = 5  # over a rollover of an amax history of 4


@pytest.mark.parametrize("pp", [2, 4])
def test_the_guarded_pipeline_has_the_bits_of_torchs(pp: int, tmp_path: Path) -> None:
    """Losses, what flows both ways, gradients, parameters, AdamW, scales and histories."""
    jobs = [Job(schedule=name, pp=pp, microbatches=2 * pp) for name in ("il", "izb", "zbv")]
    said = launch(pp, tmp_path, bodies.exact, jobs, STEPS)
    assert said.codes == [0] * pp
    for n, job in enumerate(jobs):
        ranks = [said.words[rank][n] for rank in range(pp)]
        for rank in ranks:
            assert rank["first"] == []
            assert all(count > 0 for count in rank["compared"].values())
            assert rank["losses"] == rank["native losses"]
        losses = [rank["losses"] for rank in ranks if rank["losses"][0]]
        assert len(losses) == 1, job
        assert len(losses[0]) == STEPS
        assert len(losses[0][0]) == 2 * pp
