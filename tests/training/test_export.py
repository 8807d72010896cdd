"""The exported weights of a checkpoint, in one file, have the bits that plain DCP reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from qeffect.cli import main
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits

from .helpers import CONFIG, text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of three steps."""
    folder = tmp_path_factory.mktemp("run")
    text(folder)
    (folder / "run.toml").write_text(CONFIG + '[checkpoint]\nfolder = "kept"\nevery = 3\n')
    # In a process of its own, which becomes a rank.
    command = [sys.executable, "-m", "qeffect", "runtime", "train", str(folder / "run.toml")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (found,) = (folder / "kept").glob("step-*")
    return found


def without_us(checkpoint: Path, folder: Path) -> dict[str, Tensor]:
    """The weights as torch's own converter reads them: nothing of this package takes part."""
    place = folder / "whole.pt"
    dcp_to_torch_save(checkpoint, place)
    whole = torch.load(place, weights_only=True)
    flat: dict[str, Tensor] = {}

    def take(held: dict[str, object], path: str) -> None:
        for name, one in held.items():
            inner = f"{path}.{name}" if path else name
            if isinstance(one, Tensor):
                flat[inner] = one
            else:
                assert isinstance(one, dict)
                take(one, inner)

    take(whole, "")
    return {n.removeprefix("model."): t for n, t in flat.items() if n.startswith("model.")}


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_file_has_the_bits_that_plain_dcp_reads(
    kind: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every weight by its name, with shape and dtype; the training state is left out."""
    out = tmp_path / "weights"
    assert main(["runtime", "export", str(checkpoint), "--out", str(out), "--to", kind]) == 0

    if kind == "torch":
        found = torch.load(out, weights_only=True)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        found = safetensors.load_file(out)
        with safetensors.safe_open(out, "pt") as opened:
            about = json.loads(opened.metadata()["qeffect"])
        assert (about["epoch"], about["model"]["hidden"]) == (3, 32)
    expected = without_us(checkpoint, tmp_path)
    assert found.keys() == expected.keys() >= {"layers.1.qkv.weight"}
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name
    assert f"{len(expected)} tensors" in capsys.readouterr().out
    assert [out.name, "whole.pt"] == sorted(path.name for path in tmp_path.iterdir())


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which a command says that its input is unusable."""
    capsys.readouterr()
    assert main(["runtime", "export", *argv]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_exported_is_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written for a folder without a checkpoint, a damaged file, or an output file that
    exists."""
    out = tmp_path / "weights"
    assert "no-such is not a folder" in refused(["no-such", "--out", str(out)], capsys)
    told = refused([str(checkpoint.parent), "--out", str(out)], capsys)
    assert f"is a folder of checkpoints; name one of them, such as {checkpoint}" in told

    damaged = tmp_path / checkpoint.name
    damaged.mkdir()
    for path in checkpoint.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    (data,) = damaged.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    told = refused([str(damaged), "--out", str(out)], capsys)
    assert f"{data} is damaged" in told
    assert not out.exists()

    out.write_text("mine")
    assert f"{out} exists" in refused([str(checkpoint), "--out", str(out)], capsys)
    assert out.read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a file is removed, and the system's own words are told."""

    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    argv = [str(checkpoint), "--out", str(tmp_path / "weights"), "--to", "torch"]
    assert "No space left on device" in refused(argv, capsys)
    assert [] == list(tmp_path.iterdir())


def test_without_its_package_the_message_says_what_to_install(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """safetensors is an extra."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    argv = [str(checkpoint), "--out", str(tmp_path / "weights")]
    assert "pip install 'qeffect[export]'" in refused(argv, capsys)
    assert [] == list(tmp_path.iterdir())
