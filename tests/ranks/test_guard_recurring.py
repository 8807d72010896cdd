"""
Guarded steps of torch's schedules that repeat a recorded step are judged as call by call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from qeffect.guards import recurring
from qeffect.guards.pipelining import guard
from qeffect.refusals import Refused
from tests.ranks import guard_bodies as bodies

#: Legal steps before the faulty one: the guard records the second, and the third repeats it.
LEGAL = 3
TABLES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of two whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


def outcome(name: str, entry: int, change: str) -> tuple[dict[str, Any], int]:
    """What became of an edited step behind legal ones, and how many of those were repeated."""
    run = bodies.Run(name).alone()
    guarded = guard(run.schedule)
    for number in range(LEGAL):
        run.step(number)
    repeated = guarded._boundaries._recurring.repeated

    def edit(row: list[str]) -> None:
        if change == "doubled":
            row.insert(entry, row[entry])
        else:
            del row[entry]

    bodies.edit_row(run, edit)
    return bodies.outcome(run, guarded), repeated


@pytest.mark.parametrize("name", TABLES)
def test_each_edit_has_the_outcome_that_it_has_call_by_call(
    name: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = list(map(str, bodies.Run(name).schedule.pipeline_order_with_comms[rank]))
    cases = [
        (place, change)
        for place, entry in enumerate(row)
        if "SHARD" not in entry and place % 4 == rank
        for change in ("doubled", "left out")
    ]
    found = [outcome(name, *case) for case in cases]
    monkeypatch.setattr(recurring, "_RECORDINGS", 0)
    plain = [outcome(name, *case) for case in cases]

    assert {LEGAL - 2} == {repeated for _, repeated in found}
    assert {0} == {repeated for _, repeated in plain}
    assert [one for one, _ in plain] == [one for one, _ in found]
    assert len(cases) * 0.7 < sum("refused" in one for one, _ in found)


def missed_update(name: str, rank: int) -> list[str]:
    """What is refused where a person runs a step too many, catches that, and then updates."""
    run = bodies.Run(name).alone()
    guarded = guard(run.schedule)
    guarded.follow_optimizer(run.optimizer, walks=1)
    x = torch.full((run.rows, bodies.WIDTH), 0.1)
    found: list[str] = []
    for number in range(6):
        run.optimizer.zero_grad()
        for _ in range(1 + (number == LEGAL)):
            try:
                run.schedule.step(*((x,) if rank == 0 else ()), target=x)
            except Refused as refused:
                found.append(f"step {number}: {refused.clause}")
        try:
            run.optimizer.step()
        except Refused as refused:
            found.append(f"update {number}: {refused.clause}")
            break
    return [*found, f"epoch {guarded.contract.epoch}"]


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleGPipe", *TABLES])
def test_a_step_that_is_refused_at_its_beginning_leaves_the_one_before(
    name: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of the repeated step before it are made, although its update has not come."""
    found = missed_update(name, rank)
    monkeypatch.setattr(recurring, "_RECORDINGS", 0)

    assert found == missed_update(name, rank)
    assert f"step {LEGAL}: epoch.device-count" == found[0]


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleGPipe", *TABLES])
def test_accumulated_steps_are_made_call_by_call(name: str, rank: int) -> None:
    """An epoch of several walks is not recorded; one walk with its update is."""
    for walks, repeated in ((1, 2), (2, 0)):
        run = bodies.Run(name).alone()
        guarded = guard(run.schedule)
        guarded.follow_optimizer(run.optimizer, walks=walks)
        for number in range(4):
            run.optimizer.zero_grad()
            for _ in range(walks):
                x = torch.full((run.rows, bodies.WIDTH), 0.1 + number)
                run.schedule.step(*((x,) if rank == 0 else ()), target=x)
            run.optimizer.step()

        assert repeated == guarded._boundaries._recurring.repeated
        assert 4 == guarded.contract.epoch
