"""A guarded language model has the bits of torch's own pipeline, and its loss falls."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from qeffect.gpu_runtime.training.data import Loader, Tokens
from qeffect.gpu_runtime.training.rates import Rate
from tests.profiles import by_profile
from tests.ranks import bodies as pipelines
from tests.ranks.ranks import launch

from . import language_bodies as bodies
from .helpers import language, noise, text

STEPS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the ranks leave their words."""
    (tmp_path / "said").mkdir()
    return tmp_path / "said"


def test_guarded_training_has_the_bits_of_torchs(tmp_path: Path, folder: Path) -> None:
    """
    Five steps under zero bubble and ZB-V: losses, gradients, parameters, AdamW, scales.

    Embedding, head, warm-up, cosine and the groups of decay are in it; the second has another cut,
    and the third accumulates over two walks.
    fp32 masters, clipping and other destinations are in `test_loop.py`.
    """
    path = noise(tmp_path)
    jobs = [
        language(path, schedule="izb", pp=2),
        language(path, schedule="zbv", pp=2, cut=(1, 1, 2, 1)),
        language(path, schedule="1f1b", pp=2, microbatches=4, walks=2, cut=(1, 1)),
    ][: by_profile(1, 3)]
    said = launch(2, folder, pipelines.exact, jobs, STEPS)
    assert said.codes == [0, 0]
    for n, job in enumerate(jobs):
        ranks = [said.words[rank][n] for rank in range(2)]
        for rank in ranks:
            assert rank["first"] == []
            assert rank["losses"] == rank["native losses"]
        for category in pipelines.CATEGORIES:
            assert sum(rank["compared"].get(category, 0) for rank in ranks) > 0
        (losses,) = [rank["losses"] for rank in ranks if rank["losses"][0]]
        assert len(losses) == STEPS
        assert len(losses[0]) == job.microbatches
        assert sum(losses[0]) == pytest.approx(4.16, abs=0.1)  # ln 64


def test_replicas_have_the_bits_of_torchs(tmp_path: Path, folder: Path) -> None:
    """Two replicas of one rank: their sums, embedding and head among them, clipped."""
    path = noise(tmp_path)
    jobs = [
        language(path, schedule="1f1b", pp=1, dp=2, cut=(2,), clip_norm=0.05),
        language(path, schedule="zbv", pp=1, dp=2),
    ]
    said = launch(2, folder, bodies.exact, jobs, 3)
    assert said.codes == [0, 0]
    assert [[one["same"] for one in words] for words in said.words.values()] == [[True] * 2] * 2
    assert said.words[0][0]["parameters"] != said.words[0][1]["parameters"]


def test_the_librarys_stages_have_ends_too(tmp_path: Path, folder: Path) -> None:
    """
    Over a stand-in for Transformer Engine: tokens in, a head with a store, cache and scales.

    Under `main_grad` and with destinations bound at dW; what the real library computes is compared
    on a GPU.
    """
    jobs = [
        language(noise(tmp_path), schedule="il", pp=2),
        language(noise(tmp_path), schedule="zbv", pp=2, rule="copied"),
    ][: by_profile(1, 2)]
    said = launch(2, folder, bodies.library, jobs, 3)
    assert said.codes == [0, 0]
    for n in range(len(jobs)):
        for rank in range(2):
            words = said.words[rank][n]
            assert words["same"], words["totals"]
            assert words["names"]["matrices"][-1] == "head.weight"
            assert words["names"]["others"] == [
                "embedding.weight",
                "embedding.position",
                "head.layer_norm_weight",
                "head.layer_norm_bias",
            ]
        assert sum(said.words[rank][n]["totals"]["losses"][0] for rank in range(2)) == 3 * 4


def test_evaluation_leaves_no_trace(tmp_path: Path, folder: Path) -> None:
    """Nothing moves while held-out text is evaluated, and the steps after are those of before."""
    job = language(noise(tmp_path), schedule="zbv", pp=2)
    assert job.loader is not None
    held_out = attrs.evolve(job.loader, shuffle=False)
    said = launch(2, folder, bodies.evaluating, job, held_out, 2)
    assert said.codes == [0, 0]
    for rank in range(2):
        words = said.words[rank]
        assert words["moved"] == words["differ"] == []
        assert words["same losses"]
        assert words["of"] > words["state"] > 0
        first, again, *later = words["held out"]
        assert first == again
        assert first == pytest.approx(4.16, abs=0.1)
        assert later[0] != first  # of other weights
    assert said.words[0]["held out"] == said.words[1]["held out"]


def test_the_command_trains_two_ranks(tmp_path: Path, folder: Path) -> None:
    """A run of the command on two ranks learns a sentence; rank 0 alone speaks."""
    text(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(
        """
        [model]
        vocabulary = 128
        layers = 4
        hidden = 32
        ffn = 64
        heads = 2
        sequence = 16
        [parallel]
        pp = 2
        schedule = "zbv"
        [data]
        train = "train.npy"
        held_out = "train.npy"
        [optimizer]
        rate = 0.02
        [run]
        steps = 20
        log = "log.jsonl"
        """
    )
    said = launch(2, folder, bodies.trained, str(config), "--json", "--quiet")
    assert said.codes == [0, 0]
    (code, out, _), (other, silent, _) = said.words[0], said.words[1]
    assert (code, other) == (0, 0)
    assert silent == ""
    told = json.loads(out)
    assert told["verdict"] == "accepted"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == told["losses"]
    assert losses[0] == pytest.approx(4.85, abs=0.1)  # ln 128
    assert losses[-1] < losses[0] - 1
    (held_out,) = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert held_out == pytest.approx(losses[-1], abs=0.4)
    assert lines[0]["rate"] == pytest.approx(0.002)
    assert lines[-2]["tokens"] == 20 * 4 * 16


@pytest.mark.nightly
def test_fifty_steps_learn_with_the_bits_of_torchs(tmp_path: Path, folder: Path) -> None:
    """
    From ln 128, 4.85, to less than 2, guarded and native, losses and every tensor alike.

    The text repeats a sentence, so that a model that went on would have next to no loss.
    """
    text(tmp_path)
    tokens = Tokens.open(tmp_path / "train.npy", vocabulary=128, sequence=16)
    job = language(
        noise(tmp_path),
        schedule="zbv",
        pp=2,
        vocabulary=128,
        loader=Loader(tokens=tokens, sequence=16, seed=3),
        rate=Rate(peak=2e-2, warmup=5, steps=50, least=2e-3),
    )
    said = launch(2, folder, pipelines.exact, [job], 50)
    assert said.codes == [0, 0]
    ranks = [said.words[rank][0] for rank in range(2)]
    for rank in ranks:
        assert rank["first"] == []
        assert rank["losses"] == rank["native losses"]
    (losses,) = [rank["losses"] for rank in ranks if rank["losses"][0]]
    assert sum(losses[0]) == pytest.approx(4.85, abs=0.1)
    assert sum(losses[-1]) < 2.0  # 1.4 where this was written
