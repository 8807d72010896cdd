"""A head made of TorchAO's Float8Linear, compared with the library's own full backward."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import pytest
import torch

from qeffect.gpu_runtime.backends import dynamic_head
from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.backends.protocol import BackendError, matrices
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.training.config_file import read
from qeffect.gpu_runtime.training.job_assembly import job_of
from qeffect.report import UnusableError
from tests.ranks.ranks import launch

from . import language_bodies
from . import torchao_bodies as bodies
from .helpers import CONFIG, TINY, language, noise, text

CPU = torch.device("cpu")


def test_without_the_library_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rank waits for another; a head of the layers' library needs none of it."""
    text(tmp_path)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    dynamic_head.library.cache_clear()
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.replace("[model]", '[model]\nhead = "torchao"'))
    with pytest.raises(UnusableError, match=r"\[model\] head: TorchAO cannot be imported") as told:
        job_of(read(config))
    assert "install 'qeffect[torchao]'" in str(told.value)
    assert len(str(told.value).splitlines()) == 1
    with pytest.raises(BackendError, match="TorchAO cannot be imported"):
        dynamic_head.DynamicHead(TINY, 64, CPU, 0)
    config.write_text(CONFIG)
    assert job_of(read(config)).head == "te"
    dynamic_head.library.cache_clear()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rows", [16, 48])
def test_split_has_the_bits_of_the_librarys_full_backward(rows: int) -> None:
    """
    Over `Float8Linear` itself: outputs, input gradients, dW of two microbatches in either order.

    The dW are run after both dI, from what each left behind.
    """
    pytest.importorskip("torchao.float8")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = LayerConfig(32, 64, 2, rows)
    head = dynamic_head.DynamicHead(config, 64, CPU, seed=3)
    plain = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    whole = Float8Linear.from_float(plain, Float8LinearConfig(emulate=True))
    with torch.no_grad():
        plain.weight.copy_(head.weight)
    g = torch.Generator().manual_seed(rows)
    store: dynamic_head.Store = deque()
    alone = []
    for _ in range(2):
        x = torch.randn(rows, 1, 32, generator=g).bfloat16()
        dy = (torch.randn(rows, 1, 64, generator=g) * 0.01).bfloat16()
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        head.store = store
        ours = head(mine)
        native = whole(head.norm(theirs))
        assert same_bits(ours, native)
        (dx,) = torch.autograd.grad(ours, mine, dy)
        before = plain.weight.grad
        plain.weight.grad = None
        native.backward(dy)
        assert theirs.grad is not None
        assert same_bits(dx, theirs.grad)
        assert plain.weight.grad is not None
        alone.append(plain.weight.grad)
        assert before is None or before is alone[0]
    assert head.weight.grad is None
    assert len(store) == 2
    destination = torch.full((64, 32), float("nan"), dtype=torch.bfloat16)
    order = (1, 0) if rows == 16 else (0, 1)
    for n, m in enumerate(order):
        _, operands = store[m]
        head.write(head.product(*operands), destination, accumulate=n > 0)
    assert same_bits(destination, alone[order[0]] + alone[order[1]])


@pytest.mark.ci
def test_training_has_the_bits_of_torchs(tmp_path: Path) -> None:
    """
    Interleaved, ZB-V with another cut and destinations, and tied, over native full backwards.

    The head has neither history nor scale nor cache.
    """
    pytest.importorskip("torchao.float8")
    path = noise(tmp_path)
    jobs = [
        language(path, schedule="il", pp=2, head="torchao", clip_norm=0.05),
        language(
            path, schedule="zbv", pp=2, head="torchao", cut=(1, 1, 2, 1), rule="per_microbatch"
        ),
        language(path, schedule="zbv", pp=2, head="torchao", tied=True, master=True, rule="copied"),
        language(path, schedule="il", pp=2, head="torchao", tied=True),
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.against_native, jobs, 3)
    assert said.codes == [0, 0]
    for rank in range(2):
        for one in said.words[rank]:
            assert one["same"], one["totals"]
            assert one["state"] == []
    (losses,) = [w[0]["losses"] for w in said.words.values() if w[0]["losses"][0]]
    assert sum(losses[0]) == pytest.approx(4.16, abs=0.1)  # ln 64


@pytest.mark.ci
def test_it_stands_behind_the_librarys_layers_too(tmp_path: Path) -> None:
    """Over a stand-in for Transformer Engine: its stores and caches leave the head out."""
    pytest.importorskip("torchao.float8")
    jobs = [
        language(noise(tmp_path), schedule="il", pp=2, head="torchao"),
        language(noise(tmp_path), schedule="zbv", pp=2, head="torchao", rule="copied"),
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", language_bodies.library, jobs, 3)
    assert said.codes == [0, 0]
    for rank in range(2):
        for one in said.words[rank]:
            assert one["same"], one["totals"]
            assert one["names"]["matrices"][-1] == "head.weight"
            assert one["names"]["others"][-2:] == ["head.norm.weight", "head.norm.bias"]


def test_it_begins_with_the_bits_of_the_other_head(tmp_path: Path) -> None:
    """One seed, one matrix, whichever library multiplies it; dW covers it."""
    pytest.importorskip("torchao.float8")
    found = []
    for head in ("torchao", "te", "bf16"):
        job = language(noise(tmp_path), schedule="zbv", pp=2, head=head)
        (last,) = job.stages([3], CPU, "reference")
        found.append(matrices(last)[-1])
    assert {matrix.name for matrix in found} == {"head.weight"}
    for other in found[1:]:
        assert same_bits(found[0].parameter, other.parameter)
