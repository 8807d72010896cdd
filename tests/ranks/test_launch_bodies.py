"""
The test bodies that run one launch per step on GPUs (`tests/gpu/test_one_launch.py`), here run as
replays on CPUs.

These tests do not launch a whole step. They check that each fault is really injected, and how it
must end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.profiles import few
from tests.ranks import launch_bodies
from tests.ranks.ranks import launch
from tests.training.helpers import language, noise

ONE = Job(schedule="il", pp=1, vpp=2, microbatches=2)
TWO = Job(schedule="zbv", pp=2, microbatches=2)
REPLICAS = Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=2, amax="replicas")


def one_cause(said: Any, ranks: list[int]) -> dict[str, Any]:
    """Return the cause that all remaining ranks name; their weights have not moved."""
    causes = [said.words[rank]["cause"] for rank in ranks]
    assert causes[0] is not None
    assert causes == [causes[0]] * len(ranks)
    assert all(said.words[rank]["moved"] == [] for rank in ranks)
    found: dict[str, Any] = causes[0]
    return found


@pytest.mark.ci
def test_a_rate_a_limit_and_poisoned_data(tmp_path: Path) -> None:
    """With a loss that is NaN, no rank's weights move in that step."""
    rates = [1e-3, 2e-3, 0.0, 1e-3]
    said = launch(2, tmp_path, launch_bodies.launched, TWO, "cpu", 4, rates, 0.01, 1)
    assert said.codes == [0, 0]
    for rank in range(2):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["launches"] == word["replays"]
        assert word["launches"]["moved"][1] == 0
        assert word["launches"]["moved"][0] > 0
        assert word["launches"]["norms"][1].startswith("(nan, 1.0, True, (")


def test_a_device_that_ran_something_else(tmp_path: Path) -> None:
    """The rank is named, and the clause."""
    said = launch(2, tmp_path, launch_bodies.differing, TWO, "cpu", 1)
    assert said.codes == [0, 0]
    cause = one_cause(said, [0, 1])
    assert (cause["clause"], cause["rank"]) == ("epoch.device-count", 1)


def test_an_action_twice(tmp_path: Path) -> None:
    """By its clause, on every rank."""
    said = launch(2, tmp_path, launch_bodies.refused, TWO, "cpu", 1, "1W1")
    assert said.codes == [0, 0]
    assert one_cause(said, [0, 1])["clause"] == "ownership.duplicate-wgrad"


@pytest.mark.parametrize("action", few(["1F1", "warm-up", None], [0]))
def test_a_rank_that_is_killed(action: str | None, tmp_path: Path) -> None:
    """In mid-step, or between two steps: the other stops, and says who."""
    said = launch(2, tmp_path, launch_bodies.killed, TWO, "cpu", 1, action)
    assert said.codes == [0, -9]
    cause = one_cause(said, [0])
    assert (cause["kind"], cause["rank"]) == ("gone", 1)


def test_steps_that_are_left_and_taken_up(tmp_path: Path) -> None:
    """A checkpoint between them has the epoch of the last."""
    said = launch(1, tmp_path, launch_bodies.resumed, ONE, "cpu")
    assert said.codes == [0]
    assert said.words[0] == {"checkpoint": 5, "epoch": 7, "refusal": ""}


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_gate_of_a_launch_says_on_every_rank_what_the_host_would(
    limit: float | None, tmp_path: Path
) -> None:
    """
    Its kernels stand in; every rank's word and every stage's squares go to all ranks.

    One stage has a copy of a tied weight, which counts once.
    """
    said = launch(2, tmp_path, launch_bodies.gated, limit)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    well, odd, differs = said.words[0]
    assert [case["skip"] for case in (well, odd, differs)] == [0.0, 1.0, 1.0]
    for case in (well, odd, differs):
        assert case["norm"] == case["host"]
    assert "skipped=True" in odd["norm"]
    assert (well["scale"] is None) == (limit is None)
    assert [case["said"] for case in (well, odd, differs)] == [[0, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_gate_over_replicas_takes_the_norm_of_one_and_looks_at_all(
    limit: float | None, tmp_path: Path
) -> None:
    """Replicas whose reduced gradients differ update nothing, and the host learns which replicas
    differ."""
    said = launch(2, tmp_path, launch_bodies.gated_replicas, limit)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    alike, odd, differs = said.words[0]
    assert alike["norm"] == alike["host"]
    assert [case["skip"] for case in (alike, odd, differs)] == [0.0, 1.0, 1.0]
    assert [case["said"] for case in (alike, odd, differs)] == [[0, 0], [0, 0], [0, 2]]
    # An epoch whose norm is no number commits, without an update of weights.
    assert [case["updated"] for case in (alike, odd, differs)] == [1, 1, 0]
    assert "skipped=True" in odd["norm"]


def test_launches_over_replicas_with_a_limit(tmp_path: Path) -> None:
    """Scales that are shared, and one norm."""
    said = launch(2, tmp_path, launch_bodies.launched, REPLICAS, "cpu", 3, None, 0.01, -1)
    assert said.codes == [0, 0]
    for rank in range(2):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["launches"]["norms"] == word["replays"]["norms"]


@pytest.mark.parametrize("action", ["1W1", pytest.param(None, marks=pytest.mark.ci)])
def test_steps_go_on_after_a_stop(action: str | None, tmp_path: Path) -> None:
    """From the epoch that ended, bit for bit."""
    said = launch(2, tmp_path, launch_bodies.recovered, REPLICAS, "cpu", 7, 1, action)
    assert said.codes == [0, 0]
    cause = one_cause(said, [0, 1])
    assert cause["recoverable"]
    for rank in range(2):
        word = said.words[rank]
        assert word["again"] == launch_bodies.BEFORE
        assert word["differ"] == []
        assert word["of"] > 20


def test_a_word_of_an_earlier_step_is_no_yes(tmp_path: Path) -> None:
    """
    An aborted communicator leaves what it had received before: the update is skipped.

    So is that of the step behind it, for which all words came.
    """
    said = launch(2, tmp_path, launch_bodies.unheard, None)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    assert [step["skip"] for step in said.words[0]] == [0.0, 1.0, 1.0]
    assert [step["said"] for step in said.words[0]] == [[0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("schedule", ["zbv", pytest.param("il", marks=pytest.mark.ci)])
def test_steps_of_a_tied_model(schedule: str, tmp_path: Path) -> None:
    """Its copies end alike, on one rank and on two, with AdamW's moments."""
    job = language(noise(tmp_path), tied=True, schedule=schedule, pp=2, microbatches=2)
    said = launch(2, tmp_path, launch_bodies.launched, job, "cpu", 3, None, 0.01, -1)
    assert said.codes == [0, 0]
    first, second = (copy for rank in range(2) for copy in said.words[rank]["copies"])
    assert first == second
    for rank in range(2):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["launches"]["norms"] == said.words[0]["replays"]["norms"]


@pytest.mark.ci
def test_steps_of_a_tied_model_go_on_after_a_stop(tmp_path: Path) -> None:
    """With copies on two ranks, whose group ends and is made again."""
    job = language(noise(tmp_path), tied=True, schedule="il", pp=2, microbatches=2)
    said = launch(2, tmp_path, launch_bodies.recovered, job, "cpu", 7, 1, "1W1")
    assert said.codes == [0, 0]
    assert one_cause(said, [0, 1])["clause"] == "ownership.duplicate-wgrad"
    for rank in range(2):
        assert said.words[rank]["differ"] == []
        assert said.words[rank]["of"] > 20
