"""
The embedding and head of a language model on real graphs: tied, with either kind of head, and cut
by measured times.

The command runs as a user runs it, captured, and compares every tensor of every step with torch's
own pipeline over native full backwards. Each run ends within `LIMIT_S`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qeffect.gpu_runtime.training.data import save
from qeffect.gpu_runtime.training.prompt import WholeModel

from .helpers import two_gpus

LIMIT_S = 240
DEVICE = "cuda"
RUN = """
[model]
vocabulary = 512
layers = 6
hidden = 128
ffn = 256
heads = 2
sequence = 128
{model}
[parallel]
{parallel}
[data]
train = "train.npy"
[optimizer]
rate = 0.01
clip_norm = 0.5
[run]
steps = 4
log = "log.jsonl"
"""


COMMON = """
kv_heads = 1
norm = "rmsnorm"
activation = "swiglu"
positions = "rotary"
bias = false
"""
"""Layers of the kind that most models have today."""
LEARNS = """
held_out = "train.npy"
[optimizer]
rate = 0.01
[run]
steps = 80
evaluate_windows = 2
[checkpoint]
folder = "kept"
"""


def ran(
    folder: Path, model: str, parallel: str, *options: str, ranks: int = 1, rest: str = ""
) -> dict[str, Any]:
    """What the command says of a run; it ended well. `rest` stands behind `[data] train`."""
    if not (folder / "train.npy").exists():
        save(folder / "train.npy", np.random.default_rng(3).integers(0, 512, 40000))
    path = folder / "run.toml"
    text = RUN.format(model=model, parallel=f"pp = {ranks}\n{parallel}")
    path.write_text(text.partition("[optimizer]")[0] + rest if rest else text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(start if ranks > 1 else []), "-m", "qeffect", "runtime", "train"]
    words = [*command, str(path), "--device", DEVICE, "--json", "--quiet", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return said


def require_native(folder: Path, model: str, schedule: str, ranks: int, least: int) -> None:
    """Require that every compared value of a captured run is native's, and that many are."""
    said = ran(folder, model, f'schedule = "{schedule}"', "--compare", "all", ranks=ranks)
    assert said["verdict"] == "accepted"
    assert said["differ"] == 0
    assert said["compared"] > least
    assert said["captured"] == (DEVICE == "cuda")


@pytest.mark.parametrize("head", ["te", "torchao"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("zbv", 1), pytest.param("zbv", 2, marks=two_gpus), pytest.param("il", 2, marks=two_gpus)],
)
def test_either_head_has_the_bits_of_native(
    tmp_path: Path, schedule: str, ranks: int, tied: bool, head: str
) -> None:
    """Gradients, parameters, AdamW, scales and caches of every step, clipped."""
    if head == "torchao":
        pytest.importorskip("torchao.float8")
    model = f'head = "{head}"\ntied = {str(tied).lower()}'
    require_native(tmp_path, model, schedule, ranks, 1000)


@pytest.mark.parametrize(
    ("schedule", "ranks", "head"),
    [
        ("zbv", 1, "te"),
        ("1f1b", 1, "bf16"),
        pytest.param("il", 2, "bf16", marks=two_gpus),
        pytest.param("zbv", 2, "te", marks=two_gpus),
    ],
)
def test_a_model_of_the_common_kind_has_the_bits_of_native(
    tmp_path: Path, schedule: str, ranks: int, head: str
) -> None:
    """RMSNorm, SwiGLU, rotations, one key for two queries, no biases; a head in bf16 or FP8."""
    require_native(tmp_path, f'head = "{head}"\n{COMMON}', schedule, ranks, 800)


@pytest.mark.parametrize("kind", ["", COMMON], ids=["gelu", "common"])
def test_a_checkpoint_of_the_device_is_computed_without_it(kind: str, tmp_path: Path) -> None:
    """On the CPU in fp32: the loss is that of the run's own evaluation, but for what FP8 rounds."""
    tokens = np.arange(40000) * 7 % 61
    save(tmp_path / "train.npy", tokens)
    said = ran(tmp_path, kind, 'schedule = "zbv"', rest=LEARNS)
    (held_out,) = said["held_out"].values()
    assert held_out < 4.0  # of 4.1 for a model that knows which tokens there are
    (folder,) = (tmp_path / "kept").glob("step-*")
    whole = WholeModel.of(folder)
    losses = []
    for window in (tokens[:129], tokens[128:257]):
        for count in range(1, 129):
            logits = whole.logits(window[:count].tolist())
            losses.append(-float(torch.log_softmax(logits, 0)[window[count]]))
    assert float(np.mean(losses)) == pytest.approx(held_out, abs=0.1)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=two_gpus)])
def test_a_measured_cut_is_legal_and_in_the_log(tmp_path: Path, ranks: int) -> None:
    """Each of the four stages has a layer; the times are those of replays."""
    parallel = 'schedule = "il"\nvpp = 2\ncut = "measured"\nmicrobatches = 4'
    said = ran(tmp_path, "", parallel, ranks=ranks)
    (line,) = [
        line
        for line in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        if "cut" in line
    ]
    assert said["cut"] == line["cut"]
    assert sum(line["cut"]) == 6
    assert min(line["cut"]) >= 1
    assert len(line["layer_times"]) == 6
    assert min(line["layer_times"]) > 0
