"""
The sides of a training run: the guarded pipeline, and torch's own over native full backwards.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Protocol

from ...backends.protocol import BackendError, StageBackend
from ...ranks.assembly import build_worker
from ...ranks.membership import Limits, Member
from ...ranks.worker import Worker
from ...step.optimizer import Optimizer
from ...training.assembly import JobData, backend_of
from ...training.config import Config
from ...training.evaluate import evaluate
from ...training.launches import StepRunner, mode_of
from ..comparisons.evaluation import evaluate_native
from ..comparisons.ranks import native_pipeline
from .torch_pipeline import NativePipeline

__all__ = ["GuardedTraining", "NativeTraining", "TrainingSide", "limits_of"]


def limits_of(config: Config) -> Limits:
    """The time limits of a run's configuration."""
    return Limits(start=config.run.start_s, commit=config.run.commit_s)


class TrainingSide(Protocol):
    """One side of a training run, built and ready for its first step."""

    captured: bool
    optimizer: Optimizer
    stages: Mapping[int, StageBackend]

    def step(self) -> None:
        """One optimizer step."""

    @property
    def launches(self) -> int:
        """How many of the steps whose losses were read ran as one launch."""

    def drain(self) -> None:
        """Wait until every step has ended, on every rank."""

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch; may be read once."""

    def evaluate(self, windows: int) -> float:
        """The loss on held-out text."""

    def close(self) -> None:
        """Close connections."""


class GuardedTraining:
    """
    The guarded pipeline, in the mode of the run's configuration.

    Raises:
        BackendError: The run asks for one launch per step, and its steps cannot be launches.
    """

    def __init__(self, member: Member, config: Config, data: JobData) -> None:
        self.data = data
        mode, why = mode_of(member, data.job, config.parallel.mode)
        self.captured = mode != "eager"
        _require_launches(config, why)
        self.worker: Worker = build_worker(
            member,
            data.job,
            backend_of(config),
            mode=mode,
            limits=limits_of(config),
        )
        self.steps = StepRunner(self.worker)
        _require_launches(config, self.steps.replays)
        self.optimizer = self.worker.optimizer
        self.stages: Mapping[int, StageBackend] = self.worker.runtime.stages

    def step(self) -> None:
        """One optimizer step."""
        self.steps.step()

    def drain(self) -> None:
        """Wait until every step has ended."""
        self.steps.leave()

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch; may be read once."""
        found = self.steps.result(step).losses
        self.steps.forget(step + 1)
        return found

    @property
    def launches(self) -> int:
        """How many of the steps whose losses were read ran as one launch."""
        return self.steps.launches

    def evaluate(self, windows: int) -> float:
        """The loss on held-out text."""
        assert self.data.held_out is not None
        return evaluate(self.worker, self.data.job, self.data.held_out, windows)

    def close(self) -> None:
        """End the launches and the worker."""
        self.steps.close()
        self.worker.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler holds the worker


def _require_launches(config: Config, why: str) -> None:
    if why:
        raise BackendError(f"{config.source}: no step of a launched run can be one launch: {why}")


class NativeTraining:
    """torch's own pipeline over the library's full backwards."""

    captured = False
    launches: int = 0

    def __init__(self, member: Member, config: Config, data: JobData) -> None:
        self.member, self.data = member, data
        self.pipeline: NativePipeline = native_pipeline(member, data.job, backend_of(config))
        self.optimizer = self.pipeline.optimizer
        self.stages: Mapping[int, StageBackend] = {s.index: s for s in self.pipeline.stages}

    def step(self) -> None:
        """One optimizer step."""
        self.pipeline.step()

    def drain(self) -> None:
        """Native runs no step ahead."""

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch."""
        return self.pipeline.losses_of(step)

    def evaluate(self, windows: int) -> float:
        """The loss on held-out text."""
        job, text = self.data.job, self.data.held_out
        assert text is not None
        return evaluate_native(self.member, self.pipeline, job, text, windows)

    def close(self) -> None:
        """Native's process groups last as long as the process."""
