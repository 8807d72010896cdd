"""
A checkpoint records whose amaxes determine the scales: each replica's own amaxes, or those of all
replicas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks.ranks import launch
from tests.training import bodies

SHARED = Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=2, amax="replicas")


def part(
    tmp_path: Path, name: str, job: Job, body: Any, *args: Any, beside: bool = True
) -> dict[int, Any]:
    """One launch: fresh processes, which all end well."""
    folder = tmp_path / name
    folder.mkdir()
    words = str(tmp_path / "checkpoints")
    said = launch(job.world, folder, body, job, words, *args, beside=beside)
    assert said.codes == [0] * job.world
    return said.words


@pytest.mark.parametrize("amax", [pytest.param("replica", marks=pytest.mark.ci), "replicas"])
def test_both_choices_go_on_bit_for_bit_and_neither_as_the_other(amax: str, tmp_path: Path) -> None:
    """
    What replicas share is there once, and any number of replicas goes on from it unasked.

    What they keep each its own is there once for each, and takes as many.
    """
    job = attrs.evolve(SHARED, amax=amax)
    whole = part(tmp_path, "whole", job, bodies.started, {"until": 4, "save_at": (2,)})
    resumed = part(tmp_path, "resumed", job, bodies.gone_on, {"until": 4})
    for rank in range(2):
        assert resumed[rank]["first"] == whole[rank]["saved"]["2"]
        assert resumed[rank]["last"] == whole[rank]["last"]
        assert resumed[rank]["changed"] == []
    scaling = [{n: d for n, d in whole[r]["last"].items() if n.startswith("fp8.")} for r in (0, 1)]
    shares = amax == "replicas"
    assert (scaling[0] == scaling[1]) == shares
    assert scaling[1].keys() == {n.replace("dp0", "dp0" if shares else "dp1") for n in scaling[0]}

    other = attrs.evolve(job, amax="replica" if shares else "replicas")
    words = {"replica": "each replica its own", "replicas": "the largest of all replicas"}
    for one in part(tmp_path, "otherwise", other, bodies.refused_load, {}).values():
        assert one["moved"] == []
        found, here = words[amax], words[other.amax]
        assert f"was saved with amax {found}, this run has {here}; load it with" in one["error"]

    alone = attrs.evolve(job, dp=1, microbatches=4)
    if shares:
        for one in part(tmp_path, "alone", alone, bodies.remapped, {}).values():
            assert one["loaded otherwise"] == one["differ"] == []
            assert one["same losses"]
    else:
        for one in part(tmp_path, "alone", alone, bodies.refused_load, {}).values():
            assert "has the scaling state of 2 replicas, this run has 1" in one["error"]


def test_a_contract_takes_no_checkpoint_of_the_other_choice(tmp_path: Path) -> None:
    """Sharing is a bucket of its configuration, without which no epoch commits."""
    # The body restores without `Checkpoints`, so no rank log tells of it.
    for found in part(tmp_path, "a", SHARED, bodies.restored_otherwise, beside=False).values():
        assert found["clause"] == "persistence.configuration"
        assert "amax" in found["text"]
        assert found["own"] == ""
