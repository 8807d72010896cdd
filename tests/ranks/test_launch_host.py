"""What the host does around a launch, on a machine without a device; the graph is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qeffect.counts import DeviceCounts
from qeffect.gpu_runtime.ranks.baked_optimizer import BakedOptimizer
from qeffect.gpu_runtime.ranks.channels import LostError
from qeffect.gpu_runtime.ranks.consent import Cause, StoppedError
from qeffect.gpu_runtime.ranks.gate import UpdateGate
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.launch_waits import LaunchWaits
from qeffect.gpu_runtime.ranks.one_launch import PARTS, OneLaunch
from qeffect.gpu_runtime.ranks.rehearsal import Rehearsal
from qeffect.gpu_runtime.ranks.side_stream_feed import SideStreamFeed, feed_data
from qeffect.gpu_runtime.ranks.staged_feed import StagedFeed
from qeffect.gpu_runtime.ranks.step_capture import StepCapture
from qeffect.gpu_runtime.step.clipping import Clipping
from qeffect.gpu_runtime.step.optimizer import Optimizer
from qeffect.refusals import Refused
from tests.ranks.recurring import SMALL, Rank

FIRST = 4  # launches until one is checked as one: here none comes before that is no launch


class _Event:
    """An event of a device that is always done."""

    made = 0

    def __init__(self) -> None:
        _Event.made += 1

    def record(self) -> None:
        """At once."""

    def query(self) -> bool:
        """It is."""
        return True


class _Launched:
    """A launch's host side over one rank; a script determines what the device reports."""

    def __init__(self) -> None:
        self.rank = rank = Rank(
            Job(schedule="zbv", pp=2, microbatches=2, config=SMALL), 0, late=True
        )
        self.replays, self.word = 0, 0
        self.ran: list[DeviceCounts] = []
        self.optimizer = Optimizer(list(rank.runtime.stages.values()))
        feed = StagedFeed(rank.pipeline.feed)
        feed.prepare(rank.pipeline.passages.values(), 0)
        rank.pipeline.feed = feed
        rank.pipeline.consent = SimpleNamespace(stop=_stop)  # type: ignore[assignment]
        whole = self.whole = object.__new__(OneLaunch)
        whole.worker = SimpleNamespace(  # type: ignore[assignment]
            stepping=nullcontext,
            limits=SimpleNamespace(commit=1.0, grace=0.0),
            optimizer=self.optimizer,
        )
        whole.runtime, whole.pipeline, whole.feed = rank.runtime, rank.pipeline, feed
        whole.graph = SimpleNamespace(replay=self._replay)  # type: ignore[assignment]
        whole._gate = SimpleNamespace(  # type: ignore[assignment]
            read=lambda: (self.ran.pop(0), [0, self.word]),
            close=lambda **_: None,
            read_steps=0,
            stamps=SimpleNamespace(take=lambda _: 1.5),
        )
        whole.worker.pipeline = rank.pipeline
        whole._waits = LaunchWaits(whole.worker, whole._gate)
        whole._capture = StepCapture(whole.worker, feed, whole._gate, whole._waits)
        whole._left_at, whole.steps = None, 1
        whole._messages = []
        whole._guarded = True
        whole.rehearsal = rank.rehearsal
        whole._captured = BakedOptimizer(self.optimizer)

    def _replay(self) -> None:
        self.replays += 1

    def step(self) -> None:
        """A launch, and a device that runs what is committed."""
        self.whole.step()
        self.ran.append(self.rank.contract.committed_counts()[self.rank.runtime.domain_name])


def _stop(error: Exception, epoch: int, atom: Any, passed: int) -> StoppedError:
    return StoppedError(Cause("raised", 0, None, None, None, str(error), False))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Launched]:
    """Launches of which the next is checked as one."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    made = _Launched()
    for _ in range(FIRST):
        made.step()
    assert made.rank.rehearsal.steps == [FIRST - 1, 1]
    return made


def test_launches_commit_their_steps_and_say_what_the_host_took(launched: _Launched) -> None:
    """One replay, one epoch and one commit as one each; the step before is confirmed behind it."""
    for _ in range(3):
        launched.step()
    contract = launched.rank.contract
    assert launched.replays == contract.epoch == FIRST + 3
    assert launched.rank.rehearsal.steps == [FIRST - 1, 4]
    assert contract.counts_awaited
    assert len(launched.ran) == 1
    assert tuple(launched.whole.host_ms) == PARTS
    assert min(launched.whole.host_ms.values()) >= 0


def test_events_of_launches_that_have_ended_are_taken_again(
    launched: _Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one that is still waited for: that would say that both have ended."""
    before, recorded = _Event.made, []
    record = _Event.record
    monkeypatch.setattr(_Event, "record", lambda self: (recorded.append(self), record(self))[0])
    for _ in range(6):
        launched.step()
        (under_way,) = launched.whole._waits.under_way
        assert under_way is recorded[-1]
        assert under_way not in launched.whole._waits.spare
    assert len(recorded) == 6
    assert len({*map(id, recorded)}) == 2
    assert _Event.made - before <= 1


def test_a_device_that_disagrees_stops_the_launch_behind_it(
    launched: _Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch of a step that was launched and not committed can be neither run nor saved."""
    epoch, replays = launched.rank.contract.epoch, launched.replays
    launched.word = 1
    with pytest.raises(
        StoppedError, match="the device of rank 1 did not run the committed actions"
    ):
        launched.step()
    contract = launched.rank.contract
    assert (contract.epoch, launched.replays) == (epoch, replays + 1)
    with pytest.raises(Refused, match=r"persistence\.mid-epoch"):
        launched.rank.runtime.checkpoint()

    monkeypatch.setattr(Rehearsal, "stopped", lambda self: None)
    blind = _Launched()
    for _ in range(FIRST):
        blind.step()
    blind.word = 1
    with pytest.raises(StoppedError):
        blind.step()
    blind.rank.contract.withdraw_step()  # as though nothing had been launched
    blind.rank.runtime.checkpoint()


class _Never(_Event):
    """An event of a device that is in what a rank that died owes it."""

    def query(self) -> bool:
        """It is not."""
        return False


@pytest.mark.parametrize("stopped", [True, False], ids=["heard", "late"])
def test_a_capture_begins_behind_a_bounded_wait_for_the_device(
    stopped: bool, launched: _Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guarded step before may wait in a message of a rank that died; then nothing is asked."""
    whole, asked = launched.whole, []
    monkeypatch.setattr(torch.cuda, "Event", _Never)
    monkeypatch.setattr(launched.rank.runtime, "confirm", lambda: asked.append("confirm"))
    whole.graph = None
    whole.worker.limits = SimpleNamespace(commit=0.1, grace=0.0)  # type: ignore[assignment]
    whole.pipeline.consent = SimpleNamespace(  # type: ignore[assignment]
        stop=_stop, stopped=lambda: stopped, agree=asked.append
    )
    said = "with all ranks " + ("lost its connection" if stopped else "did not end before")
    with pytest.raises(StoppedError, match=said):
        launched.step()
    assert asked == []


@pytest.mark.parametrize("stopped", [True, False], ids=["heard", "late"])
@pytest.mark.parametrize("read", ["norm", "counts"])
def test_a_norm_or_counts_are_read_behind_a_bounded_wait_for_the_device(
    read: str, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of guarded replays: the device may wait in a message of a rank that died."""
    pipeline = Rank(Job(schedule="il", pp=1, vpp=2, microbatches=2, config=SMALL), 0).pipeline
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", _Never)
    monkeypatch.setattr(pipeline, "run_actions", lambda: None)
    monkeypatch.setattr(pipeline, "finalize", lambda: {0: {"a": torch.ones(1)}})
    monkeypatch.setattr(pipeline.runtime.domain, "device", torch.device("cuda", 0))
    monkeypatch.setattr("qeffect.gpu_runtime.ranks.pipeline.square_sums", asked.append)
    monkeypatch.setattr(pipeline.runtime, "device_counts", lambda: asked.append(read))
    if read == "norm":
        pipeline.clipping = Clipping(max_norm=1.0)
    else:
        monkeypatch.setattr(pipeline.runtime, "counters", SimpleNamespace())
    pipeline.consent = SimpleNamespace(  # type: ignore[assignment]
        stop=_stop, stopped=lambda: stopped, agree=asked.append, deadline=0.1, grace=0.0
    )
    said = "with all ranks " + ("lost its connection" if stopped else "did not end before")
    with pytest.raises(StoppedError, match=said):
        pipeline.step(Optimizer(list(pipeline.runtime.stages.values())))
    assert asked == []


def _rate(launched: _Launched) -> None:
    launched.optimizer.set_rate(5e-4)


def _state(launched: _Launched) -> None:
    held = launched.optimizer.adamw.state
    target = next(iter(launched.optimizer.named.values()))
    held[target]["exp_avg"] = torch.zeros(3)


@pytest.mark.parametrize("happens", [_rate, _state])
def test_an_optimizer_that_has_changed_stops_before_the_launch(
    happens: Callable[[_Launched], None], launched: _Launched
) -> None:
    """
    A number that the graph holds, or the place of a moment; nothing is launched.

    What the step before came to is heard first: nobody ends connections under it.
    """
    replays = launched.replays
    happens(launched)
    assert len(launched.ran) == 1
    with pytest.raises(StoppedError, match="make a new OneLaunch"):
        launched.step()
    assert launched.replays == replays
    assert launched.ran == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda given: given[:1], r"expected torch\.\w+ of \(.*found torch\.\w+ of \(1, "),
        (lambda given: given.double(), r"found torch\.float64 of"),
    ],
    ids=["one that would be spread", "another type"],
)
def test_data_of_another_form_stop_before_the_launch(
    other: Callable[[torch.Tensor], torch.Tensor], said: str, launched: _Launched
) -> None:
    """A copy would take them all the same; guarded replays refuse them."""
    inner, replays = launched.whole.feed.inner, launched.replays
    give = inner.inputs
    inner.inputs = lambda *place: tuple(map(other, give(*place)))  # type: ignore[method-assign]
    with pytest.raises(StoppedError, match=said):
        launched.step()
    assert launched.replays == replays


def test_a_gate_without_its_connection_takes_no_word_for_that_of_all() -> None:
    """One rank's yes, read as every rank's, would move its weights alone."""
    gate = object.__new__(UpdateGate)
    gate.world, gate.group = 2, None
    heard = torch.ones(2)
    with pytest.raises(LostError, match="commit"):
        gate._gather(heard, torch.ones(1))
    assert heard.tolist() == [0.0, 0.0]
    gate.world = 1
    gate._gather(heard, torch.ones(1))
    assert heard.tolist() == [1.0, 1.0]


def test_the_data_of_a_step_come_in_a_copy_for_each_type(
    launched: _Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many microbatches there are."""
    copies: list[int] = []
    inner = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: (copies.append(len(to)), inner(to, of))[1]
    )
    held = [t for _, own in launched.whole.feed._held.values() for t in own]
    launched.step()
    kinds = {tensor.dtype for tensor in held}
    assert len(copies) == len(kinds)
    assert sum(copies) == len(held) > 4


def test_data_made_beside_the_stream_change_streams_once() -> None:
    """However much a step takes; whatever is given, be it twice, lives until it was used."""
    kept: list[Any] = []
    entered: list[str] = []

    class _Data:
        def record_stream(self, stream: Any) -> None:
            kept.append((self, stream))

    one = _Data()

    class _Inner:
        def inputs(self, stage: Any, step: int, microbatch: int) -> Any:
            assert entered[-1] == "in"
            return (_Data(), one)

    class _Scoped(SideStreamFeed):
        def __init__(self) -> None:
            self.inner = _Inner()  # type: ignore[assignment]

        @contextmanager
        def made_here(self) -> Iterator[Any]:
            entered.append("in")
            yield "caller"
            entered.append("out")

    stage: Any = None
    given = feed_data(_Scoped(), 3, [("inputs", stage, m) for m in range(4)])

    assert entered == ["in", "out"]
    assert len(given) == 4
    assert len({*kept}) == len(kept) == 5
    assert {stream for _, stream in kept} == {"caller"}
    assert {data for data, _ in kept} == {data for own in given for data in own}
