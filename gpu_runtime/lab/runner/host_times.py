"""
Measure the host time of each guarded action, and of a bare replay of the same graph.

In some steps, each call is timed separately; the device is drained before such a step, so that the
host never waits for a full queue. Then the calls are split into parts, one part at a time. Last,
the same graphs are replayed bare (without guards and copies), in the same order. The difference
between the two times is the cost of guards, copies and stream crossings. Bare replays change
numerical state without the contract, so a column must be closed after bare replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from ...runtime import Runtime
from ...step.graphs import GraphExecutor, product_at
from ...step.memory.slots import fill
from ...step.plan.order import Kind, Order
from .action_parts import Clock, part_times

REPLAYS = ("refresh", "forward", "dgrad", "wgrad")
"""Actions that replay one graph each."""

ASKED = ("bind", "outputs", "finish_outputs", "dgrads", "finish_dgrads")
"""Calls between these actions, which replay no graph."""

_NAMES = {Kind.FORWARD: "forward", Kind.DGRAD: "dgrad", Kind.WGRAD: "wgrad"}


@attrs.define(eq=False)
class Times:
    """
    Nanoseconds of single calls, by name, in the order of the calls.

    Args:
        clock: Function that is read before and after each call.
        ns: The times in nanoseconds, by name of the call.
    """

    clock: Clock = time.perf_counter_ns
    ns: dict[str, list[int]] = attrs.field(factory=dict)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that makes the same call and records its time."""
        clock, times = self.clock, self.ns.setdefault(name, [])

        def wrapped(*args: Any, **options: Any) -> Any:
            started = clock()
            result = call(*args, **options)
            times.append(clock() - started)
            return result

        return wrapped


class TimedActions:
    """
    Actions that time each of their calls.

    Args:
        actions: Guarded actions, or the same actions without guards.
        times: Object that receives the times.
    """

    def __init__(self, actions: Any, times: Times) -> None:
        for name in (*REPLAYS, *ASKED):
            setattr(self, name, times.timed(name, getattr(actions, name)))


def host_times(
    runtime: Runtime,
    step: Callable[[Any], None],
    actions: Any,
    synchronize: Callable[[], None],
    steps: int,
    *,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, Any]:
    """
    Time some steps call by call, then the bare replays of the same number of steps.

    Args:
        runtime: The runtime. If the runtime has captured graphs, bare replays are timed too.
        step: Function that runs one step through given actions.
        actions: The actions to time.
        synchronize: Function that waits for the device.
        steps: Number of steps.
        clock: Function that is read before and after each call.

    Returns:
        `steps`; `actions`, the number of replaying actions per step; `guarded_ns` and `bare_ns` by
        name; `copy_ns`, for the copies into static buffers alone; and `parts_ns` by part and name,
        if the runtime has both graphs and guards.
    """
    guarded, bare, copies = Times(clock), Times(clock), Times(clock)
    timed = TimedActions(actions, guarded)
    synchronize()
    for _ in range(steps):
        step(timed)
        synchronize()
    executor = runtime.executor
    parts: Mapping[str, Any] = {}
    if isinstance(executor, GraphExecutor):
        if actions is runtime.actions:
            parts = part_times(step, actions, (*REPLAYS, *ASKED), synchronize, steps, clock=clock)
        with runtime.caller_scope():
            for _ in range(steps):
                for name, replay in replays(runtime.order, executor, runtime):
                    bare.timed(name, replay)()
                synchronize()
            copy = copies.timed("copy", fill)
            for _ in range(steps):
                for buffers, values in _copied(runtime):
                    copy(buffers, values)
                synchronize()
    order = runtime.order
    return {
        "steps": steps,
        "actions": len(order.steps) + len(order.stages),
        "guarded_ns": guarded.ns,
        "bare_ns": bare.ns,
        "copy_ns": copies.ns.get("copy", []),
        "parts_ns": parts,
    }


def replays(
    order: Order, executor: GraphExecutor, runtime: Runtime
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """
    Yield the graph replays of one step in order: the name of the action, and the function that
    replays its graph.
    """
    refreshed: set[int] = set()
    for kind, stage, microbatch in order.steps:
        memory = runtime.memories[stage]
        if kind is Kind.FORWARD and stage not in refreshed:
            refreshed.add(stage)
            yield "refresh", executor.refreshes[stage].replay
        graphs = executor.slots[memory.slot_of[microbatch]]
        graph = {Kind.FORWARD: graphs.forward, Kind.DGRAD: graphs.dgrad}.get(kind)
        if graph is None:
            product = product_at(memory, microbatch)
            if product is None:
                continue  # an earlier dW of its group takes it
            graph = executor.wgrads[product].graph
        yield _NAMES[kind], graph.replay


def _copied(runtime: Runtime) -> Iterator[tuple[Any, Any]]:
    """The copies of one step's F and dI: static buffers, and the values to copy into them."""
    for memory in runtime.memories.values():
        for slot in memory.table:
            values = tuple(buffer.clone() for buffer in slot.input_views)
            gradients = tuple(buffer.clone() for buffer in slot.output_gradients)
            if values:
                yield slot.input_views, values
            if gradients:
                yield slot.output_gradients, gradients


@contextmanager
def calling(loop: Any, actions: Any) -> Iterator[None]:
    """A context in which a step loop calls the given actions instead of the loop's actions."""
    own, loop.calls = loop.calls, actions
    try:
        yield
    finally:
        loop.calls = own


def times_of(column: Any, synchronize: Callable[[], None], steps: int) -> Mapping[str, Any]:
    """The result of `host_times` for a column (a way to run a step) of the benchmark."""

    def step(actions: Any) -> None:
        with calling(column.loop, actions):
            column.step()

    return host_times(column.runtime, step, column.loop.calls, synchronize, steps)
