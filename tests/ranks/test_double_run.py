"""
Steps that run twice leave the bits of steps that run once, and no bit flip in one of the two runs
reaches an update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.ranks.causes import WEIGHT
from qeffect.gpu_runtime.ranks.double_run import STATE
from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks import double_bodies as bodies
from tests.ranks.ranks import launch

PIPE = Job(schedule="zbv", pp=2, microbatches=2)


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (PIPE, {"clip_norm": 0.01, "counts": "commit"}),
        (Job(schedule="1f1b", pp=2, vpp=1, microbatches=4, walks=2), {"counts": "next step"}),
        (Job(schedule="zbv", pp=2, microbatches=2, dropout=0.2), {}),
        (attrs.evolve(PIPE, scales="epoch", wgrad_group=2), {"counts": "commit"}),
        pytest.param(
            Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=2, amax="replicas"),
            {"mean": True, "clip_norm": 0.01},
            marks=pytest.mark.ci,
        ),
        pytest.param(
            Job(schedule="izb", pp=2, microbatches=2, rule="copied"), {}, marks=pytest.mark.nightly
        ),
        pytest.param(
            Job(schedule="izb", pp=2, microbatches=2, rule="per_microbatch"),
            {},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["counted", "two walks", "dropout", "grouped", "replicas", "copied", "per_microbatch"],
)
def test_steps_that_run_twice_leave_the_bits_of_steps_that_run_once(
    job: Job, options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, norms, parameters, AdamW, scales, histories and random positions."""
    said = launch(job.world, tmp_path, bodies.undisturbed, job, 4, 2, options)
    assert said.codes == [0] * job.world
    for rank in range(job.world):
        assert said.words[rank]["same"], said.words[rank]
        assert said.words[rank]["of"] > 20
    assert any(said.words[rank]["losses"][3] for rank in range(job.world))


#: Where a bit flips: in which run, of what kind, behind which call, and on which rank.
FLIPS = [
    (1, "output", 0, 0),
    (2, "output", 3, 1),
    (2, "input gradient", 1, 1),
    (1, "destination", 3, 0),
    (2, "destination", 3, 1),
    (1, "scale", 0, 1),
    (2, "scale", 0, 0),
    (2, "history", 0, 1),
    (1, "cache", 1, 0),
    (2, "cache", 0, 1),
]


def given(flips: list[tuple[int, str, int, int]]) -> list[dict[str, Any]]:
    """The flips as the body takes them."""
    return [dict(zip(("run", "kind", "call", "rank"), flip, strict=True)) for flip in flips]


@pytest.mark.parametrize(
    "flips", [FLIPS[::2], pytest.param(FLIPS[1::2], marks=pytest.mark.ci)], ids=["some", "others"]
)
def test_a_flip_in_one_of_two_runs_stops_all_ranks_and_nothing_is_updated(
    flips: list[tuple[int, str, int, int]], tmp_path: Path
) -> None:
    """All ranks name one rank and its gradients; the step is taken again in undisturbed bits."""
    said = launch(2, tmp_path, bodies.flipped, PIPE, given(flips), {"clip_norm": 0.01})
    assert said.codes == [0, 0]
    assert said.replay.commits == 2 * 2 * len(flips)  # undisturbed steps too: one each
    for epoch, (run, kind, call, rank) in enumerate(flips):
        place = f"run {run}, {kind} {call}, rank {rank}"
        both = [said.words[own][epoch] for own in range(2)]
        assert both[rank]["done"] == 1, place
        (cause,) = both[0]["causes"]
        assert both[1]["causes"] == [cause], place
        assert (cause["kind"], cause["step"]) == ("differs", epoch), place
        assert cause["recoverable"], place
        assert "two runs of the step differ: rank " in cause["text"], place
        assert [one["moved"] for one in both] == [[], []], place
        assert [one["differ"] for one in both] == [[], []], place
        ranks = {one["rank"] for one in cause["differ"]}
        names = {one["name"] for one in cause["differ"] if one["rank"] == rank}
        # What a rank sends to another one shows there alone, if it does not use it itself.
        assert ranks if kind == "input gradient" else rank in ranks, place
        if kind == "destination":  # nothing else reads it: one matrix of one rank
            assert (ranks, len(names)) == ({rank}, 1), place
            assert names.pop().endswith(".weight"), place
        if kind in ("scale", "history"):
            assert STATE in names, place


@pytest.mark.parametrize(
    "flip",
    [(2, "destination", 3, 1), pytest.param((2, "output", 3, 1), marks=pytest.mark.ci)],
    ids=["destination", "output"],
)
def test_without_the_comparison_a_flip_is_applied(
    flip: tuple[int, str, int, int], tmp_path: Path
) -> None:
    """A flip of the second run, whose gradients the update takes, ends in other weights."""
    said = launch(2, tmp_path, bodies.flipped, PIPE, given([flip]), {}, True)
    assert said.codes == [0, 0]
    (word,) = said.words[1]
    assert (word["done"], word["causes"]) == (1, [])
    assert word["differ"]


@pytest.mark.parametrize(
    ("job", "every", "options"),
    [
        (PIPE, 2, {"clip_norm": 0.01}),
        pytest.param(
            Job(schedule="izb", pp=2, dp=2, microbatches=2, amax="replicas"),
            1,
            {"clip_norm": 0.01, "mean": True},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["each second one", "each one, over replicas"],
)
def test_launches_that_run_twice_leave_the_bits_of_launches_that_run_once(
    job: Job, every: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, norms, parameters, AdamW, scales and histories; the contract counts one step each."""
    said = launch(job.world, tmp_path, bodies.launched, job, 5, every, options)
    assert said.codes == [0] * job.world
    for rank in range(job.world):
        word = said.words[rank]
        assert word["same"]
        assert word["of"] > 20
        assert word["twice"] == [0, 2, 2, 2, 2]


def test_a_step_that_is_launched_twice_looks_for_zero_gradients(tmp_path: Path) -> None:
    """As every other step does; no gradient of these steps is zero."""
    said = launch(2, tmp_path, bodies.zero_stages, PIPE, 5, 2)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1] == [[0.0, 0.0]] * 5


def test_a_second_run_that_posts_in_another_order_is_not_launched(tmp_path: Path) -> None:
    """The graphs of one rank post other messages in the second run; all ranks stop before it."""
    said = launch(2, tmp_path, bodies.exchanged_again, PIPE, "0SEND_F0", "0SEND_F1")
    assert said.codes == [0, 0]
    assert "the captured graphs differ in their messages" in said.words[0]
    assert said.words[0] == said.words[1]


@pytest.mark.ci
def test_a_flip_between_two_launches_is_stopped_or_undone(tmp_path: Path) -> None:
    """
    Between the launches: a scale, a history, a cache or a destination is written again before it is
    read. Another digest is stopped. A weight that has changed ends the run, without an update.
    """
    kinds = {"scale": 2, "amax_history": 3, "cache": 4, "destination": 5, "digest": 6, "weight": 9}
    said = launch(2, tmp_path, bodies.launches_flipped, PIPE, kinds, 1)
    assert said.codes == [0, 0]
    words = [said.words[rank] for rank in range(2)]
    assert [word["flips"] for word in words] == [0, len(kinds)]
    assert [word["differ"] for word in words] == [[], []]
    assert words[0]["causes"] == words[1]["causes"]
    for cause in words[0]["causes"]:
        assert (cause["kind"], cause["rank"]) == ("differs", 1)
    digest, weight = words[0]["causes"]
    assert (digest["step"], digest["recoverable"], len(digest["differ"])) == (6, True, 1)
    assert (weight["step"], weight["recoverable"]) == (9, False)
    (changed,) = [one["name"] for one in weight["differ"] if one["name"].startswith(WEIGHT)]
    assert [name.endswith(changed.removeprefix(WEIGHT)) for name in words[1]["moved"]] == [True]
    assert words[0]["moved"] == []


@pytest.mark.ci
def test_a_flip_inside_one_of_two_launches_is_never_applied(tmp_path: Path) -> None:
    """Whatever operation's output it is: the update is skipped, or the bits are undisturbed."""
    said = launch(2, tmp_path, bodies.launches_flipped_inside, PIPE, 9, 5)
    assert said.codes == [0, 0]
    words = [said.words[rank] for rank in range(2)]
    causes = words[0]["causes"]
    assert words[1]["causes"] == causes
    assert sum(word["flips"] for word in words) >= 4
    assert len(causes) >= 2
    assert all(cause["kind"] == "differs" for cause in causes)
    for word in words:
        assert word["moved"] == []
        assert word["differ"] == []
