"""
`guard(schedule)` over two replicas: DistributedDataParallel reduces once, in the last backward.

DistributedDataParallel reduces in the autograd nodes that accumulate gradients. A backward in two
parts does not pass through these nodes, and torch's inference of shapes arms
DistributedDataParallel before the first microbatch. torch reports neither fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import guard_bodies as bodies
from tests.ranks.ranks import launch

FULL = ("Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B")
SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both replicas say of each run."""
    folder: Path = tmp_path_factory.mktemp("replicas")
    words = launch(2, folder, bodies.replicas, [*FULL, *SPLIT]).words
    return {name: [words[rank][name] for rank in range(2)] for name in words[0]}


@pytest.mark.parametrize("name", FULL)
def test_a_full_backward_reduces(said: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Both replicas have the same gradients and the bits of an unguarded run; nothing is said."""
    one, other = said[name]

    assert one["gradients"] == other["gradients"]
    for rank in (one, other):
        assert rank["plain"] == rank["gradients"]
        assert [] == rank["violations"]


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_backward_reduces_nothing(said: dict[str, list[dict[str, Any]]], name: str) -> None:
    """The replicas drift apart in silence; the guard names the reduction that is missing."""
    one, other = said[name]

    assert one["gradients"] != other["gradients"]
    for rank in (one, other):
        assert rank["plain"] == rank["gradients"]
        (violation,) = rank["violations"]
        assert ["reduction.missing", 0] == violation[:2]
        assert "its last backward, " in violation[2]


def test_a_forward_before_the_step_arms_an_early_reduction(
    said: dict[str, list[dict[str, Any]]],
) -> None:
    """As torch's inference of shapes does: the first of four backwards reduces too."""
    for rank in said["armed"]:
        assert [["reduction.incomplete", 0]] == [v[:2] for v in rank["violations"]]
        assert "by 0B0" in rank["violations"][0][2]
        assert 2 == rank["reductions"]
        assert 1 == said["Schedule1F1B"][0]["reductions"]


def test_the_guard_leaves_no_hook(said: dict[str, list[dict[str, Any]]]) -> None:
    assert {(0, 0)} == {tuple(rank["hooks"]) for runs in said.values() for rank in runs}
