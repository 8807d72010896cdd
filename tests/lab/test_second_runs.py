"""
The report of steps that run twice: no flipped bit reaches an update, and flips are counted
correctly.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qeffect.gpu_runtime.lab.statistics.second_runs import derive_second_runs
from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks.ranks import launch

from . import second_run_bodies as bodies

SMALL = ["--flips", "6", "--inside", "4", "--every", "3", "--rounds", "2", "--microbatches", "2"]


@pytest.mark.nightly
def test_the_command_writes_a_report_without_a_flip_that_was_applied(tmp_path: Path) -> None:
    """On two ranks of a CPU: behind actions, and in products inside a stage."""
    out = tmp_path / "second_runs.json"
    options = [*SMALL, "--out", str(out), "--commit", "0" * 40]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.reported, options)
    assert said.codes == [0, 0]
    code, outcome = said.words[0]
    report = json.loads(out.read_text())
    derived = report["derived"]
    assert code == 0
    assert outcome["derived"] == derived == derive_second_runs(report["raw"])
    assert (report["kind"], report["complete"]) == ("second_runs", True)
    assert report["environment"]["commit"] == "0" * 40
    assert derived["wrong"] == 0
    assert derived["stopped"] >= 2
    inside = [one for one in report["raw"]["flips"] if one["steps"] == "eager steps"]
    assert [one["kind"].split()[-1] for one in inside] == ["qkv", "proj", "fc1", "fc2"]
    assert all(one["flipped"] for one in inside)
    assert any(one["end"] == "stopped" for one in inside)
    replayed, digests, look = derived["prices"]
    assert list(replayed["ratio"]) == ["every 3", "every 1"]
    assert list(digests["ratio"]) == ["digests"]
    assert (look["what"], list(look["ratio"])) == ("look", ["every 3"])
    assert len(report["raw"]["prices"][0]["rounds"]["off"]) == 2


@pytest.mark.ci
def test_no_flip_in_a_launch_is_applied(tmp_path: Path) -> None:
    """Over a stand-in for graphs, the last flip in a weight."""
    said = launch(2, tmp_path, bodies.launched, Job(schedule="zbv", pp=2, microbatches=2), 4)
    assert said.codes == [0, 0]
    for rank in range(2):
        flips = [{"steps": "launches", **one} for one in said.words[rank]]
        found = derive_second_runs({"flips": flips, "prices": []})
        assert found["wrong"] == 0
        assert found["stopped"] >= 1
        assert found["ends"]["launches: weight"] == {"stopped": 1}


@pytest.mark.parametrize(
    "odd",
    [{"end": "applied"}, {"updated": True}, {"undisturbed": False}, {"end": "ended: a cause"}],
)
def test_a_flip_that_ends_otherwise_is_wrong(odd: dict[str, object]) -> None:
    """It was applied, weights moved before the stop, or the step taken again has other bits."""
    flip = {"steps": "s", "kind": "output", "flipped": 1, "end": "stopped", "updated": False}
    good, bad = (derive_second_runs({"flips": [one], "prices": []}) for one in (flip, flip | odd))
    assert (good["wrong"], bad["wrong"]) == (0, 1)
