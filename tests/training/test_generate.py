"""The model of a checkpoint continues a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from qeffect.cli import main
from qeffect.cli.interrupts import INTERRUPTED
from qeffect.gpu_runtime.backends.ends import Ends
from qeffect.gpu_runtime.backends.protocol import BackendError, parameters
from qeffect.gpu_runtime.backends.reference.scaling import QuantizedTensor
from qeffect.gpu_runtime.backends.te import domain as te
from qeffect.gpu_runtime.backends.te.domain import TransformerEngineDomain
from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage
from qeffect.gpu_runtime.training import prompt, te_weights
from qeffect.gpu_runtime.training.config import Model
from qeffect.gpu_runtime.training.plain_model import PlainModel
from qeffect.gpu_runtime.training.prompt import WholeModel, choose
from qeffect.gpu_runtime.training.te_weights import as_reference
from tests.cli.test_interrupts import interrupted, require_promise, started, wait_for
from tests.cli.test_interrupts import processes as processes
from tests.runtime import fake_te

from .helpers import COMMON_KIND, SMALL

SENTENCE = "the quick brown fox. "
"""21 characters: windows of 16 tokens begin at each of them."""
RUN = (
    SMALL.format(vocabulary=272, layers=2)
    + """[parallel]
schedule = "1f1b"
batch = 8
microbatches = 2
[data]
train = "corpus/train.npy"
held_out = "corpus/train.npy"
[optimizer]
rate = 0.01
least_rate = 0.001
warmup = 10
[run]
steps = 100
log = "log.jsonl"
evaluate_windows = 8
[checkpoint]
folder = "kept/here"
"""
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run over a sentence that repeats."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(SENTENCE * 300)
    words = ["--text", str(folder / "text.txt"), "--tokenizer", "bytes", "--held-out", "0"]
    assert main(["runtime", "corpus", "--out", str(folder / "corpus"), "--quiet", *words]) == 0
    (folder / "run.toml").write_text(RUN)
    # In a process of its own, which becomes a rank.
    command = [sys.executable, "-m", "qeffect", "runtime", "train", str(folder / "run.toml")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (found,) = (folder / "kept" / "here").glob("step-*")
    return found


def generate(capsys: pytest.CaptureFixture[str], checkpoint: Path, *words: str) -> dict[str, Any]:
    """What the command says as JSON."""
    capsys.readouterr()
    assert main(["runtime", "generate", str(checkpoint), "--json", "--quiet", *words]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, *words: str) -> str:
    """The line with which the command says that its input is unusable."""
    capsys.readouterr()
    given = words if "--prompt" in words else ("--prompt", "we", *words)
    assert main(["runtime", "generate", str(checkpoint), "--quiet", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.ci
def test_a_repeated_sentence_is_continued(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also beyond a window of 16 tokens; the text is the prompt and what follows."""
    said = generate(capsys, checkpoint, "--prompt", "the quick", "--tokens", "75")
    assert said["text"] == SENTENCE * 4
    assert (len(said["tokens"]), said["ended"], said["step"]) == (75, False, 100)
    assert (
        main(["runtime", "generate", str(checkpoint), "--prompt", "fox. t", "--tokens", "8"]) == 0
    )
    out, err = capsys.readouterr()
    assert out == "fox. the quick\n"
    assert "After 100 steps, on the CPU with the reference backend" in err


def test_draws_follow_their_seed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same text; hot draws differ, and never take an unused token."""
    words = ["--prompt", "we", "--tokens", "30", "--temperature", "50", "--seed"]
    first, again, other = (generate(capsys, checkpoint, *words, seed) for seed in "112")
    assert first == again
    assert first["tokens"] != other["tokens"]
    assert max(first["tokens"] + other["tokens"]) < 257
    cold = ["--prompt", "the quick", "--tokens", "30", "--temperature", "0.01"]
    assert generate(capsys, checkpoint, *cold)["text"] == (SENTENCE * 2)[:39]


def test_the_model_is_the_one_that_was_trained(checkpoint: Path) -> None:
    """Computed token by token, the loss equals the loss that the run's own evaluation found."""
    folder = checkpoint.parents[2]
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    (said,) = (line for line in lines if "held_out_loss" in line)
    text = np.load(folder / "corpus" / "train.npy")
    whole = WholeModel.of(checkpoint)
    losses = [
        float(torch.nn.functional.cross_entropy(whole.logits(part), torch.tensor(int(target))))
        for start in range(0, 128, 16)
        for n in range(16)
        for part, target in [(text[start : start + n + 1].tolist(), text[start + n + 1])]
    ]
    assert sum(losses) / len(losses) == pytest.approx(said["held_out_loss"], abs=1e-5)


def test_a_text_that_ends_is_left_there(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end itself is not printed."""

    def told(*_: object, **__: object) -> Iterator[int]:
        yield from [104, 105, 256, 104]

    monkeypatch.setattr(WholeModel, "continued", told)
    said = generate(capsys, checkpoint, "--prompt", "oh ")
    assert (said["text"], said["tokens"], said["ended"]) == ("oh hi", [104, 105], True)


def test_a_moved_checkpoint_needs_its_corpus(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option; another run's corpus is refused."""
    moved = tmp_path / checkpoint.name
    moved.mkdir()
    for path in checkpoint.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert "name the corpus folder with --corpus" in refused(capsys, moved)
    own = str(checkpoint.parents[2] / "corpus")
    given = ["--prompt", "the quick", "--tokens", "12", "--corpus"]
    assert generate(capsys, moved, *given, own)["text"] == SENTENCE

    other = tmp_path / "corpus"
    (tmp_path / "other.txt").write_text("another text")
    words = ["--text", str(tmp_path / "other.txt"), "--tokenizer", "bytes"]
    assert main(["runtime", "corpus", "--out", str(other), "--quiet", *words]) == 0
    line = refused(capsys, moved, "--corpus", str(other))
    assert (
        "expected the corpus of the run, with 6301 training tokens, found a corpus with 13" in line
    )
    assert "corpus.json: No such file" in refused(capsys, moved, "--corpus", str(tmp_path))
    (other / "corpus.json").write_text("[]")
    assert "expected the record of a corpus" in refused(capsys, moved, "--corpus", str(other))

    (moved / "facts.json").write_bytes(b"{}")
    assert "facts.json has 2 bytes" in refused(capsys, moved, "--corpus", own)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "0"], "--tokens: expected at least 1, found 0"),
        (["--temperature", "-1"], "--temperature: expected a finite number of at least 0"),
        (["--temperature", "nan"], "--temperature: expected a finite number of at least 0"),
        (["--seed", "3"], "temperature 0 draws nothing; add --temperature"),
        (["--seed", "-3", "--temperature", "1"], "--seed: expected 0 to"),
        (["--prompt", ""], "--prompt: expected a value, found an empty one"),
    ],
)
def test_options_out_of_range_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Before the checkpoint is read."""
    assert said in refused(capsys, tmp_path / "none", *words)


def test_an_unknown_backend_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qeffect.gpu_runtime.training.prompt.ReferenceDomain.name", "else")
    with pytest.raises(BackendError, match="found the backend reference"):
        WholeModel.of(checkpoint)


# Checkpoints of Transformer Engine's backend


def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in for the library multiply without FP8."""

    def quantize(_: fake_te.Meta, value: Tensor, __: int) -> QuantizedTensor:
        return QuantizedTensor(value.float(), torch.ones(()))

    monkeypatch.setattr(fake_te.Meta, "quantize", quantize)
    monkeypatch.setattr(fake_te, "E4M3", torch.float32)


def library_stage(
    monkeypatch: pytest.MonkeyPatch, model: Model, *, fused: bool = True
) -> TransformerEngineStage:
    """The whole model over the stand-in, in fp32, with every parameter drawn."""
    for name, module in fake_te.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    fake_te.FP8GlobalStateManager.reset()
    te.library.cache_clear()
    te.reset_process()
    unrounded(monkeypatch)
    layer = attrs.evolve(model.layer(1), fused_qkv=fused, dtype=torch.float32)
    ends = Ends(vocabulary=model.vocabulary, embedding=True, head=True)
    domain = TransformerEngineDomain("delayed", 4, torch.device("cpu"), "action")
    stage = TransformerEngineStage(0, domain, layer, num_layers=model.layers, first=True, ends=ends)
    stage.root.float()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in stage.root.parameters():
            parameter.normal_(0.0, 0.5)
    return stage


def facts_of(model: Model, backend: str = "transformer-engine") -> dict[str, Any]:
    given = {"model": attrs.asdict(model)}
    return {"epoch": 3, "must": {"backend": backend, "given": given}, "free": {}}


@pytest.fixture
def the_library() -> Iterator[None]:
    """Forget the stand-in afterwards."""
    yield
    te.library.cache_clear()


@pytest.mark.usefixtures("the_library")
@pytest.mark.parametrize("kind", [{}, COMMON_KIND], ids=["gelu", "common"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_the_library_computes_the_same_logits(
    kind: dict[str, Any], fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights that its backend names and orders, where nothing is rounded to FP8."""
    model = Model(vocabulary=32, layers=2, hidden=32, ffn=64, heads=4, sequence=16, **kind)
    stage = library_stage(monkeypatch, model, fused=fused)
    weights = {name: one.detach().clone() for name, one in parameters(stage).items()}
    monkeypatch.setattr(prompt, "read_part", lambda *_: (dict(weights), facts_of(model)))
    whole = WholeModel.of(tmp_path)

    ids = [5, 31, 0, 7, 7, 19, 2, 11]
    tokens = torch.zeros(16, 1, dtype=torch.int64)
    tokens[: len(ids), 0] = torch.tensor(ids)
    with torch.no_grad():
        (expected,) = stage.native_forward((tokens,), first=True)
    exact = PlainModel(model, as_reference(weights, model.layer()), gelu="none")
    off, far = (
        float((one.logits(ids) - expected[len(ids) - 1, 0]).abs().max()) for one in (whole, exact)
    )
    assert off < 1e-4
    assert (far > 1e-4) == (model.activation == "gelu"), far
    assert whole.computed == "in fp32, without FP8"


def as_library(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """A reference checkpoint's weights as Transformer Engine's backend names and orders them."""
    names = {theirs: ours for ours, theirs in te_weights._LAYER.items()}
    found = {}
    for name, tensor in weights.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            if rest.startswith("qkv"):
                parts = tensor.view(3, heads, -1, *tensor.shape[1:]).transpose(0, 1)
                tensor = parts.reshape(tensor.shape)
                rest = f"self_attention.layernorm_{rest}"
            name = f"layers.{number}.{names.get(rest, rest)}"
        found[name.replace("head.norm.", "head.layer_norm_")] = tensor
    return found


def test_a_sentence_is_continued_from_weights_of_the_library(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says how it computes."""
    weights, facts = prompt.read_part(checkpoint, "model")
    facts = {**facts, "must": {**facts["must"], "backend": "transformer-engine"}}
    theirs = as_library(weights, facts["must"]["given"]["model"]["heads"])
    assert "layers.1.self_attention.layernorm_qkv.weight" in theirs
    assert "head.layer_norm_bias" in theirs
    monkeypatch.setattr(prompt, "read_part", lambda *_, **__: (dict(theirs), facts))
    said = generate(capsys, checkpoint, "--prompt", "the quick", "--tokens", "33")
    assert (said["text"], said["computed"]) == (SENTENCE * 2, "in fp32, without FP8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers.0.rotary": torch.zeros(3)}, "layers.0.rotary: expected a weight of Transf"),
        ({"layers.9.proj.bias": torch.zeros(3)}, "layers.9.proj.bias: expected a weight of"),
        ({"head.weight": torch.zeros(16, 3)}, r"head.weight: expected shape \(272, .*\), found"),
        ({"embedding.position": None}, "found 1 in only one of them, such as embedding.position"),
    ],
)
def test_other_weights_are_refused_by_name(
    change: dict[str, Any],
    said: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, facts = prompt.read_part(checkpoint, "model")
    facts = {**facts, "must": {**facts["must"], "backend": "transformer-engine"}}
    theirs: dict[str, Any] = as_library(weights, facts["must"]["given"]["model"]["heads"]) | change
    theirs = {name: tensor for name, tensor in theirs.items() if tensor is not None}
    monkeypatch.setattr(prompt, "read_part", lambda *_, **__: (theirs, facts))
    with pytest.raises(BackendError, match=said):
        WholeModel.of(checkpoint)


def test_a_draw_has_the_weights_of_its_logits() -> None:
    """A low temperature does not overflow; none takes the largest."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert choose(logits, 0.0, generator) == 1
    assert choose(logits, 1e-300, generator) == 1
    drawn = [choose(logits, 1.0, generator) for _ in range(600)]
    shares = torch.softmax(logits, 0)
    for token in range(3):
        assert drawn.count(token) / 600 == pytest.approx(float(shares[token]), abs=0.06)


@pytest.mark.nightly
def test_an_interrupt_ends_it(checkpoint: Path, processes: list[subprocess.Popen[str]]) -> None:
    """While it draws token after token."""

    def once() -> float:
        process = started(f"runtime generate {checkpoint} --prompt the --tokens 1000000")
        processes.append(process)
        wait_for(process, "After 100 steps")
        time.sleep(2.0)
        assert process.poll() is None

        seconds, out, err = interrupted(process, False)

        *progress, last = err.splitlines()
        assert (INTERRUPTED, "", "qeffect: interrupted") == (process.returncode, out, last)
        assert progress
        assert all(line.endswith(" of 1,000,000 tokens") for line in progress)
        return seconds

    require_promise(once)
