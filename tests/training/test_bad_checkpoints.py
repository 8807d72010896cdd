"""Every rank refuses a wrong checkpoint in the same words, and nothing is loaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.training.checkpoint import Checkpoints
from qeffect.gpu_runtime.training.checkpoint.facts import narrowed
from qeffect.gpu_runtime.training.checkpoint.files import checkpoint_folders, checkpoint_name
from tests.ranks.ranks import launch
from tests.training import bodies

JOB = Job(schedule="zbv", pp=2, microbatches=4)

#: What is wrong, what the error has to say, and whether `latest` still offers the checkpoint: it
#: looks at the manifest and at sizes, and reads no content. What it does not offer it refuses, in
#: the same words; it does not take the one before it.
TEXTS = {
    "a file is cut": ("__1_0.distcp has ... bytes, ... were written", False),
    "a bit of a file is flipped": ("__1_0.distcp is damaged: its SHA-256 is", True),
    "a file is missing": ("__0_0.distcp is missing; move that folder away to continue from", False),
    "a bit of DCP's index is flipped": (".metadata is damaged: its SHA-256 is", True),
    "DCP's index is missing": (".metadata is missing", False),
    "a bit of the facts is flipped": ("facts.json is damaged: its SHA-256 is", True),
    "the manifest is cut": ("manifest.json is damaged and cannot be read", False),
    "the manifest is no end of brackets": ("manifest.json is damaged and cannot be read", False),
    "the manifest is edited": (
        "manifest.json is damaged: its hash differs from its content", False,
    ),
    "the manifest is missing": (
        "manifest.json: No such file or directory; the checkpoint is not whole", False,
    ),
    "nothing is there": ("is not a folder; name a checkpoint", False),
    "another format": ("was written in format 2, this version reads format 1", False),
    "another backend": ("was saved with backend transformer-engine, this run has reference", True),
    "another recipe": ("was saved with recipe.amax_history_len 1024, this run has 4", True),
    "amax reduced over replicas": (
        "was saved with amax maximum of all, this run has each replica its own", True,
    ),
    "master weights": ("was saved with masters torch.float32, this run has None", True),
    "another model": ("was saved with hidden 64, this run has 32", True),
    "more microbatches": ("was saved with microbatches 8, this run has 4", True),
    "a fact too few": ("was saved with sequence nothing, this run has 16", True),
    "two replicas": ("has the scaling state of 2 replicas, this run has 1", True),
    "a contract too few": ("2 ranks in each of 1 replicas, found 1; move that folder away", True),
    "no epoch": ("facts.json: epoch is None, expected int", True),
    "an epoch below zero": ("facts.json: epoch is -1, expected int", True),
    "an epoch that is text": ("facts.json: epoch is 1, expected int", True),
    "a mapping without its replicas": ("facts.json: mapping has no replicas", True),
    "a tensor without a size": (
        "facts.json: model.layers.2.qkv.weight is bf16, expected a type and a size",
        True,
    ),
    "DCP's index is of something else": ("cannot be read: rank 0: Missing key", True),
    "a tensor of another size": (
        "model.layers.2.qkv.weight is torch.bfloat16 [8, 8], here torch.bfloat16 [96, 32]", True,
    ),
    "a tensor of another type": (
        "model.layers.2.qkv.weight is torch.float32 [96, 32], here torch.bfloat16", True,
    ),
    "a tensor too few": ("has no model.layers.2.qkv.weight", True),
    "a tensor too many": ("has model.layers.9.x, which this run lacks", True),
}  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What both ranks said to each."""
    words, folder = (tmp_path_factory.mktemp(name) for name in ("words", "checkpoints"))
    found = launch(2, words, bodies.damaged, JOB, str(folder))
    assert found.codes == [0, 0]
    return found.words


def test_every_damage_is_tried() -> None:
    """The table here and the one of the ranks have the same rows."""
    assert TEXTS.keys() == bodies.DAMAGE.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_it_is_named_and_nothing_is_loaded(said: dict[int, Any], name: str) -> None:
    """Also by the rank whose own share of it is sound."""
    text, offered = TEXTS[name]
    for words in said.values():
        found = words[name]
        assert found["error"] == said[0][name]["error"]
        assert all(piece in found["error"] for piece in text.split("...") if piece)
        assert found["moved"] == []
        assert found["epoch"] == 0
        if name == "nothing is there":
            assert found["latest"] is False
        else:
            assert found["latest"] == ("step-00000001" if offered else found["error"])


def test_ranks_that_load_different_ones_are_refused(said: dict[int, Any]) -> None:
    """One of them was given another path."""
    for words in said.values():
        found = words["ranks load different ones"]
        assert "ranks load different checkpoints" in found["error"]
        assert found["moved"] == []


def test_the_sound_one_is_loaded_after_all_that(said: dict[int, Any]) -> None:
    """What was refused has left nothing behind."""
    for words in said.values():
        assert words["sound"] == {"free": {"position": 1}, "same": True, "epoch": 1}


@pytest.mark.parametrize("others", [0, 1])
def test_where_none_is_whole_it_does_not_begin_anew(tmp_path: Path, others: int) -> None:
    """No checkpoint is None; a damaged one is named, and what to do, however many are before it."""
    checkpoints = Checkpoints(tmp_path / "kept")
    assert checkpoints.latest() is None
    checkpoints.prepare()
    assert checkpoints.latest() is None
    assert list(checkpoints.folder.iterdir()) == []
    for n in range(others + 1):
        (checkpoints.folder / checkpoint_name(n)).mkdir()
    with pytest.raises(
        BackendError, match=f"{checkpoint_name(others)}/manifest.json: No such file"
    ) as bad:
        checkpoints.latest()
    assert "move that folder away" in str(bad.value)


def test_a_folder_that_cannot_be_written_to_is_told_at_once(tmp_path: Path) -> None:
    """A file has its name, or that of a folder above it."""
    (tmp_path / "kept").write_text("a file")
    for folder in ("kept", "kept/inner"):
        with pytest.raises(BackendError, match=r"kept.* cannot be written to: "):
            Checkpoints(tmp_path / folder).prepare()


def test_only_folders_with_names_of_ours_are_checkpoints(tmp_path: Path) -> None:
    """A folder whose name has eight or more ASCII digits; a file does not count."""
    for name in ("step-1", "step-\u00b2", "step-000000001", "step-0000000\u0663", "step-00000001x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    assert Checkpoints(tmp_path).latest() is None
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-123456789").mkdir()
    assert [epoch for epoch, _ in checkpoint_folders(tmp_path)] == [123456789, 4]


def test_what_changed_is_a_name_and_short_values() -> None:
    """A rule of all destinations is one word of the first, and not all of them."""
    one = {"stages": [{"stage": 0, "destinations": [{"mode": "a", "matrix": "x" * 500}] * 9}]}
    other = json.loads(json.dumps(one).replace('"a"', '"b"'))
    assert narrowed(one, other, "contract") == (
        "contract.stages[0].destinations[0].mode", "a", "b",
    )  # fmt: skip
    assert narrowed(one, one, "contract") is None
    other["stages"][0]["destinations"].pop()
    found = narrowed(one, other, "contract")
    assert found == ("contract.stages[0].destinations", "9 entries", "8 entries")
    assert narrowed({"a": "x" * 500}, {"a": 1}, "contract") == ("contract.a", "x" * 40, "1")


def test_dcp_alone_loads_a_flipped_bit(tmp_path: Path) -> None:
    """Why files are hashed here."""
    held, found = {"a": torch.arange(1000.0)}, {"a": torch.zeros(1000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        state_dict_saver.save(held, checkpoint_id=tmp_path, no_dist=True)
        bodies._flip(tmp_path / "__0_0.distcp")
        state_dict_loader.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert int((found["a"] != held["a"]).sum()) == 1
