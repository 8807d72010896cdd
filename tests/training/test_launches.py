"""
Training by one launch a step has the bits of guarded replays, with all that a run has.

What a device would do is done by `tests.parallel.recorded`; all else is the run's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import launch

from . import launched_bodies as bodies
from .helpers import SMALL, text

RUN = (
    SMALL.format(vocabulary=128, layers=4)
    + """{model}
[parallel]
{parallel}
[data]
train = "train.npy"
held_out = "train.npy"
[optimizer]
rate = 0.02
warmup = 4
decay_steps = 9
weight_decay = 0.1
clip_norm = 0.5
skip_nonfinite = true
[run]
steps = 9
evaluate_every = 6
evaluate_windows = 4
"""
)
PIPE = 'pp = 2\nschedule = "zbv"\nmicrobatches = 2'
FOUR = 'pp = 2\ndp = 2\nschedule = "il"\nmicrobatches = 2\namax = "replicas"'


def files(folder: Path, parallel: str, model: str = "", **more: str) -> dict[str, str]:
    """One run by replays, and by launches: whole, and stopped and gone on with a save at 3."""
    text(folder)
    found = {}
    for name, launches, saves in (
        ("replays", False, False),
        ("launches", True, False),
        ("kept", True, True),
    ):
        body = RUN.format(
            model=model, parallel=parallel + f"\none_launch = {str(launches).lower()}"
        )
        body += f'log = "{name}.jsonl"\n' + more.get(name, "")
        body += '[checkpoint]\nfolder = "kept"\nevery = 3\n' if saves else ""
        path = folder / f"{name}.toml"
        path.write_text(body)
        found[name] = str(path)
    return found


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a log that have a loss, without what a clock and an allocator say."""
    every = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    timed = ("step_ms", "tokens_per_s", "memory_bytes")
    return [{k: v for k, v in line.items() if k not in timed} for line in every if "loss" in line]


@pytest.mark.parametrize(
    ("parallel", "model", "world"),
    [(PIPE, "", 2), (FOUR, "tied = true", 4)],
    ids=["a pipeline", "replicas of a tied model"],
)
def test_launches_train_as_replays(parallel: str, model: str, world: int, tmp_path: Path) -> None:
    """
    Losses, norms, held-out losses and every tensor: whole, and stopped at 3 and gone on afresh.

    The rate is another one in every step, and every gradient is clipped.
    """
    made = files(tmp_path, parallel, model)
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    cases = [(made["replays"], {}), (made["launches"], {}), (made["kept"], {"steps": 3})]
    whole = launch(world, tmp_path / "whole", bodies.in_turn, cases)
    again = launch(world, tmp_path / "again", bodies.in_turn, [(made["kept"], {"resume": True})])
    assert whole.codes == again.codes == [0] * world
    for rank in range(world):
        replays, launched, begun = whole.words[rank]
        (resumed,) = again.words[rank]
        assert replays["launches"] == 0
        assert launched["losses"] == replays["losses"]
        assert launched["left"] == replays["left"]
        assert launched["held_out"] == replays["held_out"]
        assert set(launched["held_out"]) == {"6", "9"}
        assert (launched["launches"], launched["replays"]) == (8, "")
        assert launched["rehearsed and as one"][1] > 0
        assert (begun["launches"], resumed["began"], resumed["launches"]) == (2, 3, 5)
        assert begun["losses"] + resumed["losses"] == replays["losses"]
        assert resumed["left"] == replays["left"]
        assert len(replays["left"]) > 50
    told = lines(tmp_path, "replays")
    assert [line["step"] for line in told] == list(range(9))
    assert len({line["rate"] for line in told}) == 8  # the peak twice, around the warm-up's end
    assert all(line["norm"] > 0.5 and not line["skipped"] for line in told)
    assert lines(tmp_path, "launches") == lines(tmp_path, "kept") == told
