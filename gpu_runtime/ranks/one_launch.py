"""
A rank's whole step as one CUDA graph (a launch). The contract is the same as for guarded steps.

The actions (F, dI and dW), the messages between ranks, the reductions and the update are nodes of
one graph, so the host does nothing between two actions. The following checks are made:

* *Once, when the step is captured*: the capture is a guarded step, so the contract checks each
  action. In addition, both ends of each channel must have posted the same messages in the same
  order.
* *Before each of the two launches after the captured step*: the contract checks every action of the
  step, one after another, without device work. This is called a rehearsal (`rehearsal.py`). The
  records of both rehearsals must describe the same step.
* *Before each later launch*: everything that the contract's checks read must be unchanged. Only
  counters may have changed, all by the same amount (`qeffect.steps` explains why all checks then
  have the same result). The rank's list of actions and the gradient destinations must also be
  unchanged. If anything differs, the step is rehearsed again. After the launch, one call commits
  the whole step.
* *Before each launch*: all memory addresses that the graph contains must be unchanged.
* *In each launch, by the device*: the device must have run every action as often as the contract
  requires, and in the required order (`qeffect.counts`). The device counts actions whatever code
  launched them (`gate.py`). Each rank votes on the update and sends its vote to all ranks. If one
  rank's counts differ, or its vote is missing, every rank skips this update and the update of every
  later launch. If a rank dies while votes are exchanged, some ranks may have received all votes and
  updated their weights. Then all ranks restart from a checkpoint.
* *One step later, by the host*: the contract checks the device's counts. If a rank voted no, the
  training stops on all ranks with the same cause. No rank has updated its weights since that vote.

A step that runs twice (`double_run.py`) is two launches. The first launch runs the work of the step
and keeps the digests of its gradients. The second launch restores the state, runs the work again,
compares the digests, and then runs the vote and the update. A rank whose two runs differ votes no.

After a stop that all ranks survived, `OneLaunch.rebuild` restarts the epoch (the optimizer step).
The epoch restarts from the weights and scales after the last update. Each device has kept this
state. The graph of the step contains connections that are closed now, so the step is captured
again. If a rank is gone, all ranks restart from a checkpoint.

`step_capture.py` captures the step, and `launch_waits.py` waits for launches and reads their
verdicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from ..backends.protocol import BackendError, parameters
from ..step.clipping import DeviceNorm, Norm
from ..step.launch_executor import LaunchExecutor
from .baked_optimizer import BakedOptimizer
from .consent import StoppedError
from .gate import UpdateGate
from .launch_waits import LaunchWaits, log_event
from .obstacles import obstacles
from .rehearsal import Rehearsal
from .staged_feed import StagedFeed
from .step_capture import StepCapture, post_by_graph
from .worker import Worker

__all__ = ["OneLaunch", "obstacles"]

PARTS = ("data", "guards", "launch", "step before", "commit")
"""Names of the parts of the host's time in a launch; `step before` is the wait for the last step's
verdict.
"""


class OneLaunch:
    """
    Runs the training steps of one rank. The first step is guarded and runs without graphs. The
    second step is captured and launched. Each later step is launched.

    Every rank of the job makes a `OneLaunch`, and takes part in each step.

    Args:
        worker: The rank's worker, in mode ``one launch``.

    Attributes:
        host_ms: The host's time for the latest launch, in milliseconds, by kind of work. `PARTS`
            lists the kinds, such as the launch itself.
        rehearsal: Runs the contract's checks without device work. This object also counts the
            rehearsed steps and the steps checked in one call. It says why the latest rehearsed step
            could not be checked in one call.

    Raises:
        BackendError: The step cannot be one launch. The message lists every obstacle.
    """

    def __init__(self, worker: Worker) -> None:
        if problems := obstacles(worker):
            raise BackendError(f"the step cannot be one launch: {'; '.join(problems)}")
        self.worker, self.runtime = worker, worker.runtime
        self.capture_seconds = 0.0
        self.steps = 0
        self._begin()

    def _begin(self) -> None:
        """Prepare for launches over the worker's current connections. No step is captured yet."""
        self.pipeline = self.worker.pipeline
        self.feed = StagedFeed(self.pipeline.feed)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.twice: tuple[torch.cuda.CUDAGraph, ...] = ()  # both launches of a step that runs twice
        self._messages: list[list[int]] = []  # what each graph posts, for the rank log
        self.between: Callable[[], None] = lambda: None  # called between these; for tests
        if self.pipeline.double is not None:
            self.pipeline.double.forget()
        assert self.runtime.counters is not None
        self._gate = UpdateGate(self.runtime.counters, self.worker)
        self._waits = LaunchWaits(self.worker, self._gate)
        self._capture = StepCapture(self.worker, self.feed, self._gate, self._waits)
        self._left_at: int | None = None
        self._captured: BakedOptimizer | None = None
        self._guarded = False  # whether a guarded step was taken over these connections
        self.host_ms: dict[str, float] = {}
        assert isinstance(self.runtime.executor, LaunchExecutor)
        self.rehearsal = Rehearsal(self.pipeline, self.runtime.executor)

    def step(self) -> None:
        """
        Run one optimizer step.

        Raises:
            StoppedError: All ranks stopped in this step or the previous step, with the same cause.
        """
        if self._left_at is not None:
            raise BackendError(
                "leave() ended the launches; call resume() first, or take the step with Worker.step"
            )
        if not self._guarded:
            self._first()
        else:
            epoch, handoff = self.runtime.epoch, self.runtime.handoff
            try:
                with self.worker.stepping():
                    # The launch runs on the graph stream, after the caller's work so far.
                    back = handoff.cross()
                    try:
                        self._launch()
                    finally:
                        handoff.cross_back(back)
            except Exception as error:
                raise self._ended(error, epoch) from None
        self.steps += 1

    def _first(self) -> None:
        """Run a guarded step, which opens the connections that a capture needs."""
        try:
            self.worker.calibrate()
            gradients = self.worker.step()
        except StoppedError:
            self._gate.close(abort=True)
            raise
        if self.pipeline.double is not None:
            with self.runtime.caller_scope():
                self.pipeline.double.warm(gradients)
        self._guarded = True

    def _runs(self) -> int:
        """How often the next step runs its work: 2 if the step runs twice, else 1."""
        double = self.pipeline.double
        return 2 if double is not None and double.due(self.runtime.epoch) else 1

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """A context in which an exception ends the training on every rank, with the same cause."""
        epoch = self.runtime.epoch
        try:
            with self.worker.stepping(), self.runtime.caller_scope():
                yield
        except Exception as error:
            raise self._ended(error, epoch) from None

    def stop(self, error: Exception) -> StoppedError:
        """End the training on every rank, between two steps; all ranks report the same cause."""
        return self._ended(error, self.runtime.epoch)

    def _ended(self, error: Exception, epoch: int) -> StoppedError:
        """End the training on every rank, with the same cause."""
        self._stopped()
        stopped = self.pipeline._stopped(error, epoch, told=epoch - self._waits.asking)
        self._gate.close(abort=True)
        return stopped

    def _stopped(self) -> None:
        self.feed.rehearsing = True
        try:
            self.rehearsal.stopped()
        finally:
            self.feed.rehearsing = False

    def _launch(self) -> None:
        runtime = self.runtime
        at = [time.perf_counter()]
        if self.graph is None:
            self.feed.prepare(self.pipeline.passages.values(), runtime.epoch)
            captured = self._capture.run(self._release)
            self.capture_seconds, self._captured = captured.seconds, captured.optimizer
            self.graph, self.twice = captured.graph, captured.twice
            self._messages = captured.messages
            at.append(time.perf_counter())
        else:
            try:
                self.feed.load(runtime.epoch)
                at.append(time.perf_counter())
                self._rehearse()
                self._require_unmoved()
            except Exception:
                # First the verdict of the previous step, which may run and must not be aborted.
                self._waits.confirm()
                raise
        assert self.graph is not None
        at.append(time.perf_counter())
        log_event(self.pipeline, "order", messages=self._messages)
        log_event(self.pipeline, "launch")
        runs = self._runs()
        if runs == 2:
            first, second = self.twice
            first.replay()
            self.between()
            second.replay()
            log_event(self.pipeline, "second_run")
        else:
            self.graph.replay()
        runtime.handoff.record_tail()
        self._waits.record()
        at.append(time.perf_counter())
        self._waits.confirm()
        at.append(time.perf_counter())
        epoch = runtime.epoch
        self.rehearsal.commit()
        log_event(self.pipeline, "commit", epoch)
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
        Raise an error if the optimizer has changed since the capture.

        Raises:
            BackendError: The optimizer's state was replaced, or a learning rate or another number
                changed.
        """
        assert self._captured is not None
        if not self._captured.unmoved():
            raise BackendError(
                "since the step was captured, a tensor of the optimizer's state was replaced, or a "
                "number such as the learning rate was changed; make a new OneLaunch"
            )

    def _release(self) -> None:
        """
        After a stop, abort the gate's group and drop the graph, because closing the channels waits
        for the graph.
        """
        self._gate.let_go()
        self._drop()

    def _drop(self) -> None:
        graphs = [graph for graph in (self.graph, *self.twice) if graph is not None]
        self.graph, self.twice = None, ()
        for graph in graphs:
            graph.reset()  # a graph that still runs is destroyed when it has ended

    @property
    def norm(self) -> Norm | None:
        """
        The norm of the last step's gradients; None if gradients are neither clipped nor checked for
        values that are not finite.

        Waits for the device.
        """
        if self._gate.norm is None or self.graph is None:
            return self.worker.norm
        return self._gate.norm.read()

    @property
    def device_norm(self) -> DeviceNorm | None:
        """
        The norm that each launch computes, as tensors on the device; None if the worker needs no
        norm.
        """
        return self._gate.norm

    @property
    def ahead(self) -> int:
        """Number of launched steps without a verdict."""
        return len(self._waits.under_way)

    def weights_ms(self, epoch: int) -> float:
        """
        Return the device's time in one dW of each stage, summed over the stages, in milliseconds.
        The launch of the epoch must have a verdict.

        This time contains no wait for another rank. The result is NaN if the step was not a launch,
        if the step ran twice, or if its time was already returned.
        """
        return self._waits.weights_ms.pop(epoch, math.nan)

    def all_gather(self, own: Tensor) -> Tensor:
        """
        Gather every rank's tensor between two steps. The earlier step may still be running.

        Args:
            own: This rank's tensor, on the CPU, with the same shape and dtype on all ranks. Every
                rank must call this method.

        Returns:
            The tensors of all ranks, by rank.

        Raises:
            StoppedError: A rank has stopped in the step that is still running; all ranks raise the
                same cause.
        """
        with self._ending():
            self._waits.asking = self.ahead
            found = self.worker.consent.all_gather(own)
            self._waits.asking = 0
        return found

    def leave(self) -> None:
        """
        Wait for the last step and its verdict (counts and votes). Afterwards guarded steps or a
        checkpoint are possible.

        Raises:
            StoppedError: All ranks stopped in the last step, with the same cause.
        """
        with self._ending():
            if self.ahead:
                self._waits.confirm()
            self.runtime.drain()
        self._left_at = self.runtime.epoch
        post_by_graph(self.pipeline, False)
        log_event(self.pipeline, "leave")
        self._weights_moved()
        self.pipeline.feed = self.feed.inner
        with self.runtime.caller_scope():
            self.runtime.take_snapshot()

    def _weights_moved(self) -> None:
        """
        Advance the weights' version counters, which reveal stale caches; a launch does not advance
        them.
        """
        weights = [p for s in self.runtime.stages.values() for p in parameters(s).values()]
        torch.autograd.graph.increment_version(weights)

    def rebuild(self, stopped: StoppedError) -> None:
        """
        Restart the epoch (the stopped optimizer step) after a stop that all ranks survived. Every
        rank must call this method.

        The next step is guarded, and the step after it is captured.

        Raises:
            StoppedError: The cause is not recoverable, or the ranks' devices have run different
                numbers of updates: relaunch, and resume from a checkpoint.
            BackendError: A rank did not take part in the restart, or its device did not finish
                before the deadline.
        """
        self._restart(stopped)
        self._begin()

    def give_up(self, stopped: StoppedError) -> None:
        """
        Restart the epoch as `rebuild` does, and use no launches any more. Later steps use
        `Worker.step`, which replays one graph per action.

        This method makes no connections for launches. Otherwise one rank could close such a
        connection while another rank is still connecting.

        Raises:
            StoppedError: The cause is not recoverable, or the ranks' devices have run different
                numbers of updates.
            BackendError: A rank did not take part, or its device did not finish before the
                deadline.
        """
        self._restart(stopped)
        self._drop()
        self.worker.replay_actions()

    def _restart(self, stopped: StoppedError) -> None:
        """Restart the epoch from the weights after the last update that all devices ran."""
        base = self._capture.epoch
        if base is None or not stopped.cause.recoverable:
            self.worker.rebuild(stopped)
        else:
            self.worker.settle()
            kept, epoch = self._gate.kept, base + int(self._gate.updated)
            self.worker.rebuild(
                stopped, epoch=epoch, restore=lambda: self.runtime.rebuild_from(epoch, kept)
            )
            self._weights_moved()

    def resume(self) -> None:
        """
        Continue with launches after `leave`, if no step has run since.

        Raises:
            BackendError: A step has run since `leave`. Make a new `OneLaunch`.
        """
        rebuilt = self.pipeline is not self.worker.pipeline
        if rebuilt or self._left_at not in (None, self.runtime.epoch):
            raise BackendError("steps were taken since leave(); make a new OneLaunch")
        self._left_at = None
        if self.graph is not None:
            self.pipeline.feed = self.feed
            post_by_graph(self.pipeline, True)
        log_event(self.pipeline, "resume")

    def close(self) -> None:
        """
        Drop the graph. The graph contains connections, which cannot be closed while the graph
        exists.
        """
        if self._gate.open:  # after a stop a device may wait for a rank that is gone
            worker = self.worker
            worker.member.synchronize(worker.limits.commit, action="close", step=self.runtime.epoch)
        self._drop()
        if self.pipeline.consent is not None:
            self.pipeline.consent.release = None
        self.pipeline.feed = self.feed.inner
        self._gate.close()
