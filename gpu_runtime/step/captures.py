"""
Code that all graph-capturing executors share: the warm-up before a capture, the report of a
capture, and the check of the addresses that captured graphs contain.

Warm-up runs before a capture on the same stream, because libraries allocate memory and choose
kernels on first use. Warm-up changes numerical state (FP8 scales and amaxes) and gradient
destinations; both are restored afterwards.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import attrs
import torch

from ..backends.protocol import BackendError, StateDomain
from .eager import EagerExecutor, StageMemory
from .memory.counters import DeviceCounters
from .memory.numerical_state import preserving
from .streams import GraphStream, Handoff

__all__ = [
    "BakedAddresses",
    "CaptureReport",
    "CapturedExecutor",
    "capture_graph",
    "no_collection",
    "warmed",
]


@attrs.define
class CaptureReport:
    """
    Times of a capture on the host, and the number of captured graphs.

    Args:
        warmup_seconds: Host seconds from the start of the warm-up until the device is idle.
        capture_seconds: Host seconds of the captures.
        num_graphs: Number of captured graphs.
        phases: Host seconds of each phase, by name; the host does not wait for the device between
            phases.
    """

    warmup_seconds: float = 0.0
    capture_seconds: float = 0.0
    num_graphs: int = 0
    phases: dict[str, float] = attrs.field(factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the host time of a block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.phases[name] = self.phases.get(name, 0.0) + spent


class BakedAddresses:
    """
    The memory addresses that a stage's graphs contain, and a fast check that these addresses are
    unchanged.

    The check first runs a probe, which takes microseconds. Only if the probe finds a difference are
    the addresses compared by name.

    Args:
        memory: The stage's memory, whose addresses the graphs contain.
    """

    def __init__(self, memory: StageMemory) -> None:
        self.addresses = memory.addresses()
        self._prepare(memory)

    def _prepare(self, memory: StageMemory) -> None:
        self._look = memory.address_probe()
        self._seen = self._look()

    def check(self, memory: StageMemory) -> None:
        """
        Compare the recorded addresses with the current addresses.

        Raises:
            BackendError: A tensor has moved to another address; the message names the first such
                tensor.
        """
        if self._look() == self._seen:
            return
        now = memory.addresses()
        if self.addresses != now:
            baked = self.addresses
            name = next(n for n in (*baked, *now) if baked.get(n) != now.get(n))
            raise BackendError(
                f"stage {memory.stage.index}: {name} was at {baked.get(name)} when graphs were "
                f"captured and is at {now.get(name)}; update tensors in place, or make a new "
                "runtime"
            )
        self._prepare(memory)


class CapturedExecutor:
    """
    Keeps the report of captured graphs, and checks the addresses that the graphs contain.

    Args:
        domain: The state domain (stages whose scales are updated together). No module may be added
            to the domain after the capture.
        report: Times of the warm-up and of the capture.
    """

    def __init__(self, domain: StateDomain, report: CaptureReport) -> None:
        self.domain = domain
        self.report = report
        self.baked: dict[int, BakedAddresses] = {}

    def bake(self, memories: Mapping[int, StageMemory]) -> None:
        """
        Record the addresses of each stage's memory. Graphs contain these addresses from now on.
        """
        self.baked = {index: BakedAddresses(memory) for index, memory in memories.items()}

    def check_addresses(self, memory: StageMemory) -> None:
        """
        Compare the addresses that graphs contain with the current addresses.

        Raises:
            BackendError: A tensor has moved, or a module was added to the domain.
        """
        self.domain.check_membership()
        self.baked[memory.stage.index].check(memory)


@contextmanager
def warmed(
    domain: StateDomain,
    memories: Mapping[int, StageMemory],
    handoff: Handoff,
    counters: DeviceCounters | None = None,
) -> Iterator[CaptureReport]:
    """
    A context in which graphs can be captured, because all stages are warmed up. The context runs on
    the graph stream. At its end the numerical state and the counters are restored, and gradient
    destinations and tapes (data that F keeps for dI and dW) are emptied.

    Args:
        domain: The state domain (stages whose scales are updated together). From the capture on, no
            module may be added to the domain.
        memories: Physical memory by stage.
        handoff: The stream on which graphs are captured and run.
        counters: Counters that graphs increment; None if nothing is counted.

    Raises:
        BackendError: The domain or a stage cannot be captured; all reasons are listed.
    """
    stages = [memory.stage for memory in memories.values()]
    obstacles = [*domain.capture_obstacles()]
    for stage in stages:
        obstacles += [f"stage {stage.index}: {o}" for o in stage.capture_obstacles()]
    if obstacles or not isinstance(handoff, GraphStream):
        raise BackendError(f"cannot capture: {'; '.join(obstacles) or 'no graph stream'}")
    domain.freeze()
    report = CaptureReport()
    counted = None if counters is None else counters.values.clone()
    handoff.wait_for_caller()
    with handoff.scope(), no_collection(), preserving(domain):
        started = time.perf_counter()
        for memory in memories.values():
            warm_up(memory, report)
        if counters is not None:
            counters.warm()
        with report.phase("warmup drain"):
            handoff.synchronize()
            # The graphs' private pools cannot use the memory that the warm-up leaves in the cache.
            torch.cuda.empty_cache()
        report.warmup_seconds = time.perf_counter() - started
        yield report
        handoff.synchronize()
        for memory in memories.values():
            memory.arena.zero()
            memory.table.rebuild()
        if counters is not None and counted is not None:
            counters.values.copy_(counted)  # the warm-up, and stand-ins of graphs, run actions
    handoff.synchronize()
    domain.check_membership()


def capture_graph(
    work: Callable[[], None],
    pool: Any,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> torch.cuda.CUDAGraph:
    """
    Capture the operations that `work` queues on the current stream as one graph.

    Unlike `torch.cuda.graph`, this function neither collects garbage nor empties the cache. If
    `work` raises an error, that error is raised, and not the error of the broken capture.

    Args:
        work: Queues the operations.
        pool: The memory pool of the graph.
        phase: Function such as `CaptureReport.phase` that takes a phase's name and returns a
            context. The beginning and the end of the capture each run in such a context.
    """
    graph = torch.cuda.CUDAGraph()
    with phase("capture begin"):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
        with phase("capture end"):
            graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """
    End a capture that failed.

    CUDA invalidates a capture in which the host waits for the stream. Then torch raises before it
    tells its allocator and its generator that the capture has ended: the allocator frees no memory
    that another stream has used, and the generator draws no numbers outside of graphs. This
    function tells the allocator. A capture that succeeds tells the generator, so a small capture
    follows.
    """
    with suppress(RuntimeError):
        graph.capture_end()
        return
    with suppress(AttributeError, RuntimeError):  # the name is private; or it was told
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with suppress(RuntimeError):  # the caller gets the error of the capture that failed
        small = torch.cuda.CUDAGraph()
        small.capture_begin(capture_error_mode="thread_local")
        try:
            torch.zeros(1, device="cuda")
        finally:
            small.capture_end()


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from destroying device objects during a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def warm_up(memory: StageMemory, report: CaptureReport) -> None:
    """
    Run a stage's refresh, F, dI and every kind of dW once, in the buffers of the stage's first
    microbatch or group.

    Variants of dW that differ only in the memory to which they write are of one kind, because they
    use the same kernels.
    """
    eager = EagerExecutor()
    slot, *further = list(memory.table)[: max(map(len, memory.groups))]
    each = [*memory.variants, *memory.later_variants]
    kinds = list({variant.accumulate: variant for variant in each}.values())
    with report.phase("warmup refresh"):
        eager.refresh(memory)
    for used in (slot, *further):
        with report.phase("warmup F"):
            eager.forward(memory, used)
        with report.phase("warmup dI"):
            eager.dgrad(memory, used, kinds[0])
    with report.phase("warmup dW"):
        for n, variant in enumerate(kinds):
            eager.run_work(memory, slot, variant, further, keep=n + 1 < len(kinds))
