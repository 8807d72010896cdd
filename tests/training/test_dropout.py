"""
Dropout in training: torch's bits, a resumed run that continues the random numbers, and faults that
end the run.
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from qeffect.cli import main
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.training.data import Tokens
from tests.ranks import bodies as pipelines
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import CONFIG, SMALL, language, noise, text
from .test_kills import killed_often

DROPPING = SMALL + "dropout = 0.1\n"
RUN = (
    DROPPING.format(vocabulary=128, layers=4)
    + """[parallel]
pp = 2
schedule = "zbv"
[data]
train = "train.npy"
held_out = "held.npy"
[optimizer]
rate = 0.02
warmup = 2
decay_steps = 4
[checkpoint]
folder = "kept"
every = 1
[run]
steps = 4
evaluate_every = 1
evaluate_windows = 2
log = "log.jsonl"
"""
)
ALONE = CONFIG.replace(
    SMALL.format(vocabulary=256, layers=2), DROPPING.format(vocabulary=256, layers=2)
)


def written(folder: Path, **files: str) -> dict[str, str]:
    """Token files and training files; the path of each of the latter."""
    text(folder)
    text(folder, "held.npy", repeats=4)
    for name, body in files.items():
        (folder / f"{name}.toml").write_text(body)
    return {name: str(folder / f"{name}.toml") for name in files}


@pytest.mark.ci
def test_guarded_training_has_the_bits_of_torchs(tmp_path: Path) -> None:
    """Zero bubble, ZB-V, two walks, two replicas with own and shared amaxes: every tensor."""
    path = noise(tmp_path)
    jobs = [
        language(path, schedule="izb", pp=2, dropout=0.1),
        language(path, schedule="zbv", pp=2, cut=(1, 1, 2, 1), dropout=0.25),
        language(path, schedule="1f1b", pp=2, microbatches=4, walks=2, cut=(1, 1), dropout=0.1),
        language(path, schedule="il", pp=1, dp=2, microbatches=2, dropout=0.1),
        language(path, schedule="izb", pp=2),
        language(path, schedule="il", pp=1, dp=2, microbatches=2, dropout=0.1, amax="replicas"),
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", pipelines.exact, jobs, 3)
    assert said.codes == [0, 0]
    for n in range(len(jobs)):
        for rank in range(2):
            one = said.words[rank][n]
            assert one["first"] == []
            assert one["losses"] == one["native losses"]
    last = [[said.words[rank][n]["losses"] for rank in range(2)] for n in range(len(jobs))]
    assert last[0] != last[4]  # without dropout the losses are others


@pytest.mark.ci
def test_a_run_that_is_killed_draws_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """The position of each rank's generator is in the checkpoint: same losses, same bits."""
    job = Job(schedule="zbv", pp=2, microbatches=4, dropout=0.1)
    killed_often(tmp_path, job, until=5, kills=2, seed=0)


@pytest.mark.ci
def test_a_run_goes_on_with_the_losses_of_the_undisturbed_one(tmp_path: Path) -> None:
    """A resume draws on, an evaluation draws nothing, and other dropout is refused."""
    evaluating = "evaluate_every = 1\n"
    files = written(
        tmp_path,
        run=RUN,
        whole=RUN.replace('"kept"', '"whole"').replace(evaluating, "evaluate_every = 0\n"),
        none=RUN.replace('"kept"', '"none"').replace("dropout = 0.1\n", ""),
        other=RUN.replace("dropout = 0.1", "dropout = 0.2"),
        without=RUN.replace("dropout = 0.1\n", ""),
        alone=RUN.replace("pp = 2", "pp = 1"),
    )
    words = ["--json", "--quiet"]
    cases = [
        [files["run"], *words, "--steps", "2"],
        [files["other"], *words, "--resume"],
        [files["without"], *words, "--resume"],
        [files["run"], *words, "--resume"],
        [files["whole"], *words],
        [files["none"], *words],
    ]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", bodies.in_turn, cases)
    codes, outs, errs = zip(*said.words[0], strict=True)
    assert list(codes) == [0, 2, 2, 0, 0, 0]
    assert "was saved with model.dropout 0.1, this run has 0.2" in errs[1] + outs[1]
    assert "was saved with model.dropout 0.1, this run has nothing" in errs[2] + outs[2]
    begun, resumed, whole, none = (json.loads(outs[n])["losses"] for n in (0, 3, 4, 5))
    assert begun + resumed == whole
    assert len(whole) == 4
    assert whole != none

    (tmp_path / "alone").mkdir()
    alone = launch(1, tmp_path / "alone", bodies.in_turn, [[files["alone"], *words, "--resume"]])
    code, out, err = alone.words[0][0]
    assert code == 2
    assert "generator.position, which this run lacks; this state belongs to one rank" in out + err


def test_a_generator_that_stands_still_ends_the_run(tmp_path: Path) -> None:
    """As a graph whose seed was baked in: no weight is updated, and the cause names the clause."""
    files = written(tmp_path, alone=ALONE)
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.standing_still, files["alone"])
    code, out, err = said.words[0]
    assert code == 1
    assert "order.draws-again" in out + err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            'device = "cuda"\n[parallel]\nmode = "one launch"\n',
            "expected [parallel] mode = 'replays' or 'eager', because every F in one graph",
        ),
        (
            'device = "cuda"\nbackend = "reference"\n',
            "expected [parallel] mode = 'eager', because the reference backend draws",
        ),
        (
            'device = "cuda"\n[parallel]\nmode = "replays"\n[model]\nscales = "epoch"\n',
            "expected [parallel] mode = 'eager', because with scales = 'epoch' dropout draws",
        ),
    ],
)
def test_a_mode_without_dropout_is_refused(
    change: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any rank begins, with exit code 2."""
    run, *others = change.split("[")
    text = ALONE + run
    for table in others:
        name, body = table.split("]\n")
        text = _with(text, name, body)
    files = written(tmp_path, alone=text)
    assert main(["runtime", "train", files["alone"]]) == 2
    assert f"[model] dropout: {words}" in capsys.readouterr().err


def _with(text: str, table: str, fields: str) -> str:
    """Add fields to a table of a training file, or the table with them."""
    head = f"[{table}]\n"
    return text.replace(head, head + fields) if head in text else text + head + fields


@pytest.mark.parametrize("value", ["1.0", "-0.1", "true", "nan", "inf"])
def test_dropout_is_a_probability_below_one(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = written(tmp_path, alone=ALONE.replace("dropout = 0.1", f"dropout = {value}"))
    assert main(["runtime", "train", files["alone"]]) == 2
    assert "[model] dropout: expected a number of at least 0 and below 1" in capsys.readouterr().err


def test_an_evaluation_drops_nothing(tmp_path: Path) -> None:
    """Before the first step, held-out losses are those of the model without dropout."""
    path = noise(tmp_path)
    jobs = [language(path, schedule="1f1b", pp=1, dropout=p) for p in (0.0, 0.5)]
    assert jobs[0].loader is not None
    few = attrs.evolve(jobs[0].loader, tokens=Tokens(path, jobs[0].loader.tokens.values[:81]))
    (tmp_path / "said").mkdir()
    said = launch(1, tmp_path / "said", bodies.held_out, jobs, few)
    without, dropping = said.words[0]
    assert len(without) > 1
    assert dropping == without
