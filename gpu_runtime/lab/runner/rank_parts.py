"""
Device times of the parts of a rank's step, and the bound that follows from them.

The measured parts are: a stage's graphs one by one, all actions of a rank in order without messages
(the rank's row of the schedule), and a message between two ranks. A dW that adds to a gradient also
reads it, and takes longer than the first dW of its stage, which only writes; so the dW of each
microbatch is timed separately.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch

from qeffect.schedule.actions import Kind
from qeffect.schedule.durations import Durations
from qeffect.schedule.steptime import step_time

from ...ranks.channels import Message
from ...ranks.job import Job
from ...ranks.membership import Member
from ...ranks.worker import Worker
from ...step.captures import capture_graph, no_collection
from ...step.eager import Executor, StageMemory
from ...step.graphs import GraphExecutor, product_at
from ...step.optimizer import Gradients
from ...step.plan.order import ComputeAction, Order
from ..statistics.summary import exact_median
from .timing import meet_idle

__all__ = [
    "action_of",
    "bound_ms",
    "device_ms",
    "message_ms",
    "row_as_one_graph",
    "times_alone",
    "times_in_row",
]

REPLAYS = 20
_ROWS = 6
_QUEUEING_CYCLES = 40_000_000
"""About 20 ms of device time, in which the host queues messages."""

Times = dict[str, dict[str, float]]
"""Milliseconds by stage, and by `F`, `I`, `W` and `refresh`."""


def times_alone(worker: Worker, gradients: Gradients) -> tuple[Times, float]:
    """
    Times in milliseconds of each stage's graphs, and of the update, when nothing else runs.

    The runtime cannot be used afterwards, because these replays compute nothing useful. The time of
    dW is the mean over the stage's microbatches. Without captured graphs, the times are empty and
    the update's time is 0.
    """
    executor = worker.runtime.executor
    if not isinstance(executor, GraphExecutor):
        return {}, 0.0
    found = {}
    with worker.runtime.caller_scope():
        update = device_ms(lambda: worker.optimizer.step(gradients))
        for index, memory in worker.runtime.memories.items():
            graphs = executor.slots[next(iter(memory.table)).index]
            every = range(len(memory.slot_of))
            ran = [product for m in every if (product := product_at(memory, m)) is not None]
            one_of = {product.variant: product for product in ran}
            took = {
                variant: device_ms(executor.wgrads[product].graph.replay)
                for variant, product in one_of.items()
            }
            found[str(index)] = {
                "F": device_ms(graphs.forward.replay),
                "I": device_ms(graphs.dgrad.replay),
                "W": sum(took[product.variant] for product in ran) / len(every),
                "refresh": device_ms(executor.refreshes[index].replay),
            }
    return found, update


def times_in_row(worker: Worker, gradients: Gradients, order: Order) -> tuple[Times, float]:
    """
    Times of all actions of a rank, replayed in order without messages.

    A graph that is replayed alone finds its own data in the device's cache. When all actions of a
    rank are replayed in order, the cache holds the data of the previous graph.
    """
    executor = worker.runtime.executor
    if not isinstance(executor, GraphExecutor):
        return {}, 0.0
    acts = list(_row(worker, gradients, order))
    spent: list[list[float]] = [[] for _ in acts]
    with worker.runtime.caller_scope():
        for _ in range(_ROWS):
            marks = [_mark() for _ in range(len(acts) + 1)]
            torch.cuda.synchronize()
            torch.cuda._sleep(_QUEUEING_CYCLES)  # type: ignore[no-untyped-call]
            marks[0].record()
            for (_, _, act), mark in zip(acts, marks[1:], strict=True):
                act()
                mark.record()
            torch.cuda.synchronize()
            for times, (began, ended) in zip(spent, pairwise(marks), strict=True):
                times.append(began.elapsed_time(ended))
    places: dict[tuple[str, str], list[float]] = {}
    for (stage, kind, _), times in zip(acts, spent, strict=True):
        places.setdefault((stage, kind), []).append(exact_median(times))
    found: Times = {}
    for (stage, kind), medians in places.items():
        found.setdefault(stage, {})[kind] = statistics.mean(medians)
    return found, found.pop("")["update"]


@contextmanager
def row_as_one_graph(
    worker: Worker, gradients: Gradients, order: Order
) -> Iterator[Callable[[], None]]:
    """
    A context with one graph that contains a rank's actions, refreshes and update, without messages.

    The replays compute nothing useful, as in `times_alone`. The worker's mode must be `one launch`,
    because graphs of single actions cannot become part of another graph.
    """
    acts = [act for _, _, act in _row(worker, gradients, order)]
    with worker.runtime.caller_scope():
        torch.cuda.synchronize()
        with no_collection():
            graph = capture_graph(lambda: _run(acts), torch.cuda.graph_pool_handle())
        yield graph.replay
        torch.cuda.synchronize()
        graph.reset()


def _run(acts: Iterable[Callable[[], object]]) -> None:
    for act in acts:
        act()


def _row(
    worker: Worker, gradients: Gradients, order: Order
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """
    Yield the stage and kind of each action of a rank, and a function that runs it without asking
    the contract; refreshes come first, the update last.
    """
    memories, executor = worker.runtime.memories, worker.runtime.executor
    for index, memory in memories.items():
        yield str(index), "refresh", partial(executor.refresh, memory)
    for step in order.steps:
        if (act := action_of(step, memories[step.stage], executor)) is not None:
            yield str(step.stage), step.kind.value, act
    yield "", "update", lambda: worker.optimizer.step(gradients)


def action_of(
    step: ComputeAction, memory: StageMemory, executor: Executor
) -> Callable[[], object] | None:
    """
    Return a function that runs an action on the slot (the buffers) of its microbatch.

    None for a dW whose product an earlier dW of the same group computes.
    """
    slot = memory.table[memory.slot_of[step.microbatch]]
    variant = memory.variants[step.microbatch]
    if step.kind is Kind.FORWARD:
        return partial(executor.forward, memory, slot)
    if step.kind is Kind.DGRAD:
        return partial(executor.dgrad, memory, slot, variant)
    if not (group := memory.groups[step.microbatch]):
        return None
    first, *others = (memory.table[memory.slot_of[m]] for m in group)
    return partial(executor.wgrad, memory, first, variant, others)


def device_ms(act: Callable[[], object]) -> float:
    """
    Device time of a call in milliseconds, without the time of the launch: a quarter of the time of
    four calls in a row.
    """
    times = []
    for _ in range(REPLAYS):
        start, end = _mark(), _mark()
        torch.cuda.synchronize()
        start.record()
        for _ in range(4):
            act()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 4)
    return float(exact_median(times))


def message_ms(member: Member, job: Job, worker: Worker) -> float:
    """
    Time in milliseconds of a message with an activation from rank 0 to rank 1 or back, when nothing
    else runs.

    The device sleeps while the host queues all messages, so that the host's speed does not matter.
    The result is zero on other ranks and without GPUs. The messages that this function posts are
    not part of a schedule.
    """
    channels = worker.pipeline.channels
    if member.device.type == "cpu" or job.pp == 1:
        return 0.0
    tensor = job.config.hidden_states(member.device).buffer()
    start, end = _mark(), _mark()
    meet_idle(member)
    if member.rank > 1:
        return 0.0
    torch.cuda._sleep(_QUEUEING_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(REPLAYS):
        for source in (0, 1):
            post = channels.send if member.rank == source else channels.receive
            channels.wait(post(tensor, 1 - member.rank, Message(source, 0, source == 1)))
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) / (2 * REPLAYS))


def bound_ms(
    job: Job,
    alone: Mapping[str, Mapping[str, float]],
    updates: Sequence[float],
    message: float,
) -> float | None:
    """
    The critical path of a schedule, from the times of each stage's graphs and of a message.

    A stage's weight-cache refresh precedes its first F and waits for no message. The result is None
    without captured graphs.
    """
    if not alone:
        return None
    stages = {int(stage): times for stage, times in alone.items()}
    ranks = {rank: {"update": update} for rank, update in enumerate(updates)}
    every = {**dict.fromkeys("FIW", 0.0), "message": message}
    return float(step_time(job.table(), Durations(every, "ms", stages, ranks)).time)


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
