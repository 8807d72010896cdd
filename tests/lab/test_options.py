"""What the parts of `qeffect runtime report` refuse before any measurement."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.lab.runner.processes import ChildProcess
from qeffect.gpu_runtime.lab.runner.starts import RankStarts
from tests.training.helpers import SMALL, text

COMMIT = "0" * 40
#: A small run of each part that needs no device, without its file.
PARTS = {
    "scale": ("--device", "cpu", "--cells", "tiny", "--compared"),
    "tables": ("--device", "cpu", "--cells", "tiny-m4", "--parts", "steps"),
    "peers": ("--device", "cpu", "--modes", "ours", "--cells", "tiny-m2"),
    "restarts": ("--schedules", "il", "--same"),
    "kills": ("--kills", "1"),
    "second_runs": ("--flips", "0", "--inside", "0", "--rounds", "1", "--every", "2"),
    "bench": ("--device", "cpu", "--columns", "native"),
    "pools": ("--device", "cpu"),
    "probes": ("--device", "cpu", "--only", "addresses"),
    "curves": (),
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that measures would fail its test."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("expected a refusal before any process starts")

    monkeypatch.setattr(ChildProcess, "__init__", start)
    monkeypatch.setattr(RankStarts, "start", start)
    run = subprocess.run

    def asked(command: Any, *arguments: Any, **options: Any) -> Any:
        assert command[0] in ("git", "nvidia-smi"), command
        return run(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "run", asked)


def words_of(part: str, folder: Path) -> list[str]:
    """The words of a part."""
    if part != "curves":
        return [part, *PARTS[part]]
    text(folder)
    config = folder / "run.toml"
    ends = '[parallel]\npp = 1\n[data]\ntrain = "train.npy"\nheld_out = "train.npy"\n'
    config.write_text(SMALL.format(vocabulary=128, layers=2) + ends)
    return [part, str(config), "--runs", "native:il:0"]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refused part."""
    assert main(["runtime", "report", *words, "--commit", COMMIT]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("part", PARTS)
def test_a_place_that_cannot_be_written_is_refused(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, a file in no folder, a file where nobody may write, and one in place of a file."""
    words = words_of(part, tmp_path)
    (tmp_path / "file").write_text("kept")
    for place, said in (
        (tmp_path, "expected a file, found a folder"),
        (tmp_path / "none" / "r.json", "there is no folder"),
        (tmp_path / "file" / "r.json", "there is no folder"),
        (Path("/proc/r.json"), "cannot write /proc/r.json"),
        (Path("/proc/version"), "cannot write /proc/version"),
    ):
        if "proc" in str(place) and not Path("/proc/version").exists():
            continue
        assert said in refusal([*words, "--out", str(place)], capsys)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(
    os.geteuid() == 0, reason="needs a user other than root, who can write everywhere"
)
@pytest.mark.parametrize("part", PARTS)
def test_a_read_only_folder_is_refused(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for a file in it that could itself be written: it is replaced as a whole."""
    words = words_of(part, tmp_path)
    folder = tmp_path / "shut"
    folder.mkdir()
    (folder / "old.json").write_text("{}")
    folder.chmod(0o555)
    try:
        for name in ("new.json", "old.json"):
            assert "cannot write" in refusal([*words, "--out", str(folder / name)], capsys)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("scale --device cpu --cells --compared", "--cells and --compared are both empty"),
        ("scale --device cpu --rounds 0", "must be at least 1, found 0"),
        ("scale --device cpu --schedules nope", "nope"),
        ("tables --merge a.json --steps 3", "--steps 3 given, but --merge only merges reports"),
        (
            "tables --merge a.json --no-profile",
            "--no-profile given, but --merge only merges reports",
        ),
        ("tables --device cpu --parts steps --microbatches 4", "only the part resources"),
        ("peers --device cpu --modes local", "--modes local needs --device cuda"),
        ("peers --device cpu --modes ours --limit 0", "--limit must be positive, found 0"),
        ("restarts --one-launch", "--one-launch makes a step one CUDA graph"),
        ("restarts --device cuda --one-launch --eager", "--one-launch makes a step one CUDA graph"),
        ("restarts --eager", "--eager given, but a CPU has no CUDA graphs"),
        ("restarts --hidden 64", "--hidden 64 given, but on a CPU the layer width is always 64"),
        (
            "kills --one-launch",
            "--one-launch makes a step one CUDA graph, so it needs --device cuda",
        ),
        ("modes --limit 0", "--limit must be above 0, found 0"),
        ("modes --framework torchtitan --device cuda", "--framework torchtitan runs on a CPU only"),
        ("second_runs --every 0", "--every must be at least 1, found 0"),
        ("second_runs --inside -1", "--inside must be at least 0, found -1"),
        ("kills --kills 0", "--kills must be at least 1, found 0"),
        ("kills --seed -1", "--seed must be at least 0, found -1"),
        (
            "kills --kills 2 --at-once 3",
            "--at-once: expected at most the number of kills (2), so that each",
        ),
        (
            "bench step --microbatches 4",
            "--microbatches [4] given, but only the sweep varies the number",
        ),
        ("bench --rank 0", "--rank 0 given, but only the sweep runs a single rank"),
        (
            "bench sweep --no-profile",
            "--no-profile given, but the sweep runs no steps",
        ),
        ("streams --quick --checks 5", "--checks 5 given, but --quick already sets the number"),
        ("probes --device cpu --only interleaved", "interleaved needs --device cuda"),
        ("curves run.toml --merge a.json --out r.json", "--merge starts no runs"),
        ("curves --merge a.json --steps 2 --out r.json", "--steps 2 given, but --merge"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line that names both; the rest of a command line never hides one of them."""
    monkeypatch.chdir(tmp_path)
    given = words.split()
    if "--merge" in given:  # which takes no commit
        assert main(["runtime", "report", *given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
    else:
        line = refusal(given, capsys)
    assert said in line
