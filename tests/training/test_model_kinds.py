"""
Models of the common kind: shared keys, RMSNorm, SwiGLU, rotary positions, no biases, a bf16 head.
"""

from __future__ import annotations

import cmath
import json
import math
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.cli import main
from qeffect.gpu_runtime.backends.ends import Ends
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import parameters
from qeffect.gpu_runtime.backends.reference import ReferenceDomain, ReferenceStage
from qeffect.gpu_runtime.backends.reference.linear import ScaledLinear
from qeffect.gpu_runtime.backends.split_head import SplitHead, Store
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.training.command import _count
from qeffect.gpu_runtime.training.config import Config, Model
from qeffect.gpu_runtime.training.plain_model import PlainModel
from qeffect.gpu_runtime.training.prompt import WholeModel
from qeffect.gpu_runtime.training.saves import _LATER
from tests.ranks.ranks import launch

from . import language_bodies
from . import torchao_bodies as bodies
from .helpers import COMMON, COMMON_KIND, COMMON_MODEL, SMALL, language, noise, text

CPU = torch.device("cpu")
MODEL = Model(vocabulary=32, layers=2, hidden=32, ffn=64, heads=4, sequence=16, **COMMON_KIND)
RUN = (
    SMALL.format(vocabulary=256, layers=2).replace("heads = 2\n", "")
    + COMMON_MODEL
    + """{model}
[parallel]
schedule = "{schedule}"
pp = 1
batch = 2
microbatches = 4
[data]
train = "train.npy"
[run]
steps = 3
[checkpoint]
folder = "kept"
every = 2
"""
)


def weights_of(model: Model) -> dict[str, Tensor]:
    """Drawn weights, by the reference backend's names."""
    job = language_stage(model)
    torch.manual_seed(5)
    return {n: torch.randn(p.shape, dtype=torch.float64) for n, p in parameters(job).items()}


def language_stage(model: Model) -> ReferenceStage:
    """The whole model in one stage."""
    ends = Ends(vocabulary=model.vocabulary, embedding=True, head=True, kind=model.head)
    domain = ReferenceDomain(4)
    return ReferenceStage(0, domain, model.layer(1), num_layers=model.layers, first=True, ends=ends)


def by_formula(model: Model, w: dict[str, Tensor], ids: list[int]) -> list[float]:
    """
    The logits behind a text, from the published formulas, number by number.

    RMSNorm (Zhang and Sennrich, 2019), RoPE (Su et al., 2021) as Llama pairs elements, GQA (Ainslie
    et al., 2023) and SwiGLU (Shazeer, 2020).
    """

    def norm(row: Tensor, name: str) -> Tensor:
        return row / math.sqrt(float((row * row).mean()) + 1e-5) * w[f"{name}.weight"]

    def rotated(head: Tensor, place: int) -> Tensor:
        half = len(head) // 2
        turned = torch.zeros_like(head)
        for i in range(half):
            angle = place * 10000.0 ** (-2 * i / len(head))
            z = complex(head[i], head[i + half]) * cmath.exp(1j * angle)
            turned[i], turned[i + half] = z.real, z.imag
        return turned

    width, groups = model.hidden // model.heads, model.kv_heads
    rows = [w["embedding.weight"][token] for token in ids]
    for n in range(model.layers):
        at = f"layers.{n}"
        qkv = [w[f"{at}.qkv.weight"] @ norm(row, f"{at}.norm1") for row in rows]
        keys = [
            [rotated(one[model.hidden + g * width :][:width], t) for g in range(groups)]
            for t, one in enumerate(qkv)
        ]
        values = [
            [one[model.hidden + (groups + g) * width :][:width] for g in range(groups)]
            for one in qkv
        ]
        mixed = []
        for t, one in enumerate(qkv):
            heads = []
            for h in range(model.heads):
                query, g = rotated(one[h * width :][:width], t), h // (model.heads // groups)
                scores = torch.stack([query @ keys[s][g] for s in range(t + 1)])
                shares = torch.softmax(scores / math.sqrt(width), 0)
                heads.append(sum(share * values[s][g] for s, share in enumerate(shares)))
            mixed.append(torch.cat(heads))
        rows = [row + w[f"{at}.proj.weight"] @ one for row, one in zip(rows, mixed, strict=True)]
        for t, row in enumerate(rows):
            inner = w[f"{at}.fc1.weight"] @ norm(row, f"{at}.norm2")
            gate, up = inner[: model.ffn], inner[model.ffn :]
            rows[t] = row + w[f"{at}.fc2.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return (w["head.weight"] @ norm(rows[-1], "head.norm")).tolist()


def test_the_model_is_that_of_the_published_formulas() -> None:
    """In fp32, against fp64."""
    weights = {name: one * 0.3 for name, one in weights_of(MODEL).items()}
    ids = [5, 31, 0, 7, 7, 19, 2]
    expected = by_formula(MODEL, weights, ids)
    plain = PlainModel(MODEL, weights, gelu="none").logits(ids)
    assert plain.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert max(expected) - min(expected) > 1.0


@pytest.mark.parametrize("kind", [COMMON_KIND, {}], ids=["common", "gelu"])
def test_the_reference_backend_computes_the_plain_model(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is rounded to FP8 or bf16."""
    model = Model(vocabulary=32, layers=2, hidden=32, ffn=64, heads=4, sequence=16, **kind)
    stage = language_stage(model)
    monkeypatch.setattr(
        ScaledLinear,
        "forward",
        lambda self, x: torch.nn.functional.linear(
            x, torch.cat(self.weights), torch.cat(self.biases) if self.biased else None
        ),
    )
    stage.float()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0.0, 0.3)
    weights = {name: one.detach().clone() for name, one in parameters(stage).items()}
    ids = [5, 31, 0, 7, 7, 19, 2]
    tokens = torch.zeros(16, 1, dtype=torch.int64)
    tokens[: len(ids), 0] = torch.tensor(ids)
    with torch.no_grad():
        (found,) = stage.native_forward((tokens,), first=False)
    plain = PlainModel(model, weights, gelu="none").logits(ids)
    assert float((found[len(ids) - 1, 0] - plain).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "model",
    [MODEL, attrs.evolve(MODEL, tied=True), Model(vocabulary=64, hidden=32, ffn=64, heads=2)],
    ids=["common", "tied", "gelu"],
)
def test_parameters_are_counted(model: Model) -> None:
    """As many as the whole model has."""
    held = {name: one.numel() for name, one in parameters(language_stage(model)).items()}
    counted = sum(held.values()) - model.tied * held["head.weight"]
    assert _count(Config(model=model)) == counted


def test_a_head_in_bf16_has_the_bits_of_torchs_full_backward() -> None:
    """Outputs, input gradients, and dW of two microbatches in either order, after both dI."""
    head = SplitHead(COMMON, 64, CPU, seed=3)
    assert [name for name, _ in head.named_parameters()] == ["weight", "norm.weight"]
    g = torch.Generator().manual_seed(1)
    store: Store = deque()
    alone = []
    for _ in range(2):
        x = torch.randn(16, 2, 32, generator=g).bfloat16()
        dy = torch.randn(16, 2, 64, generator=g).bfloat16()
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        head.store = store
        ours = head(mine)
        weight = head.weight.detach().clone().requires_grad_()
        native = torch.nn.functional.linear(head.norm(theirs), weight)
        assert same_bits(ours, native)
        (dx,) = torch.autograd.grad(ours, mine, dy)
        native.backward(dy)
        assert theirs.grad is not None
        assert weight.grad is not None
        assert same_bits(dx, theirs.grad)
        alone.append(weight.grad)
    for order in ((0, 1), (1, 0)):
        destination = torch.full((64, 32), float("nan"), dtype=torch.bfloat16)
        for n, m in enumerate(order):
            head.write(head.product(*store[m][1]), destination, accumulate=n > 0)
        assert same_bits(destination, alone[order[0]] + alone[order[1]])


def test_training_has_the_bits_of_torchs_pipeline(tmp_path: Path) -> None:
    """Interleaved and ZB-V over two ranks, tied and not, over native full backwards."""
    path = noise(tmp_path)
    jobs = [
        language(path, schedule="il", pp=2, config=COMMON, head="bf16", clip_norm=0.05),
        language(path, schedule="zbv", pp=2, config=COMMON, tied=True, master=True, rule="copied"),
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.against_native, jobs, 3)
    assert said.codes == [0, 0]
    for rank in range(2):
        first, second = said.words[rank]
        assert first["same"], first["totals"]
        assert second["same"], second["totals"]
        assert first["state"] == []
    (losses,) = [w[0]["losses"] for w in said.words.values() if w[0]["losses"][0]]
    assert sum(losses[0]) == pytest.approx(4.16, abs=0.1)  # ln 64


@pytest.mark.ci
def test_the_librarys_layers_are_asked_for_the_same_kind(tmp_path: Path) -> None:
    """Over a stand-in for Transformer Engine, against its full backward; fused and split QKV."""
    split = attrs.evolve(COMMON, fused_qkv=False)
    jobs = [
        language(noise(tmp_path), schedule="il", pp=2, config=COMMON, head="bf16"),
        language(noise(tmp_path), schedule="zbv", pp=2, config=split, rule="copied"),
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", language_bodies.library, jobs, 3)
    assert said.codes == [0, 0]
    for rank in range(2):
        bf16, scaled = said.words[rank]
        for one in (bf16, scaled):
            assert one["same"], one["totals"]
            assert one["names"]["matrices"][-1] == "head.weight"
        assert bf16["names"]["others"] == ["embedding.weight", "head.norm.weight"]
        assert scaled["names"]["others"] == ["embedding.weight", "head.layer_norm_weight"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("kv_heads = 3", "heads 4 is not a multiple of kv_heads 3"),
        ("kv_heads = 1", "kv_heads * head width is 8; FP8 products need a multiple of 16"),
        ('norm = "batch"', "norm: expected one of 'layernorm', 'rmsnorm'"),
    ],
)
def test_a_kind_that_cannot_be_is_refused_in_a_line(
    field: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file and the field."""
    text(tmp_path)
    config = tmp_path / "run.toml"
    name = field.split(" =")[0]
    kept = [line for line in RUN.splitlines() if not line.startswith(f"{name} =")]
    config.write_text("\n".join(kept).format(model=field, schedule="1f1b"))
    assert main(["runtime", "train", str(config)]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told, told
    assert "[model]" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    "size", [{"norm": "batch"}, {"positions": "none"}, {"activation": "relu"}, {"kv_heads": 0}]
)
def test_a_layer_of_an_unknown_kind_is_refused(size: dict[str, Any]) -> None:
    """Where it is described."""
    with pytest.raises(ValueError, match=next(iter(size))):
        LayerConfig(**size)
    with pytest.raises(ValueError, match="even width"):
        LayerConfig(48, 64, 16, positions="rotary")


def test_a_run_saves_resumes_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two schedules and a resume of each have one digest; gpt2's names are refused."""
    model = 'head = "bf16"\nscales = "epoch"\ntied = true'
    digests = set()
    for schedule in ("1f1b", "zbv"):
        folder = tmp_path / schedule
        folder.mkdir()
        text(folder)
        config = folder / "run.toml"
        config.write_text(RUN.format(model=model, schedule=schedule))
        words = [str(config), "--json", "--digest"]
        last = folder / "kept" / "step-00000003"
        for number, options in enumerate(([], ["--resume"])):
            (folder / f"said{number}").mkdir()
            # In a process of its own, which becomes a rank.
            said = launch(
                1, folder / f"said{number}", language_bodies.trained, *words, *options
            ).words[0]
            assert said[0] == 0, said
            digests.add(json.loads(said[1])["digest"])
            if not options:
                shutil.rmtree(last)
        assert WholeModel.of(last).logits([1, 2, 3]).isfinite().all()
        out = str(folder / "out.pt")
        assert main(["runtime", "export", str(last), "--out", out, "--names", "gpt2"]) == 2
        assert "--names gpt2: expected [model] kv_heads = 0" in capsys.readouterr().err
    assert len(digests) == 1


def test_a_model_of_an_earlier_release_is_the_same_model() -> None:
    """A field that it lacked has the value that was in force."""
    assert _LATER == {
        **{"dropout": 0.0, "scales": "action", "kv_heads": 0, "norm": "layernorm"},
        **{"activation": "gelu", "positions": "learned", "bias": True, "wgrad_group": 1},
    }
