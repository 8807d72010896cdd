"""Digests of gradients: what they distinguish, and in which step two runs first differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect.cli import main
from qeffect.gpu_runtime.step.memory import gradient_digests
from qeffect.gpu_runtime.step.memory.gradient_digests import digest
from tests.ranks.ranks import launch

from . import digest_bodies as bodies
from .helpers import CONFIG, text

RUN = (
    CONFIG.replace("steps = 3", 'steps = 4\nlog = "{name}.jsonl"')
    .replace("microbatches = 2", "microbatches = 2\npp = 2")
    .replace("batch = 2", "batch = 1")
)
GUARD = "[guard]\ndigests = true\n"


def test_a_flip_of_any_bit_of_any_element_changes_the_digest() -> None:
    """Words of eight bytes and single elements, whatever the place."""
    for dtype, bits, size in (
        (torch.bfloat16, torch.int16, 12),
        (torch.float32, torch.int32, 7),
        (torch.bfloat16, torch.int16, 5),
    ):
        tensor = torch.randn(size).to(dtype)
        seen = {int(digest(tensor))}
        for place in range(size):
            for bit in range(bits.itemsize * 8 - 1):
                other = tensor.clone()
                other.view(bits)[place] ^= 1 << bit
                seen.add(int(digest(other)))
        assert len(seen) == 1 + size * (bits.itemsize * 8 - 1)


def test_a_digest_is_of_bits_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest ignores strides and the division into words; two swapped elements change it."""
    tensor = torch.randn(8, 12).to(torch.bfloat16)
    whole = int(digest(tensor))
    assert int(digest(tensor.t().contiguous().t())) == whole
    held = torch.empty(8 * 12 + 1, dtype=torch.bfloat16)
    held[1:] = tensor.reshape(-1)
    assert int(digest(held[1:])) == whole
    assert int(digest(tensor.flip(0))) != whole
    assert int(digest(torch.tensor([0.0]))) != int(digest(torch.tensor([-0.0])))
    monkeypatch.setattr(gradient_digests, "_WORDS", 5)
    assert int(digest(tensor)) == whole
    assert int(digest(torch.empty(0))) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of runs on two ranks: `one`, `same`, `flipped` before step 2, and `plain`."""
    folder = tmp_path_factory.mktemp("digests")
    text(folder)
    cases: list[dict[str, Any]] = []
    for name in ("one", "same", "flipped", "plain"):
        path = folder / f"{name}.toml"
        path.write_text(RUN.format(name=name) + (GUARD if name != "plain" else ""))
        cases.append({"argv": [str(path)]})
    cases[2].update(step=2, weight="layers.0.fc2.weight", rank=1)
    (folder / "said").mkdir()
    said = launch(2, folder / "said", bodies.in_turn, cases)
    for words in said.words.values():
        assert [code for code, _, _ in words] == [0] * 4, words
    return folder


def compared(
    folder: Path, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a comparison."""
    argv = ["runtime", "bisect", *(str(folder / f"{one}.jsonl") for one in (first, second))]
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_two_equal_runs_have_equal_digests(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step is compared, and every gradient of both ranks is in the log."""
    code, found = compared(folder, "one", "same", capsys)
    assert (code, found["verdict"], found["compared"]) == (0, "accepted", 4)
    assert (found["step"], found["gradients"]) == (None, [])
    lines = [json.loads(line) for line in (folder / "one.jsonl").read_text().splitlines()]
    (names,) = (line["gradients"] for line in lines if "gradients" in line)
    steps = [line["digests"] for line in lines if "digests" in line]
    assert len(steps) == 4
    assert [[len(own) for own in names]] * 4 == [[len(own) for own in step] for step in steps]
    assert [1, "layers.1.fc2.weight"] in names[1]
    assert len({one for step in steps for own in step for one in own}) > 0.9 * sum(
        len(own) for step in steps for own in step
    )


def test_the_first_step_that_differs_is_named_with_its_gradients(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit of a weight of rank 1 flips before step 2: gradients of both ranks differ from there
    on, none before."""
    code, found = compared(folder, "one", "flipped", capsys)
    assert (code, found["verdict"], found["step"], found["compared"]) == (1, "refused", 2, 3)
    ranks = {(one["rank"], one["stage"]) for one in found["gradients"]}
    assert ranks == {(0, 0), (1, 1)}
    assert {"rank": 1, "stage": 1, "name": "layers.1.fc1.weight"} in found["gradients"]
    paths = [str(folder / f"{name}.jsonl") for name in ("one", "flipped")]
    assert main(["runtime", "bisect", *paths]) == 1
    assert "Step 2 is the first that differs, in " in capsys.readouterr().out


def test_digests_change_no_bit(folder: Path) -> None:
    """The losses are those of a run without digests."""
    losses = [
        [
            line["loss"]
            for line in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
            if "loss" in line
        ]
        for name in ("one", "plain")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_launches_have_the_digests_of_guarded_steps(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The digests are taken in the graph of the step."""
    text(tmp_path)
    body = RUN.replace("[parallel]", '[parallel]\nmode = "one launch"')
    (tmp_path / "whole.toml").write_text(body.format(name="whole") + GUARD)
    (tmp_path / "said").mkdir()
    argv = [str(tmp_path / "whole.toml"), "--json"]
    said = launch(2, tmp_path / "said", bodies.launched, [{"argv": argv}])
    code, out, err = said.words[0][0]
    assert code == 0, err
    assert json.loads(out)["launches"] == 3
    paths = [str(folder / "one.jsonl"), str(tmp_path / "whole.jsonl")]
    assert main(["runtime", "bisect", *paths]) == 0
    assert "Equal: every gradient in 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "", "expected digests of gradients, found none"),
        (lambda text: text.replace('"digests"', '"x"'), "found none"),
        (
            lambda text: text.replace('"step": 1,', '"step": "z",'),
            "expected a line of the file that [run] log names",
        ),
        (lambda text: text.replace('"step": 1,', '"step": Infinity,'), "line 3: expected a line"),
        (
            lambda text: "[" * 100_000 + "\n" + text,
            "line 1: expected a line of the file that [run] log names",
        ),
        (lambda text: "[]]\n" + text, "line 1: expected a line of the file that [run] log names"),
        (lambda text: text.replace("layers.0", "layers.9"), "only one of the runs has layers."),
    ],
)
def test_a_log_that_cannot_be_compared_is_unusable(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    """Exit code 2, with what was expected."""
    path = tmp_path / "other.jsonl"
    path.write_text(change((folder / "one.jsonl").read_text()))
    assert main(["runtime", "bisect", str(folder / "one.jsonl"), str(path)]) == 2
    assert said in capsys.readouterr().err


def test_steps_that_were_taken_again_count_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run appends to its log; a killed run leaves half a line."""
    path = tmp_path / "again.jsonl"
    both = (folder / "flipped.jsonl").read_text() + (folder / "one.jsonl").read_text()
    path.write_text(both + '{"step": 4, "dig')
    assert main(["runtime", "bisect", str(folder / "one.jsonl"), str(path)]) == 0
    assert "Equal: every gradient in 4 steps" in capsys.readouterr().out


def test_digests_without_a_log_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing would keep them."""
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + GUARD)
    assert main(["runtime", "train", str(path)]) == 2
    assert (
        "[guard] digests: expected [run] log, to which digests are written, found none"
        in capsys.readouterr().err
    )
