"""
A rank is killed at any moment and all ranks are started again: the run ends like an undisturbed
run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qeffect.gpu_runtime.ranks.job import Job
from tests.ranks.rank_logs import replayed
from tests.ranks.ranks import launch
from tests.training import bodies

JOB = Job(schedule="zbv", pp=2, microbatches=4)


def killed_often(tmp_path: Path, job: Job, until: int, kills: int, seed: int) -> None:
    """Kill a rank so often, then let it end; and compare."""
    places = [tmp_path / name for name in ("whole", "killed", "words")]
    for place in places:
        place.mkdir()
    whole = launch(job.world, places[2], bodies.killed, job, str(places[0]), until, None)
    assert whole.codes == [0] * job.world
    deaths = launches = 0
    logs = []
    while deaths < kills:
        words = tmp_path / f"words {launches}"
        words.mkdir()
        at = seed + launches
        said = launch(job.world, words, bodies.killed, job, str(places[1]), until, at)
        launches += 1
        logs += said.logs
        assert launches <= 2 * kills, (
            "too many launches: the run has too few steps for so many kills"
        )
        assert set(said.codes) <= {0, -9}, said.codes
        deaths += said.codes.count(-9)
        assert said.codes.count(-9) <= 1
        for one in said.words.values():
            if said.codes.count(-9):
                assert one["cause"] is not None
                assert not one["recoverable"]
    words = tmp_path / "the last"
    words.mkdir()
    last = launch(job.world, words, bodies.killed, job, str(places[1]), until, None)
    assert last.codes == [0] * job.world
    together = replayed([*logs, *last.logs])
    assert together is not None
    assert 1 < together.attempts <= launches + 1
    assert together.checkpoints >= until - 1
    for rank in range(job.world):
        ended, undisturbed = last.words[rank], whole.words[rank]
        assert 0 < ended["began"] < until
        assert ended["bits"] == undisturbed["bits"]
        assert ended["losses"]
        assert ended["losses"] == {n: undisturbed["losses"][n] for n in ended["losses"]}
    left = {path.name for path in places[1].iterdir()}
    assert left == {f"step-{n:08d}" for n in range(until - 2, until + 1)}


@pytest.mark.ci
def test_a_run_that_is_killed_often_ends_in_the_same_bits(tmp_path: Path) -> None:
    """In the middle of steps and of saves, drawn at random: before and behind files and names."""
    killed_often(tmp_path, JOB, until=7, kills=5, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 200])
def test_twenty_kills_in_a_row(tmp_path: Path, seed: int) -> None:
    """Likewise, with more places."""
    killed_often(tmp_path, JOB, until=24, kills=20, seed=seed)


@pytest.mark.slow
def test_twenty_kills_of_two_replicas(tmp_path: Path) -> None:
    """Four processes, of which any may be killed."""
    job = Job(schedule="il", pp=2, dp=2, microbatches=2)
    killed_often(tmp_path, job, until=24, kills=20, seed=300)


@pytest.mark.parametrize("where", bodies.IN_SAVES)
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path: Path, where: str) -> None:
    """Wherever in the save; behind the name it is the new one that is there."""
    words, folder = tmp_path / "words", tmp_path / "checkpoints"
    words.mkdir()
    said = launch(2, words, bodies.killed_in, JOB, str(folder), where)
    assert sorted(code or 0 for code in said.codes) == [-9, 0]
    (survivor,) = said.words.values()
    assert "the process has ended" in survivor["cause"]
    assert survivor["latest"] == (
        "step-00000002" if where == "behind the name" else "step-00000001"
    )


@pytest.mark.slow
def test_torchrun_starts_it_again_twenty_times(tmp_path: Path) -> None:
    """Its own restarts, without a hand: the last attempt ends in the uninterrupted run's bits."""
    words, folder, plain = (tmp_path / name for name in ("words", "checkpoints", "plain"))
    for place in (words, plain):
        place.mkdir()
    until, kills = 40, 20
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(kills), "-m", "tests.training.killed",
        str(folder), str(words), str(until), str(kills), "400",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    whole = launch(2, plain, bodies.killed, JOB, str(tmp_path / "whole"), until, None)
    for rank in range(2):
        last = json.loads((words / f"{rank}.{kills}.json").read_text())
        assert last["attempt"] == kills
        assert 0 < last["began"] < until
        assert last["bits"] == whole.words[rank]["bits"]
