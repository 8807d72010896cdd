"""
Training with one launch per step on real graphs has the bits of guarded replays, with every feature
of a run.

The test bodies are those of `tests/training/test_launches.py`, which uses a stand-in for graphs.
Every start of ranks ends within `LIMIT_S`: a rank that hangs is killed and fails its test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qeffect.gpu_runtime.training.data import save
from tests.ranks import ranks
from tests.training import launched_bodies as bodies
from tests.training import test_launches as on_cpu
from tests.training.test_launches import Replays, begun_again, files, require_alike

from .helpers import four_gpus, two_ranks

LIMIT_S = 300.0  # a rank loads the library, and is made three times
CLIP = 0.01
RUN = f"""
[model]
vocabulary = 512
layers = 4
hidden = 128
ffn = 256
heads = 2
sequence = 128
history = 4
{{model}}
[parallel]
{{parallel}}
[data]
train = "train.npy"
held_out = "train.npy"
[optimizer]
rate = 0.02
warmup = 4
decay_steps = 9
weight_decay = 0.1
clip_norm = {CLIP}
skip_nonfinite = true
[run]
device = "cuda"
steps = 9
evaluate_every = 6
evaluate_windows = 4
"""


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", LIMIT_S)


def made(folder: Path, parallel: str, model: str = "") -> dict[str, str]:
    """The files of the test on a CPU, of a model of the library, over tokens of chance."""
    found = files(folder, parallel, model, RUN)
    save(folder / "train.npy", np.random.default_rng(3).integers(0, 512, 40000))
    return found


@pytest.mark.parametrize(
    ("parallel", "model", "world"),
    [
        ('schedule = "zbv"', "", 1),
        pytest.param('pp = 2\nschedule = "zbv"', "", 2, marks=two_ranks),
        pytest.param('pp = 2\nschedule = "il"', "tied = true", 2, marks=two_ranks),
        pytest.param('dp = 2\nschedule = "il"\namax = "replicas"', "", 2, marks=two_ranks),
        pytest.param(on_cpu.FOUR, "tied = true", 4, marks=four_gpus),
    ],
    ids=["one rank", "zbv", "il of a tied model", "replicas", "four ranks of a tied model"],
)
def test_launches_train_as_replays(parallel: str, model: str, world: int, tmp_path: Path) -> None:
    """Losses, norms and every tensor; whole, and stopped at 3 and gone on in fresh processes."""
    require_alike(tmp_path, made(tmp_path, parallel, model), world, bodies.on_devices, clip=CLIP)


@two_ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_refused_step_is_begun_again(victim: int, tmp_path: Path) -> None:
    """The other rank has launched, and brings losses together: it is woken there, and goes on."""
    found = made(tmp_path, 'pp = 2\nschedule = "zbv"')
    faults = [[7, victim, "twice", "1W1" if victim else "0W1"]]
    replays = Replays(tmp_path, found, bodies.on_devices)
    words, (stop,) = begun_again(tmp_path, found, faults, replays, body=bodies.on_devices)
    for launched in words:
        assert launched["launches"] == 9 - 2
    assert stop["step"] == 7
    assert f"rank {victim}, step 7" in stop["stopped"]
