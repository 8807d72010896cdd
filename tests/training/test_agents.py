"""
Two torchrun agents restart a run together after a worker dies, after an agent dies, or if an agent
is late.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .agents import Agents

pytestmark = pytest.mark.ci


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Two agents, which nobody has started."""
    made = Agents(tmp_path, share=getattr(request, "param", True))
    yield made
    made.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing befell, of two workers under one agent."""
    made = Agents(tmp_path_factory.mktemp("undisturbed"))
    made.train_alone()
    losses = made.losses()
    assert losses[-1] < losses[0] / 2
    return losses


@pytest.mark.nightly
def test_a_late_agent_is_awaited(agents: Agents, undisturbed: list[float]) -> None:
    """No attempt was lost."""
    agents.start(0)
    time.sleep(6.0)
    agents.start(1)
    assert agents.codes() == [0, 0], agents.said()
    assert agents.resumes() == []
    assert agents.replayed() == 1
    assert agents.losses() == undisturbed


@pytest.mark.parametrize("agent", [pytest.param(0, marks=pytest.mark.slow(minutes=2)), 1])
def test_a_killed_worker_restarts_both(
    agents: Agents, undisturbed: list[float], agent: int
) -> None:
    """Only one agent counts the restart; the ranks meet all the same and lose nothing."""
    for n in range(2):
        agents.start(n)
    agents.wait(lambda: agents.trained(40))
    agents.kill_worker(agent)
    assert agents.codes() == [0, 0], agents.said()
    assert agents.resumes()
    assert agents.losses() == undisturbed
    assert agents.replayed() > 1
    told = [line["warning"] for line in agents.log() if "warning" in line]
    assert any("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all agents" in one for one in told)


@pytest.mark.nightly
@pytest.mark.parametrize("agents", [False], indirect=True, ids=["a store for each round"])
def test_a_lost_host_that_comes_back_joins(agents: Agents, undisturbed: list[float]) -> None:
    """Its new agent counts from 0, where the other agent counts from 1."""
    for n in range(2):
        agents.start(n)
    agents.wait(lambda: agents.trained(40))
    agents.kill_host(1)
    agents.start(1)
    assert agents.codes() == [0, 0], agents.said()
    assert agents.resumes()
    assert agents.losses() == undisturbed
    assert agents.replayed() > 1
    assert not any("warning" in line for line in agents.log())


@pytest.mark.slow(minutes=2)  # torchelastic alone waits most of a minute
@pytest.mark.parametrize("agents", [False], indirect=True, ids=["a store for each round"])
def test_an_orphan_of_a_killed_agent_does_not_reach_the_next_attempt(
    agents: Agents, undisturbed: list[float]
) -> None:
    """It is stopped while the others begin again, then wakes up beside them, and ends."""
    for n in range(2):
        agents.start(n)
    agents.wait(lambda: agents.trained(40))
    orphan = agents.worker(1)
    os.kill(orphan, signal.SIGSTOP)
    try:
        agents.kill_agent(1)
        agents.start(1)
        agents.wait(lambda: bool(agents.resumes()))
        os.kill(orphan, signal.SIGCONT)
        assert agents.codes() == [0, 0], agents.said()
        agents.wait(lambda: not agents.runs(orphan))
    finally:
        if agents.runs(orphan):
            os.kill(orphan, signal.SIGKILL)
    assert agents.losses() == undisturbed
    assert agents.replayed() > 1
