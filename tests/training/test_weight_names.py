"""
Weights under the names of other programs: exported to a program like GPT-2's, and imported again.
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
from torch import Tensor
from torch.nn import functional

from qeffect.cli import main
from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.training.weight_names import WeightNames
from tests.profiles import few
from tests.ranks.ranks import launch

from .helpers import CONFIG, text
from .start_bodies import saved_at_once

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RUN = (
    CONFIG.replace("steps = 3", "steps = 40\nevaluate_windows = 24")
    .replace('train = "train.npy"', 'train = "train.npy"\nheld_out = "train.npy"')
    .replace("[parallel]", "{model}[parallel]")
    + '[checkpoint]\nfolder = "{folder}"\n'
)
NAMES = """# another program's
embedding.weight = tok
embedding.position = pos
layers.*.norm1.weight = block.*.a.w
layers.*.norm1.bias = block.*.a.b
layers.*.qkv.weight = block.*.qkv.w transposed
layers.*.qkv.bias = block.*.qkv.b
layers.*.proj.weight = block.*.o.w
layers.*.proj.bias = block.*.o.b
layers.*.norm2.weight = block.*.b.w
layers.*.norm2.bias = block.*.b.b
layers.*.fc1.weight = block.*.up.w
layers.*.fc1.bias = block.*.up.b
layers.*.fc2.weight = block.*.down.w   transposed
layers.*.fc2.bias = block.*.down.b
head.norm.weight = last.w
head.norm.bias = last.b
head.weight = out
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with its checkpoint and its report."""
    folder = tmp_path_factory.mktemp("run")
    text(folder)
    (folder / "names").write_text(NAMES)
    (folder / "run.toml").write_text(RUN.format(model="", folder="kept"))
    command = [sys.executable, "-m", "qeffect", "runtime", "train", str(folder / "run.toml")]
    done = subprocess.run(
        [*command, "--json"], check=True, capture_output=True, timeout=120, text=True
    )
    (folder / "said.json").write_text(done.stdout)
    return folder


def exported(run: Path, folder: str, out: str, *names: str) -> dict[str, Tensor]:
    """The weights that a command writes."""
    (checkpoint,) = (run / folder).glob("step-*")
    where = run / out
    argv = ["runtime", "export", str(checkpoint), "--out", str(where), "--to", "torch", *names]
    assert main([*argv, "--quiet"]) == 0
    held: dict[str, Tensor] = torch.load(where, weights_only=True)
    return held


def gpt2_loss(weights: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> float:
    """The mean loss of windows under GPT-2 as its authors describe it, in fp32."""
    w = {name.removeprefix("transformer."): one.float() for name, one in weights.items()}
    width, heads = config["n_embd"], config["n_head"]

    def norm(x: Tensor, name: str) -> Tensor:
        given = (w[f"{name}.weight"], w[f"{name}.bias"], config["layer_norm_epsilon"])
        return functional.layer_norm(x, (width,), *given)

    def conv1d(x: Tensor, name: str) -> Tensor:  # its matrices have inputs first
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x, y = tokens[:, :-1], tokens[:, 1:]
    hidden = w["wte.weight"][x] + w["wpe.weight"][: x.shape[1]]
    for n in range(config["n_layer"]):
        parts = conv1d(norm(hidden, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn").split(width, dim=-1)
        query, key, value = (p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts)
        scores = query @ key.transpose(-1, -2) / (width // heads) ** 0.5
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value
        mixed = mixed.transpose(1, 2).flatten(-2)
        hidden = hidden + conv1d(mixed, f"h.{n}.attn.c_proj")
        inner = functional.gelu(conv1d(norm(hidden, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc"))
        hidden = hidden + conv1d(inner, f"h.{n}.mlp.c_proj")
    logits = norm(hidden, "ln_f") @ w["lm_head.weight"].T
    return float(functional.cross_entropy(logits.flatten(0, 1), y.flatten()))


@pytest.mark.ci
def test_gpt2_computes_the_same_loss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to FP8, and it has learned; the configuration is said, and is complete."""
    weights = exported(run, "kept", "gpt2", "--names", "gpt2")
    told = capsys.readouterr().out
    config = json.loads(told[told.index("{") :])
    assert config["model_type"] == "gpt2"
    assert (config["n_layer"], config["n_inner"], config["n_positions"]) == (2, 64, 16)
    assert not config["tie_word_embeddings"]

    tokens = torch.from_numpy(np.load(run / "train.npy").astype(np.int64))
    windows = torch.stack([tokens[16 * n : 16 * n + 17] for n in range(24)])
    own = json.loads((run / "said.json").read_text())["held_out"]["40"]
    found = gpt2_loss(weights, config, windows)
    assert own < 4.0
    assert found == pytest.approx(own, abs=0.05)


@pytest.mark.parametrize("names", few(["gpt2", "names"], [1]))
def test_a_round_trip_has_the_same_bits(run: Path, names: str) -> None:
    """Out under other names, into a new run, and out again."""
    path = str(run / "names") if names == "names" else names
    there = exported(run, "kept", f"{names}.there", "--names", path)
    own = exported(run, "kept", f"{names}.own")
    assert not there.keys() & own.keys()
    begins = f'start = "{names}.there"\nstart_names = "{names}"\n'
    config = run / f"again-{names}.toml"
    config.write_text(RUN.format(model=begins, folder=f"again-{names}"))
    words = run / f"words-{names}"
    words.mkdir()
    assert launch(1, words, saved_at_once, str(config)).codes == [0]

    back = exported(run, f"again-{names}", f"{names}.back")
    assert back.keys() == own.keys()
    assert all(same_bits(back[name], own[name]) for name in own)
    again = exported(run, f"again-{names}", f"{names}.again", "--names", path)
    assert all(same_bits(again[name], there[name]) for name in there)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("embedding.weight tok", "line 1: expected OURS = THEIRS"),
        (
            "layers.*.x = y",
            "line 1: expected OURS = THEIRS, with one * in both names or in neither",
        ),
        ("a.*.*.x = b.*.*.x", "more than one * in a.*.*.x"),
        ("a = b\na = c", "line 2: a second line for a"),
        (
            "embedding.weight = tok",
            "expected a line for embedding.position, found none; add embedding.position = ",
        ),
        (NAMES.replace("= out", "= tok"), "found tok for both"),
        (NAMES.replace("= last.b", "= last.b transposed"), "head.norm.bias has 1 dimensions"),
    ],
)
def test_names_that_do_not_fit_are_one_line(
    run: Path, lines: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written."""
    (tmp_path / "names").write_text(lines)
    (checkpoint,) = (run / "kept").glob("step-*")
    out = tmp_path / "out"
    words = ["--out", str(out), "--to", "torch", "--names", str(tmp_path / "names"), "--quiet"]
    assert main(["runtime", "export", str(checkpoint), *words]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_file_of_names_says_what_there_is() -> None:
    """One of the names that are known, or a file."""
    with pytest.raises(BackendError, match=r"llama: .*No such file.*; expected gpt2, or a file of"):
        WeightNames.of("llama")
