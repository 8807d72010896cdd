"""
`scales = "epoch"`: the bits of training depend only on the model, the recipe, the number of
microbatches and the replicas.

One digest of parameters, AdamW's moments and scales, and every loss, are the same under every
schedule and mapping, with clipping, dropout and a tied embedding. With default scales the same
mappings give different bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.training.language_model import LanguageJob
from tests.ranks import bodies as pipelines
from tests.ranks.ranks import launch

from . import epoch_bodies as bodies
from . import language_bodies
from .helpers import SMALL, language, noise, text

STEPS = 3
LAYERS = 8
ALL = {"tied": True, "dropout": 0.1, "clip_norm": 0.5, "skip_nonfinite": True}
SINGLE = ("1f1b", "gpipe")


def job(path: Path, schedule: str, pp: int, **options: Any) -> LanguageJob:
    """Eight layers and eight microbatches a step, however they are mapped."""
    given = {"scales": "epoch", "microbatches": 8, **ALL, **options}
    stages = pp * (given.get("vpp") or (1 if schedule in SINGLE else 2))
    given.setdefault("cut", (LAYERS // stages,) * stages)
    return language(path, schedule=schedule, pp=pp, **given)


def results(jobs: list[LanguageJob], folder: Path) -> list[dict[str, Any]]:
    """Of each job: the digest, and the losses, norms and calibration that all ranks agree on."""
    folder.mkdir()
    world = jobs[0].world
    said = launch(world, folder, bodies.trained, jobs, STEPS)
    assert said.codes == [0] * world
    return [merged([said.words[rank][n] for rank in range(world)]) for n in range(len(jobs))]


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say alike, and the losses of those that have them, by replica."""
    first = ranks[0]
    for name in ("digest", "norms", "calibrated"):
        assert all(rank[name] == first[name] for rank in ranks), name
    return {**first, "losses": [rank["losses"] for rank in ranks if rank["losses"][0]]}


def same(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Require that all jobs have one result; return it."""
    first = found[0]
    assert found == [first] * len(found)
    assert len(first["losses"][0]) == STEPS
    assert 2 <= first["calibrated"][0] <= 6
    assert first["calibrated"][1]
    return first


@pytest.mark.ci
def test_one_and_two_ranks_have_one_digest_and_default_scales_have_not(tmp_path: Path) -> None:
    """ZB-V over an uneven cut, Interleaved 1F1B, and one rank alone; then the same by default."""
    path = noise(tmp_path)
    plain = {"scales": "action", "dropout": 0.0}
    alone = [job(path, "1f1b", 1), job(path, "1f1b", 1, **plain)]
    two = [
        job(path, "zbv", 2, cut=(1, 2, 3, 2)),
        job(path, "il", 2),
        job(path, "zbv", 2, cut=(1, 2, 3, 2), **plain),
        job(path, "il", 2, **plain),
    ]
    one, other = results(alone, tmp_path / "one"), results(two, tmp_path / "two")
    same([one[0], *other[:2]])
    assert all(norm is not None for norm in one[0]["norms"])
    assert len({found["digest"] for found in (one[1], *other[2:])}) == 3
    assert one[1]["calibrated"] is None


@pytest.mark.nightly
def test_every_schedule_of_two_and_four_ranks_has_the_digest_of_one(tmp_path: Path) -> None:
    """GPipe, 1F1B, Interleaved 1F1B, ZB-V, Interleaved Zero Bubble and DualPipeV."""
    path = noise(tmp_path)
    alone = [job(path, "1f1b", 1), job(path, "il", 1, vpp=4), job(path, "1f1b", 1, walks=2)]
    found = results(alone, tmp_path / "one")
    for pp in (2, 4):
        names = ("gpipe", "1f1b", "il", "zbv", "izb", "dualpipev")
        jobs = [job(path, name, pp) for name in names]
        if pp == 2:
            jobs += [job(path, "1f1b", 2, cut=(3, 5)), job(path, "zbv", 2, provisioning="static")]
        found += results(jobs, tmp_path / str(pp))
    same(found)


@pytest.mark.ci
@pytest.mark.parametrize("amax", ["replica", pytest.param("replicas", marks=pytest.mark.nightly)])
def test_two_replicas_of_one_and_of_two_ranks_have_one_digest(amax: str, tmp_path: Path) -> None:
    """Each replica with its own scales, or all with one; gradients are summed over replicas."""
    path = noise(tmp_path)
    options: dict[str, Any] = {"dp": 2, "microbatches": 4, "amax": amax}
    one = [job(path, "1f1b", 1, **options), job(path, "zbv", 1, **options)]
    two = [job(path, name, 2, **options) for name in ("il", "zbv", "1f1b", "gpipe")]
    found = [*results(one, tmp_path / "one"), *results(two, tmp_path / "two")]
    assert len(same(found)["losses"]) == 2


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        {"rule": "per_microbatch"},
        pytest.param({"rule": "copied"}, marks=pytest.mark.nightly),
        pytest.param({"master": True, "tied": False}, marks=pytest.mark.nightly),
    ],
    ids=["per_microbatch", "copied", "masters"],
)
def test_other_sums_have_one_digest_too(options: dict[str, Any], tmp_path: Path) -> None:
    """Another than that of `accumulate`, since sums round otherwise."""
    path = noise(tmp_path)
    alone = results([job(path, "1f1b", 1, **options), job(path, "1f1b", 1)], tmp_path / "one")
    two = [job(path, "zbv", 2, **options), job(path, "gpipe", 2, **options)]
    found = same([alone[0], *results(two, tmp_path / "two")])
    assert found["digest"] != alone[1]["digest"]


@pytest.mark.ci
def test_recomputed_activations_have_one_digest(tmp_path: Path) -> None:
    """No stage, some stages and every stage, on one rank and on two."""
    path = noise(tmp_path)
    one = [job(path, "1f1b", 1), job(path, "1f1b", 1, recompute=(0,))]
    two = [job(path, "zbv", 2, recompute=some) for some in ((1, 3), (0, 1, 2, 3))]
    same([*results(one, tmp_path / "one"), *results(two, tmp_path / "two")])


@pytest.mark.ci
def test_grouped_wgrads_have_one_digest(tmp_path: Path) -> None:
    """One product of two, or of all, microbatches; each group is a recipe of its own in bf16."""
    path = noise(tmp_path)
    groups = 2, 8
    one = [job(path, "1f1b", 1, wgrad_group=group) for group in groups]
    two = [job(path, name, 2, wgrad_group=group) for group in groups for name in ("zbv", "il")]
    alone = [*results([*one, job(path, "gpipe", 1)], tmp_path / "one")]
    pairs = results(two, tmp_path / "two")
    found = [same([alone[n], *pairs[2 * n : 2 * n + 2]])["digest"] for n in range(2)]
    assert len({*found, alone[2]["digest"]}) == 3


@pytest.mark.nightly
def test_every_schedule_has_the_digest_of_one_rank_with_groups(tmp_path: Path) -> None:
    """GPipe, 1F1B, Interleaved 1F1B, ZB-V, Interleaved Zero Bubble and DualPipeV; two walks too."""
    path = noise(tmp_path)
    options: dict[str, Any] = {"wgrad_group": 4}
    alone = [job(path, "1f1b", 1, **options), job(path, "1f1b", 1, walks=2, **options)]
    found = results(alone, tmp_path / "one")
    for pp in (2, 4):
        names = ("gpipe", "1f1b", "il", "zbv", "izb", "dualpipev")
        jobs = [job(path, name, pp, **options) for name in names]
        found += results(jobs, tmp_path / str(pp))
    same(found)


@pytest.mark.ci
def test_a_run_stopped_under_one_mapping_goes_on_under_others(tmp_path: Path) -> None:
    """ZB-V of two ranks, then four ranks, then one: the bits of a run that never stopped."""
    path, kept = noise(tmp_path), str(tmp_path / "kept")
    (whole,) = results([job(path, "1f1b", 1)], tmp_path / "whole")
    losses: list[list[float]] = []
    for n, (mapping, body) in enumerate(
        [
            (job(path, "zbv", 2), bodies.stopped),
            (job(path, "il", 4), bodies.resumed),
            (job(path, "gpipe", 1), bodies.resumed),
        ]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        said = launch(mapping.world, folder, body, mapping, kept, n + 1)
        assert said.codes == [0] * mapping.world
        found = merged([said.words[rank] for rank in range(mapping.world)])
        assert (found["calibrated"] is None) == (n > 0)  # never after a resume
        losses += found["losses"][0]
    assert found["digest"] == whole["digest"]
    assert losses == whole["losses"][0]


@pytest.mark.ci
def test_a_checkpoint_of_another_recipe_or_rule_is_refused(tmp_path: Path) -> None:
    """The scales, and how gradients are summed, belong to the recipe."""
    path, kept = noise(tmp_path), str(tmp_path / "kept")
    saved = job(path, "1f1b", 1)
    others = [
        (attrs.evolve(saved, scales="action", dropout=0.0), "saved with recipe.scales epoch"),
        (attrs.evolve(saved, rule="per_microbatch"), "saved with sums.rule accumulate"),
        (attrs.evolve(saved, wgrad_group=4), "sums.group"),
    ]
    for n, (mapping, said_so) in enumerate([(saved, ""), *others]):
        folder = tmp_path / str(n)
        folder.mkdir()
        body = bodies.resumed if n else bodies.stopped
        said = launch(1, folder, body, mapping, kept, 2)
        assert said.codes == [0]
        assert said_so in said.words[0].get("refused", "")
        assert bool(n) == ("refused" in said.words[0])


@pytest.mark.ci
def test_guarded_training_has_the_bits_of_torchs_pipeline(tmp_path: Path) -> None:
    """Native full backwards under torch's own schedules, calibrated by the same rule."""
    path = noise(tmp_path)
    jobs = [job(path, "zbv", 2), job(path, "1f1b", 2), job(path, "1f1b", 1, dp=2, microbatches=4)]
    (tmp_path / "said").mkdir()
    said = launch(2, tmp_path / "said", pipelines.exact, jobs, STEPS)
    assert said.codes == [0, 0]
    for n in range(len(jobs)):
        for rank in range(2):
            one = said.words[rank][n]
            assert one["first"] == []
            assert one["compared"]["scales"] > 0
            assert one["losses"] == one["native losses"]


def test_a_calibrated_run_has_the_bits_of_the_oracle(tmp_path: Path) -> None:
    """The oracle is plain torch, with its own quantization and its own calibration."""
    mapping = Job(schedule="1f1b", pp=1, layers=2, scales="epoch")
    said = launch(1, tmp_path, bodies.beside_oracle, mapping, STEPS)
    assert said.codes == [0]
    assert said.words[0]["differ"] == []
    assert said.words[0]["of"] == 32
    assert said.words[0]["walks"][0] == said.words[0]["walks"][1] > 1


@pytest.mark.ci
def test_a_failure_in_the_calibration_stops_all_ranks_and_a_rebuild_calibrates_anew(
    tmp_path: Path,
) -> None:
    """One cause; afterwards the bits of a run without the failure."""
    said = launch(2, _made(tmp_path), bodies.stumbling, job(noise(tmp_path), "zbv", 2), STEPS)
    assert said.codes == [0, 0]
    assert said.words[0] == said.words[1]
    assert said.words[0]["cause"].endswith("RuntimeError: an injected failure")
    assert (said.words[0]["epoch"], said.words[0]["same"]) == (0, True)


def _made(path: Path) -> Path:
    folder = path / "said"
    folder.mkdir()
    return folder


@pytest.mark.ci
def test_layers_of_the_plain_model_have_their_own_seeds(tmp_path: Path) -> None:
    """Four stages of one layer, or one stage of four."""
    found = []
    for n, mapping in enumerate(
        [
            Job(schedule="1f1b", pp=1, layers=4, scales="epoch", dropout=0.2),
            Job(schedule="zbv", pp=2, scales="epoch", dropout=0.2),
        ]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        said = launch(mapping.world, folder, bodies.trained, [mapping], STEPS)
        assert said.codes == [0] * mapping.world
        found.append(merged([said.words[rank][0] for rank in range(mapping.world)]))
    same(found)


FILE = (
    SMALL.format(vocabulary=256, layers=4)
    + """scales = "epoch"
dropout = 0.1
[parallel]
schedule = "SCHEDULE"
pp = PP
[data]
train = "train.npy"
[optimizer]
clip_norm = 0.5
[run]
steps = 2
log = "log.jsonl"
"""
)


def test_the_command_prints_the_same_digest_of_every_mapping(tmp_path: Path) -> None:
    """`qeffect runtime train FILE --digest`."""
    text(tmp_path)
    digests = []
    for pp, name in ((1, "gpipe"), (2, "zbv")):
        file = tmp_path / f"{name}.toml"
        file.write_text(FILE.replace("SCHEDULE", name).replace("PP", str(pp)))
        folder = tmp_path / str(pp)
        folder.mkdir()
        said = launch(pp, folder, language_bodies.trained, str(file), "--digest")
        code, out, err = said.words[0]
        assert code == 0, err
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        logged = [json.loads(line) for line in lines]
        assert logged[0] == {"calibration_walks": 2, "converged": True}
        assert [one["step"] for one in logged[1:]] == [0, 1]
        (tmp_path / "log.jsonl").unlink()
        (line,) = [line for line in out.splitlines() if "digest of parameters" in line]
        digests.append(line.split(": ")[1])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64
