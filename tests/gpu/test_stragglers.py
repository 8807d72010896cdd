"""
A rank whose device is slow is named in steps that are one launch, on real graphs over two GPUs.

A kernel that only spins, behind every F, dI and dW in the graphs of one rank's slots, slows down
the device of that rank. The rows that each test prints (run with ``-s``) show the times of both
ranks by step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ranks
from tests.ranks.ranks import launch
from tests.training import slow_device_bodies as bodies

from .helpers import two_gpus
from .test_launched_training import made

LIMIT_S = 300.0  # a rank loads the library, captures every slot, and the step
STEPS = 24


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", LIMIT_S)


def launched(folder: Path, schedule: str, slow: int) -> list[dict[str, Any]]:
    """The log's lines of launches, without the guarded first step; -1 slows no rank."""
    path = Path(made(folder, f'pp = 2\nschedule = "{schedule}"')["launches"])
    path.write_text(path.read_text().replace("steps = 9", f"steps = {STEPS}"))
    (folder / "said").mkdir()
    said = launch(2, folder / "said", bodies.slow_device, str(path), slow)
    assert said.codes == [0, 0]
    assert [said.words[rank]["launches"] for rank in range(2)] == [STEPS - 1] * 2
    lines = [json.loads(line) for line in (folder / "launches.jsonl").read_text().splitlines()]
    found = [line for line in lines if "launch_ms" in line and line["step"] > 0]
    print(f"\n{schedule}, slow rank {slow if slow >= 0 else 'none'}: by rank, in ms")
    for line in found:
        told = line.get("slowest", "nobody")
        print(f"  step {line['step']:2}: one dW a stage {line.get('weights_ms')}, "
              f"launch {line['launch_ms']}, named {told}")  # fmt: skip
    return found


@two_gpus
@pytest.mark.alone
@pytest.mark.parametrize(("schedule", "slow"), [("zbv", 0), ("zbv", 1), ("il", 1)])
def test_the_slow_device_is_named(schedule: str, slow: int, tmp_path: Path) -> None:
    """It spins 2 million cycles, about a millisecond, behind each action; a dW takes less."""
    lines = launched(tmp_path, schedule, slow)
    timed = [line for line in lines if None not in line.get("weights_ms", [None])]
    assert len(timed) == len(lines) == STEPS - 1
    for line in timed:
        assert line["weights_ms"][slow] > 1.5 * line["weights_ms"][1 - slow] > 0
    named = [line["slowest"] for line in lines if "slowest" in line]
    assert len(named) == len(lines) - 3  # the first does not count, and three do
    assert {one["rank"] for one in named} == {slow}


@two_gpus
@pytest.mark.alone
def test_of_two_equal_devices_nobody_is_named(tmp_path: Path) -> None:
    """Launches take equally long on both ranks; each rank's stages have the same size."""
    lines = launched(tmp_path, "zbv", -1)
    assert all(None not in line["weights_ms"] for line in lines)
    assert [line["slowest"] for line in lines if "slowest" in line] == []
