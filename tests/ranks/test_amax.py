"""Scaling state that replicas share, or that each replica keeps separately."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import BackendError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.step.memory.scaling import SharedScaling
from tests.ranks import amax_bodies, bodies
from tests.ranks.ranks import launch

FOUR = Job(schedule="zbv", pp=2, dp=2, microbatches=2, amax="replicas")
TWO = Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=2, amax="replicas")


@pytest.mark.ci
def test_replicas_that_share_have_the_largest_of_what_each_saw(tmp_path: Path) -> None:
    """Histories and scales after each step, on both ranks of the pipeline, bit for bit."""
    said = launch(4, tmp_path, amax_bodies.shared, FOUR, 3)
    assert said.codes == [0] * 4
    for rank in range(4):
        for step in said.words[rank]:
            assert step["of"] > 4
            assert step["replicas differ"] == step["by hand"] == []
            assert step["replicas saw otherwise"] != []
        assert any(step["own"] for step in said.words[rank])


@pytest.mark.ci
def test_replicas_that_do_not_share_keep_what_each_saw(tmp_path: Path) -> None:
    """Their data differ, and so do their histories and scales."""
    said = launch(2, tmp_path, amax_bodies.shared, attrs.evolve(TWO, amax="replica"), 2)
    assert said.codes == [0, 0]
    for rank in range(2):
        for step in said.words[rank]:
            assert step["own"] == []
            assert any(name.endswith("amax_history") for name in step["replicas differ"])
            assert any(name.endswith("scale") for name in step["replicas differ"])


@pytest.mark.ci
def test_shared_scaling_has_the_bits_of_native_steps_and_a_collective_each(tmp_path: Path) -> None:
    """torch's own pipeline, and behind each step one maximum or minimum for each tensor."""
    jobs = [TWO, attrs.evolve(TWO, schedule="izb", amax="replica")]
    said = launch(2, tmp_path, bodies.exact, jobs, 3)
    assert said.codes == [0, 0]
    for rank in range(2):
        for word in said.words[rank]:
            assert set(word["differ"].values()) == {0}
            assert word["compared"]["scales"] > 10
            assert word["losses"] == word["native losses"]
    first, second = said.words[0]
    assert first["losses"] != second["losses"]


@pytest.mark.parametrize(
    ("fault", "clause"),
    [("missing", "reduction.missing"), ("early", "reduction.out-of-order")],
)
def test_an_epoch_whose_scaling_was_not_shared_in_its_place_is_refused(
    fault: str, clause: str, tmp_path: Path
) -> None:
    """On one rank: all stop, no weight moves, and the step again gives the bits of no fault."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    said = launch(2, tmp_path / "a", amax_bodies.refused, TWO, 1, fault)
    whole = launch(2, tmp_path / "b", amax_bodies.plain, TWO, 2)
    assert said.codes == whole.codes == [0, 0]
    for rank in range(2):
        word: dict[str, Any] = said.words[rank]
        assert word["cause"] == said.words[0]["cause"]
        assert (word["cause"]["clause"], word["cause"]["rank"]) == (clause, 1)
        assert word["moved"] == []
        assert word["epoch"] == 2
        assert word["bits"] == whole.words[rank]


def test_ranks_that_were_told_different_things_do_not_begin(tmp_path: Path) -> None:
    """Half of them would wait for a collective that never comes."""
    said = launch(2, tmp_path, amax_bodies.unlike, TWO)
    expected = "amax is replica on rank 0 and replicas on rank 1; give every rank the same"
    assert said.words == {0: expected, 1: expected}


class _Done:
    def wait(self) -> None:
        """It has ended."""


def _states(*values: tuple[float, float, float]) -> dict[str, Tensor]:
    return {
        "stages.0.forward.amax_history": torch.tensor([[v[0]] for v in values]),
        "stages.0.forward.scale": torch.tensor([values[0][1]]),
        "stages.0.backward.scale": torch.tensor([values[0][2]]),
    }


def _share(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Both at once, in one process."""
    held: list[Tensor] = []

    def largest(words: Tensor) -> _Done:
        held.append(words)
        return _Done()

    sides = [SharedScaling(one).start(largest), SharedScaling(other).start(largest)]
    assert held[0].dtype == torch.int32
    together = torch.maximum(*held)
    for words, side in zip(held, sides, strict=True):
        words.copy_(together)
        side.wait()


def test_what_is_not_finite_in_one_replica_is_so_in_all() -> None:
    """NaN above infinity above all numbers; the smallest scale, the smallest normal one too."""
    one = _states((0.0, 1.0, 3.0e38), (math.inf, 0, 0), (-0.0, 0, 0), (5.0, 0, 0))
    other = _states((-math.nan, 0.25, 1.2e-38), (2.0, 0, 0), (0.0, 0, 0), (4.0, 0, 0))
    _share(one, other)
    for state in (one, other):
        history = state["stages.0.forward.amax_history"].flatten().tolist()
        assert math.isnan(history[0])
        assert history[1:] == [math.inf, 0.0, 5.0]
        assert state["stages.0.forward.scale"].tolist() == [0.25]
        assert state["stages.0.backward.scale"].item() == torch.tensor(1.2e-38).item()
    assert all(torch.equal(one[n].view(torch.int32), other[n].view(torch.int32)) for n in one)


def test_what_replicas_hold_alike_is_not_moved() -> None:
    """So that one replica, or equal data, gives the numbers of no sharing."""
    one = _states((0.5, 2.0, 1.0), (7.25, 0, 0))
    other = {name: tensor.clone() for name, tensor in one.items()}
    before = {name: tensor.clone() for name, tensor in one.items()}
    _share(one, other)
    assert all(torch.equal(one[name], before[name]) for name in one)


def test_a_recipe_without_histories_has_nothing_to_share() -> None:
    """A tensor that is not float32 cannot be compared as words."""
    with pytest.raises(BackendError, match="this recipe has none; use amax='replica'"):
        SharedScaling({})
    with pytest.raises(
        BackendError, match=r"a\.scale: expected torch.float32, found torch.float64"
    ):
        SharedScaling({"a.scale": torch.ones(1, dtype=torch.float64)})
