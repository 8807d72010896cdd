"""
Waits between the host and two streams: each wait is needed, because a delay shows an error without
it.

Every test delays a stream by a long kernel. With the wait the result is right; without the wait the
same test body finds a stale result.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qeffect.counts import COUNTED, DeviceCounts
from qeffect.gpu_runtime.lab.comparisons.driver import GuardedRun
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.step import captures, graphs
from qeffect.gpu_runtime.step.memory.arena import Arena
from qeffect.gpu_runtime.step.memory.counters import DeviceCounters
from qeffect.gpu_runtime.step.memory.numerical_state import live_state
from qeffect.gpu_runtime.step.streams import GraphStream
from tests.ranks import ranks
from tests.ranks.ranks import launch

from . import waiting_bodies
from .helpers import guarded_run
from .test_one_launch import LIMIT_S, ONE
from .waiting_bodies import LONG_DELAY, UnrecordedEvent, delay

WAITS = pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])


class TestCounters:
    """`step/memory/counters.py`: the host reads what the device has written, and not before."""

    @pytest.fixture
    def counters(self) -> DeviceCounters:
        """Counters of one slot, compiled, at zero, and read."""
        made = DeviceCounters([(0, 0)], torch.device("cuda", torch.cuda.current_device()))
        made.warm()
        made.read()
        torch.cuda.synchronize()
        assert made.taken().stages[0] == (0,) * len(COUNTED)
        return made

    @staticmethod
    def taken(counters: DeviceCounters) -> int:
        """How many F the host learns of."""
        return counters.taken().stages[0][COUNTED.index("F")]

    @WAITS
    def test_taken_waits_for_the_copy(self, waits: bool, counters: DeviceCounters) -> None:
        """`read` records an event behind its copy, and `taken` waits for the event."""
        if not waits:
            counters._done = UnrecordedEvent()
        delay()
        counters.ran("F", 0)
        counters.read()

        assert self.taken(counters) == int(waits)
        torch.cuda.synchronize()

    @WAITS
    def test_taken_waits_for_the_gate(self, waits: bool, counters: DeviceCounters) -> None:
        """`gate` records the event behind its comparison; its outcome is the device's."""
        if not waits:
            counters._done = UnrecordedEvent()
        delay()
        counters.ran("F", 0)
        skip = counters.gate(DeviceCounts(0, {0: (0,) * len(COUNTED)}))

        assert self.taken(counters) == int(waits)
        assert float(skip) == 1.0


class TestGraphs:
    """`step/graphs.py`: the tail of a graph, and what a capture waits for."""

    @WAITS
    def test_a_graph_marks_its_tail(self, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """A caller waits for the event inside the graph of F before it reads the outputs."""
        with monkeypatch.context() as patch:
            if not waits:
                patch.setattr(GraphStream, "record_tail", lambda self: None)
            run = guarded_run()
        run.step()
        found, before, left = read_behind_a_delay(run)

        assert not same(before, left), (
            "F changed no output, so the test cannot detect a missing wait"
        )
        assert same(found, left) == waits

    @WAITS
    def test_a_capture_waits_for_its_caller(
        self, waits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """State that the caller is still writing is kept over the warm-up as it will be."""
        runtime = guarded_run(captured=False).runtime
        state = list(live_state(runtime.domain).values())
        real = captures.warm_up

        def drained(*given: Any) -> None:
            real(*given)
            torch.cuda.synchronize()  # the caller has written before anything is put back

        monkeypatch.setattr(captures, "warm_up", drained)
        with runtime.handoff.scope():  # memory for copies is there: making it may wait
            copies = [tensor.clone() for tensor in state]
        del copies
        if not waits:
            monkeypatch.setattr(GraphStream, "wait_for_caller", lambda self: None)
        torch.cuda.synchronize()
        delay()
        for tensor in state:
            tensor.fill_(0.5)
        graphs.capture(runtime.domain, runtime.memories, runtime.plan, runtime.handoff)
        torch.cuda.synchronize()

        assert all(bool((tensor == 0.5).all()) for tensor in state) == waits

    @WAITS
    def test_a_warm_up_is_drained(self, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time of the warm-up is measured after the device has finished, and no capture runs at
        the same time."""
        runtime = guarded_run(captured=False).runtime
        real, drained = captures.warm_up, []
        took = delayed_seconds()

        def slow(*given: Any) -> None:
            real(*given)
            delay()

        monkeypatch.setattr(captures, "warm_up", slow)
        begin = torch.cuda.CUDAGraph.capture_begin

        def begun(graph: Any, *given: Any, **options: Any) -> None:
            drained.append(runtime.handoff.stream.query())  # type: ignore[attr-defined]
            begin(graph, *given, **options)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begun)
        if not waits:
            monkeypatch.setattr(GraphStream, "synchronize", lambda self: None)
            # To give memory back to the device waits for the device too.
            monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        executor = graphs.capture(runtime.domain, runtime.memories, runtime.plan, runtime.handoff)

        assert drained[0] == waits
        if waits:
            assert executor.report.warmup_seconds > 0.9 * took * len(runtime.memories)
        torch.cuda.synchronize()

    @WAITS
    def test_a_capture_ends_with_an_idle_stream(
        self, waits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Destinations are zero when `capture` returns, for a caller of any stream."""
        runtime = guarded_run(captured=False).runtime
        real = Arena.zero

        def slow(arena: Arena) -> None:
            delay()
            real(arena)

        monkeypatch.setattr(Arena, "zero", slow)
        if not waits:
            monkeypatch.setattr(GraphStream, "synchronize", lambda self: None)
        graphs.capture(runtime.domain, runtime.memories, runtime.plan, runtime.handoff)

        assert runtime.handoff.stream.query() == waits  # type: ignore[attr-defined]
        torch.cuda.synchronize()


def delayed_seconds() -> float:
    """How long one delay takes here."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    delay()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def read_behind_a_delay(run: GuardedRun) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """
    Run the first F of an epoch behind a delay of the graph stream.

    Returns:
        Its outputs as a caller on a stream of its own reads them at once, as they were before F,
        and as F left them.
    """
    runtime, actions = run.runtime, run.runtime.actions
    _, index, m = runtime.order.steps[0]
    key, stage = runtime.key(index, m), runtime.stages[index]
    inputs = run.workload.inputs(stage, key.epoch, m)
    memory = runtime.memories[index]
    outputs = runtime.executor.slots[memory.slot_of[m]].static.outputs  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    before, found, left = ([tensor.clone() for tensor in outputs] for _ in range(3))
    torch._foreach_copy_(found, list(outputs))  # its kernel is loaded before the delay
    graph_stream = runtime.handoff.stream  # type: ignore[attr-defined]
    caller, done = torch.cuda.Stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    assert caller != graph_stream, "expected a caller's stream of its own, found the graph stream"
    torch.cuda.synchronize()
    with torch.cuda.stream(caller):
        delay(graph_stream, LONG_DELAY)
        done.record(graph_stream)
        actions.refresh(index)
        ref = actions.forward(key, inputs)
        torch._foreach_copy_(found, list(actions.outputs(key, ref)))
        assert not done.query(), "the delay ended before the caller's copy was queued"
        actions.finish_outputs(key, ref)
    torch.cuda.synchronize()
    torch._foreach_copy_(left, list(outputs))
    return found, before, left


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all tensors are equal, once the device is idle."""
    torch.cuda.synchronize()
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestLaunches:
    """`ranks/one_launch.py`: the waits around a launch, on one rank."""

    @pytest.fixture(autouse=True)
    def _bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ranks, "LIMIT_S", LIMIT_S)

    @staticmethod
    def said(body: Any, waits: bool, folder: Path, job: Job = ONE, *, refused: str = "") -> Any:
        """What the rank says; the model of ranks refuses its log by a clause, or accepts it."""
        found = launch(1, folder, body, job, waits, refused=refused)
        assert found.codes == [0]
        return found.words[0]

    @WAITS
    def test_a_step_is_confirmed_when_it_has_ended(self, waits: bool, tmp_path: Path) -> None:
        """
        The host waits for the step before; else it reads a row that is not published.

        It then stops as though a connection were lost, which no other rank ended. The model of
        ranks refuses such a stop.
        """
        clause = "" if waits else "ranks.order"
        why = self.said(waiting_bodies.confirmed, waits, tmp_path, refused=clause)

        assert (why == "") == waits

    @WAITS
    def test_a_launch_waits_for_its_caller(self, waits: bool, tmp_path: Path) -> None:
        """A rate that the caller's stream sets is the rate of the update."""
        assert self.said(waiting_bodies.rated, waits, tmp_path) == waits

    @WAITS
    def test_a_caller_waits_for_the_launch(self, waits: bool, tmp_path: Path) -> None:
        """The tail behind the launch is that of the update, not of the last dW."""
        assert self.said(waiting_bodies.updated, waits, tmp_path) == waits

    @WAITS
    def test_leaving_drains_the_device(self, waits: bool, tmp_path: Path) -> None:
        """`leave` also waits for device work that was submitted after the last launch."""
        assert self.said(waiting_bodies.left, waits, tmp_path) == waits

    @WAITS
    def test_closing_waits_for_the_launch(self, waits: bool, tmp_path: Path) -> None:
        """`close` drops the graph when its launch has ended; every stream then sees the update."""
        assert self.said(waiting_bodies.closed, waits, tmp_path) == waits
