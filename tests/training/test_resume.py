"""Training that stops and resumes in other processes ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks.rank_logs import replayed
from tests.ranks.ranks import Said, launch
from tests.training import bodies


def part(tmp_path: Path, name: str, job: Job, body: Any, *args: Any) -> Said:
    """One launch: fresh processes, which all end well."""
    folder = tmp_path / name
    folder.mkdir()
    said = launch(job.world, folder, body, job, str(tmp_path / "checkpoints"), *args)
    assert said.codes == [0] * job.world
    return said


@pytest.mark.parametrize(
    ("schedule", "dp", "asynchronous"),
    [
        pytest.param("il", 1, False, marks=pytest.mark.ci),
        pytest.param("zbv", 1, True, marks=pytest.mark.ci),
        ("il", 2, True),
        pytest.param("zbv", 2, False, marks=pytest.mark.ci),
    ],
)
def test_save_at_3_resume_to_8_is_the_uninterrupted_run(
    tmp_path: Path, schedule: str, dp: int, asynchronous: bool
) -> None:
    """Losses, weights, AdamW, histories and scales, on every rank."""
    job = Job(schedule=schedule, pp=2, dp=dp, microbatches=4 // dp)
    options = {"until": 8, "save_at": (3,), "asynchronous": asynchronous}
    whole = part(tmp_path, "whole", job, bodies.started, options)
    resumed = part(tmp_path, "resumed", job, bodies.gone_on, {"until": 8})
    for rank in range(job.world):
        a, b = whole.words[rank], resumed.words[rank]
        assert (b["began"], b["epoch"], b["free"]) == (3, 8, {"position": 12})
        assert b["first"] == a["saved"]["3"]
        assert b["first"] != a["last"]
        assert len(b["last"]) > 50
        assert b["last"] == a["last"]
        assert b["losses"] == {step: a["losses"][step] for step in ("3", "4", "5", "6", "7")}
        assert b["changed"] == []
    assert any(resumed.words[rank]["losses"]["7"] for rank in range(job.world))
    together = replayed([*whole.logs, *resumed.logs])
    assert together is not None
    assert (together.attempts, together.checkpoints, together.commits) == (2, 1, 13 * job.world)
    kinds = {name.split(".")[0] for name in resumed.words[0]["last"]}
    assert kinds == {"model", "optim", "fp8"}
