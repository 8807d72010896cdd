"""
`guard` over the tables of every torch release, run by a stand-in for torch's loop.

The stand-in does what the loops of torch 2.11 to 2.15 have in common. It takes the entries of this
rank's row (its line of the schedule table) one by one, and calls the stage's method for each entry.
These methods compute nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect.guards import deepspeed, megatron, pipelining, torchtitan
from qeffect.guards.pipelining import guard
from qeffect.guards.releases import UntestedReleaseError
from qeffect.refusals import Refused
from qeffect.schedule.actions import Action, Kind, Schedule, ScheduleError
from qeffect.schedule.tables import read_table

ROOT = Path(__file__).parents[2]
TABLES = Path(__file__).parents[1] / "schedule" / "torch_tables"
RELEASES = sorted(path.name for path in TABLES.iterdir() if path.is_dir())
ZBV = "ScheduleZBVZeroBubble_pp2_vpp2_m4"


class Entry:
    """An action as torch has it."""

    def __init__(self, action: Action) -> None:
        self.computation_type = action.kind
        self.stage_index = action.stage
        self.microbatch_index = action.microbatch if action.microbatch >= 0 else None
        self.sub_actions = tuple(map(Entry, action.parts)) or None
        self.text = str(action)

    def __str__(self) -> str:
        return self.text


class Stage:
    """A stage that computes nothing."""

    def __init__(self, index: int, last: int) -> None:
        self.stage_index, self.is_first, self.is_last = index, index == 0, index == last

    def forward_one_chunk(self, fwd_chunk_id: int) -> None: ...

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any, full_backward: bool) -> None: ...

    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None: ...

    def get_fwd_recv_ops(self, chunk: int) -> None: ...

    def get_bwd_recv_ops(self, chunk: int) -> None: ...

    def get_fwd_send_ops(self, chunk: int) -> None: ...

    def get_bwd_send_ops(self, chunk: int) -> None: ...

    def perform_reduce_grad(self, factor: int) -> None: ...


class Walk:
    """A schedule of torch's, as far as `guard` looks at one."""

    _has_backward = True

    def __init__(self, table: Schedule, rank: int) -> None:
        self.rank, self._num_stages = rank, table.num_stages
        self._n_microbatches = table.num_microbatches
        self._stages = [Stage(s, table.num_stages - 1) for s in table.stages_of(rank)]
        self.pipeline_order_with_comms: dict[int, list[Any]] = {
            n: [Entry(a) for a in row if a is not None] for n, row in enumerate(table.rows)
        }

    def step(self) -> None:
        stages = {stage.stage_index: stage for stage in self._stages}
        for entry in self.pipeline_order_with_comms[self.rank]:
            for part in entry.sub_actions or (entry,):
                self.perform(stages[part.stage_index], part)

    @staticmethod
    def perform(stage: Stage, entry: Entry) -> None:
        kind, m = entry.computation_type, entry.microbatch_index
        calls: dict[Kind, Callable[[], None]] = {
            Kind.FORWARD: lambda: stage.forward_one_chunk(m),
            Kind.DGRAD: lambda: stage.backward_one_chunk(m, loss=None, full_backward=False),
            Kind.BACKWARD: lambda: stage.backward_one_chunk(m, loss=None, full_backward=True),
            Kind.WGRAD: lambda: stage.backward_weight_one_chunk(m),
            Kind.RECV_F: lambda: stage.get_fwd_recv_ops(m),
            Kind.RECV_B: lambda: stage.get_bwd_recv_ops(m),
            Kind.SEND_F: lambda: stage.get_fwd_send_ops(m),
            Kind.SEND_B: lambda: stage.get_bwd_send_ops(m),
            Kind.REDUCE_GRAD: lambda: stage.perform_reduce_grad(1),
        }
        calls.get(kind, lambda: None)()


@pytest.mark.parametrize("release", RELEASES)
def test_every_row_of_every_release_is_accepted(release: str) -> None:
    """Two guarded steps of each rank of each table; deferred receives are refused beforehand."""
    accepted, refused = 0, dict[str, str]()
    for path in sorted((TABLES / release).glob("*.csv")):
        table = read_table(path)
        for rank in range(table.num_ranks):
            walk = Walk(table, rank)
            try:
                guarded = guard(walk)
            except ScheduleError as error:
                refused[path.name] = str(error)
                continue
            walk.step()
            walk.step()
            assert 2 == guarded.contract.epoch
            accepted += 1

    assert accepted > 30
    assert bool(refused) is (release >= "2.13")
    assert all("defer" in name for name in refused)
    assert all("schedule.message-order" in said for said in refused.values())


@pytest.mark.parametrize("entry", ["0WAIT_SEND_F1", "3WAIT_REDUCE_GRAD", "0RECV_B2", "3I1"])
@pytest.mark.parametrize("change", ["doubled", "missing"])
def test_waits_of_the_newest_release_are_guarded(entry: str, change: str) -> None:
    """Where torch says when a send or a reduction ends, one too many or too few is refused."""
    walk = Walk(read_table(TABLES / RELEASES[-1] / f"{ZBV}.comms.csv"), 0)
    guard(walk)
    row = walk.pipeline_order_with_comms[0]
    place = list(map(str, row)).index(entry)
    if change == "doubled":
        row.insert(place, row[place])
    else:
        del row[place]

    with pytest.raises(Refused, match=r"ownership\.|reduction\.|order\.|epoch\."):
        walk.step()


class TestUntestedReleases:
    """A torch release that the guard was not tested with."""

    @pytest.fixture(params=["2.10.0", "2.16.0a0+git1", "3.0.1"], autouse=True)
    def release(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        release: str = request.param
        monkeypatch.setattr(torch, "__version__", release)
        return release

    @pytest.fixture
    def walk(self) -> Walk:
        return Walk(read_table(TABLES / RELEASES[-1] / f"{ZBV}.comms.csv"), 0)

    def test_are_refused_and_the_schedule_stays_as_it_was(self, walk: Walk, release: str) -> None:
        with pytest.raises(UntestedReleaseError) as refused:
            guard(walk)

        said = str(refused.value)
        assert said.startswith(f"this guard was tested with torch 2.11 to 2.15; {release} is ")
        assert "untested=True" in said
        assert "step" not in vars(walk)

    def test_are_guarded_on_request(
        self, walk: Walk, release: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        guarded = guard(walk, untested=True)
        walk.step()

        assert guarded.contract.epoch == 1
        assert [release in record.message for record in caplog.records] == [True]

    def test_are_warned_of_in_manner_report(
        self, walk: Walk, release: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        guarded = guard(walk, manner="report")
        walk.step()

        assert guarded.contract.epoch == 1
        assert guarded.violations == ()
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("qeffect.guards", logging.WARNING)
        assert release in record.message


@pytest.mark.parametrize("release", ["2.11.0", "2.13.0+cpu", "2.15.1"])
def test_tested_releases_are_guarded_in_silence(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    walk = Walk(read_table(TABLES / RELEASES[-1] / f"{ZBV}.comms.csv"), 0)
    guarded = guard(walk)
    walk.step()

    assert guarded.contract.epoch == 1
    assert caplog.records == []


@pytest.mark.parametrize("release", ["2.12.1", "2.14.0+cu130"])
@pytest.mark.parametrize("manner", ["refuse", "report"])
def test_releases_between_tested_ones_are_warned_of(
    release: str, manner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their tables were read, but no loop of theirs was run: guarded, with a warning."""
    monkeypatch.setattr(torch, "__version__", release)
    walk = Walk(read_table(TABLES / RELEASES[-1] / f"{ZBV}.comms.csv"), 0)
    guarded = guard(walk, manner=manner)
    walk.step()

    assert guarded.contract.epoch == 1
    said = f"this guard was tested with torch 2.11, 2.13, 2.15, not with {release}"
    assert [said] == [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("page", "name", "tested"),
    [
        ("pipelining", "torch", pipelining.TESTED),
        ("torchtitan", "torch", pipelining.TESTED),
        ("torchtitan", "TorchTitan", torchtitan.TESTED),
        ("deepspeed", "DeepSpeed", deepspeed.TESTED),
        ("megatron", "Megatron-core", megatron.TESTED),
    ],
)
def test_a_page_names_the_tested_releases(page: str, name: str, tested: tuple[str, ...]) -> None:
    """In one sentence, which is that of the code."""
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    several = f"{', '.join(tested[:-1])} and {tested[-1]}" if len(tested) > 1 else tested[0]

    assert f"tested with {name} {several}" in text
