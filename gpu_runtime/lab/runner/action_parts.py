"""
Split the host time of a guarded action into its parts, such as the check, the launch and the
commit.

The calls inside an action are timed one part at a time, because reading the clock costs as much as
a small part and would distort the times of other parts. The clock's own cost is measured on an
empty call and subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from qeffect.contract import Contract

from ...step.graphs import GraphExecutor
from ...step.memory.arena import Arena
from ...step.memory.slots import Boundary
from ...step.performer import DevicePerformer
from ...step.streams import GraphStream, HostHandoff
from ..statistics.summary import exact_median

Clock = Callable[[], int]
"""A monotonic clock that returns nanoseconds from an arbitrary start."""

_CROSSING = ("cross", "cross_back", "record_tail")

PARTS: Final[Mapping[str, tuple[tuple[Any, tuple[str, ...]], ...]]] = {
    "kernel check": ((Contract, ("check_refresh", "check_forward", "check_dgrad", "check_wgrad")),),
    "kernel commit": ((Contract, ("commit",)),),
    "kernel streams": ((Contract, ("enter", "wait")),),
    "kernel bind and read": ((Contract, ("bind", "read", "finish_read")),),
    "streams and events": ((GraphStream, _CROSSING), (HostHandoff, _CROSSING)),
    "caller's tensors": ((Boundary, ("check",)),),
    "copies": ((DevicePerformer, ("fill",)),),
    "destinations": ((Arena, ("present",)),),
    "addresses": ((GraphExecutor, ("check_addresses",)),),
    "executor": ((GraphExecutor, ("refresh", "forward", "dgrad", "wgrad")),),
}
"""The timed calls of each part. The executor's calls include the address check and the launch."""

_CALIBRATIONS = 2000


class _Watch:
    """
    Reads the clock for one part of an action (such as its check) at a time.

    Args:
        clock: Function that is read before and after each call.

    Attributes:
        reading: Nanoseconds of the timed calls since `reading` was set to zero.
        calls: Number of timed calls so far.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reading = self.calls = 0
        self._added = 0
        self._added = self._calibrated()

    def _calibrated(self) -> int:
        """The clock's own cost: the median reading of an empty call."""
        timed, read = self.timed(_nothing), []
        for _ in range(_CALIBRATIONS):
            self.reading = 0
            timed()
            read.append(self.reading)
        return round(exact_median(read))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that makes the same call and adds the time of the call to `reading`."""
        clock, added = self.clock, self._added

        def watched(*args: Any, **options: Any) -> Any:
            started = clock()
            try:
                return call(*args, **options)
            finally:
                self.reading += clock() - started - added
                self.calls += 1

        return watched

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """
        A context that times the calls of one part, by replacing each method in the class that
        defines it.
        """
        watched = [(definer(owner, n), n) for owner, names in PARTS[part] for n in names]
        with ExitStack() as restored:
            for owner, name in watched:
                original = vars(owner)[name]
                restored.callback(setattr, owner, name, original)
                setattr(owner, name, self.timed(original))
            yield


def definer(owner: Any, name: str) -> Any:
    """Return what defines a name: the module itself, or the class or base class of a method."""
    return next(place for place in getattr(owner, "__mro__", (owner,)) if name in vars(place))


def _nothing() -> None:
    """A call that does nothing."""


class _Split:
    """Guarded actions whose calls record the time that one part of each call takes."""

    def __init__(
        self, actions: Any, names: tuple[str, ...], watch: _Watch, ns: Mapping[str, list[int]]
    ) -> None:
        for name in names:
            setattr(self, name, self._call(getattr(actions, name), watch, ns[name]))

    @staticmethod
    def _call(call: Callable[..., Any], watch: _Watch, ns: list[int]) -> Callable[..., Any]:
        def split(*args: Any, **options: Any) -> Any:
            watch.reading, before = 0, watch.calls
            result = call(*args, **options)
            if watch.calls != before:
                ns.append(watch.reading)
            return result

        return split


def part_times(
    step: Callable[[Any], None],
    actions: Any,
    names: tuple[str, ...],
    synchronize: Callable[[], None],
    steps: int,
    *,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, dict[str, list[int]]]:
    """
    Split the calls of guarded steps into parts; each part is timed in its own steps.

    Args:
        step: Function that runs one step through given actions.
        actions: The guarded actions (F, dI and dW under the contract) whose calls are split.
        names: Names of the calls to split.
        synchronize: Function that waits for the device.
        steps: Number of steps for each part.
        clock: Function that is read before and after each call of a part.

    Returns:
        Nanoseconds of single calls in the order of the calls, by part and kind of call; if a kind
        of call never uses a part, that part is left out.
    """
    watch = _Watch(clock)
    found: dict[str, dict[str, list[int]]] = {}
    for part in PARTS:
        ns: dict[str, list[int]] = {name: [] for name in names}
        split = _Split(actions, names, watch, ns)
        with watch.of(part):
            for _ in range(steps):
                step(split)
                synchronize()
        found[part] = {name: read for name, read in ns.items() if read}
    return found
