"""
The host's waits for launches, and each launch's verdict: the device's counts and all ranks' votes.

Every wait has a deadline, because a device may wait for a rank that has died.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from .consent import DisagreementError, wait_for
from .gate import UNLIKE, UpdateGate
from .pipeline import Pipeline
from .worker import Worker

__all__ = ["LaunchWaits", "log_event"]

#: Launches whose times are kept until they are asked for.
_KEPT = 1024


@attrs.define(eq=False, slots=False)
class LaunchWaits:
    """
    The launches of one rank that have no verdict (counts and votes) yet. A launch runs a whole step
    as one graph.

    Args:
        worker: The worker (the pipeline of this rank) that launches the steps.
        gate: The gate, which publishes the device's counts and the votes.

    Attributes:
        under_way: The events of launches without a verdict, in the order of the launches.
        spare: Events of launches that have ended, for reuse.
        asking: Number of verdicts for which the host currently waits.
        weights_ms: By epoch, for the last launches with a verdict: device milliseconds in one dW of
            each stage, summed over the stages (`LaunchStamps`); the value is NaN for a launch
            without time stamps.
    """

    worker: Worker
    gate: UpdateGate
    under_way: list[Any] = attrs.field(factory=list, init=False)
    spare: list[Any] = attrs.field(factory=list, init=False)
    asking: int = attrs.field(default=0, init=False)
    weights_ms: dict[int, float] = attrs.field(factory=dict, init=False)
    pipeline: Pipeline = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pipeline = self.worker.pipeline

    def record(self) -> None:
        """Record an event at the end of the launch that was just queued."""
        done = self.spare.pop() if self.spare else _event()
        self.pipeline.runtime.handoff.record(done)
        self.under_way.append(done)

    def confirm(self) -> None:
        """
        Wait for the oldest launch without a verdict, and read its verdict. Do nothing if the
        contract expects no counts.

        Raises:
            Refused: The device did not run exactly the committed actions.
            DisagreementError: A rank voted no, or its vote is missing.
        """
        if self.pipeline.runtime.contract.counts_awaited:
            self._confirm(self.under_way.pop(0))

    def _confirm(self, done: Any) -> None:
        """
        Read the counts and votes that the device published for the oldest launch without a verdict.
        """
        runtime, double = self.pipeline.runtime, self.pipeline.double
        self.asking = 1
        self.wait(done)
        self.spare.append(done)
        step = self.gate.read_steps
        counted, said = self.gate.read()
        self._keep_time(runtime.epoch - 1, step)
        log_event(
            self.pipeline, "votes", runtime.epoch - 1, votes=said
        )  # of the step before this one
        runtime.contract.present_counts({runtime.domain_name: counted})
        if double is not None:
            double.require_told_equal(dict(enumerate(said)))
        if odd := [rank for rank, word in enumerate(said) if word == 1]:
            raise DisagreementError(
                f"the device of rank {odd[0]} did not run the committed actions, or its vote is "
                "missing"
            )
        if unlike := [rank for rank, word in enumerate(said) if word == UNLIKE]:
            raise DisagreementError(
                f"the reduced gradients of the replica of rank {unlike[0]} differ from the first "
                "replica's (sum of squares)"
            )
        self.asking = 0

    def _keep_time(self, epoch: int, step: int) -> None:
        """
        Keep the time stamps of a launch; the oldest stamps are dropped if nobody asks for them.
        """
        self.weights_ms[epoch] = self.gate.stamps.take(step)
        if len(self.weights_ms) > _KEPT:
            del self.weights_ms[min(self.weights_ms)]

    def quiet(self) -> None:
        """Wait until the device has finished all work."""
        done = _event()
        self.pipeline.runtime.handoff.record(done)
        self.wait(done)
        # Other streams wait for no other rank.
        self.worker.member.synchronize(
            self.worker.limits.commit, action="capture", step=self.pipeline.runtime.epoch
        )

    def wait(self, done: Any) -> None:
        """Wait for an event; stop waiting if another rank stops or the deadline passes."""
        limits = self.worker.limits
        wait_for(done, self.pipeline.consent, deadline=limits.commit, grace=limits.grace)


def log_event(pipeline: Pipeline, event: str, epoch: int | None = None, **fields: Any) -> None:
    """
    Write an event to the rank log, if there is a log. The event belongs to the current step, or to
    `epoch`.
    """
    if pipeline.log is not None:
        pipeline.log(event, epoch=pipeline.runtime.epoch if epoch is None else epoch, **fields)


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
