"""Both halves of the handoff on a device without streams, and what they report to the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from qeffect.gpu_runtime.step import streams
from qeffect.gpu_runtime.step.streams import GraphStream, HostHandoff, SideStream, handoff_for

from .helpers import guarded_run
from .orders import table_order

ORDER = table_order("ScheduleZBVZeroBubble", 1)


def test_a_cpu_has_the_no_op() -> None:
    """A CPU's handoff does nothing, but it is there."""
    assert isinstance(handoff_for(torch.device("cpu")), HostHandoff)


def test_every_action_crosses_twice() -> None:
    """Each action waits for its caller before, and its caller waits after: two handoffs each."""
    run = guarded_run(ORDER)
    before = run.runtime.handoff.handoffs

    run.step()

    # Every F, dI and dW, a refresh for each stage, finalize, update.
    actions = len(ORDER.steps) + len(ORDER.stages) + 2
    assert 2 * actions == run.runtime.handoff.handoffs - before


def test_the_kernel_hears_of_both_halves() -> None:
    """After a step neither stream has anything that the other did not wait for."""
    run = guarded_run(ORDER)

    run.step()

    memory = run.runtime.contract.memory
    assert list(memory.submitted) == list(memory.joined)
    assert list(memory.waited) == list(memory.replays)
    assert memory.replays[0] == len(ORDER.steps) + len(ORDER.stages)


def test_the_update_runs_on_the_graph_stream_and_replays_wait_for_it() -> None:
    """
    The optimizer's update runs on the graph stream, after the caller's work. The contract knows
    this: after the update, a refresh on any caller's link is accepted.
    """
    run = guarded_run(ORDER)
    runtime = run.runtime
    told: list[tuple[str, Any]] = []
    placed: list[tuple[bool, str]] = []

    class Watched(HostHandoff):
        inside = False

        def scope(self) -> Any:
            @contextmanager
            def inside() -> Iterator[None]:
                self.inside = True
                yield
                self.inside = False

            return inside()

    handoff = runtime.performer.handoff = Watched()
    step = run.optimizer.step

    def stepped(gradients: Any, **told_more: Any) -> None:
        placed.append((handoff.inside, told[-1][0]))
        step(gradients, **told_more)

    run.optimizer.step = stepped  # type: ignore[method-assign]
    runtime.contract.observer = lambda name, arguments, _: told.append((name, arguments))
    run.step()

    memory = runtime.contract.memory
    end = [name for name, _ in told]
    assert [(True, "check_update")] == placed
    assert ["submit", "join", "check_update", "commit_update", "join", "wait"] == end[-6:]
    assert ("check_update", (0, 0)) in told
    assert [0] == memory.unawaited
    assert [1] == memory.undrained


class FakeCuda:
    """Streams and events of `torch.cuda` that only note what they are asked, on two devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = 0
        self.log: list[str] = []
        log = self.log

        class Stream:
            def __init__(self, device: Any = None, *, handle: int = 7, index: int = 0) -> None:
                self.cuda_stream, self.device_index = handle, index

            def wait_event(self, event: Any) -> None:
                log.append(f"{self.cuda_stream} waits for {event.of}")

        class Event:
            of = 0

            def __init__(self, **_: Any) -> None:
                pass

            def record(self, stream: Stream) -> None:
                self.of = stream.cuda_stream

        self.current: dict[int, Any] = {0: Stream(handle=1), 1: Stream(handle=2, index=1)}
        self.made = 0

        def current_stream(_: Any) -> Stream:
            self.made += 1
            found: Stream = self.current[0]
            return found

        def set_stream(stream: Stream) -> None:
            self.current[stream.device_index] = stream
            self.device = stream.device_index

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before = self.device, self.current[0]
            set_stream(stream)
            yield
            self.device, self.current[0] = before

        monkeypatch.setattr(streams, "_current_handle", lambda i: self.current[i].cuda_stream)
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": current_stream,
            "set_stream": set_stream,
            "current_device": lambda: self.device,
            "stream": on,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        self.Stream = Stream


class TestGraphStream:
    """The handoff of a device, over streams that note what they are asked."""

    def test_both_halves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The graph stream waits for the caller, runs, and the caller waits for its tail."""
        cuda = FakeCuda(monkeypatch)
        handoff = GraphStream(torch.device("cuda", 0))

        back = handoff.cross()
        assert 7 == cuda.current[0].cuda_stream
        handoff.record_tail()
        handoff.cross_back(back)

        assert 1 == cuda.current[0].cuda_stream
        assert ["7 waits for 1", "1 waits for 7"] == cuda.log
        assert 2 == handoff.handoffs

    def test_a_caller_on_the_graph_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own order is both halves: no event, no switch; both are counted all the same."""
        cuda = FakeCuda(monkeypatch)
        handoff = GraphStream(torch.device("cuda", 0))
        torch.cuda.set_stream(handoff.stream)

        handoff.cross_back(back := handoff.cross())

        assert back is None
        assert [] == cuda.log
        assert 2 == handoff.handoffs

    def test_callers_are_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A caller's stream is made into an object once; another caller's is another."""
        cuda = FakeCuda(monkeypatch)
        handoff = GraphStream(torch.device("cuda", 0))
        for handle in (1, 3, 1, 3):
            cuda.current[0] = cuda.Stream(handle=handle)
            handoff.wait_for_caller()

        assert [f"7 waits for {handle}" for handle in (1, 3, 1, 3)] == cuda.log
        assert 2 == cuda.made

    def test_another_device_is_current(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The device and both its stream and the other's are as before afterwards."""
        cuda = FakeCuda(monkeypatch)
        handoff = GraphStream(torch.device("cuda", 0))
        cuda.device = 1

        back = handoff.cross()
        assert (0, 7) == (cuda.device, cuda.current[0].cuda_stream)
        handoff.cross_back(back)

        assert 1 == cuda.device
        assert [1, 2] == [cuda.current[i].cuda_stream for i in (0, 1)]

    def test_a_caller_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Streams that come and go do not pile up."""
        cuda = FakeCuda(monkeypatch)
        handoff = GraphStream(torch.device("cuda", 0))
        for handle in range(100, 300):
            cuda.current[0] = cuda.Stream(handle=handle)
            handoff.wait_for_caller()

        assert len(handoff._callers._known) <= 64


class TestSideStream:
    """A stream that waits for none, over streams that note what they are asked."""

    def test_the_caller_waits_behind_it_and_it_waits_for_nobody(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is current inside; a caller's stream is made into an object once."""
        cuda = FakeCuda(monkeypatch)
        side = SideStream(torch.device("cuda", 0))
        for _ in range(2):
            with side.scope() as caller:
                assert (7, 1) == (cuda.current[0].cuda_stream, caller.cuda_stream)
            assert 1 == cuda.current[0].cuda_stream

        assert ["1 waits for 7"] * 2 == cuda.log
        assert 1 == cuda.made

    def test_what_fails_inside_leaves_the_callers_stream_current(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the caller waits for nothing."""
        cuda = FakeCuda(monkeypatch)
        side = SideStream(torch.device("cuda", 0))
        with pytest.raises(KeyError), side.scope():
            raise KeyError
        assert 1 == cuda.current[0].cuda_stream
        assert [] == cuda.log

    def test_another_device_is_current(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The device and both its stream and the other's are as before afterwards."""
        cuda = FakeCuda(monkeypatch)
        side = SideStream(torch.device("cuda", 0))
        cuda.device = 1
        with side.scope():
            assert (0, 7) == (cuda.device, cuda.current[0].cuda_stream)

        assert 1 == cuda.device
        assert [1, 2] == [cuda.current[i].cuda_stream for i in (0, 1)]
