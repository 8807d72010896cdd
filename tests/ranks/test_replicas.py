"""
Gradients over replicas: buckets that are reduced in one call, and public faults of other projects.

`HELD` lists these faults and names the test that runs each fault here, over replicas that are
processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.replicas import calls_of
from qeffect.verification.failures.catalogue import FAILURES
from tests.profiles import few
from tests.ranks import replica_bodies
from tests.ranks.ranks import launch

JOB = Job(schedule="izb", pp=2, dp=2, microbatches=2)
SHORT = Job(schedule="il", pp=1, vpp=2, dp=2, microbatches=2)

#: By the failure's name in the catalogue, a test of this module or of another one.
HELD = {
    "transformer-engine-1976": "test_a_reduction_that_is_started_wrongly_stops_all",
    "transformer-engine-2614": "test_gradients_that_were_never_reduced_are_not_committed",
    "megatron-lm-5273": "test_gradients_that_were_never_reduced_are_not_committed",
    "megatron-lm-4500": "test_gradients_that_were_never_reduced_are_not_committed",
    "pytorch-144530": "test_gradients_that_were_never_reduced_are_not_committed",
    "pytorch-134052": "test_a_reduction_that_is_started_wrongly_stops_all",
    "megatron-lm-7186": "test_a_reduction_that_is_started_wrongly_stops_all",
    "megatron-lm-2218": "test_a_reduction_that_is_started_wrongly_stops_all",
    "deepspeed-5605": "test_a_reduction_that_is_started_wrongly_stops_all",
    "megatron-lm-1012": "test_a_reduction_that_is_started_wrongly_stops_all",
    "open-instruct-1498": "test_a_reduction_that_is_started_wrongly_stops_all",
    "megatron-bridge-5380": "test_gradients_that_were_never_reduced_are_not_committed",
    "piper-13": "test_gradients_that_were_never_reduced_are_not_committed",
}


def test_every_public_failure_of_reductions_has_its_test() -> None:
    """The catalogue's rows of this relation, whose models the verification runs one by one."""
    rows = {f.name: f for f in FAILURES}
    # Rows that no contract sees (`untold`) have nothing to be refused here.
    seen = [f for f in FAILURES if f.relation == "reduction" and f.verdict == "refused"]
    assert [f.name for f in seen if f.name not in HELD] == []
    assert len(HELD) == 13
    for name, test in HELD.items():
        assert rows[name].verdict == "refused"
        assert callable(globals()[test])


@pytest.mark.parametrize("dtype", few(["bfloat16", "float32"], (1,)))
def test_two_replicas_have_the_bits_of_one_call_a_gradient(dtype: str, tmp_path: Path) -> None:
    """A bucket leaves in one call for each type of its gradients, and no bit moves."""
    said = launch(4, tmp_path, replica_bodies.together, JOB, 3, dtype)
    assert said.codes == [0] * 4
    types = 1 if dtype == "bfloat16" else 2  # gradients that dI makes stay bf16
    for rank in range(4):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["of"] > 20
        assert word["peers"]
        one, many = word["calls"]
        assert len(one) == len(many) == 2
        assert {n for calls in one.values() for n in calls} == {types}
        assert min(n for calls in many.values() for n in calls) > 2


def test_three_replicas_have_one_result_however_it_leaves(tmp_path: Path) -> None:
    """Its last bits are the library's order of adding: the same on all replicas, which is what is
    promised; that they are others than one by one is why `together` is asked for there."""
    said = launch(3, tmp_path, replica_bodies.together, _of_three(), 2, "float32")
    assert said.codes == [0] * 3
    for rank in range(3):
        assert said.words[rank]["peers"]
        assert said.words[rank]["differ"] != []


def _of_three() -> Job:
    return Job(schedule="il", pp=1, vpp=2, dp=3, microbatches=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mean_is_the_sum_divided(dtype: str, tmp_path: Path) -> None:
    """Of two replicas: the division is exact."""
    said = launch(2, tmp_path, replica_bodies.meant, SHORT, dtype)
    assert said.codes == [0, 0]
    for rank in range(2):
        word = said.words[rank]
        assert word["differ"] == []
        assert word["of"] > 10
        assert word["sum"] > 0


WRONG: dict[str, tuple[int, tuple[str, ...], str]] = {
    # A hook that fires before the deferred dW, or takes a half for the last backward.
    "before the last dW": (0, ("early", "0REDUCE_GRAD", "0W1"), "arena.incomplete"),
    # Every microbatch ends the accumulation.
    "after the first microbatch": (1, ("early", "0REDUCE_GRAD", "0W0"), "order.incomplete"),
    # Replicas that issue their collectives in different orders.
    "in another order": (1, ("behind", "1REDUCE_GRAD", "0REDUCE_GRAD"), "reduction.out-of-order"),
    # One update for two halves.
    "twice": (0, ("twice", "1REDUCE_GRAD"), "epoch.already-final"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_reduction_that_is_started_wrongly_stops_all(case: str, tmp_path: Path) -> None:
    """On the rank where it happens, by clause, before it is sent; no replica hangs in it."""
    victim, change, clause = WRONG[case]
    said = launch(2, tmp_path, replica_bodies.disturbed, SHORT, victim, change)
    cause = _one(said, 2)
    assert cause["rank"] == victim
    assert cause["kind"] == "refused"
    assert cause["clause"] == clause
    assert {said.words[rank]["epoch"] for rank in range(2)} == {2}


def test_gradients_that_were_never_reduced_are_not_committed(tmp_path: Path) -> None:
    """A hook that never fires: the rank's own guard of the commit says which bucket."""
    said = launch(2, tmp_path, replica_bodies.unreduced, SHORT, 1)
    cause = _one(said, 2)
    assert cause["clause"] == "reduction.missing"


def _one(said: Any, world: int) -> dict[str, Any]:
    assert said.codes == [0] * world
    causes = [said.words[rank]["cause"] for rank in range(world)]
    assert causes == [causes[0]] * world
    assert all(said.words[rank]["moved"] == [] for rank in range(world))
    assert causes[0] is not None
    found: dict[str, Any] = causes[0]
    return found


def test_what_leaves_in_one_call_is_of_one_type_and_not_large() -> None:
    """Types and sizes alone determine which gradients share a call, so the calls are the same on
    every replica."""
    given = [
        torch.zeros(4),
        torch.zeros(300),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(5),
        torch.zeros(3, dtype=torch.bfloat16),
    ]
    sizes = [[t.numel() for t in call] for call in calls_of(given, together=True, alone=1000)]
    assert sizes == [[4, 5], [300], [2, 3]]
    assert [len(call) for call in calls_of(given, together=True, alone=None)] == [3, 2]
    assert [len(call) for call in calls_of(given, together=False, alone=None)] == [1] * 5
