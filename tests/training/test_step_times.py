"""The log has each rank's times of a step and of a save, and names a rank that computes longest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qeffect.gpu_runtime.training.step_times import SlowestRank
from tests.ranks.ranks import launch

from . import step_times_bodies as bodies
from .helpers import CONFIG, text

RUN = (
    CONFIG.replace("[parallel]", "[parallel]\npp = 2").replace("steps = 3", "steps = 7")
    + 'log = "log.jsonl"\n[checkpoint]\nfolder = "kept"\nevery = 4\n'
)


def trained(folder: Path, run: str, slow: int) -> tuple[list[dict[str, Any]], str]:
    """The log of a run in which one rank computes slowly, and what the terminal showed."""
    text(folder)
    (folder / "run.toml").write_text(run)
    (folder / "said").mkdir()
    said = launch(2, folder / "said", bodies.slow, [str(folder / "run.toml")], slow)
    assert said.codes == [0, 0]
    (code, _, err) = said.words[0][0]
    assert code == 0, err
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], err


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slow_rank_is_named(slow: int, tmp_path: Path) -> None:
    """In the log, with the times of all ranks; once on the terminal. The other rank waits."""
    lines, err = trained(tmp_path, RUN, slow)

    steps = [line for line in lines if "loss" in line]
    assert [0, 1, 2, 3, 4, 5, 6] == [line["step"] for line in steps]
    for line in steps:
        assert 2 == len(line["compute_ms"]) == len(line["wait_ms"])
        assert line["compute_ms"][slow] > line["compute_ms"][1 - slow]
        assert line["wait_ms"][slow] < line["wait_ms"][1 - slow]
    assert not any("slowest" in line for line in steps[:3])  # one step does not count, three do
    for line in steps[3:]:
        assert slow == line["slowest"]["rank"]
        assert line["slowest"]["times_median"] >= 1.5
    assert 1 == err.count(f"SLOW RANK {slow}: it computes ")
    assert 0 == err.count(f"SLOW RANK {1 - slow}")
    saves = [line for line in lines if "save_ms" in line]
    assert [3, 6] == [line["step"] for line in saves]
    assert all(len(line["save_ms"]) == 2 and min(line["save_ms"]) > 0 for line in saves)


def test_no_rank_is_named_below_one_and_a_half_times_the_median() -> None:
    """The mean over ten steps decides; a single long step does not, nor does a step untimed."""
    slowest = SlowestRank()
    even = [10.0, 10.0, 14.0, 10.0]
    assert [None] * 4 == [slowest.take(even) for _ in range(4)]
    assert slowest.take([10.0, 20.0, 10.0, 10.0]) is None
    assert slowest.take([math.nan, 10.0, 90.0, 10.0]) is None
    for _ in range(10):
        found = slowest.take([10.0, 10.0, 15.0, 10.0])
    assert (2, 1.5) == found


def test_one_rank_alone_is_not_slow() -> None:
    """One rank has no other rank to compare it with."""
    slowest = SlowestRank()
    assert [None] * 5 == [slowest.take([float(n)]) for n in range(5)]
