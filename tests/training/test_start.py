"""A run that begins with exported weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.cli import main
from qeffect.gpu_runtime.step.memory.numerical_state import same_bits
from qeffect.gpu_runtime.training.export import read_weights
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import CONFIG, text
from .start_bodies import saved_at_once

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEPT = '[checkpoint]\nfolder = "{}"\n'


def run_file(folder: Path, name: str, **changes: str) -> str:
    """A run of three steps that keeps its checkpoint in a folder of its name."""
    body = CONFIG + KEPT.format(name)
    for table, lines in changes.items():
        body = body.replace(f"[{table}]\n", f"[{table}]\n{lines}\n")
    path = folder / f"{name}.toml"
    path.write_text(body)
    return str(path)


def trained(folder: Path, *cases: list[str]) -> list[tuple[int, str, str]]:
    """The commands' exit codes and what they said, one after the other in one process."""
    words = folder / f"said{len(list(folder.glob('said*')))}"
    words.mkdir()
    found = launch(1, words, bodies.in_turn, [[*case, "--json"] for case in cases])
    assert found.codes == [0]
    told: list[tuple[int, str, str]] = [tuple(one) for one in found.words[0]]
    return told


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a run in both formats, and its text."""
    folder = tmp_path_factory.mktemp("run")
    text(folder)
    ((code, _, err),) = trained(folder, [run_file(folder, "first")])
    assert code == 0, err
    (checkpoint,) = (folder / "first").glob("step-*")
    for kind in ("torch", "safetensors"):
        words = ["--out", str(folder / kind), "--to", kind, "--quiet"]
        assert main(["runtime", "export", str(checkpoint), *words]) == 0
    return folder


def changed(folder: Path, **tensors: Tensor | None) -> Path:
    """The exported weights with some replaced, or left out."""
    held = {**torch.load(folder / "torch", weights_only=True), **tensors}
    path = folder / "changed"
    torch.save({name: one for name, one in held.items() if one is not None}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("safetensors", 1), pytest.param("torch", 2, marks=pytest.mark.ci)],
)
def test_a_round_trip_has_the_same_bits(weights: Path, kind: str, ranks: int) -> None:
    """Export, start and save: over one rank, and with masters over another mapping."""
    parallel = f"pp = {ranks}"
    name = f"again{ranks}"
    path = run_file(
        weights, name, model=f'start = "{kind}"', parallel=parallel, optimizer="master = true"
    )
    words = weights / f"words{ranks}"
    words.mkdir()
    said = launch(ranks, words, saved_at_once, path)
    assert said.codes == [0] * ranks
    assert any(str(weights / kind) in note for note in said.words[0])
    expected, _ = read_weights(next((weights / "first").glob("step-*")))
    found, facts = read_weights(weights / name / "step-00000000")
    assert facts["epoch"] == 0
    assert found.keys() == expected.keys() >= {"layers.1.qkv.weight", "embedding.weight"}
    for tensor in expected:
        assert same_bits(found[tensor], expected[tensor]), tensor
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    held: dict[str, Any] = {
        f"optim.{tensor}.master": torch.empty_like(one, dtype=torch.float32)
        for tensor, one in expected.items()
    }
    load(held, storage_reader=FileSystemReader(weights / name / "step-00000000"), no_dist=True)
    for tensor, one in expected.items():
        assert same_bits(held[f"optim.{tensor}.master"], one.float()), tensor


def test_a_run_goes_on_from_what_was_learned(weights: Path) -> None:
    """Its first loss is lower than that of the run before; a resume does not need the file."""
    copy = weights / "copy"
    copy.write_bytes((weights / "torch").read_bytes())
    path = run_file(weights, "further", model='start = "copy"', run='log = "log"')
    first, begun = trained(weights, [run_file(weights, "drawn")], [path])
    assert (first[0], begun[0]) == (0, 0), begun
    losses = [json.loads(out)["losses"] for _, out, _ in (first, begun)]
    assert losses[1][0] < losses[0][0]
    lines = [json.loads(line) for line in (weights / "log").read_text().splitlines()]
    assert lines[0] == {"started_from": str(copy), "weights": 29}

    copy.unlink()
    again, missing = trained(
        weights,
        [path, "--resume", "--steps", "5"],
        [run_file(weights, "new", model='start = "copy"')],
    )
    assert (again[0], len(json.loads(again[1])["losses"])) == (0, 2)
    assert (missing[0], json.loads(missing[1])["error"]) == (
        2,
        f"{weights / 'new.toml'}: [model] start: {copy}: No such file or directory",
    )


def test_weights_of_another_model_are_one_line(weights: Path, tmp_path: Path) -> None:
    """Names, shapes, types, a file of something else: exit code 2, and no checkpoint."""
    name = "layers.1.qkv.weight"
    own = torch.load(weights / "torch", weights_only=True)[name]
    cases: dict[str, str] = {}

    def case(label: str, path: Path, said: str) -> None:
        kept = weights / label
        path.rename(kept)
        cases[run_file(weights, f"of-{label}", model=f'start = "{label}"')] = said

    case(
        "lacking",
        changed(weights, **{name: None}),
        f"lacks {name}; in total it lacks 1 weight of the model",
    )
    case(
        "more",
        changed(weights, other=own),
        "has other, which the model lacks; in total it has 1 such weight",
    )
    case("shape", changed(weights, **{name: own[:5].clone()}), "expected the shape [96, 32], found")
    case("type", changed(weights, **{name: own.float()}), "expected the type torch.bfloat16, found")
    (tmp_path / "text").write_text("no weights at all")
    case("text", tmp_path / "text", "expected weights in a file of safetensors or torch.save")
    torch.save([1], tmp_path / "list")
    case("list", tmp_path / "list", "expected weights in a file of safetensors or torch.save")
    (tmp_path / "half").write_bytes((weights / "torch").read_bytes()[:3000])
    case("half", tmp_path / "half", "expected weights in a file of safetensors or torch.save")
    for (code, out, err), (path, said) in zip(
        trained(weights, *([path] for path in cases)), cases.items(), strict=True
    ):
        assert code == 2, (out, err)
        assert f"{path}: [model] start: " in json.loads(out)["error"]
        assert said in json.loads(out)["error"]
        assert not list((weights / Path(path).stem).glob("step-*"))


def test_weights_that_are_not_finite_are_not_trained(weights: Path) -> None:
    """The run ends as diverged, before its first step."""
    name = "layers.0.fc1.weight"
    own = torch.load(weights / "torch", weights_only=True)[name].clone()
    own[3, 3] = torch.inf
    changed(weights, **{name: own})
    ((code, out, _),) = trained(weights, [run_file(weights, "inf", model='start = "changed"')])
    said = json.loads(out)
    assert (code, said["verdict"]) == (1, "refused")
    assert name in said["cause"]["text"]
    assert said["losses"] == []


def test_a_comparison_draws_its_weights(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The native side begins with the seed's."""
    path = run_file(weights, "compared", model='start = "torch"')
    for argv in (
        ["runtime", "train", path, "--compare", "ends"],
        ["runtime", "report", "curves", path, "--runs", "native:il:0", "--out", "/tmp/none.json"],
    ):
        assert main(argv) == 2
        assert "draws the weights of every run from the seed" in capsys.readouterr().err
