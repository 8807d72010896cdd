"""
Measure the times of a model's parts on a device. These times are used to cut the model into stages
of equal time, and to choose the number of microbatches per weight-gradient product.

Three stages of one layer each are built and timed. The first stage also has the embedding; the
third stage also has norm, head and loss. The embedding's time is the first stage's time minus the
second stage's time. The time of norm, head and loss is the third stage's time minus the second
stage's time. All layers of a model have the same shape, so a single layer is measured. Each action
(F, dI or dW) runs alone, eagerly or as a replay of a graph, depending on the run's mode. The first
dW of a step overwrites its destination and later dW add to it, so the time of dW is the mean over
all microbatches of a step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from ..backends.protocol import BackendError, StageBackend
from ..ranks.membership import Member, agree_on, all_gather
from ..runtime import Mode, Runtime, RuntimeConfig
from ..step.eager import StageMemory
from ..step.plan.order import Order
from .language_model import LanguageJob

__all__ = ["ACTIONS", "Times", "agreed_times", "measure_times", "slowest"]

ACTIONS = ("F", "dI", "dW")
WARMUP = 3
REPEATS = 15
_ACTIONS_OF_ONE = ("0F", "1F", "2F", "2I", "2W", "1I", "1W", "0I", "0W")
"""The actions of one microbatch over three stages."""
_DIGITS = 3
_FINE = 6


@attrs.frozen
class Times:
    """
    The times of F, dI and dW (in this order) of each part of a model (a layer, the embedding, the
    head), in milliseconds.

    Args:
        embedding: Times of the embedding.
        layer: Times of one layer.
        head: Times of norm, head and loss.
        products: For each number of microbatches, the times of one dW product over that many
            microbatches: three times, for the embedding, one layer, and the head.
    """

    embedding: tuple[float, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]
    products: Mapping[int, tuple[float, ...]] = attrs.field(factory=dict)

    def fields(self, layers: int) -> dict[str, object]:
        """
        Return the fields of a training file that contain these times. Each time is the sum over F,
        dI and dW.

        Args:
            layers: Number of layers of the model.

        >>> Times((0.0, 0.25, 0.0), (1.0, 1.0, 0.5), (1.0, 0.5, 0.5)).fields(2)
        {'embedding_time': 0.25, 'layer_times': [2.5, 2.5], 'head_time': 2.0}
        """
        return {
            "embedding_time": round(sum(self.embedding), _DIGITS),
            "layer_times": [round(sum(self.layer), _DIGITS)] * layers,
            "head_time": round(sum(self.head), _DIGITS),
        }

    @property
    def parts(self) -> dict[str, tuple[float, ...]]:
        """
        Return, for each part of the model (a layer, the embedding, the head), the times of F, dI
        and dW, then the time of each dW product over several microbatches.
        """
        owns = {"embedding": self.embedding, "layer": self.layer, "head": self.head}
        return {
            name: (*own, *(took[n] for took in self.products.values()))
            for n, (name, own) in enumerate(owns.items())
        }

    def durations(self, cut: Sequence[int]) -> dict[str, Any]:
        """
        Return the times of every stage in the format of `qeffect plan --durations`.

        Args:
            cut: Number of layers of each stage.

        >>> times = Times((0, 0.5, 0), (1, 1, 0.5), (1, 1, 0.5), {2: (0, 0.75, 0.75)})
        >>> times.durations((2, 1))["stages"]["1"]
        {'F': 2.0, 'I': 2.0, 'W': 1.0, 'grouped_W': {'2': 1.5}}
        """
        parts = self.parts
        layer = [round(float(one), _FINE) for one in self.layer]
        found: dict[str, Any] = {"unit": "ms", **dict(zip("FIW", layer, strict=True)), "stages": {}}
        for stage, layers in enumerate(cut):
            held = [parts["layer"]] * layers
            held += [parts["embedding"]] * (stage == 0) + [parts["head"]] * (stage == len(cut) - 1)
            sums = [round(float(sum(column)), _FINE) for column in zip(*held, strict=True)]
            own: dict[str, Any] = dict(zip("FIW", sums, strict=False))
            found["stages"][str(stage)] = own
            if self.products:
                own["grouped_W"] = dict(zip(map(str, self.products), sums[3:], strict=True))
        return found


def slowest(ranks: Sequence[Times]) -> Times:
    """
    For each action (F, dI, dW) of each part of the model (a layer, the embedding, the head), return
    the longest time on any rank.

    >>> slowest([Times((0,), (1,), (4,)), Times((1,), (3,), (2,))])
    Times(embedding=(1,), layer=(3,), head=(4,), products={})
    """

    def longest(part: str) -> tuple[float, ...]:
        return tuple(map(max, zip(*(getattr(one, part) for one in ranks), strict=True)))

    return Times(longest("embedding"), longest("layer"), longest("head"))


def measure_times(
    job: LanguageJob,
    device: torch.device,
    backend: str,
    *,
    mode: Mode,
    repeats: int = REPEATS,
    groups: Sequence[int] = (),
) -> Times:
    """
    Measure the median times of a layer, the embedding and the head on a device, after a warm-up.

    The measured stages are dropped afterwards, and Transformer Engine's FP8 state of this process
    is reset. Therefore build the run's own stages after this call.

    Args:
        job: The job whose model is measured.
        device: The device to measure on.
        backend: `reference` or `transformer-engine`.
        mode: How the actions run: `eager` or `replays`.
        repeats: Number of times that each action is run and timed.
        groups: Numbers of microbatches for which one dW product over that many microbatches is
            timed. Each number must be above 1 and divide the microbatches per walk (pass over the
            schedule). The job then needs ``scales="epoch"``.

    Raises:
        BackendError: A stage cannot be built or captured, or only some of the stages recompute
            activations.
    """
    if job.recompute and len(job.recompute) < job.num_stages:
        raise BackendError(
            "a layer's time is measured once for all stages; expected every stage or no stage to "
            f"recompute, found stages {list(job.recompute)} of {job.num_stages}"
        )
    probe = attrs.evolve(
        job,
        schedule="1f1b",
        pp=3,
        vpp=1,
        cut=(1, 1, 1),
        wgrad_group=1,
        recompute=(0, 1, 2) if job.recompute else (),
    )
    stages = probe.stages((0, 1, 2), device, backend)
    embedding, layer, head = _measured(stages, job, 1, mode, repeats)
    products = {
        group: tuple(part[-1] for part in _measured(stages, job, group, mode, repeats))
        for group in groups
    }
    return Times(embedding, layer, head, products)


def _measured(
    stages: Sequence[StageBackend], job: LanguageJob, group: int, mode: Mode, repeats: int
) -> list[tuple[float, ...]]:
    """
    Return the times of F, dI and one dW product over `group` microbatches, for embedding, layer and
    head.
    """
    products = job.microbatches // group
    microbatches = range(group * min(2, products))
    row = " ".join(f"{action}{m}" for m in microbatches for action in _ACTIONS_OF_ONE)
    order = Order.parse(row).grouped(group)
    runtime = Runtime(stages, order, RuntimeConfig(rule=job.rule, mode=mode, group=group))
    with runtime.caller_scope():
        for memory in runtime.memories.values():
            _fill(memory, job.vocabulary)
        first, layer, last = (
            _medians(runtime, memory, products, repeats) for memory in runtime.memories.values()
        )
    runtime.drain()
    runtime.close()

    def beyond(whole: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(0.0, a - b) for a, b in zip(whole, layer, strict=True))

    return [beyond(first), layer, beyond(last)]


def agreed_times(
    member: Member, job: LanguageJob, backend: str, *, mode: Mode, place: str
) -> Times:
    """
    Measure the parts of a model (a layer, the embedding, the head) on every rank's device. Return
    the slowest rank's time for each action.

    Every rank calls this function. The measured stages are freed before any rank continues.

    Args:
        member: This rank.
        job: The job whose model is measured.
        backend: `reference` or `transformer-engine`.
        mode: How the actions run: `eager` or `replays`.
        place: The training file and the field, for the beginning of an error message.

    Raises:
        BackendError: A rank cannot build or capture a stage; every rank raises this error.
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
    Fill the buffers with varied values, because gradients of a single repeated token would be added
    one after another.
    """
    generator = torch.Generator().manual_seed(0)
    for slot in memory.table:
        for into in (*slot.input_views, *slot.output_gradients):
            if into.dtype == torch.int64:
                values = torch.randint(vocabulary, into.shape, generator=generator)
            else:
                values = torch.randn(into.shape, generator=generator)
            into.detach().copy_(values.to(into.dtype))


def _medians(
    runtime: Runtime, memory: StageMemory, products: int, repeats: int
) -> tuple[float, ...]:
    """Return the medians of F and dI, and the mean over the `products` dW products of a step."""
    executor, device = runtime.executor, runtime.domain.device
    at = {slot.index: slot for slot in memory.table}
    blocks = [members for members in memory.groups if members]
    executor.refresh(memory)
    spans: dict[str, list[float]] = defaultdict(list)
    for n in range(WARMUP + repeats):
        for block, members in enumerate(blocks):
            slots = [at[memory.slot_of[m]] for m in members]
            variants = [memory.variants[m] for m in members]
            took = {
                "F": [_milliseconds(partial(executor.forward, memory, s), device) for s in slots],
                "dI": [
                    _milliseconds(partial(executor.dgrad, memory, s, v), device)
                    for s, v in zip(slots, variants, strict=True)
                ],
                str(block): [
                    _milliseconds(
                        partial(executor.wgrad, memory, slots[0], variants[0], slots[1:]), device
                    )
                ],
            }
            if n >= WARMUP:
                for name, times in took.items():
                    spans[name] += times
    medians = {name: statistics.median(times) for name, times in spans.items()}
    # The first product of a step writes, and each later one adds.
    wgrad = (medians["0"] + (products - 1) * medians.get("1", 0.0)) / products
    return medians["F"], medians["dI"], wgrad


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
