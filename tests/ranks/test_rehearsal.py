"""A step that is one launch makes the same calls to the contract as guarded replays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks import bodies
from tests.ranks.ranks import launch
from tests.training.helpers import language, noise


def rehearsed_as_guarded(words: Mapping[str, Any]) -> list[str]:
    """The lines of a guarded step, which another one and the rehearsal have too; nothing moved."""
    lines: list[str]
    lines, second = words["guarded"]
    assert words["refusal"] is None
    assert lines == second == words["rehearsed"]
    assert words["moved"] == []
    return lines


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.ci)])
@pytest.mark.parametrize("schedule", ["il", "izb", "zbv"])
def test_the_rehearsed_step_has_the_transitions_of_a_guarded_one(
    schedule: str, pp: int, tmp_path: Path
) -> None:
    """Every transition with its arguments, in order; no tensor moves and no message is posted."""
    job = Job(schedule=schedule, pp=pp, microbatches=2 * pp)
    said = launch(pp, tmp_path, bodies.rehearsed, job, None)

    assert said.codes == [0] * pp
    for rank in range(pp):
        assert len(rehearsed_as_guarded(said.words[rank])) > 10 * pp
        assert said.words[rank]["posted"] == 0


@pytest.mark.parametrize("group", [2, 4])
def test_so_has_a_rehearsed_step_with_grouped_wgrads(group: int, tmp_path: Path) -> None:
    """Each product takes its group's tapes, in a rehearsal as in a guarded step."""
    job = Job(schedule="zbv", scales="epoch", wgrad_group=group)
    said = launch(2, tmp_path, bodies.rehearsed, job, None)

    assert said.codes == [0] * 2
    for rank in range(2):
        lines = rehearsed_as_guarded(said.words[rank])
        assert sum("ungroup_wgrad" in str(line) for line in lines) == 2 * 4 // group * (group - 1)


@pytest.mark.parametrize(
    ("action", "rank", "clause"),
    [
        ("0F0", 0, "ownership.stale-reference"),
        ("0I0", 0, "ownership.wgrad-before-dgrad"),
        ("0W1", 0, "arena.incomplete"),
        ("0WAIT_SEND_F3", 0, "ownership.live-tape"),
    ],
)
def test_a_rehearsal_refuses_what_a_guarded_step_refuses(
    action: str, rank: int, clause: str, tmp_path: Path
) -> None:
    """A program without one of its actions is refused before its commit: nothing was launched."""
    said = launch(2, tmp_path, bodies.rehearsed, Job(schedule="zbv"), action)

    assert said.words[rank]["refusal"] == clause
    assert said.words[rank]["where"] in ("rehearsal", "guards of the commit")


@pytest.mark.parametrize("schedule", ["il", pytest.param("zbv", marks=pytest.mark.ci)])
def test_reductions_over_replicas_are_rehearsed_in_their_places(
    schedule: str, tmp_path: Path
) -> None:
    """Those of each stage behind its end, and that of scales behind all; nothing is reduced."""
    job = Job(schedule=schedule, pp=1, vpp=2, dp=2, microbatches=2, amax="replicas")
    if schedule == "zbv":
        job = Job(schedule=schedule, pp=2, dp=2, microbatches=4, amax="replicas")
    said = launch(job.world, tmp_path, bodies.rehearsed, job, None)

    assert said.codes == [0] * job.world
    for rank in range(job.world):
        first = rehearsed_as_guarded(said.words[rank])
        assert sum("start_reduction" in line for line in first) == 3


@pytest.mark.parametrize(
    ("given", "ranks", "order"),
    [
        ({"schedule": "zbv"}, [0], "SSFFSF"),
        ({"schedule": "il"}, [0, 1], "SSFFSF"),
        pytest.param(
            *({"schedule": "il", "dp": 2, "amax": "replicas"}, [0, 1, 2, 3], "SSSFSFFF"),
            marks=pytest.mark.ci,
        ),
    ],
    ids=["both on one rank", "one each", "one each, in two replicas"],
)
def test_the_sum_over_a_tie_is_rehearsed_in_its_place(
    given: dict[str, Any], ranks: list[int], order: str, tmp_path: Path
) -> None:
    """
    Behind all stages' sums, ended before that of scales begins; on each rank that has a copy.

    A sum that has no end of its own, as those over one replica, is told so in a rehearsal too.
    """
    job = language(noise(tmp_path), tied=True, pp=2, microbatches=2, **given)
    said = launch(job.world, tmp_path, bodies.rehearsed, job, None)

    assert said.codes == [0] * job.world
    for rank in range(job.world):
        first = rehearsed_as_guarded(said.words[rank])
        told = [line.split("_reduction")[0] for line in first if "_reduction" in line]
        letters = "".join({"start": "S", "finish": "F"}[verb] for verb in told)
        assert letters == (order if rank in ranks else "")
