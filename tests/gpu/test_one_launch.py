"""
A step as one launch on real graphs: it has the bits of replays, and every fault ends it on every
rank.

The test bodies are those of `tests/ranks/test_launch_bodies.py`, which runs them as replays on
CPUs. Every start of ranks ends within `LIMIT_S`: a rank that hangs is killed and fails its test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from qeffect.gpu_runtime.backends.layers import LayerConfig
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.training.data import Loader, Tokens
from qeffect.gpu_runtime.training.language_model import LanguageJob
from tests.ranks import launch_bodies, ranks
from tests.ranks.ranks import launch
from tests.ranks.test_launch_bodies import one_cause
from tests.training.helpers import noise

from .helpers import four_gpus, two_ranks

LIMIT_S = 240.0  # a rank loads the library, captures every slot, and the step twice
CONFIG = LayerConfig(128, 256, 2, 128)
ONE = Job(schedule="il", pp=1, vpp=2, microbatches=4, config=CONFIG)
TWO = Job(schedule="zbv", pp=2, microbatches=4, config=CONFIG)
REPLICAS = Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=4, config=CONFIG, amax="replicas")
FOUR = Job(schedule="zbv", pp=2, dp=2, microbatches=4, config=CONFIG, amax="replicas")
LARGE = Job(
    schedule="il", pp=1, vpp=2, layers=2, microbatches=4, config=LayerConfig(1024, 4096, 8, 2048)
)
STEPS = 7  # guarded; captured; two launches that are rehearsed, and three checked as one


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", LIMIT_S)


@pytest.mark.parametrize(
    "job",
    [
        ONE,
        pytest.param(TWO, marks=two_ranks),
        pytest.param(Job(schedule="il", pp=2, microbatches=4, config=CONFIG), marks=two_ranks),
        pytest.param(Job(schedule="izb", pp=2, microbatches=4, config=CONFIG), marks=two_ranks),
        attrs.evolve(ONE, rule="per_microbatch"),
        pytest.param(attrs.evolve(TWO, rule="per_microbatch"), marks=two_ranks),
        attrs.evolve(ONE, scales="epoch", wgrad_group=4),
        pytest.param(attrs.evolve(TWO, scales="epoch", wgrad_group=2), marks=two_ranks),
        attrs.evolve(ONE, layers=2, recompute=(0,)),
        pytest.param(attrs.evolve(TWO, layers=2, recompute=(0, 1, 2, 3)), marks=two_ranks),
        pytest.param(REPLICAS, marks=two_ranks),
        pytest.param(attrs.evolve(REPLICAS, amax="replica"), marks=two_ranks),
        pytest.param(FOUR, marks=four_gpus),
    ],
    ids=[
        *("one rank", "zbv", "il", "izb", "one rank, per microbatch", "zbv, per microbatch"),
        *("one rank, grouped", "zbv, grouped"),
        *("one rank, recomputed", "zbv, recomputed", "replicas"),
        *("replicas of their own amax", "four ranks"),
    ],
)
def test_launches_leave_the_bits_of_replays(job: Job, tmp_path: Path) -> None:
    """Parameters, AdamW with its step counts, scales and histories, after five of them."""
    said = launch(job.world, tmp_path, launch_bodies.launched, job, "cuda", STEPS, None, None, -1)
    assert said.codes == [0] * job.world
    assert said.replay.launches == (STEPS - 1) * job.world  # of their rank logs
    for rank in range(job.world):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["of"] > 20
        assert word["launches"]["steps"] == [float(STEPS)]
        # Attention reserves random numbers also without dropout; a checkpoint has their position.
        assert word["launches"]["draws"] == word["replays"]["draws"] > 0


@pytest.mark.parametrize(
    "job",
    [
        ONE,
        pytest.param(TWO, marks=two_ranks),
        pytest.param(REPLICAS, marks=two_ranks),
        pytest.param(FOUR, marks=four_gpus),
    ],
    ids=["one rank", "two ranks", "replicas", "four ranks"],
)
def test_rates_and_the_norm_are_values_of_the_device(job: Job, tmp_path: Path) -> None:
    """A rate that changes each step, a limit that clips each, and a step that is skipped."""
    rates = [1e-3, 2e-3, 5e-4, 1e-3, 3e-3, 1e-3, 2e-3]
    said = launch(job.world, tmp_path, launch_bodies.launched, job, "cuda", STEPS, rates, 0.01, 5)
    assert said.codes == [0] * job.world
    for rank in range(job.world):
        word = said.words[rank]
        assert word["launches"]["norms"] == word["replays"]["norms"]
        assert word["launches"]["norms"] == said.words[0]["launches"]["norms"]
        assert word["launches"]["norms"][5].startswith("(nan, 1.0, True, (")
        assert word["launches"]["moved"][5] == 0
        assert min(word["launches"]["moved"][:5]) > 0
        assert word["launches"]["steps"] == word["replays"]["steps"]
        assert word["differ"] == []


def tied(folder: Path, **options: Any) -> LanguageJob:
    """A language model of a layer a stage, whose embedding and head are one weight."""
    options = {"pp": 2, "microbatches": 4, "config": CONFIG, "vocabulary": 512, **options}
    path = noise(folder, 40000, vocabulary=512)
    tokens = Tokens.open(path, vocabulary=512, sequence=CONFIG.sequence)
    loader = Loader(tokens=tokens, sequence=CONFIG.sequence, seed=3)
    return LanguageJob(tied=True, loader=loader, **options)


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "zbv", "pp": 1},
        pytest.param({"schedule": "zbv"}, marks=two_ranks),
        pytest.param({"schedule": "il"}, marks=two_ranks),
        pytest.param({"schedule": "zbv", "dp": 2, "amax": "replicas"}, marks=four_gpus),
        pytest.param({"schedule": "il", "dp": 2, "amax": "replicas"}, marks=four_gpus),
    ],
    ids=["one rank", "zbv", "il", "zbv on four ranks", "il on four ranks"],
)
def test_a_tied_models_launches_leave_the_bits_of_replays(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """Both copies on one rank or on two; all gradients clipped by a norm that counts one."""
    job = tied(tmp_path, **given)
    said = launch(job.world, tmp_path, launch_bodies.launched, job, "cuda", STEPS, None, 0.01, -1)
    assert said.codes == [0] * job.world
    copies = []
    for rank in range(job.world):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["of"] > 20
        assert word["launches"]["steps"] == [float(STEPS)]
        assert word["launches"]["norms"] == word["replays"]["norms"]
        assert word["launches"]["norms"] == said.words[0]["launches"]["norms"]
        assert min(word["launches"]["moved"]) > 0
        copies += word["copies"]
    assert len(copies) == 2 * job.dp
    assert all(copy == copies[0] for copy in copies)


@pytest.mark.parametrize(
    ("given", "victim", "action"),
    [
        pytest.param({"schedule": "il"}, 1, "1W1", marks=two_ranks),
        pytest.param({"schedule": "il"}, 0, None, marks=two_ranks),
        pytest.param({"schedule": "il", "dp": 2, "amax": "replicas"}, 3, "1W1", marks=four_gpus),
    ],
    ids=["a refusal", "a device that differs", "a refusal on four ranks"],
)
def test_a_tied_model_goes_on_bit_for_bit(
    given: dict[str, Any], victim: int, action: str | None, tmp_path: Path
) -> None:
    """The group of its copies is let go with all others, before the graph, and made again."""
    job = tied(tmp_path, **given)
    require_recovered(job, victim, action, tmp_path)


@two_ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_device_that_ran_something_else_updates_no_rank(victim: int, tmp_path: Path) -> None:
    """Every rank's device skips; the next step names the rank and the clause on all."""
    said = launch(2, tmp_path, launch_bodies.differing, TWO, "cuda", victim)
    assert said.codes == [0, 0]
    cause = one_cause(said, [0, 1])
    assert (cause["clause"], cause["rank"]) == ("epoch.device-count", victim)
    assert [said.words[rank]["after"] for rank in range(2)] == [1, 1]


@two_ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_refused_rehearsal_launches_nothing(victim: int, tmp_path: Path) -> None:
    """The other rank's launch waits for messages that never come, and is woken."""
    action = "1W1" if victim else "0W1"
    said = launch(2, tmp_path, launch_bodies.refused, TWO, "cuda", victim, action)
    assert said.codes == [0, 0]
    cause = one_cause(said, [0, 1])
    assert (cause["clause"], cause["rank"]) == ("ownership.duplicate-wgrad", victim)
    assert said.words[victim]["launched"] == 0
    assert said.words[victim]["after"] == 0


@pytest.mark.parametrize(
    ("job", "victim", "action"),
    [
        (ONE, 0, "1W1"),
        (ONE, 0, None),
        pytest.param(TWO, 1, "1W1", marks=two_ranks),
        pytest.param(TWO, 0, None, marks=two_ranks),
        pytest.param(REPLICAS, 1, "1W1", marks=two_ranks),
        pytest.param(REPLICAS, 0, None, marks=two_ranks),
        pytest.param(FOUR, 3, "1W1", marks=four_gpus),
        pytest.param(FOUR, 2, None, marks=four_gpus),
    ],
)
def test_after_a_stop_launches_go_on_bit_for_bit(
    job: Job, victim: int, action: str | None, tmp_path: Path
) -> None:
    """From the last update of all devices: a guarded step, a captured one, and launches of it."""
    require_recovered(job, victim, action, tmp_path)


def require_recovered(job: Job, victim: int, action: str | None, tmp_path: Path) -> None:
    """Require one cause on all ranks, and behind it the bits of steps without a fault."""
    said = launch(job.world, tmp_path, launch_bodies.recovered, job, "cuda", 9, victim, action)
    assert said.codes == [0] * job.world
    ranks_of = list(range(job.world))
    cause = one_cause(said, ranks_of)
    clause = "epoch.device-count" if action is None else "ownership.duplicate-wgrad"
    assert (cause["clause"], cause["rank"]) == (clause, victim)
    for rank in ranks_of:
        word = said.words[rank]
        assert word["again"] == launch_bodies.BEFORE
        assert word["captured"]
        assert word["differ"] == []
        assert word["of"] > 20


@two_ranks
@pytest.mark.parametrize(
    "action",
    ["1F1", "warm-up", None],
    ids=["in its replays", "in the warm-up of a capture", "between launches"],
)
def test_a_rank_that_is_killed_under_nccl_stops_the_other(
    action: str | None, tmp_path: Path
) -> None:
    """Within limits that are set, with one cause that names it; and the process ends."""
    said = launch(2, tmp_path, launch_bodies.killed, TWO, "cuda", 1, action)
    assert said.codes == [0, -9]
    cause = one_cause(said, [0])
    assert cause["rank"] == 1
    assert cause["kind"] in ("gone", "late")
    assert not cause["recoverable"]


def test_a_rate_that_a_graph_holds_may_not_change(tmp_path: Path) -> None:
    """A number of the host is baked in: the launch is refused, and nothing moves."""
    said = launch(1, tmp_path, launch_bodies.changed, ONE, "cuda")
    assert said.codes == [0]
    cause = one_cause(said, [0])
    assert "a number such as the learning rate was changed" in cause["text"]


@pytest.mark.parametrize("invalid", [False, True], ids=["refused by the gate", "invalid"])
@pytest.mark.parametrize(
    "job", [ONE, pytest.param(TWO, marks=two_ranks)], ids=["one rank", "two ranks"]
)
def test_a_step_that_cannot_be_captured_is_replayed(
    job: Job, invalid: bool, tmp_path: Path
) -> None:
    """From the failed capture on, with the bits of a run of replays."""
    said = launch(job.world, tmp_path, launch_bodies.uncaptured, job, 4, invalid)
    assert said.codes == [0] * job.world
    for rank in range(job.world):
        word = said.words[rank]
        assert word["executors"] == ["GraphExecutor", "GraphExecutor"]
        assert word["differ"] == []
        assert word["of"] > 20


def test_a_launch_reserves_less_memory_than_replays(tmp_path: Path) -> None:
    """
    A launch has one memory pool; replays have a pool for each slot. Recomputation makes a launch's
    pool smaller.
    """
    found = []
    for one, recompute in ((False, ()), (True, ()), (True, (0, 1))):
        job = attrs.evolve(LARGE, recompute=recompute)
        folder = tmp_path / str(len(found))
        folder.mkdir()
        said = launch(1, folder, launch_bodies.reserved, job, one)
        assert said.codes == [0]
        found.append(said.words[0])

    replays, launches, recomputed = found
    assert recomputed < launches < replays


def test_launches_are_left_for_a_checkpoint_and_taken_up(tmp_path: Path) -> None:
    """Behind a guarded step of the worker they are not."""
    said = launch(1, tmp_path, launch_bodies.resumed, ONE, "cuda")
    assert said.codes == [0]
    word = said.words[0]
    assert (word["checkpoint"], word["epoch"]) == (5, 7)
    assert "steps were taken since leave()" in word["refusal"]
