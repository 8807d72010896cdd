"""
What one rank runs in the tests of waits around a launch, once with each wait and once without it.

A long kernel delays one stream, so that work that does not wait for the stream always reads too
early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qeffect.gpu_runtime.ranks.consent import StoppedError
from qeffect.gpu_runtime.ranks.job import Job
from qeffect.gpu_runtime.ranks.one_launch import OneLaunch
from qeffect.gpu_runtime.ranks.worker import Worker
from qeffect.gpu_runtime.step.optimizer import Gradients
from tests.ranks.launch_bodies import BEFORE, _made

#: Cycles of a kernel that waits: about 0.2 s, longer than a step of a small model by far.
DELAY = 400_000_000
#: About 2 s, for a delay behind which a busy host has to queue an action of its own.
LONG_DELAY = 10 * DELAY


class UnrecordedEvent(torch.cuda.Event):
    """An event that is never recorded, so that a wait for the event returns at once."""

    def record(self, stream: Any = None) -> None:
        """Record nothing."""


def delay(stream: Any = None, cycles: int = DELAY) -> None:
    """
    Keep a stream busy, by default the current stream.

    The first use of a kernel in a process loads the kernel, which may wait for all streams. So all
    work that is queued behind a delay must have run once before.
    """
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _begun(job: Job, prepare: Callable[[OneLaunch], None] | None = None) -> OneLaunch:
    """A runner whose next step is checked in one call."""
    worker = _made(job, "cuda", one=True, rate=1e-3)
    runner = OneLaunch(worker)
    if prepare is not None:
        prepare(runner)
    for _ in range(BEFORE):
        runner.step()
    torch.cuda.synchronize()
    return runner


class _Weights:
    """Copies of all parameters, in memory that is allocated before any stream is delayed."""

    def __init__(self, worker: Worker) -> None:
        self._live = [t.detach() for t in worker.optimizer.named.values()]
        self._kept = [t.clone() for t in self._live]
        self.take()  # its kernel is loaded before anything is delayed

    def take(self) -> None:
        """Copy on the current stream, without waiting for another."""
        torch._foreach_copy_(self._kept, self._live)

    def same(self, other: _Weights) -> bool:
        """Whether two copies are equal, once the device is idle."""
        torch.cuda.synchronize()
        return all(torch.equal(a, b) for a, b in zip(self._kept, other._kept, strict=True))


def _close(runner: OneLaunch) -> None:
    torch.cuda.synchronize()
    runner.leave()
    runner.close()
    runner.worker.close()


def confirmed(job: Job, waits: bool) -> str:
    """
    Run two launches of which the first is delayed; return why the second launch stopped, or an
    empty text if it did not stop.
    """
    runner = _begun(job)
    if not waits:
        runner._waits.wait = lambda done: None  # type: ignore[method-assign]
    delay(runner.runtime.handoff.stream)  # type: ignore[attr-defined]
    try:
        for _ in range(2):
            runner.step()
    except StoppedError as stopped:
        torch.cuda.synchronize()
        return stopped.cause.text
    _close(runner)
    return ""


def rated(job: Job, waits: bool) -> bool:
    """
    Whether a launch has used the learning rate 0 that the caller's stream sets behind a delay.
    """
    runner = _begun(job)
    handoff: Any = runner.runtime.handoff
    before, after = _Weights(runner.worker), _Weights(runner.worker)
    torch.cuda.synchronize()
    if not waits:
        handoff._from_caller = UnrecordedEvent()
    delay()
    runner.worker.optimizer.set_rate(0.0)
    runner.step()
    torch.cuda.synchronize()
    after.take()
    still = after.same(before)
    _close(runner)
    return still


def updated(job: Job, waits: bool) -> bool:
    """Whether a caller that reads the weights right after a launch finds updated weights."""

    def late(runner: OneLaunch) -> None:
        """Delay each launch behind its last dW, whose graph has recorded the tail."""
        capture = runner._gate.capture

        def delayed(gradients: Gradients | None, differs: Tensor | None = None) -> Tensor:
            if gradients is not None:
                torch.cuda._sleep(DELAY)  # type: ignore[no-untyped-call]
            return capture(gradients, differs)

        runner._gate.capture = delayed  # type: ignore[method-assign]

    runner = _begun(job, late)
    handoff: Any = runner.runtime.handoff
    before, found, left = (_Weights(runner.worker) for _ in range(3))
    torch.cuda.synchronize()
    if not waits:
        handoff.record_tail = lambda: None
    runner.step()
    found.take()
    torch.cuda.synchronize()
    left.take()
    assert not left.same(before), (
        "the step changed no weight, so the test cannot detect a missing wait"
    )
    fresh = found.same(left)
    _close(runner)
    return fresh


def left(job: Job, waits: bool) -> bool:
    """Whether `leave` returns only when the work queued behind the last launch has ended."""
    runner = _begun(job)
    runtime = runner.runtime
    flag, found = (torch.zeros((), device=runner.worker.member.device) for _ in range(2))
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    flag.fill_(0.0)
    torch.cuda.synchronize()
    with runtime.caller_scope():
        delay()
        flag.fill_(1.0)
    if not waits:
        runtime.drain = runtime.contract.drain  # type: ignore[method-assign]
    runner.leave()
    with torch.cuda.stream(aside):  # waits for no other stream
        found.copy_(flag)
    torch.cuda.synchronize()
    assert float(flag) == 1.0
    runner.close()
    runner.worker.close()
    return float(found) == 1.0


def closed(job: Job, waits: bool) -> bool:
    """Whether every stream reads the weights of the last launch once `close` has returned."""
    runner = _begun(job)
    before, found, after = (_Weights(runner.worker) for _ in range(3))
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before.take()
    torch.cuda.synchronize()
    delay(runner.runtime.handoff.stream)  # type: ignore[attr-defined]
    runner.step()
    # The graph is dropped afterwards, so that nothing but the wait can be seen.
    drop, runner._drop = runner._drop, lambda: None  # type: ignore[method-assign]
    synchronize = torch.cuda.synchronize
    if not waits:
        torch.cuda.synchronize = lambda *_: None
    runner.close()
    torch.cuda.synchronize = synchronize
    with torch.cuda.stream(aside):  # waits for no other stream
        found.take()
    torch.cuda.synchronize()
    after.take()
    assert not after.same(before), (
        "the step changed no weight, so the test cannot detect a missing wait"
    )
    fresh = found.same(after)
    drop()
    runner.worker.close()
    return fresh
