"""
One norm over the gradients of all ranks: all ranks clip alike and skip alike, with torch's own
bits.

The reference is torch's pipeline over native full backwards, whose gradients of all ranks are
brought together and clipped by `torch.nn.utils` in float64.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.step.clipping import (
    Clipping,
    DeviceNorm,
    Norm,
    parts_of,
    square_sums,
)
from tests.ranks import clip_bodies
from tests.ranks.ranks import launch

STEPS = 3
LIMIT = 0.01
TWO = [Job(schedule="zbv", pp=2), Job(schedule="il", pp=2, rule="per_microbatch")]
FOUR = [Job(schedule="izb", pp=2, dp=2, microbatches=4)]


@pytest.mark.parametrize(
    "jobs",
    [TWO, pytest.param(FOUR, marks=pytest.mark.ci)],
    ids=["two ranks", "two ranks, two replicas"],
)
def test_clipped_training_has_the_bits_of_plain_torch_over_all_parameters(
    jobs: list[Job], tmp_path: Path
) -> None:
    """Every step is clipped; parameters, AdamW's moments, scales and histories are compared."""
    world = jobs[0].world
    said = launch(world, tmp_path, clip_bodies.clipped, jobs, STEPS, LIMIT)
    assert said.codes == [0] * world
    for n in range(len(jobs)):
        ranks = [said.words[rank][n] for rank in range(world)]
        for rank in ranks:
            assert rank["differ"] == []
            assert rank["of"] > 20
            assert rank["losses"] == rank["native losses"]
            assert rank["norms"] == ranks[0]["norms"]
            for (total, factor, skipped), theirs in zip(rank["norms"], rank["theirs"], strict=True):
                assert 0 < factor < 1
                assert not skipped
                # The root of a sum of squared norms, added in another order, in float64.
                assert math.isclose(float(total), theirs, rel_tol=1e-14)


@pytest.mark.parametrize(
    ("job", "rank"),
    [(TWO[0], 1), pytest.param(FOUR[0], 3, marks=pytest.mark.ci)],
    ids=["two ranks", "one of two replicas"],
)
def test_one_value_that_is_not_finite_on_one_rank_skips_every_ranks_update(
    job: Job, rank: int, tmp_path: Path
) -> None:
    """The epoch commits, no weight and no count of AdamW moves, and what follows is torch's."""
    spoil = (rank, 1, math.nan)
    said = launch(job.world, tmp_path, clip_bodies.clipped, [job], STEPS, LIMIT, spoil)
    assert said.codes == [0] * job.world
    for n in range(job.world):
        (word,) = said.words[n]
        assert [skipped for _, _, skipped in word["norms"]] == [False, True, False]
        assert word["moved"][1] == 0
        assert word["moved"][0] > 10
        assert word["moved"][2] > 10
        assert word["epoch"] == STEPS
        assert word["counted"] == [STEPS - 1]
        assert word["differ"] == []
        assert word["of"] > 20


def test_an_infinite_gradient_skips_without_a_limit_too(tmp_path: Path) -> None:
    """`skip_nonfinite` alone; no gradient is changed otherwise."""
    spoil = (0, 0, -math.inf)
    said = launch(2, tmp_path, clip_bodies.clipped, [TWO[0]], 2, None, spoil)
    assert said.codes == [0, 0]
    for rank in range(2):
        (word,) = said.words[rank]
        assert [norm[1:] for norm in word["norms"]] == [[1.0, True], [1.0, False]]
        assert [word["moved"][0], word["counted"], word["differ"]] == [0, [1], []]


def test_which_rank_has_which_stage_does_not_move_a_bit_of_the_norm(tmp_path: Path) -> None:
    """Four stages in a loop and in a V: the first epoch's gradients are the same sums."""
    jobs = [Job(schedule=name, pp=2, microbatches=1) for name in ("il", "gpipe")]
    jobs[1] = Job(schedule="gpipe", pp=4, microbatches=1)
    (loop, line) = (
        launch(job.world, _folder(tmp_path, job.schedule), clip_bodies.mapped, [job], 1)
        for job in jobs
    )
    assert loop.words[0] == loop.words[1]
    assert {str(words) for words in line.words.values()} == {str(loop.words[0])}
    assert float(loop.words[0][0][0]) > 0


def _folder(path: Path, name: str) -> Path:
    made = path / name
    made.mkdir()
    return made


def test_replicas_that_do_not_have_one_gradient_stop_before_the_update(tmp_path: Path) -> None:
    """Both are finite, so nothing is skipped: the reduction did not do its work."""
    said = launch(4, tmp_path, clip_bodies.diverged, FOUR[0])
    assert said.codes == [0] * 4
    causes = [said.words[rank]["cause"] for rank in range(4)]
    assert causes == [causes[0]] * 4
    assert causes[0]["kind"] == "disagreed"
    assert "the reduced gradients of stage 3" in causes[0]["text"]
    assert all(said.words[rank]["moved"] == [] for rank in range(4))


def test_ranks_with_different_limits_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """One rank alone could clip, or skip, otherwise."""
    said = launch(2, tmp_path, clip_bodies.unlike, TWO[0])
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    assert "clip_norm is 1.0 on rank 0 and 2.0 on rank 1" in said.words[0]


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_is_no_positive_number_is_refused(limit: float) -> None:
    """A limit of nothing would set every gradient to zero."""
    with pytest.raises(BackendError, match="clip_norm is"):
        Clipping(max_norm=limit)


@pytest.mark.parametrize(
    "parts",
    [[9.0, 16.0], [1e300, 1e-300, 3.0], [0.1] * 7, [math.nan, 1.0], [1.0, math.inf], [0.0]],
)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("limit", [None, 0.3, 1e9])
def test_a_device_says_what_the_host_says(
    parts: list[float], skip: bool, limit: float | None
) -> None:
    """The same steps in the same order, so that one launch has the bits of replays."""
    clipping = Clipping(max_norm=limit, skip_nonfinite=skip)
    device = DeviceNorm.on(torch.device("cpu"), clipping, len(parts))
    device.take(torch.tensor(parts, dtype=torch.float64))
    read, host = device.read(), Norm.of(parts, clipping)
    assert repr(read) == repr(host)
    assert read.zero_stages == host.zero_stages == [n for n, one in enumerate(parts) if not one]
    assert read.nonfinite_stages == host.nonfinite_stages
    assert len(host.nonfinite_stages) == sum(not math.isfinite(one) for one in parts)


def test_a_stages_part_is_the_sum_of_its_parameters_squares_in_their_order() -> None:
    """Computed here one after another."""
    g = torch.Generator().manual_seed(5)
    named = {str(n): torch.randn(3 + n, 7, generator=g).bfloat16() for n in range(6)}
    named["bias"] = torch.randn(11, generator=g)
    (part,) = square_sums({4: named}).values()
    squares = [torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in named.values()]
    assert float(part) == float(torch.stack(squares).sum())
    assert math.isclose(float(part), sum(float(t.double().square().sum()) for t in named.values()))


def _model(layers: int) -> dict[str, torch.Tensor]:
    """Gradients of a model by its own names, of quite different sizes."""
    g = torch.Generator().manual_seed(6)
    named = {"embedding.weight": torch.randn(16, 8, generator=g)}
    for n in range(layers):
        for name, shape in (("fc1.weight", (8, 8)), ("norm.weight", (8,)), ("fc1.bias", (8,))):
            named[f"layers.{n}.{name}"] = torch.randn(shape, generator=g) * (1 + n / 7)
    return {**named, "head.weight": torch.randn(16, 8, generator=g), "head.norm": torch.ones(8)}


def _cut(named: dict[str, torch.Tensor], cut: list[int]) -> dict[int, dict[str, torch.Tensor]]:
    """The same gradients by stage, matrices first, as stages name them."""
    found: dict[int, dict[str, torch.Tensor]] = {stage: {} for stage in range(len(cut))}
    for matrices in (True, False):
        for name, gradient in named.items():
            if (gradient.dim() > 1 and not name.startswith("embedding")) is not matrices:
                continue
            kind, _, rest = name.partition(".")
            if kind != "layers":
                found[0 if kind == "embedding" else len(cut) - 1][name] = gradient
                continue
            stage, number = 0, int(rest.split(".")[0])
            while number >= cut[stage]:
                stage, number = stage + 1, number - cut[stage]
            found[stage][f"layers.{number}.{rest.partition('.')[2]}"] = gradient
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_where_the_model_is_cut_does_not_move_a_bit_of_the_norm(tied: bool) -> None:
    """Stages of any number of layers; a copy of the head's weight counts where it is the first."""
    named, norms, by_stage = _model(12), set(), set()
    for cut in ([12], [5, 7], [7, 5], [1, 11], [2, 10], [6, 6], [3] * 4, [1] * 12):
        gradients = _cut(named, cut)
        elsewhere = {(len(cut) - 1, "head.weight")} if tied else set()
        parts = square_sums(gradients, elsewhere)
        assert list(parts) == list(parts_of(gradients, elsewhere)) == sorted(parts)
        assert len(parts) == 14
        norms.add(Norm.of([float(part) for part in parts.values()], Clipping(max_norm=1.0)).total)
        whole = [sum(float(p) for (s, _), p in parts.items() if s == n) for n in range(len(cut))]
        by_stage.add(sum(whole))
    assert len(norms) == 1
    assert len(by_stage) > 1  # added up by stage, the cut shows
    squares = sum(float(g.double().square().sum()) for g in named.values())
    squares -= float(named["head.weight"].double().square().sum()) if tied else 0.0
    assert math.isclose(norms.pop(), math.sqrt(squares))


def test_a_part_tells_its_stage() -> None:
    """A stage is zero if all its parts are, and not finite if one is."""
    clipping = Clipping(max_norm=1.0, parts=((0, -1), (0, 0), (1, 0), (2, 0), (2, 2**31)))
    norm = Norm.of([0.0, 4.0, 0.0, math.nan, 0.0], clipping)
    assert (norm.zero_stages, norm.nonfinite_stages) == ([1], [2])
    device = DeviceNorm.on(torch.device("cpu"), clipping)
    device.take(torch.tensor(norm.parts, dtype=torch.float64))
    assert (device.read().zero_stages, device.read().nonfinite_stages) == ([1], [2])
