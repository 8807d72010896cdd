"""The scale of the loss over ranks: a step whose weights do not add up never updates any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from qeffect.gpu_runtime.ranks.job import Job
from tests.training.helpers import language, noise

from . import weight_bodies as bodies
from .ranks import launch


def ranks_of(folder: Path, jobs: list[Job]) -> list[list[dict[str, Any]]]:
    """What each of two ranks said of each job."""
    said = launch(2, folder, bodies.stepped, jobs)
    assert [0, 0] == said.codes
    return [said.words[rank] for rank in range(2)]


def test_a_wrong_divisor_stops_every_rank(tmp_path: Path) -> None:
    """Two walks of two microbatches: the right divisor commits, two wrong ones are refused."""
    common = {"schedule": "1f1b", "pp": 2, "microbatches": 4, "walks": 2}
    jobs = [
        Job(**common),
        bodies.Divided(**common, parts=4),
        bodies.Divided(**common, parts=2),  # by the microbatches of one walk
        bodies.Divided(**common, parts=1),  # not at all
    ]
    said = ranks_of(tmp_path, jobs)

    for rank in said:
        assert ["", "", *["epoch.wrong-weights"] * 2] == [step["clause"] for step in rank]
        assert [1, 1, 0, 0] == [step["epoch"] for step in rank]
        assert [True, True, False, False] == [step["moved"] for step in rank]
    assert [[None], [[1, 1]]] == [rank[0]["sums"] for rank in said]


def test_replicas_share_the_sum(tmp_path: Path) -> None:
    """The gradients of two replicas are summed, so a loss divided without them is refused."""
    common = {"schedule": "1f1b", "pp": 1, "dp": 2, "microbatches": 2}
    said = ranks_of(tmp_path, [Job(**common), bodies.Divided(**common, parts=2)])

    for rank in said:
        assert [[1, 2]] == rank[0]["sums"]
        assert ["", "epoch.wrong-weights"] == [step["clause"] for step in rank]


def test_a_wrong_divisor_of_tied_stages_stops_every_rank(tmp_path: Path) -> None:
    """The embedding's rank shares its weight with the head's rank, which weights the loss."""
    given = language(noise(tmp_path), schedule="1f1b", pp=2, microbatches=2, tied=True)
    common = {f.name: getattr(given, f.name) for f in attrs.fields(type(given))}
    jobs = [bodies.DividedLanguage(**common, parts=parts) for parts in (2, 1)]
    (tmp_path / "said").mkdir()
    said = ranks_of(tmp_path / "said", jobs)

    for rank in said:
        assert ["", "epoch.wrong-weights"] == [step["clause"] for step in rank]
        assert [True, False] == [step["moved"] for step in rank]
