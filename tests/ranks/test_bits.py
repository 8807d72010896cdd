"""The guarded pipeline computes the same bits as torch's own pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from qeffect.gpu_runtime.ranks.job import Job
from tests.profiles import by_profile
from tests.ranks import bodies
from tests.ranks.ranks import launch

STEPS = 3  # each F and dI rolls an amax history of 4, which is full within the first
CASES = {
    "two ranks": [
        Job(schedule="il", pp=2),
        Job(schedule="zbv", pp=2),
        Job(schedule="izb", pp=2),
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
    "several walks": [
        Job(schedule="zbv", pp=2, microbatches=8, walks=2),
        Job(schedule="1f1b", pp=2, microbatches=6, walks=3),
    ],
    "other schedules": [
        Job(schedule="dualpipev", pp=2),
        Job(schedule="1f1b", pp=2),
        Job(schedule="gpipe", pp=2),
    ],
}
#: Cases that the profile dev runs too.
EVERYWHERE = ("two ranks", "several walks")

TABLES = Path(__file__).parents[1] / "schedule" / "torch_tables"


def test_tables_of_other_releases_have_the_same_bits(tmp_path: Path) -> None:
    """torch 2.15 awaits its sends in the table; the order of F and dI is that of before."""
    name = "ScheduleZBVZeroBubble_pp2_vpp2_m4"
    files = [str(TABLES / "2.15.0" / f"{name}{kind}.comms.csv") for kind in ("", ".sends2")]
    files.append(str(TABLES / "2.11.0" / f"{name}.comms.csv"))
    said = launch(2, tmp_path, bodies.alike, Job(schedule="zbv", pp=2), files, 2)
    assert said.codes == [0, 0]
    for rank in range(2):
        assert [run["differ"] for run in said.words[rank]] == [[]] * 4
        assert all(run["of"] > 0 for run in said.words[rank])
    slots = [[run["slots"] for run in said.words[rank]] for rank in range(2)]
    assert slots == [[6, 8, 6, 6], [5, 6, 6, 5]]  # its waits keep slots for longer


@pytest.mark.skipif(
    not hasattr(torch_schedules._PipelineSchedule, "_warmup_p2p"),
    reason="torch 2.11 sends these messages itself; the test imitates it under later releases",
)
def test_the_first_messages_of_torch_2_11_reach_every_rank(tmp_path: Path) -> None:
    """In ZB-V two stages in a row are on one rank, and gloo sends nothing from a rank to itself."""
    said = launch(2, tmp_path, bodies.connected_as_by_torch_2_11, [Job(schedule="zbv", pp=2)], 1)

    assert said.codes == [0, 0]
    for rank in range(2):
        (found,) = said.words[rank]
        assert set(found["differ"].values()) == {0}


@pytest.mark.parametrize(
    "case",
    [
        c
        if c in EVERYWHERE
        else pytest.param(c, marks=pytest.mark.nightly if c == "four ranks" else pytest.mark.ci)
        for c in CASES
    ],
)
def test_the_guarded_pipeline_has_the_bits_of_torchs(case: str, tmp_path: Path) -> None:
    """Losses, what flows both ways, gradients, parameters, AdamW, scales and histories."""
    jobs = CASES[case][: by_profile(2, 3)]
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
