"""What keeps a step from being one launch: every obstacle, wherever it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.backends.protocol import BackendError, Reports
from qeffect.gpu_runtime.ranks import obstacles as obstacle_module
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.membership import Member
from qeffect.gpu_runtime.ranks.obstacles import obstacles
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.runtime import (
    MODES,
    RuntimeConfig,
    one_launch_obstacles,
    step_mode,
    without_launches,
)
from qeffect.gpu_runtime.training.step_runner import mode_of

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
#: Every obstacle: the facts that make it, and its sentence.
OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "mode": (
        {"mode": "replays"},
        "the runtime's mode is 'replays': make it with RuntimeConfig(mode='one launch')",
    ),
    "optimizer": (
        {"capturable": False},
        "the update cannot be captured: make the optimizer with capturable=True",
    ),
    "rule": (
        {"rule": "copied"},
        "rule is 'copied', which is not supported in a launch: take 'accumulate' or "
        "'per_microbatch'",
    ),
    "gradients": (
        {"keeps_gradients": True},
        "scales are updated once an epoch and the table's dI are not in the order of microbatches, "
        "which is not supported in a launch: take a table whose dI are in this order",
    ),
    "draws": (
        {"draws": True},
        "F draws random numbers, but a launch does not set the position of their generator: take "
        "mode 'replays', or leave dropout out",
    ),
    "walks": (
        {"walks": 3},
        "a step has 3 walks (passes over the table), which is not supported in a launch: take one "
        "walk over a table of all microbatches",
    ),
    "device": ({"device": CPU}, "a CPU has no CUDA graphs: run on cuda"),
}


def found(**facts: Any) -> list[str]:
    """The obstacles of a configuration without any, changed by the given facts."""
    given = {"device": CUDA, "rule": "accumulate"} | facts
    return one_launch_obstacles(**given)


def test_without_an_obstacle_a_step_is_one_launch() -> None:
    """With either rule that writes inside of the graphs."""
    assert found() == found(rule="per_microbatch") == []


@pytest.mark.parametrize("name", OBSTACLES)
def test_each_obstacle_has_its_sentence(name: str) -> None:
    """It says what to change, and no other obstacle is named."""
    facts, sentence = OBSTACLES[name]

    assert found(**facts) == [sentence]


def test_all_obstacles_are_named_at_once() -> None:
    """In the order of the list."""
    facts = {k: v for given, _ in OBSTACLES.values() for k, v in given.items()}

    assert found(**facts) == [sentence for _, sentence in OBSTACLES.values()]


def test_a_worker_has_the_obstacles_of_its_configuration() -> None:
    """All at once, and a launch is refused with them; its walks and its mode exclude each other."""
    config = RuntimeConfig(rule="copied")
    kept = SimpleNamespace(kept=[])
    domain = SimpleNamespace(device=CPU)
    stage = SimpleNamespace(reports=Reports(draws=True))
    runtime = SimpleNamespace(config=config, domain=domain, memories={0: kept}, stages={0: stage})
    worker: Any = SimpleNamespace(runtime=runtime, optimizer=SimpleNamespace(capturable=False))
    named = ["mode", "optimizer", "rule", "gradients", "draws", "device"]
    wanted = [OBSTACLES[name][1] for name in named]
    wanted[0] = wanted[0].replace("'replays'", "'eager'")

    assert obstacles(worker) == wanted
    kept.kept, stage.reports = None, Reports()
    runtime.config = RuntimeConfig(mode="replays", walks=3)
    assert obstacles(worker) == [OBSTACLES[n][1] for n in ("mode", "optimizer", "walks", "device")]
    with pytest.raises(BackendError) as caught:
        OneLaunch(worker)
    assert str(caught.value) == f"the step cannot be one launch: {'; '.join(obstacles(worker))}"


@pytest.mark.parametrize("draws", [True, None, False])
def test_draws_are_an_obstacle_even_if_no_position_is_reported(draws: bool | None) -> None:
    """None says that F draws, and does not report where."""
    config = RuntimeConfig(mode="replays")
    stage = SimpleNamespace(reports=Reports(draws=draws))
    domain, memories = SimpleNamespace(device=CPU), dict[int, Any]()
    runtime = SimpleNamespace(config=config, domain=domain, memories=memories, stages={0: stage})
    worker: Any = SimpleNamespace(runtime=runtime, optimizer=SimpleNamespace(capturable=True))

    assert (OBSTACLES["draws"][1] in obstacles(worker)) is (draws is not False)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_jobs_dropout_is_an_obstacle(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before anything is built."""
    monkeypatch.setattr(step_mode, "device_obstacle", lambda _: None)
    monkeypatch.setattr(obstacle_module, "all_gather", lambda _, said: [said])
    why = OBSTACLES["draws"][1] if dropout else ""
    member = Member(0, 1, 0, CUDA, None)

    mode = "replays" if dropout else "one launch"
    assert (mode, why) == mode_of(member, Job(dropout=dropout), "one launch")


def test_a_configuration_refuses_walks_by_the_same_sentence() -> None:
    """It is refused as soon as it is made."""
    with pytest.raises(BackendError) as caught:
        RuntimeConfig(mode="one launch", walks=3)
    said = f"mode is 'one launch', but {OBSTACLES['walks'][1]}, or set mode='replays'"
    assert str(caught.value) == said


def test_a_step_that_cannot_be_one_launch_is_replayed() -> None:
    """The other modes stay."""
    assert [without_launches(mode) for mode in MODES] == ["eager", "replays", "replays"]
