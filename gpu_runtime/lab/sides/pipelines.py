"""
The sides of a pipeline over ranks: native, guarded steps, one launch per step, and training runs.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.protocol import BackendError, StageBackend
from ...ranks.job import Batches, Job
from ...ranks.membership import Limits, Member
from ...ranks.one_launch import OneLaunch
from ...ranks.worker import Worker
from ...runtime import Mode, RuntimeConfig, mode_on
from ...step.optimizer import Gradients, Optimizer
from ...training.step_runner import StepRunner
from ..comparisons.ranks import live_tensors, native_pipeline
from .side import RankSide
from .torch_pipeline import Batch, NativePipeline

S = TypeVar("S")

__all__ = [
    "GuardedSide",
    "LaunchSide",
    "NativeSide",
    "TrainedSide",
    "backend_on",
    "build_guarded",
    "build_native",
    "build_side",
    "build_worker_of",
    "drawn_batches",
    "isolation",
    "unit_bytes",
]


class DrawnBatches(Batches):
    """Batches that are drawn in advance, so that no step waits for the host's random numbers."""

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Leave the loss on the device."""


def backend_on(device: str) -> str:
    """The backend of a device."""
    return "reference" if device == "cpu" else "transformer-engine"


def drawn_batches(job: Job, device: torch.device) -> Batch:
    """Return input and target of each microbatch, the same in every step and on every rank."""
    draw = job.batch(device)
    held = [draw(0, m) for m in range(job.microbatches)]
    return lambda step, microbatch: held[microbatch]


@contextmanager
def isolation(member: Member) -> Iterator[None]:
    """
    A context for one side: memory peaks are measured from the start of the context, and the side's
    memory is freed before the next side is built.
    """
    if member.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(member.device)
    try:
        yield
    finally:
        gc.collect()
    dist.barrier()  # not after an error, which may be this rank's alone


class NativeSide:
    """
    torch's own schedule over full backwards, as users run it without QEffect.

    Args:
        member: This rank.
        pipeline: The rank's pipeline before its first step.
    """

    first_steps, launches = 1, 0
    mode: Mode = "eager"

    def __init__(self, member: Member, pipeline: NativePipeline) -> None:
        self.member, self.pipeline = member, pipeline
        self.optimizer = pipeline.optimizer

    @property
    def stages(self) -> Mapping[int, StageBackend]:
        """The rank's stages by index."""
        return {stage.index: stage for stage in self.pipeline.stages}

    def step(self) -> None:
        """Run one optimizer step."""
        self.pipeline.step()

    def drain(self) -> None:
        """Do nothing: native runs no step ahead."""

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch."""
        return self.pipeline.losses_of(step)

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes."""
        self.member.synchronize()
        return live_tensors(self.stages, self.optimizer)

    def facts(self) -> dict[str, Any]:
        """No further numbers for the report, because native has no graphs and no slots."""
        return {}

    def close(self) -> None:
        """Do nothing: native's process groups last as long as the process."""


class GuardedSide:
    """
    One rank of a guarded pipeline, which replays graphs or makes eager calls.

    Args:
        worker: The rank's worker before its first step.
    """

    first_steps, launches = 1, 0

    def __init__(self, worker: Worker) -> None:
        self.worker, self.optimizer = worker, worker.optimizer
        self.mode = worker.runtime.config.mode

    @property
    def stages(self) -> Mapping[int, StageBackend]:
        """The rank's stages by index."""
        return self.worker.runtime.stages

    def step(self) -> None:
        """Run one optimizer step."""
        self.worker.step()

    def drain(self) -> None:
        """Do nothing: guarded steps do not run ahead."""

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch."""
        assert isinstance(self.worker.feed, Batches)
        return self.worker.feed.losses_of(step)

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes."""
        self.worker.runtime.handoff.synchronize()
        return live_tensors(self.stages, self.optimizer)

    def facts(self) -> dict[str, Any]:
        """
        Numbers of handoffs between ranks and of replays, counted in one further step; also slots,
        bytes of the arena (gradient memory), graphs, and the time to set up each.
        """
        runtime = self.worker.runtime
        executor: Any = runtime.executor
        before = runtime.handoff.handoffs, getattr(executor, "num_replays", 0)
        self.step()
        after = runtime.handoff.handoffs, getattr(executor, "num_replays", 0)
        found: dict[str, Any] = {
            "handoffs": after[0] - before[0],
            "replays": after[1] - before[1],
            "slots": [stage.slots for stage in runtime.contract.stages],
            "arena_bytes": sum(memory.arena.num_bytes for memory in runtime.memories.values()),
        }
        report = getattr(executor, "report", None)
        if report is not None:
            found["graphs"] = report.num_graphs
            found["warmup_s"] = report.warmup_seconds
            found["capture_s"] = report.capture_seconds
        return found

    def close(self) -> None:
        """Close the rank's worker."""
        self.worker.close()


class LaunchSide(GuardedSide):
    """
    A guarded rank whose steps are one launch each; the first step is guarded, the second is
    captured.

    Args:
        worker: The rank's worker, in mode `one launch`, before its first step.
    """

    first_steps = 2

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.whole = OneLaunch(worker)

    def step(self) -> None:
        """Run one optimizer step."""
        self.whole.step()

    def drain(self) -> None:
        """Wait until every launch has ended; later steps may follow."""
        self.whole.leave()
        self.whole.resume()

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, read once no launch is in flight."""
        self.whole.leave()
        found = super().state()
        self.whole.resume()
        return found

    def facts(self) -> dict[str, Any]:
        """The same facts as for replays; a step is one graph, which is replayed once."""
        found = super().facts()
        found["graphs"] = found["replays"] = 1
        found["capture_s"] += self.whole.capture_seconds
        return found

    def close(self) -> None:
        """End the launches, then close the worker."""
        self.whole.close()
        super().close()


class TrainedSide(GuardedSide):
    """
    A guarded rank of a training run; its steps are launches if its mode is `one launch`.

    Args:
        worker: The rank's worker, over `Batches`, before its first step.

    Raises:
        BackendError: The mode is `one launch`, but a step cannot be one launch.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.steps = StepRunner(worker)
        if self.steps.why_replays:
            raise BackendError(f"a step cannot be one launch: {self.steps.why_replays}")

    @property
    def launches(self) -> int:  # type: ignore[override]
        """Number of launches among the steps whose losses were read."""
        return self.steps.launches

    def step(self) -> None:
        """Run one optimizer step."""
        self.steps.step()

    def drain(self) -> None:
        """Wait until every step has ended."""
        self.steps.leave()

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch, which can be read only once."""
        found = self.steps.result(step).losses
        self.steps.forget(step + 1)
        return found

    def close(self) -> None:
        """End the launches and the worker."""
        self.steps.close()
        super().close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler holds the worker


def build_native(
    member: Member,
    job: Job,
    *,
    optimizer: Callable[[list[StageBackend]], Optimizer] = Optimizer,
    look: Callable[[Gradients], None] = lambda _: None,
) -> NativeSide:
    """
    Build the native side of a job over batches drawn in advance; every rank calls this function.

    Args:
        member: This rank.
        job: The pipeline to build.
        optimizer: Function that makes the optimizer.
        look: Function that is called with the gradients of every step, before the update.
    """
    pipeline = native_pipeline(
        member,
        job,
        backend_on(member.device.type),
        batch=drawn_batches(job, member.device),
        optimizer=optimizer,
        look=look,
    )
    return NativeSide(member, pipeline)


def build_guarded(
    member: Member,
    job: Job,
    mode: Mode | None = None,
    *,
    optimizer: Callable[..., Optimizer] = Optimizer,
    dtype: torch.dtype = torch.bfloat16,
) -> GuardedSide:
    """
    Build the guarded side of a job over batches drawn in advance; every rank calls this function.

    Args:
        member: This rank.
        job: The pipeline to build.
        mode: How a step runs; None for graph replays on a GPU and eager calls on a CPU.
        optimizer: Function that makes the optimizer.
        dtype: Data type of accumulated gradients. A data type other than bf16 is also the data type
            of master weights.
    """
    batch = drawn_batches(job, member.device)
    if dtype is not torch.bfloat16:
        optimizer = partial(optimizer, master_dtype=dtype)
    worker = build_worker_of(
        member,
        job,
        mode_on(member.device) if mode is None else mode,
        feed=lambda replica: DrawnBatches(batch, member.device),
        limits=Limits(message=30.0, commit=30.0),
        optimizer=optimizer,
        dtype=dtype,
    )
    return LaunchSide(worker) if mode == "one launch" else GuardedSide(worker)


def build_worker_of(
    member: Member,
    job: Job,
    mode: Mode,
    *,
    feed: Callable[[int], Batches] | None = None,
    limits: Limits | None = None,
    optimizer: Callable[..., Optimizer] = Optimizer,
    dtype: torch.dtype = torch.bfloat16,
    fuse: bool | None = None,
) -> Worker:
    """
    Build a job's worker, with the data, optimizer and gradient type that a measurement chooses.

    Args:
        member: This rank.
        job: The pipeline to build.
        mode: How a step runs: `eager`, `replays` or `one launch`.
        feed: Function that makes the data of a replica; None for the job's data.
        limits: Timeouts in seconds.
        optimizer: Function that makes the optimizer.
        dtype: Data type of accumulated gradients.
        fuse: Whether the library accumulates into `main_grad` itself; None lets the library choose.
    """
    backend = backend_on(member.device.type)
    return Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(
            indices, member.device, backend, fuse=fuse, replica=member.rank // job.pp
        ),
        feed or (lambda replica: Batches(job.batch(member.device, replica), member.device)),
        RuntimeConfig(
            rule=job.rule,
            provisioning=job.provisioning,
            mode=mode,
            dtype=dtype,
            amax=job.amax,
            group=job.wgrad_group,
        ),
        limits=limits,
        optimizer=optimizer,
        ties=job.ties,
    )


def build_side(member: Member, make: Callable[[], S]) -> tuple[S, float]:
    """Build a side; return the side, and the seconds that building took on this rank."""
    began = time.perf_counter()
    side = make()
    member.synchronize()
    return side, time.perf_counter() - began


def unit_bytes(side: RankSide) -> list[int]:
    """Bytes of each matrix gradient of the rank."""
    return [
        math.prod(unit.shape) * unit.matrices[0].parameter.element_size()
        for stage in side.stages.values()
        for unit in stage.units
    ]
