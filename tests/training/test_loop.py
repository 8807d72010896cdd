"""
The training loop: it stops and continues, clips, reports the norm, and repeats a stopped step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.training.checkpoint.files import checkpoint_folders
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import SMALL, language, noise, text

RUN = (
    SMALL.format(vocabulary=128, layers=4)
    + """[parallel]
pp = 2
schedule = "zbv"
[data]
train = "train.npy"
[optimizer]
rate = 0.02
warmup = 2
decay_steps = 6
clip_norm = 0.5
[checkpoint]
folder = "kept"
every = 2
[run]
steps = 6
log = "log.jsonl"
"""
)


def files(folder: Path) -> dict[str, Path]:
    """A run, the same elsewhere and undisturbed, on one rank, and of another model."""
    text(folder)
    bodies_of = {
        "run": RUN,
        "whole": RUN.replace('"kept"', '"whole"').replace("log.jsonl", "whole.jsonl"),
        "alone": RUN.replace("pp = 2", "pp = 1").replace('"zbv"', '"gpipe"\nbatch = 2'),
        "other": RUN.replace("ffn = 64", "ffn = 128"),
        "nowhere": RUN.replace('folder = "kept"\n', ""),
        "foreign": RUN.replace("[data]", "[data]\nseed = 5"),
    }
    made = {}
    for name, body in bodies_of.items():
        made[name] = folder / f"{name}.toml"
        made[name].write_text(body)
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    """A log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Losses and norms to the last bit; what cannot be gone on from is one line."""
    made = files(tmp_path)
    words = ["--json", "--quiet"]
    cases = [
        [str(made["run"]), *words, "--steps", "4", "--resume"],  # there is none yet: it begins
        [str(made["run"]), *words],  # forgotten to say so
        [str(made["other"]), *words, "--resume"],
        [str(made["foreign"]), *words, "--resume"],
        [str(made["nowhere"]), *words, "--resume"],
        [str(made["run"]), *words, "--resume"],
        [str(made["whole"]), *words],
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.in_turn, cases)
    assert said.codes == [0, 0]
    codes, outs, errs = zip(*said.words[0], strict=True)
    assert list(codes) == [0, 2, 2, 2, 2, 0, 0] == [code for code, _, _ in said.words[1]]
    for n, told in (
        (1, "continue from it with --resume"),
        (2, "was saved with model.ffn 64, this run has 128"),
        (3, "expected seed 0"),
        (4, "--resume needs a folder of checkpoints"),
    ):
        (line,) = errs[n].splitlines() or [outs[n]]
        assert told in line

    begun, resumed, whole = (json.loads(outs[n]) for n in (0, 5, 6))
    assert [run["began"] for run in (begun, resumed, whole)] == [0, 4, 0]
    assert [run["steps"] for run in (begun, resumed, whole)] == [4, 6, 6]
    assert begun["losses"] + resumed["losses"] == whole["losses"]
    parts, at_once = lines(tmp_path / "log.jsonl"), lines(tmp_path / "whole.jsonl")
    at_once = [line for line in at_once if "loss" in line]
    told = [{k: line[k] for k in ("step", "loss", "norm", "tokens")} for line in at_once]
    assert told == [
        {k: line[k] for k in ("step", "loss", "norm", "tokens")} for line in parts if "loss" in line
    ]
    assert all(line["norm"] > 0 and not line["skipped"] for line in at_once)
    (note,) = [line for line in parts if "resumed" in line]
    assert note["step"] == 4
    assert "4" in Path(note["resumed"]).name
    kept = [sorted(p.name for p in (tmp_path / name).glob("step-*")) for name in ("kept", "whole")]
    assert len(kept[0]) == len(kept[1]) == 3

    # One rank, one stage, other microbatches: the same weights go on with the same text.
    (tmp_path / "alone").mkdir()
    argv = [str(made["alone"]), *words, "--steps", "7", "--resume"]
    alone = launch(1, tmp_path / "alone", bodies.in_turn, [argv])
    code, out, err = alone.words[0][0]
    assert code == 0, err
    assert json.loads(out)["began"] == 6
    assert json.loads(out)["losses"][0] == pytest.approx(whole["losses"][-1], abs=0.3)


def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """An unusable folder at once; a save in the middle in the log; one at the end with 2."""
    made = files(tmp_path)["run"]
    (tmp_path / "kept").mkdir()
    for step in (2, 4, 6):
        (tmp_path / "kept" / f"step-{step:08d}").write_text("a file is where a checkpoint would be")
    nowhere = tmp_path / "unusable.toml"
    nowhere.write_text(RUN.replace('"kept"', '"train.npy"').replace("log.jsonl", "unusable.jsonl"))
    (tmp_path / "said").mkdir()
    words = ["--json", "--quiet"]
    cases = [[str(nowhere), *words], [str(made), *words]]
    said = launch(2, tmp_path / "said", bodies.in_turn, cases)
    assert said.codes == [0, 0]
    code, out, err = said.words[0][0]
    assert code == 2
    (line,) = err.splitlines() or [out]
    assert "[checkpoint] folder: " in line
    assert "train.npy cannot be written to: File exists" in line
    assert not (tmp_path / "unusable.jsonl").exists()
    code, out, err = said.words[0][1]
    assert code == 2
    (line,) = err.splitlines() or [out]
    assert "cannot save step-00000006" in line
    log = lines(tmp_path / "log.jsonl")
    assert [line["step"] for line in log if "not_saved" in line] == [1, 3]
    assert [line["step"] for line in log if "loss" in line] == [0, 1, 2, 3, 4, 5]


def test_a_stopped_step_is_begun_again(tmp_path: Path) -> None:
    """With `retries`, a step that all ranks survived has the bits of one that was not stopped."""
    made = files(tmp_path)["nowhere"]
    made.write_text(made.read_text().replace("\nsteps = 6", "\nsteps = 3\nretries = 1"))
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.stumbling, str(made))
    assert said.codes == [0, 0]
    for rank in range(2):
        words = said.words[rank]
        assert words["stopped twice"]
        assert words["losses"] == words["undisturbed"]
        assert len(words["losses"]) == 3
        assert words["differ"] == []
    assert sum("stopped" in line for line in lines(tmp_path / "log.jsonl")) == 2


@pytest.mark.ci
def test_clipped_training_has_the_bits_of_torchs(tmp_path: Path) -> None:
    """The native side clips by the norm of all ranks' gradients, with the same factor."""
    jobs = [
        language(noise(tmp_path), schedule="zbv", pp=2, clip_norm=0.05),
        language(
            noise(tmp_path),
            schedule="il",
            pp=2,
            clip_norm=0.05,
            master=True,
            weight_decay=0.1,
            rule="copied",
        ),
    ]
    loose = attrs.evolve(jobs[0], clip_norm=None)
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.exact, [*jobs, loose], 3)
    assert said.codes == [0, 0]
    for rank in range(2):
        clipped, master, free = said.words[rank]
        assert [True] * 3 == [clipped["same"], master["same"], free["same"]]
        assert clipped["parameters"] != free["parameters"]  # it did clip


def test_an_update_that_fails_half_way_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    """The last good checkpoint stays the newest; the run names the failure and exits with 2."""
    made = files(tmp_path)
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.half_updated, str(made["alone"]), 3)

    code, out, err = said.words[0]
    assert code == 2
    assert "an injected failure" in out + err
    assert "Traceback" not in out + err
    assert [2] == sorted(number for number, _ in checkpoint_folders(tmp_path / "kept"))
