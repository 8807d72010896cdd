"""
`[guard] replay_every`: what a run reports about steps that run twice, and how the run continues or
ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.training.config_file import differences, read
from tests.ranks.ranks import launch

from . import replay_bodies as bodies
from .helpers import CONFIG, text

RUN = (
    CONFIG.replace("steps = 3", 'steps = 5\nlog = "{name}.jsonl"')
    .replace("microbatches = 2", "microbatches = 2\npp = 2")
    .replace("batch = 2", "batch = 1")
    .replace("warmup = 2", "warmup = 2\ndecay_steps = 5")
)
KEPT = '[checkpoint]\nfolder = "{name}"\nevery = 2\n'
GUARD = "[guard]\ndigests = true\nreplay_every = 2\n"
FLIP = {"step": 3, "rank": 1, "matrix": "layers.0.fc1"}


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Runs on two ranks: `plain`; `stopped` and resumed; with a flip `again`, `often`, `stop` and
    `unseen`.
    """
    folder = tmp_path_factory.mktemp("replay")
    text(folder)
    again = GUARD + 'on_mismatch = "again"\n'
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("[guard]\ndigests = true\n", {}),
        "again": (again, FLIP),
        "stopped": (GUARD, {}),
        "often": (again, {**FLIP, "times": 9}),
        "stop": (GUARD, FLIP),
        "unseen": (GUARD, {**FLIP, "removed": True}),
    }
    given = []
    for name, (guard, flip) in cases.items():
        path = folder / f"{name}.toml"
        path.write_text(RUN.format(name=name) + KEPT.format(name=f"kept {name}") + guard)
        given.append({"argv": [str(path)], **flip})
    given[2]["argv"] += ["--steps", "3"]
    given.insert(3, {"argv": [given[2]["argv"][0], "--resume"]})
    names = ["plain", "again", "stopped", "resumed", "often", "stop", "unseen"]
    words: dict[str, Any] = {}
    for part in (slice(4), slice(4, None)):
        into = folder / f"said {part.start}"
        into.mkdir()
        said = launch(2, into, bodies.in_turn, given[part])
        for n, name in enumerate(names[part]):
            words[name] = [said.words[rank][n] for rank in range(2)]
    (folder / "words.json").write_text(json.dumps(words))
    return folder


def words_of(folder: Path, name: str) -> list[tuple[int, str, str]]:
    """Exit code and output of a run, by rank."""
    found: list[tuple[int, str, str]] = json.loads((folder / "words.json").read_text())[name]
    return found


def test_steps_that_run_twice_change_nothing_but_their_lines(folder: Path) -> None:
    """Losses and digests are those of a run without, also if the run is stopped and resumed."""
    for name in ("plain", "stopped", "resumed"):
        assert [code for code, _, _ in words_of(folder, name)] == [0, 0], name
    plain = [line for line in lines(folder, "plain") if "loss" in line]
    found = [line for line in lines(folder, "stopped") if "loss" in line]
    assert [(one["loss"], one["digests"]) for one in found] == [
        (one["loss"], one["digests"]) for one in plain
    ]
    assert [one["step"] for one in found if one.get("runs") == 2] == [1, 3]
    assert {one["mismatches"] for one in found if "runs" in one} == {0}
    assert not any("runs" in line for line in plain)


def test_a_mismatch_is_one_line_and_the_step_is_taken_again(folder: Path) -> None:
    """The line names rank, stage and matrix; the losses are those of an undisturbed run."""
    assert [code for code, _, _ in words_of(folder, "again")] == [0, 0]
    found = lines(folder, "again")
    (line,) = [one for one in found if "mismatch" in one]
    assert (line["step"], line["again"]) == (3, True)
    assert line["mismatch"] == [[1, 1, "layers.1.fc1.weight", 1]]
    losses = [(one["loss"], one["digests"]) for one in found if "loss" in one]
    assert losses == [(o["loss"], o["digests"]) for o in lines(folder, "plain") if "loss" in o]
    assert [one["mismatches"] for one in found if "runs" in one] == [0, 1]
    status = json.loads((folder / "kept again" / "status.json").read_text())
    assert (status["ended_by"], status["mismatches"]) == ("steps", 1)


@pytest.mark.ci
def test_launches_that_run_twice_tell_a_mismatch_one_step_later(
    folder: Path, tmp_path: Path
) -> None:
    """The step that was launched behind it is skipped too; both are taken again."""
    text(tmp_path)
    body = RUN.format(name="launched").replace("[parallel]", '[parallel]\nmode = "one launch"')
    guard = GUARD + 'on_mismatch = "again"\n'
    (tmp_path / "run.toml").write_text(body + KEPT.format(name="kept") + guard)
    (tmp_path / "said").mkdir()
    argv = [str(tmp_path / "run.toml"), "--json"]
    said = launch(2, tmp_path / "said", bodies.launched, argv, 3, 1, 2)
    code, out, err = said.words[0]
    assert code == 0, err
    assert json.loads(out)["mismatches"] == 1
    found = lines(tmp_path, "launched")
    (line,) = [one for one in found if "mismatch" in one]
    assert (line["step"], line["again"], len(line["mismatch"])) == (3, True, 1)
    (names,) = (one["gradients"] for one in lines(folder, "plain") if "gradients" in one)
    assert line["mismatch"] == [[1, *names[1][2], 1]]
    losses = [(one["loss"], one["digests"]) for one in found if "loss" in one]
    assert losses == [(o["loss"], o["digests"]) for o in lines(folder, "plain") if "loss" in o]
    assert [one["step"] for one in found if one.get("runs") == 2] == [1, 3]


@pytest.mark.parametrize(("name", "times"), [("stop", 1), ("often", 3)])
def test_a_mismatch_ends_the_run_with_a_cause_of_its_own(
    folder: Path, name: str, times: int
) -> None:
    """At once, or after three in a row; the status file and the last line say why."""
    every = [one for one in lines(folder, name) if "mismatch" in one]
    assert [one["again"] for one in every] == [True] * (times - 1) + [False]
    status = json.loads((folder / f"kept {name}" / "status.json").read_text())
    assert (status["ended_by"], status["resume"]) == ("differs", False)
    assert (status["mismatches"], status["step"]) == (times, 3)
    assert status["checkpoint"] == "step-00000002"
    assert "two runs of the step differ: rank 1 has 1 difference" in status["cause"]
    assert [code for code, _, _ in words_of(folder, name)] == [1, 1]
    _, out, err = words_of(folder, name)[0]
    assert "Every rank stopped: rank 1, step 3, commit: two runs of the step differ" in out + err


def test_without_the_comparison_the_flip_is_in_the_next_digests(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bisect` finds the step and the matrix in which the run first differs from a run without."""
    argv = ["runtime", "bisect", str(folder / "plain.jsonl"), str(folder / "unseen.jsonl")]
    assert main([*argv, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3
    assert found["gradients"] == [{"rank": 1, "stage": 1, "name": "layers.1.fc1.weight"}]


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ("replay_every = -1", "[guard] replay_every: expected a whole number of at least 0"),
        ("replay_every = 1.5", "[guard] replay_every: expected a whole number of at least 0"),
        ('replay_every = 1\non_mismatch = "go"', "on_mismatch: expected one of 'stop', 'again'"),
        ('on_mismatch = "again"', "on_mismatch: expected replay_every beside it, found none"),
        ("replay_every = 1\n[run]\ndeterministic = false", "expected [run] deterministic = true"),
    ],
)
def test_a_bad_value_is_refused(
    guard: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line that names the field, what was expected and what was found."""
    path = tmp_path / "run.toml"
    path.write_text(f"[guard]\n{guard}\n")
    assert main(["runtime", "train", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_of_before_names_no_field_that_it_did_not_have(tmp_path: Path) -> None:
    """A field that is not at its default is named."""
    (tmp_path / "run.toml").write_text("")
    own = read(tmp_path / "run.toml").record()
    saved = {name: dict(fields) for name, fields in own.items()}
    del saved["guard"]
    assert differences(saved, own) == []
    own["guard"]["replay_every"] = 3
    assert differences(saved, own) == ["[guard] replay_every was 0, is 3"]
