"""
A rank's whole step as one CUDA graph, under the same contract.

The slots' graphs, the messages between ranks, the sums and the update are nodes of one graph, so
that no host stands between two actions. What is checked, and when:

* *Once, when the step is captured*: everything that guarded replays check, since the capture is a
  guarded step; and that the two ends of each channel posted the same messages in the same order.
* *At the two launches behind the captured step's, before them*: every transition of the step, one
  after another, by the same guarded actions over the same contract, with an executor that runs
  nothing (`Rehearsal`). Both are recorded, and have to be the same step.
* *At each later launch, before it*: that all which those transitions read is what it was, but for
  counters that moved alike (`qeffect.steps` says why every guard then says what it said), and that
  the row's program and the gradient destinations are. What differs is rehearsed. Behind the launch
  the whole step is committed as one.
* *At each launch*: that nothing that a graph bakes in has moved.
* *In each launch, by the device*: whether it ran every action as often and in the order that the
  contract says (`qeffect.counts`), whoever launched it. Each rank's word goes to all ranks; the
  update is skipped on every rank where one rank's differs, or where a rank's word did not come,
  and so is that of every launch behind it. Where a rank dies while words are under way, some ranks
  may have heard all and updated: then all begin again from a checkpoint.
* *A step later, by the host*: the device's counts are presented to the contract, and what a rank
  said of itself ends the training on all ranks with one cause. No weights have moved since.

`OneLaunch.rebuild` then begins the epoch again where all ranks are still there: from the weights
and scales behind the last update that all devices ran, which the device has kept by itself. Slots'
graphs stay. A step's graph holds connections that are gone, and is captured again. Where a rank is
gone, the ranks begin again from a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..backends.protocol import BackendError, parameters
from ..step.clipping import DeviceNorm, Norm
from ..step.graphs import GraphExecutor, no_collection
from .baked_optimizer import BakedOptimizer
from .consent import DisagreementError, StoppedError, wait_for
from .gate import UNLIKE, UpdateGate
from .obstacles import obstacles
from .rehearsal import Rehearsal
from .staged_feed import StagedFeed
from .worker import Worker

__all__ = ["OneLaunch", "obstacles"]

PARTS = ("data", "guards", "launch", "step before", "commit")
"""What the host does in a launch: `step before` is its wait for that step, and its verdict."""


class OneLaunch:
    """
    Training steps of one rank, each one launch; the first two are a guarded and a captured one.

    Every rank of the world makes one, and takes each step.

    Args:
        worker: The rank's worker, in mode ``one launch``.

    Attributes:
        host_ms: What the host's parts of the latest launch took, by the names of `PARTS`.
        rehearsal: Its guards; it says how many steps were rehearsed, how many checked as one, and
            why the latest of the former could not be.

    Raises:
        BackendError: The step cannot be one launch; every obstacle is named.
    """

    def __init__(self, worker: Worker) -> None:
        if problems := obstacles(worker):
            raise BackendError(f"the step cannot be one launch: {'; '.join(problems)}")
        self.worker, self.runtime = worker, worker.runtime
        self.capture_seconds = 0.0
        self.steps = 0
        self._begin()

    def _begin(self) -> None:
        """Over the worker's connections as they are now; nothing is captured."""
        self.pipeline = self.worker.pipeline
        self.feed = StagedFeed(self.pipeline.feed)
        self.graph: torch.cuda.CUDAGraph | None = None
        assert self.runtime.counters is not None
        self._gate = UpdateGate(self.runtime.counters, self.worker)
        self._launched: list[Any] = []
        self._spare: list[Any] = []  # events of launches that have ended
        self._left: int | None = None
        self._asking = 0  # 1 while the step before is asked about
        self._captured: BakedOptimizer | None = None
        self._guarded = False  # whether a guarded step was taken over these connections
        self._base: int | None = None  # the epoch of the step that was captured
        self.host_ms: dict[str, float] = {}
        assert isinstance(self.runtime.executor, GraphExecutor)
        self.rehearsal = Rehearsal(self.pipeline, self.runtime.executor)

    def step(self) -> None:
        """
        One optimizer step.

        Raises:
            StoppedError: It, or the one before, ended on every rank, for one cause.
        """
        if self._left is not None:
            raise BackendError("launches were left; call resume() first, or step the worker")
        if not self._guarded:
            self._first()
        else:
            epoch, handoff = self.runtime.epoch, self.runtime.handoff
            try:
                with self.worker.stepping():
                    # The launch runs on the graph stream: behind what the caller's has now.
                    back = handoff.cross()
                    try:
                        self._launch()
                    finally:
                        handoff.cross_back(back)
            except Exception as error:
                raise self._ended(error, epoch) from None
        self.steps += 1

    def _first(self) -> None:
        """A guarded step, in which connections that a capture needs come into being."""
        try:
            self.worker.step()
        except StoppedError:
            self._gate.close(abort=True)
            raise
        self._guarded = True

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """What is raised inside ends the training on every rank, for one cause."""
        epoch = self.runtime.epoch
        try:
            with self.worker.stepping(), self.runtime.caller_scope():
                yield
        except Exception as error:
            raise self._ended(error, epoch) from None

    def _ended(self, error: Exception, epoch: int) -> StoppedError:
        """What was raised in a step ends the training on every rank, for one cause."""
        self._stopped()
        stopped = self.pipeline._stopped(error, epoch, told=epoch - self._asking)
        self._gate.close(abort=True)
        return stopped

    def _stopped(self) -> None:
        self.feed.rehearsing = True
        try:
            self.rehearsal.stopped()
        finally:
            self.feed.rehearsing = False

    def _launch(self) -> None:
        runtime, contract = self.runtime, self.runtime.contract
        at = [time.perf_counter()]
        if self.graph is None:
            self.feed.prepare(self.pipeline.passages.values(), runtime.epoch)
            self._capture()
            at.append(time.perf_counter())
        else:
            try:
                self.feed.load(runtime.epoch)
                at.append(time.perf_counter())
                self._rehearse()
                self._require_unmoved()
            except Exception:
                # What the step before came to is told first, and nobody aborts it under way.
                if contract.counts_awaited:
                    self._confirm(self._launched.pop(0))
                raise
        assert self.graph is not None
        at.append(time.perf_counter())
        self.graph.replay()
        runtime.handoff.record_tail()
        done = self._spare.pop() if self._spare else _event()
        runtime.handoff.record(done)
        at.append(time.perf_counter())
        self._launched.append(done)
        if contract.counts_awaited:
            self._confirm(self._launched.pop(0))
        at.append(time.perf_counter())
        self.rehearsal.commit()
        at.append(time.perf_counter())
        spent = (1e3 * (end - begin) for begin, end in pairwise(at))
        self.host_ms = dict(zip(PARTS, spent, strict=True))

    def _rehearse(self) -> None:
        self.feed.rehearsing = True
        try:
            self.rehearsal.run()
        finally:
            self.feed.rehearsing = False

    def _require_unmoved(self) -> None:
        """
        Require that the optimizer is what was captured.

        Raises:
            BackendError: Its state was replaced, or a learning rate or another number changed.
        """
        assert self._captured is not None
        if not self._captured.unmoved():
            raise BackendError(
                "the optimizer's state has moved, or one of its numbers has changed, since the "
                "step was captured; make a new OneLaunch"
            )

    def _capture(self) -> None:
        """Capture this step, guards and all; what it launches, it launches like every other."""
        runtime, pipeline, contract = self.runtime, self.pipeline, self.runtime.contract
        self._quiet()
        runtime.confirm()
        domain = runtime.domain_name
        before = contract.committed_counts()[domain]
        pipeline.feed = self.feed
        if pipeline.consent is not None:
            # The host waits for the gate's first collective, which only a rank that came joins.
            pipeline.consent.agree(runtime.epoch)
            pipeline.consent.release = self._release
        self._gate.warm()
        self._quiet()
        if pipeline.consent is not None:
            # All capture at once, or none; on a connection that a stop ends.
            pipeline.consent.agree(runtime.epoch)
        self._base = runtime.epoch  # what all ranks begin again from, or none
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with no_collection():
            graph.capture_begin(
                pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
            )
            try:
                pipeline.actions()
                gradients = pipeline.finalize()
                skip = self._gate.capture(gradients)
                self.worker.optimizer.step(gradients, skip=skip, scale=self._gate.scale)
            except BaseException:
                with suppress(RuntimeError):  # what ended the capture is to be told, not this
                    graph.capture_end()
                raise
            graph.capture_end()
        self.capture_seconds = time.perf_counter() - began
        contract.check_commit(caller="main")
        if pipeline.consent is not None:
            pipeline.consent.agree(runtime.epoch)
        self._gate.begin(before, contract.committed_counts()[domain])
        self._quiet()
        self._captured = BakedOptimizer(self.worker.optimizer)
        pipeline.launched = True
        self.graph = graph

    def _release(self) -> None:
        """After a stop: let the gate's kernels go, and drop the graph, which channels wait for."""
        self._gate.let_go()
        self._drop()

    def _drop(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.reset()  # one that still runs is destroyed when it has ended

    def _confirm(self, done: Any) -> None:
        """Learn what the device said of the step before the one that was just launched."""
        self._asking = 1
        self._await(done)
        self._spare.append(done)
        counted, said = self._gate.read()
        self.runtime.contract.present_counts({self.runtime.domain_name: counted})
        if odd := [rank for rank, word in enumerate(said) if word == 1]:
            raise DisagreementError(
                f"the device of rank {odd[0]} did not run what was committed, or its word did not "
                "come"
            )
        if unlike := [rank for rank, word in enumerate(said) if word == UNLIKE]:
            raise DisagreementError(
                f"the reduced gradients of the replica of rank {unlike[0]} have other squares than "
                "those of the first replica"
            )
        self._asking = 0

    def _quiet(self) -> None:
        """Wait for the device as for a launched step: it may be in what a rank that died owes."""
        done = _event()
        self.runtime.handoff.record(done)
        self._await(done)
        torch.cuda.synchronize()  # what other streams have is this rank's alone

    def _await(self, done: Any) -> None:
        """Wait for what was launched, but not for what another rank has given up."""
        limits = self.worker.limits
        wait_for(done, self.pipeline.consent, deadline=limits.commit, grace=limits.grace)

    @property
    def norm(self) -> Norm | None:
        """
        The norm of the last step's gradients, where it is clipped or looked at.

        Waits for the device.
        """
        if self._gate.norm is None or self.graph is None:
            return self.worker.norm
        return self._gate.norm.read()

    @property
    def device_norm(self) -> DeviceNorm | None:
        """Where each launch leaves the norm on the device; None where nobody looks at it."""
        return self._gate.norm

    @property
    def ahead(self) -> int:
        """How many steps were launched of which the host has not learned what they came to."""
        return len(self._launched)

    def gathered(self, own: Tensor) -> Tensor:
        """
        What every rank brings between two steps, the last of which may be under way.

        Args:
            own: On the CPU, of one form on all ranks; every rank calls it.

        Returns:
            Those of all ranks, by rank.

        Raises:
            StoppedError: A rank has stopped, for one cause, in the step that is under way.
        """
        with self._ending():
            self._asking = self.ahead
            found = self.worker.consent.gathered(own)
            self._asking = 0
        return found

    def leave(self) -> None:
        """
        Wait for the last step and its verdict; guarded replays, or a checkpoint, may follow.

        Raises:
            StoppedError: It ended on every rank, for one cause.
        """
        with self._ending():
            if self.runtime.contract.counts_awaited and self._launched:
                self._confirm(self._launched.pop(0))
            self.runtime.drain()
        self._left, self.pipeline.launched = self.runtime.epoch, False
        self._weights_moved()
        self.pipeline.feed = self.feed.inner
        with self.runtime.caller_scope():
            self.runtime.take_snapshot()

    def _weights_moved(self) -> None:
        """Launches move weights, and not the version counters by which caches are told stale."""
        weights = [p for s in self.runtime.stages.values() for p in parameters(s).values()]
        torch.autograd.graph.increment_version(weights)

    def rebuild(self, stopped: StoppedError) -> None:
        """
        Begin the epoch again after a stop that all ranks survived; every rank calls it.

        The next step is a guarded one, the second from here is captured.

        Raises:
            StoppedError: The cause is not recoverable, or the ranks' devices have updated different
                numbers of steps: relaunch, and resume from a checkpoint.
            BackendError: A rank did not come back, or its device came to no end.
        """
        if self._base is None or not stopped.cause.recoverable:
            self.worker.rebuild(stopped)
        else:
            self.worker.settle()
            kept, epoch = self._gate.kept, self._base + int(self._gate.updated)
            self.worker.rebuild(
                stopped, epoch=epoch, restore=lambda: self.runtime.rebuild_from(epoch, kept)
            )
            self._weights_moved()
        self._begin()

    def resume(self) -> None:
        """
        Go on with launches after `leave`, where no step was taken since.

        Raises:
            BackendError: One was: make a new OneLaunch.
        """
        rebuilt = self.pipeline is not self.worker.pipeline
        if rebuilt or self._left not in (None, self.runtime.epoch):
            raise BackendError("steps were taken since launches were left; make a new OneLaunch")
        self._left = None
        if self.graph is not None:
            self.pipeline.feed, self.pipeline.launched = self.feed, True

    def close(self) -> None:
        """Drop the graph: it holds connections, which cannot end before it."""
        if self._gate.open:  # after a stop a device may wait for a rank that is gone
            torch.cuda.synchronize()
        self._drop()
        if self.pipeline.consent is not None:
            self.pipeline.consent.release = None
        self.pipeline.feed = self.feed.inner
        self._gate.close()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
