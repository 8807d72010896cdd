"""
Measure a model's parts on a device, so that it can be cut into stages of equal time.

Three stages of one layer each are built and timed: the first with the embedding, the second with
the layer alone, the third with norm, head and loss. An end of the model costs its stage's time
minus the second stage's. All layers of a model have one shape, so one layer stands for all. Each
action runs alone, through the run's own kind of executor: eager or graphs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from ..backends.protocol import BackendError
from ..ranks.membership import Member, agree_on, all_gather
from ..runtime import Mode, Runtime, RuntimeConfig
from ..step.eager import StageMemory
from ..step.plan.order import Order
from .language_model import LanguageJob

__all__ = ["ACTIONS", "Times", "agreed_times", "measure_times", "slowest"]

ACTIONS = ("F", "dI", "dW")
WARMUP = 3
REPEATS = 15
_ORDER = "0F0 1F0 2F0 2I0 2W0 1I0 1W0 0I0 0W0"
_DIGITS = 3


@attrs.frozen
class Times:
    """
    Times in milliseconds of each part's F, dI and dW, in this order.

    Args:
        embedding: Times of the embedding.
        layer: Times of one layer.
        head: Times of norm, head and loss.
    """

    embedding: tuple[float, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]

    def fields(self, layers: int) -> dict[str, object]:
        """
        Return the fields of a configuration that hold these times: sums over F, dI and dW.

        Args:
            layers: Layers of the model.

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
    Return, for each action of each part, the time on the rank where the action takes longest.

    >>> slowest([Times((0,), (1,), (4,)), Times((1,), (3,), (2,))])
    Times(embedding=(1,), layer=(3,), head=(4,))
    """

    def longest(part: str) -> tuple[float, ...]:
        return tuple(map(max, zip(*(getattr(one, part) for one in ranks), strict=True)))

    return Times(longest("embedding"), longest("layer"), longest("head"))


def measure_times(
    job: LanguageJob, device: torch.device, backend: str, *, mode: Mode, repeats: int = REPEATS
) -> Times:
    """
    Time a layer and both ends of a model on a device: medians, after a warm-up.

    The measured stages are dropped afterwards. Transformer Engine's FP8 state of the process is
    reset, so build the run's own stages afterwards.

    Args:
        job: The model.
        device: The device to measure on.
        backend: `reference` or `transformer-engine`.
        mode: How the actions run: `eager` or `replays`.
        repeats: Timed repeats of each action.

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


def agreed_times(
    member: Member, job: LanguageJob, backend: str, *, mode: Mode, place: str
) -> Times:
    """
    Time a model's parts on the device of every rank; for each action, the slowest rank's time
    counts.

    Every rank calls it. The measured stages are freed before any rank continues.

    Args:
        member: This rank.
        job: The model.
        backend: `reference` or `transformer-engine`.
        mode: How the actions run: `eager` or `replays`.
        place: Where the error occurred, as the beginning of its message: a file and a field.

    Raises:
        BackendError: A rank cannot build or capture a stage; every rank raises it.
    """
    own, problem = None, ""
    try:
        own = measure_times(job, member.device, backend, mode=mode)
    except (BackendError, RuntimeError, ValueError) as error:
        problem = f"{place}: rank {member.rank} cannot measure: {error}"
    agree_on(member, problem)
    times = slowest(all_gather(member, own))
    gc.collect()
    if member.device.type == "cuda":
        torch.cuda.empty_cache()
    return times


def _fill(memory: StageMemory, vocabulary: int) -> None:
    """
    Fill the buffers with varied values; gradients of one repeated token would be added in turn.
    """
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
