"""
The sides of a pipeline over ranks: native, eager calls, replays, and one launch per step.

Every side takes the same batches, which are drawn before its first step.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.protocol import StageBackend
from ...ranks.channels import transport_of
from ...ranks.job import Batches, Job
from ...ranks.membership import Limits, Member
from ...ranks.one_launch import OneLaunch
from ...ranks.worker import Worker
from ...runtime import Mode, RuntimeConfig
from ...step.graphs import GraphExecutor
from ...step.optimizer import Gradients, Optimizer
from ...step.plan.order import Order
from ..comparisons.ranks import live_tensors
from .columns import Side
from .torch_pipeline import Batch, NativePipeline

S = TypeVar("S")

__all__ = [
    "LaunchSide",
    "NativeSide",
    "PipelineSide",
    "ReplaySide",
    "backend_on",
    "build_side",
    "drawn_batches",
    "isolated",
    "unit_bytes",
]


class DrawnBatches(Batches):
    """Batches drawn beforehand, so that no step waits for the host's random numbers."""

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Leave the loss on the device."""


def backend_on(device: str) -> str:
    """The backend of a device."""
    return "reference" if device == "cpu" else "transformer-engine"


def drawn_batches(job: Job, device: torch.device) -> Batch:
    """Input and target of each microbatch, the same in every step and on every rank."""
    draw = job.batch(device)
    held = [draw(0, m) for m in range(job.microbatches)]
    return lambda step, microbatch: held[microbatch]


@contextmanager
def isolated(member: Member) -> Iterator[None]:
    """Free a side's memory before the next side is built; peaks count from here."""
    if member.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(member.device)
    try:
        yield
    finally:
        gc.collect()
    dist.barrier()  # not after an error, which may be this rank's alone


class PipelineSide(Side, Protocol):
    """
    One rank of a side, built and ready for its first step.

    Attributes:
        first_steps: Steps that belong to the side's set-up.
        optimizer: The optimizer of the rank's stages.
    """

    first_steps: int
    optimizer: Optimizer

    @property
    def stages(self) -> Mapping[int, StageBackend]:
        """The rank's stages by index."""

    def state(self) -> dict[str, Tensor]:
        """Everything that training moves, live, not copied; waits for the device."""


class NativeSide:
    """
    torch's own schedule over full backwards: what users run today.

    Args:
        member: This rank.
        job: The pipeline.
        backend: `reference` or `transformer-engine`.
        optimizer: Makes the optimizer.
        look: Called with the gradients of every step, before its update.
    """

    first_steps = 1

    def __init__(
        self,
        member: Member,
        job: Job,
        backend: str,
        *,
        optimizer: Callable[[list[StageBackend]], Optimizer] = Optimizer,
        look: Callable[[Gradients], None] | None = None,
    ) -> None:
        group = dist.new_group(list(range(member.world)), backend=transport_of(member.device))
        order = Order.of_rank(job.table(), member.rank)
        self.member = member
        self.pipeline = NativePipeline(
            job.cls_name,
            job.stages(order.stages, member.device, backend, loss=False),
            job.num_stages,
            order,
            job.microbatches,
            drawn_batches(job, member.device),
            job.loss,
            group,
            rule=job.rule,
            reduce=look,
            optimizer=optimizer,
        )
        self.optimizer = self.pipeline.optimizer

    @property
    def stages(self) -> Mapping[int, StageBackend]:
        """The rank's stages by index."""
        return {stage.index: stage for stage in self.pipeline.stages}

    def step(self) -> None:
        """One optimizer step."""
        self.pipeline.step()

    def state(self) -> dict[str, Tensor]:
        """Everything that training moves."""
        self.member.synchronize()
        return live_tensors(self.stages, self.optimizer)

    def facts(self) -> dict[str, Any]:
        """Native has no graphs and no slots."""
        return {}

    def close(self) -> None:
        """Native's process groups last as long as the process."""


class ReplaySide:
    """
    A guarded rank: replays of graphs, or eager calls.

    Args:
        member: This rank.
        job: The pipeline.
        backend: `reference` or `transformer-engine`.
        mode: How a step runs.
        optimizer: Makes the optimizer.
    """

    first_steps = 1

    def __init__(
        self,
        member: Member,
        job: Job,
        backend: str,
        mode: Mode,
        *,
        optimizer: Callable[..., Optimizer] = Optimizer,
    ) -> None:
        self.worker = Worker(
            member,
            job.table(),
            job.pp,
            lambda indices: job.stages(indices, member.device, backend),
            lambda replica: DrawnBatches(drawn_batches(job, member.device), member.device),
            RuntimeConfig(rule=job.rule, mode=mode),
            limits=Limits(message=30.0, commit=30.0),
            optimizer=optimizer,
            ties=job.ties,
        )
        self.optimizer = self.worker.optimizer

    @property
    def stages(self) -> Mapping[int, StageBackend]:
        """The rank's stages by index."""
        return self.worker.runtime.stages

    def step(self) -> None:
        """One optimizer step."""
        self.worker.step()

    def state(self) -> dict[str, Tensor]:
        """Everything that training moves."""
        self.worker.runtime.handoff.synchronize()
        return live_tensors(self.stages, self.optimizer)

    def facts(self) -> dict[str, Any]:
        """Handoffs and replays of one more step; slots, arena, graphs and their set-up times."""
        runtime = self.worker.runtime
        executor = runtime.executor
        captured = executor if isinstance(executor, GraphExecutor) else None
        before = runtime.handoff.handoffs, 0 if captured is None else captured.num_replays
        self.step()
        after = runtime.handoff.handoffs, 0 if captured is None else captured.num_replays
        found: dict[str, Any] = {
            "handoffs": after[0] - before[0],
            "replays": after[1] - before[1],
            "slots": [stage.slots for stage in runtime.contract.stages],
            "arena_bytes": sum(memory.arena.num_bytes for memory in runtime.memories.values()),
        }
        if captured is not None:
            found["graphs"] = captured.report.num_graphs
            found["warmup_s"] = captured.report.warmup_seconds
            found["capture_s"] = captured.report.capture_seconds
        return found

    def close(self) -> None:
        """End the rank."""
        self.worker.close()


class LaunchSide(ReplaySide):
    """
    A guarded rank, each step one launch: the first step is guarded, the second is captured.

    Args:
        member: This rank.
        job: The pipeline.
        backend: `transformer-engine`.
        optimizer: Makes the optimizer.
    """

    first_steps = 2

    def __init__(
        self,
        member: Member,
        job: Job,
        backend: str,
        *,
        optimizer: Callable[..., Optimizer] = Optimizer,
    ) -> None:
        super().__init__(member, job, backend, "one launch", optimizer=optimizer)
        self.whole = OneLaunch(self.worker)

    def step(self) -> None:
        """One optimizer step."""
        self.whole.step()

    def state(self) -> dict[str, Tensor]:
        """Everything that training moves, after the launches in flight."""
        self.whole.leave()
        found = super().state()
        self.whole.resume()
        return found

    def facts(self) -> dict[str, Any]:
        """As of replays, with the step's one graph."""
        found = super().facts()
        found["graphs"] += 1
        found["replays"] = 1  # of a step's one graph, in which the slots' are nodes
        found["capture_s"] += self.whole.capture_seconds
        return found

    def close(self) -> None:
        """End the launches, then the rank."""
        self.whole.close()
        super().close()


def build_side(member: Member, make: Callable[[], S]) -> tuple[S, float]:
    """Build a side; return it with the seconds that this took on this rank."""
    began = time.perf_counter()
    side = make()
    member.synchronize()
    return side, time.perf_counter() - began


def unit_bytes(side: PipelineSide) -> list[int]:
    """Bytes of each matrix gradient of the rank."""
    return [
        math.prod(unit.shape) * unit.matrices[0].parameter.element_size()
        for stage in side.stages.values()
        for unit in stage.units
    ]
