"""
CUDA graphs of every slot's F, dI and dW, and of every stage's cache refresh.

Graphs that share a memory pool are correct only if they are replayed in the order of their capture.
If one graph frees memory during its capture, the next graph uses this memory as scratch memory. The
library's backward frees memory that its forward saved. Therefore each slot (a microbatch's buffers)
has a private pool. Within a slot the order is always F, dI, dW; the contract's ownership clauses
enforce this order.

A step that is one launch has no graphs of single actions: one graph with one pool contains all its
actions (`launch_executor.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch

from ..backends.protocol import StateDomain
from .captures import CapturedExecutor, CaptureReport, capture_graph, warmed
from .eager import EagerExecutor, StageMemory
from .effects import UNREPORTED, Effects
from .memory.counters import DeviceCounters
from .memory.slots import Slot
from .plan.slots import SlotPlan, WgradVariant
from .streams import Handoff


@attrs.define(eq=False)
class SlotGraphs:
    """
    The graphs of F and dI of one slot (one microbatch's buffers), with the reports and results that
    were recorded at capture.
    """

    forward: torch.cuda.CUDAGraph
    dgrad: torch.cuda.CUDAGraph
    ran: Effects
    queued: tuple[tuple[str, ...], Effects]
    static: Slot


class Product(NamedTuple):
    """
    Identifies one captured dW.

    Args:
        slots: The slots (sets of buffers) that the dW reads, by their indices in the process's
            pool.
        variant: To which memory the dW writes, and whether it overwrites or adds.
    """

    slots: tuple[int, ...]
    variant: WgradVariant


@attrs.frozen(eq=False)
class WgradGraph:
    """
    The graph of a dW, with the matrices and results that were recorded at capture.

    Args:
        graph: The captured CUDA graph.
        covered: The matrices whose gradient the graph computes.
        wgrads: Gradients in the library's memory, under the destination rule `copied`.
    """

    graph: torch.cuda.CUDAGraph
    covered: tuple[str, ...]
    wgrads: Mapping[str, torch.Tensor]


class GraphExecutor(CapturedExecutor):
    """
    An executor that replays captured graphs, and returns the evidence that was recorded at capture.

    The evidence consists of an action's effects, and of the names of the matrices whose dW the
    action queued or computed. The evidence does not show whether, or how often, a graph was
    replayed; the device counters (`memory/counters.py`) show this.
    """

    marks_tail = True

    def __init__(self, domain: StateDomain, report: CaptureReport) -> None:
        super().__init__(domain, report)
        # The context in which a replayed F draws random numbers, if the domain has one.
        self._drawing = getattr(domain, "drawing", nullcontext)
        self.num_replays = 0
        self.slots: dict[int, SlotGraphs] = {}
        self.wgrads: dict[Product, WgradGraph] = {}
        self.refreshes: dict[int, torch.cuda.CUDAGraph] = {}
        self.refreshed: dict[int, Effects] = {}

    def refresh(self, memory: StageMemory) -> Effects:
        """
        Check that every captured address is unchanged, then refresh.

        Raises:
            BackendError: A parameter, a scale or a cache has moved to another address, or a module
                was added.
        """
        self.check_addresses(memory)
        self.num_replays += 1
        self.refreshes[memory.stage.index].replay()
        memory.stage.cache_was_refreshed()
        return self.refreshed[memory.stage.index]

    def forward(self, memory: StageMemory, slot: Slot) -> Effects:
        """
        Replay F. Random numbers are drawn from the domain's current position in the random stream,
        not from the position at capture.
        """
        graphs = self.slots[slot.index]
        self.num_replays += 1
        with self._drawing() as begun:
            graphs.forward.replay()
        slot.outputs = graphs.static.outputs
        if begun is None or graphs.ran.draws is None:
            return graphs.ran
        return graphs.ran._replace(draws=begun)

    def dgrad(
        self, memory: StageMemory, slot: Slot, variant: WgradVariant
    ) -> tuple[tuple[str, ...], Effects]:
        """
        Replay dI. Each replay queues the dW work of the matrices that were recorded at capture.
        """
        graphs = self.slots[slot.index]
        self.num_replays += 1
        graphs.dgrad.replay()
        slot.dgrads = graphs.static.dgrads
        slot.non_matrix = graphs.static.non_matrix
        return graphs.queued

    def wgrad(
        self,
        memory: StageMemory,
        slot: Slot,
        variant: WgradVariant,
        others: Sequence[Slot] = (),
    ) -> tuple[str, ...]:
        """Replay one variant of a dW of one slot or of several slots."""
        captured = self.wgrads[product_of(slot, variant, others)]
        self.num_replays += 1
        captured.graph.replay()
        slot.wgrads = captured.wgrads
        return captured.covered


def product_of(slot: Slot, variant: WgradVariant, others: Sequence[Slot]) -> Product:
    """Identify a dW of one slot (one microbatch's buffers), or of several slots as one product."""
    return Product((slot.index, *(other.index for other in others)), variant)


def product_at(memory: StageMemory, microbatch: int) -> Product | None:
    """
    Identify a microbatch's dW in an epoch's first walk (pass over the rank's actions); None if
    another microbatch's dW includes it.
    """
    if not (group := memory.groups[microbatch]):
        return None
    return Product(tuple(memory.slot_of[m] for m in group), memory.variants[microbatch])


def capture(
    domain: StateDomain,
    memories: Mapping[int, StageMemory],
    plan: SlotPlan,
    handoff: Handoff,
    *,
    shared_pool: Hashable | None = None,
    counters: DeviceCounters | None = None,
) -> GraphExecutor:
    """
    Warm up, then capture every graph that the plan needs.

    Args:
        domain: The state domain (stages whose scales are updated together). After the capture, no
            module may be added to the domain.
        memories: Physical memory by stage.
        plan: The number of slots (sets of buffers) per stage, and the slot of each microbatch.
        handoff: The stream on which graphs are captured and run, and its waits for the caller's
            stream.
        shared_pool: A memory pool that all slots share; None gives each slot its own pool. With a
            shared pool, all F are captured first, then all dI, then all dW, and replays corrupt
            data. Only a test passes a pool, to show this corruption.
        counters: Counters on the device that every graph increments when it runs. They are zero
            after the capture.

    Raises:
        BackendError: The domain or a stage cannot be captured; all reasons are listed.
    """
    with warmed(domain, memories, handoff, counters) as report:
        executor = GraphExecutor(domain, report)
        started = time.perf_counter()
        recorder = _Recorder(handoff, report)
        eager = EagerExecutor(counters)
        for memory in memories.values():
            executor.refreshes[memory.stage.index] = recorder.record(
                "refresh",
                torch.cuda.graph_pool_handle(),
                partial(_refresh, eager, memory, executor.refreshed),
            )
        build = _per_stage if shared_pool is None else _shared
        executor.slots, executor.wgrads = build(recorder, memories, plan, eager)
        handoff.synchronize()
        report.capture_seconds = time.perf_counter() - started
    executor.bake(memories)
    return executor


def _refresh(eager: EagerExecutor, memory: StageMemory, seen: dict[int, Effects]) -> None:
    seen.setdefault(memory.stage.index, eager.refresh(memory))  # a stand-in graph acts again


class _Recorder:
    """Captures graphs on the graph stream, one after another."""

    def __init__(self, handoff: Handoff, report: CaptureReport) -> None:
        self.handoff = handoff
        self.report = report

    def record(self, name: str, pool: Any, action: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture one action, and record the event that callers wait for at the graph's end."""

        def work() -> None:
            with self.report.phase(f"capture {name}"):
                action()
                self.handoff.record_tail()

        graph = capture_graph(work, pool, self.report.phase)
        self.report.num_graphs += 1
        return graph


class _SlotCapture:
    """Captures F, dI and dW of one slot (one microbatch's buffers), in the given memory pools."""

    def __init__(
        self,
        recorder: _Recorder,
        memory: StageMemory,
        slot: Slot,
        eager: EagerExecutor,
    ) -> None:
        self.recorder = recorder
        self.memory = memory
        self.slot = slot
        used = memory.slot_of.index(slot.index)
        self.bound = memory.variants[used]
        self.eager = eager
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.ran = UNREPORTED
        self.queued: tuple[tuple[str, ...], Effects] = ((), UNREPORTED)
        # Kept as long as the graphs: the pool gives freed memory to the next capture.
        self.outputs: tuple[torch.Tensor, ...] = ()

    def capture_forward(self, pool: Any) -> None:
        def act() -> None:
            self.ran = self.eager.forward(self.memory, self.slot)

        self.graphs["F"] = self.recorder.record("F", pool, act)
        self.outputs = self.slot.outputs

    def capture_dgrad(self, pool: Any) -> None:
        def act() -> None:
            self.queued = self.eager.dgrad(self.memory, self.slot, self.bound)

        self.graphs["dI"] = self.recorder.record("dI", pool, act)

    def finish(self) -> SlotGraphs:
        static = attrs.evolve(self.slot, tape=self.memory.stage.new_tape(self.slot.index))
        static.outputs = self.outputs
        return SlotGraphs(
            self.graphs["F"],
            self.graphs["dI"],
            self.ran,
            self.queued,
            static,
        )


#: The captured graphs of a process: by slot, and by dW.
_Captured = tuple[dict[int, SlotGraphs], dict[Product, WgradGraph]]


class _WgradCapture:
    """Captures every dW that the plan has for a stage."""

    def __init__(
        self, recorder: _Recorder, memory: StageMemory, plan: SlotPlan, eager: EagerExecutor
    ) -> None:
        self.recorder = recorder
        self.memory = memory
        self.eager = eager
        first = memory.table.first_index
        self.products = [
            Product(tuple(first + local for local in slots), variant)
            for slots, variant in plan.products(memory.stage.index, memory.arena.rule)
        ]

    def of(self, slots: tuple[int, ...]) -> list[Product]:
        """Capture every dW of these slots, as one product."""
        return [product for product in self.products if product.slots == slots]

    def capture(self, product: Product, pool: Any, *, keep: bool) -> WgradGraph:
        """
        Capture one dW.

        Args:
            product: Which dW to capture: the slots that it reads, and where and how it writes.
            pool: The memory pool of its intermediate results.
            keep: Whether the deferred work stays on the tapes, for another capture.
        """
        slot, *others = (self.memory.table[index] for index in product.slots)
        covered: list[tuple[str, ...]] = []

        def act() -> None:
            covered.append(
                self.eager.wgrad_keeping(self.memory, slot, product.variant, others, keep=keep)
            )

        graph = self.recorder.record("dW", pool, act)
        return WgradGraph(graph, covered[0], dict(slot.wgrads))


def _slot_captures(
    recorder: _Recorder, memory: StageMemory, eager: EagerExecutor
) -> list[_SlotCapture]:
    return [_SlotCapture(recorder, memory, slot, eager) for slot in memory.table]


def _per_stage(
    recorder: _Recorder, memories: Mapping[int, StageMemory], plan: SlotPlan, eager: EagerExecutor
) -> _Captured:
    """
    Capture each slot in a pool of its own, and the dW of several slots in one further pool.

    A dW of several slots reads data that their dI retained. It is therefore captured after all
    graphs of these slots, so that no later capture in a slot's pool can take that memory. The
    graphs in the further pool use this pool only for intermediate results, and one stream replays
    them.
    """
    finished: dict[int, SlotGraphs] = {}
    wgrads: dict[Product, WgradGraph] = {}
    for memory in memories.values():
        own = _WgradCapture(recorder, memory, plan, eager)
        for slot in _slot_captures(recorder, memory, eager):
            pool = torch.cuda.graph_pool_handle()
            slot.capture_forward(pool)
            slot.capture_dgrad(pool)
            alone = own.of((slot.slot.index,))
            for n, product in enumerate(alone):
                wgrads[product] = own.capture(product, pool, keep=n + 1 < len(alone))
            finished[slot.slot.index] = slot.finish()
        several = [product for product in own.products if len(product.slots) > 1]
        shared = torch.cuda.graph_pool_handle() if several else None
        for product in several:
            wgrads[product] = own.capture(product, shared, keep=True)
    return finished, wgrads


def _shared(
    recorder: _Recorder, memories: Mapping[int, StageMemory], plan: SlotPlan, eager: EagerExecutor
) -> _Captured:
    captures = [one for m in memories.values() for one in _slot_captures(recorder, m, eager)]
    wgrads: dict[Product, WgradGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    for slot in captures:
        slot.capture_forward(pool)
    for slot in captures:
        slot.capture_dgrad(pool)
    for memory in memories.values():
        own = _WgradCapture(recorder, memory, plan, eager)
        for product in own.products:
            wgrads[product] = own.capture(product, pool, keep=True)
    return {slot.slot.index: slot.finish() for slot in captures}, wgrads
