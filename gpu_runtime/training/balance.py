"""
How long the parts of a model take on a device, so that it can be cut into stages of equal time.

Three stages are made and timed: a layer between others, one behind the embedding, and one before
norm, head and loss. What the two ends take is what theirs take longer. The layers of a model are of
one shape, so that one of them stands for all. Each action runs by itself through the executor that
the run itself has: eager, or as a graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from ..runtime import Mode, Runtime, RuntimeConfig
from ..step.eager import StageMemory
from ..step.plan.order import Order
from .model import Language

__all__ = ["ACTIONS", "Times", "measured", "slowest"]

ACTIONS = ("F", "dI", "dW")
WARMUP = 3
REPEATS = 15
_ORDER = "0F0 1F0 2F0 2I0 2W0 1I0 1W0 0I0 0W0"
_DIGITS = 3


@attrs.frozen
class Times:
    """
    Milliseconds that F, dI and dW of each part take, in this order.

    Args:
        embedding: Of the embedding.
        layer: Of one layer.
        head: Of norm, head and loss.
    """

    embedding: tuple[float, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]

    def fields(self, layers: int) -> dict[str, object]:
        """
        What a configuration holds of it, as its fields are called.

        >>> Times((0.0, 0.25, 0.0), (1.0, 1.0, 0.5), (1.0, 0.5, 0.5)).fields(2)
        {'embedding_time': 0.25, 'layer_times': [2.5, 2.5], 'head_time': 2.0}
        """
        return {
            "embedding_time": round(sum(self.embedding), _DIGITS),
            "layer_times": [round(sum(self.layer), _DIGITS)] * layers,
            "head_time": round(sum(self.head), _DIGITS),
        }


def slowest(ranks: Sequence[Times]) -> Times:
    """
    What each action of each part takes on the rank where it takes longest.

    >>> slowest([Times((0,), (1,), (4,)), Times((1,), (3,), (2,))])
    Times(embedding=(1,), layer=(3,), head=(4,))
    """

    def longest(part: str) -> tuple[float, ...]:
        return tuple(map(max, zip(*(getattr(one, part) for one in ranks), strict=True)))

    return Times(longest("embedding"), longest("layer"), longest("head"))


def measured(
    job: Language, device: torch.device, backend: str, *, mode: Mode, repeats: int = REPEATS
) -> Times:
    """
    Time a layer and both ends of a model on a device: medians, after a warm-up.

    The stages that it makes are forgotten; under Transformer Engine FP8 state of the process is
    reset, so the run's own stages are made after.

    Args:
        job: The model.
        device: Where.
        backend: `reference` or `transformer-engine`.
        mode: How the actions run: `eager` or `replays`.
        repeats: How often each action is timed.

    Raises:
        BackendError: A stage cannot be built or captured.
    """
    probe = attrs.evolve(job, schedule="1f1b", pp=3, vpp=1, cut=(1, 1, 1))
    stages = probe.stages((0, 1, 2), device, backend)
    config = RuntimeConfig(rule=job.rule, mode=mode)
    runtime = Runtime(stages, Order.parse(_ORDER), config)
    found: list[tuple[float, ...]] = []
    with runtime.caller_scope():
        for memory in runtime.memories.values():
            _fill(memory, job.vocabulary)
        for memory in runtime.memories.values():
            found.append(_medians(runtime, memory, repeats))
    runtime.drain()
    runtime.close()
    first, layer, last = found

    def beyond(whole: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(0.0, a - b) for a, b in zip(whole, layer, strict=True))

    return Times(beyond(first), layer, beyond(last))


def _fill(memory: StageMemory, vocabulary: int) -> None:
    """Put something into the buffers that is not all alike: rows of one token are added in turn."""
    generator = torch.Generator().manual_seed(0)
    (slot,) = memory.table
    for into in (*slot.input_views, *slot.output_gradients):
        if into.dtype == torch.int64:
            values = torch.randint(vocabulary, into.shape, generator=generator)
        else:
            values = torch.randn(into.shape, generator=generator)
        into.detach().copy_(values.to(into.dtype))


def _medians(runtime: Runtime, memory: StageMemory, repeats: int) -> tuple[float, ...]:
    (slot,), (variant,), executor = memory.table, memory.variants, runtime.executor
    acts: Mapping[str, Callable[[], object]] = {
        "F": lambda: executor.forward(memory, slot),
        "dI": lambda: executor.dgrad(memory, slot, variant),
        "dW": lambda: executor.wgrad(memory, slot, variant),
    }
    executor.refresh(memory)
    spans: dict[str, list[float]] = {name: [] for name in ACTIONS}
    for n in range(WARMUP + repeats):
        for name in ACTIONS:
            took = _milliseconds(acts[name], runtime.domain.device)
            if n >= WARMUP:
                spans[name].append(took)
    return tuple(statistics.median(spans[name]) for name in ACTIONS)


def _milliseconds(act: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        act()
        return (time.perf_counter() - began) * 1e3
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    act()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
