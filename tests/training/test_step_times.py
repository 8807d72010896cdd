"""
The log contains each rank's times of steps and saves, and names the rank that computes longest.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.ranks.launch_stamps import LaunchStamps
from qeffect.gpu_runtime.training.step_times import SlowestRank
from tests.ranks.ranks import launch

from . import step_times_bodies as bodies
from .helpers import CONFIG, text
from .test_launches import PIPE, files

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
        assert line["compute_ms"][slow] == pytest.approx(3 * line["compute_ms"][1 - slow])
        assert 0 < line["wait_ms"][slow] < line["wait_ms"][1 - slow]
    assert not any("slowest" in line for line in steps[:3])  # one step does not count, three do
    for line in steps[3:]:
        assert slow == line["slowest"]["rank"]
        assert line["slowest"]["times_median"] == pytest.approx(3.0)
    assert 1 == err.count(f"SLOW RANK {slow}: its computation takes ")
    assert 0 == err.count(f"SLOW RANK {1 - slow}")
    saves = [line for line in lines if "save_ms" in line]
    assert [3, 6] == [line["step"] for line in saves]
    assert all(len(line["save_ms"]) == 2 and min(line["save_ms"]) > 0 for line in saves)


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_the_slow_rank_of_launches_is_named(slow: int, tmp_path: Path) -> None:
    """By its device's time in one dW of each stage, which contains no wait for another rank."""
    path = files(tmp_path, PIPE)["launches"]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.slow_launches, path, slow)
    assert said.codes == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "launches.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    launched = [line for line in steps if "weights_ms" in line]
    assert [line["step"] for line in launched] == [*range(1, len(steps))]  # the first is guarded
    for line in launched:
        assert line["weights_ms"][slow] == 2 * line["weights_ms"][1 - slow]
    named = [line["slowest"] for line in launched if "slowest" in line]
    assert named == [{"rank": slow, "times_median": 2.0}] * (len(launched) - 3)


class TestStamps:
    """What a launch stamped, as the host reads it."""

    def stamps(self) -> LaunchStamps:
        """Two stages; a clock that a stamp moves by a millisecond."""
        self.now = 0
        self.number = torch.zeros((), dtype=torch.int64)

        def stamp(ring: Tensor, number: Tensor, place: int) -> None:
            self.now += 1_000_000
            ring[int(number) % len(ring), place] = self.now

        return LaunchStamps(stamp, self.number, (0, 3), rows=2)

    def test_the_first_dw_of_each_stage_counts(self) -> None:
        """Later ones, and all other actions, stamp nothing."""
        ran: list[Any] = []
        executor = SimpleNamespace(
            wgrad=lambda memory, slot, variant: ran.append((memory.stage.index, slot)) or "done",
            forward=lambda *given: given,
        )
        stamps = self.stamps()
        around = stamps.around(executor)
        assert around.forward(1, 2) == (1, 2)
        for stage, slot in ((3, 0), (0, 0), (0, 1), (3, 1)):
            memory = SimpleNamespace(stage=SimpleNamespace(index=stage))
            assert around.wgrad(memory, slot, "accumulate") == "done"
        assert (ran, self.now) == ([(3, 0), (0, 0), (0, 1), (3, 1)], 4_000_000)
        assert stamps.take(0) == 2.0

    def test_a_launch_without_stamps_has_no_time(self) -> None:
        """A step that ran twice, one that was asked for before, and a stage that is missing."""
        stamps = self.stamps()
        assert math.isnan(stamps.take(0))
        stamps.warm()
        assert stamps.take(0) == 2.0
        assert math.isnan(stamps.take(0))
        stamps.mark(0)
        stamps.mark(1)
        assert math.isnan(stamps.take(0))

    def test_rows_of_launches_are_apart(self) -> None:
        """The next launch runs before the host reads the one before it."""
        stamps = self.stamps()
        stamps.warm()
        self.number += 1
        self.now += 5_000_000
        stamps.warm()
        assert [stamps.take(0), stamps.take(1)] == [2.0, 2.0]
        stamps.warm()
        stamps.clear()
        assert math.isnan(stamps.take(1))


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
