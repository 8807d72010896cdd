"""
Capture a rank's whole step as one graph. If some steps run twice, two more graphs are captured, one
for each run of such a step.

Either all ranks capture in the same step, or no rank captures. A capture is a guarded step: the
contract checks each action while the device work is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from ..backends.epoch_scales import move_scales
from ..backends.protocol import BackendError
from ..step.captures import capture_graph, no_collection
from ..step.optimizer import Gradients
from .baked_optimizer import BakedOptimizer
from .double_run import DoubleRun
from .gate import UpdateGate
from .launch_waits import LaunchWaits, log_event
from .pipeline import Pipeline
from .staged_feed import StagedFeed
from .worker import Worker

__all__ = ["CapturedStep", "StepCapture", "post_by_graph"]


@attrs.frozen
class CapturedStep:
    """
    The result of a capture.

    Args:
        graph: The graph of the step.
        twice: The two graphs of a step that runs twice, one per run; empty if no step runs twice.
        optimizer: The optimizer's addresses and numbers at the capture.
        messages: The messages that each graph posts (`Channels.orders`).
        seconds: Host time of the capture.
    """

    graph: torch.cuda.CUDAGraph
    twice: tuple[torch.cuda.CUDAGraph, ...]
    optimizer: BakedOptimizer
    messages: list[list[int]]
    seconds: float


@attrs.define(eq=False, slots=False)
class StepCapture:
    """
    Captures the step of one rank, over the rank's current connections.

    Args:
        worker: The worker (the pipeline of this rank) whose step is captured.
        feed: The step's data, at the addresses from which the graph reads.
        gate: Exchanges the votes on the update.
        waits: Waits for the device.
        epoch: The epoch of the captured step. If the capture fails, all ranks restart at this
            epoch. None before the capture.
    """

    worker: Worker
    feed: StagedFeed
    gate: UpdateGate
    waits: LaunchWaits
    epoch: int | None = None
    pipeline: Pipeline = attrs.field(init=False)
    # The memory of all three graphs: only one of them runs at a time, and none reads what another
    # one leaves there.
    _pool: Any = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.pipeline = self.worker.pipeline

    def run(self, release: Callable[[], None]) -> CapturedStep:
        """
        Capture this step while the contract checks the actions. Then launch the graph, as in later
        steps.

        Every rank calls this method.

        Args:
            release: Function that is called after a stop, before the connections that the graph
                contains are closed.
        """
        pipeline, runtime = self.pipeline, self.pipeline.runtime
        contract = runtime.contract
        self.waits.quiet()
        runtime.confirm()
        domain = runtime.domain_name
        before = contract.committed_counts()[domain]
        pipeline.feed = self.feed
        if pipeline.consent is not None:
            # The host waits for the gate's first collective, which needs every rank.
            pipeline.consent.agree(runtime.epoch)
            pipeline.consent.release = release
        self.gate.warm()
        self.waits.quiet()
        if pipeline.consent is not None:
            # All ranks capture at once, or none; a stop ends this connection.
            pipeline.consent.agree(runtime.epoch)
        self.epoch = runtime.epoch
        log_event(pipeline, "capture")
        began = time.perf_counter()
        # The graphs' pool cannot use the memory that the guarded step leaves in the cache.
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        graph, messages = self._with_messages(self._whole)
        double = pipeline.double
        twice: tuple[torch.cuda.CUDAGraph, ...] = ()
        if double is not None:
            first, of_first = self._with_messages(partial(self._first_run, double))
            second, of_second = self._with_messages(partial(self._second_run, double))
            twice = first, second
            if messages != of_first or messages != of_second:
                raise BackendError(
                    "each run of a step that runs twice must post the same messages, in the same "
                    "order, as a step that runs once; the captured graphs differ in their messages"
                )
        seconds = time.perf_counter() - began
        contract.check_commit(caller="main")
        log_event(pipeline, "finish")
        log_event(pipeline, "consent")
        if pipeline.consent is not None:
            pipeline.consent.agree(runtime.epoch)
        log_event(pipeline, "captured")
        self.gate.begin(before, contract.committed_counts()[domain])
        self.waits.quiet()
        optimizer = BakedOptimizer(self.worker.optimizer)
        post_by_graph(pipeline, True)
        return CapturedStep(graph, twice, optimizer, messages, seconds)

    def _with_messages(self, work: Callable[[], None]) -> tuple[Any, list[list[int]]]:
        """Capture work as one graph; return the graph and the messages that it posts."""
        channels = self.pipeline.channels
        before = channels.posted()
        with no_collection():
            graph = capture_graph(work, self._pool)
        return graph, channels.orders(before)

    def _whole(self) -> None:
        """Run the work of a step, the vote and the update, and ask the contract."""
        runtime = self.worker.runtime
        performer: Any = runtime.performer
        stamped = self.gate.stamps.around(performer.executor)
        with runtime.performed_by(attrs.evolve(performer, executor=stamped)):
            self.pipeline.run_actions()
            # The performer keeps the sums of stages that are complete; each sum is made once.
            gradients = self.pipeline.finalize()
        self._update(gradients)

    def _update(self, gradients: Gradients, differs: Tensor | None = None) -> None:
        move_scales(self.worker.runtime.domain)  # before the gate keeps the state after the step
        skip = self.gate.capture(gradients, differs)
        self.worker.optimizer.step(gradients, skip=skip, scale=self.gate.scale)

    def _first_run(self, double: DoubleRun) -> None:
        """Run the first launch of a step that runs twice: the work, without vote and update."""
        double.begin()
        double.keep_first(double.again(self.pipeline))

    def _second_run(self, double: DoubleRun) -> None:
        """
        Run the second launch: the same work from the same state, the comparison, the vote and the
        update.
        """
        double.restore()
        gradients = double.again(self.pipeline)
        if self.pipeline.zeros is not None:
            self.pipeline.zeros.take(gradients)
        double.compare(gradients)
        self._update(gradients, double.differs)


def post_by_graph(pipeline: Pipeline, by_graph: bool) -> None:
    """
    Set whether the graph or the host posts the messages. If `by_graph` is True, the graph posts
    them, and the rank log contains only the messages of the capture. If `by_graph` is False, the
    host posts and logs each message.
    """
    pipeline.launched = by_graph
    pipeline.channels.log = None if by_graph else pipeline.log
