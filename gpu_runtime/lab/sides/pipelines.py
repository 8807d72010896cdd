"""
One side of a pipeline over ranks, made and timed: what `scale` and `tables` have in common.

The native side is torch's schedule runtime over stages whose backward is the library's full one.
Every side takes the same batches, which were drawn before its first step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.protocol import StageBackend
from ...ranks.channels import transport_of
from ...ranks.job import Batches, Job
from ...ranks.worker import Worker
from ...ranks.world import Limits, Member, gathered
from ...runtime import RuntimeConfig
from ...step.optimizer import Gradients, Optimizer
from ...step.plan.order import Order
from ..runner.profiler import profiled
from ..statistics.traces import matrix_copies
from .torch_pipeline import Batch, NativePipeline

__all__ = [
    "Drawn",
    "Turns",
    "backend_on",
    "drawn",
    "native_side",
    "released",
    "timed",
    "waited",
    "worker_side",
]

WARMUP = 3
PROFILED = 2
"""Steps under the profiler, after those that are timed."""


@attrs.frozen
class Turns:
    """
    How a side is timed.

    Args:
        rounds: Turns, each of some steps back to back and one step by itself.
        steps: Steps of a turn.
        profile: Whether some more steps run under the profiler.
    """

    rounds: int
    steps: int
    profile: bool = True


class Drawn(Batches):
    """Batches that were drawn before, so that no step waits for the host's random numbers."""

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """The loss is left where it is."""


def backend_on(device: str) -> str:
    """The backend of a device."""
    return "reference" if device == "cpu" else "transformer-engine"


def drawn(job: Job, device: torch.device) -> Batch:
    """One step's input and target of every microbatch, the same at each step and on every rank."""
    draw = job.batch(device)
    held = [draw(0, m) for m in range(job.microbatches)]
    return lambda step, microbatch: held[microbatch]


@contextmanager
def released(member: Member) -> Iterator[None]:
    """Nothing of one side is left when the next is made; peaks are counted from here."""
    if member.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(member.device)
    try:
        yield
    finally:
        gc.collect()
    dist.barrier()  # not behind an error, which may be this rank's alone


def native_side(
    member: Member,
    job: Job,
    backend: str,
    *,
    optimizer: Callable[[list[StageBackend]], Optimizer] = Optimizer,
    look: Callable[[Gradients], None] | None = None,
) -> NativePipeline:
    """
    torch's own schedule over full backwards: what users run today.

    Args:
        member: This rank.
        job: The pipeline.
        backend: Whose layers.
        optimizer: Makes the optimizer.
        look: Is shown the gradients of every step, before its update.
    """
    group = dist.new_group(list(range(member.world)), backend=transport_of(member.device))
    order = Order.of_rank(job.table(), member.rank)
    return NativePipeline(
        job.cls_name,
        job.stages(order.stages, member.device, backend, loss=False),
        job.num_stages,
        order,
        job.microbatches,
        drawn(job, member.device),
        job.loss,
        group,
        rule=job.rule,
        reduce=look,
        optimizer=optimizer,
    )


def worker_side(
    member: Member,
    job: Job,
    backend: str,
    config: RuntimeConfig,
    *,
    optimizer: Callable[..., Optimizer] = Optimizer,
) -> Worker:
    """
    A guarded rank of a job over batches that were drawn before.

    Args:
        member: This rank.
        job: The pipeline.
        backend: Whose layers.
        config: How it runs.
        optimizer: Makes the optimizer.
    """
    return Worker(
        member,
        job.table(),
        job.pp,
        lambda indices: job.stages(indices, member.device, backend),
        lambda replica: Drawn(drawn(job, member.device), member.device),
        config,
        limits=Limits(message=30.0, commit=30.0),
        optimizer=optimizer,
        ties=job.ties,
    )


def waited(member: Member) -> None:
    """Every rank, its device idle, is here."""
    member.synchronize()
    dist.barrier()


def timed(
    member: Member,
    step: Callable[[], object],
    turns: Turns,
    *,
    made: float,
    facts: dict[str, Any],
    units: Collection[int] | None = None,
) -> dict[str, Any]:
    """
    Back-to-back turns, then single synchronised steps; the slowest rank counts.

    Args:
        member: This rank; all ranks call it.
        step: One step.
        turns: How many.
        made: Seconds that the side took to be made on this rank.
        facts: What else is known of this rank.
        units: Bytes of each matrix gradient, to count their copies under the profiler; None does
            not.

    Returns:
        Milliseconds of each round (`step_ms`, `single_ms`, `host_ms`), and by rank the reserved
        bytes at most (`peak_bytes`), facts and, under the profiler, `busy_ms` and `copies`.
    """
    for _ in range(WARMUP):
        step()
    back, singles, hosts = [], [], []
    for _ in range(turns.rounds):
        waited(member)
        began = time.perf_counter()
        for _ in range(turns.steps):
            step()
        member.synchronize()
        back.append(1e3 * (time.perf_counter() - began) / turns.steps)
        waited(member)
        began = time.perf_counter()
        step()
        hosts.append(1e3 * (time.perf_counter() - began))
        member.synchronize()
        singles.append(1e3 * (time.perf_counter() - began))
    on_device = member.device.type == "cuda"
    peak = torch.cuda.max_memory_reserved(member.device) if on_device else 0
    waited(member)
    busy = copies = None
    if on_device and turns.profile:
        busy, trace = profiled(step, member.synchronize, PROFILED)
        copies = None if units is None else matrix_copies(trace, units)
    ranks = gathered(member, (back, singles, hosts, made, peak, facts, busy, copies))
    found: dict[str, Any] = {
        "step_ms": [max(rank[0][n] for rank in ranks) for n in range(turns.rounds)],
        "single_ms": [max(rank[1][n] for rank in ranks) for n in range(turns.rounds)],
        "host_ms": [max(rank[2][n] for rank in ranks) for n in range(turns.rounds)],
        "construction_s": max(rank[3] for rank in ranks),
        "peak_bytes": [rank[4] for rank in ranks],
        "facts": [rank[5] for rank in ranks],
        "busy_ms": [rank[6] for rank in ranks if rank[6] is not None],
    }
    if units is not None:
        found["copies"] = [rank[7] for rank in ranks if rank[7] is not None]
    return found
