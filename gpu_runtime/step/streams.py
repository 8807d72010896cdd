"""
One graph stream, and both halves of the handoff with the streams that call into it.

Warmup, copies, capture and replay all run on one stream that the runtime owns. A caller's work must
be visible to a replay (the graph stream waits for the caller), and a replay's results to the caller
(the caller waits for an event at the graph's tail). With the first half only, a consumer reads
half-updated state, silently. A CPU has no streams: there both halves are counted and do nothing, so
that the completion guards run the same. So it is for a caller that runs on the graph stream itself:
one stream's own order is both halves, and an event between its actions would only cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import attrs
import torch

_UNCHANGED = nullcontext()
"""A scope that changes nothing; it keeps no state, so one serves all."""
_MOST_CALLERS = 64
"""Streams that a handoff remembers; torch's own pools have 32 of each priority."""


def _no_handle(device_index: int) -> int:
    raise RuntimeError(f"this torch has no CUDA, so device {device_index} has no current stream")


_current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_handle)
"""The driver's handle of the stream that is current on a device: three looks for each action."""


class Handoff(Protocol):
    """The two halves, and the scope in which the graph stream is current."""

    handoffs: int

    def wait_for_caller(self) -> None:
        """Make the graph stream wait for everything the current stream has been given."""

    def record_tail(self) -> None:
        """Mark the end of what the graph stream has been given; in a capture, inside the graph."""

    def record(self, event: Any) -> None:
        """Record an event of the caller's behind what the graph stream has been given."""

    def caller_waits(self) -> None:
        """Make the current stream wait for the latest tail."""

    def scope(self) -> Any:
        """A context in which the graph stream is the current one."""

    def cross(self) -> Any:
        """`wait_for_caller`, then make the graph stream current; `cross_back` takes the result."""

    def cross_back(self, caller: Any) -> None:
        """Make the stream current again that was before `cross`, then `caller_waits`."""

    def synchronize(self) -> None:
        """Let the host wait until the graph stream is empty."""


@attrs.define
class HostHandoff:
    """A CPU's: program order is the only order there is."""

    handoffs: int = 0

    def wait_for_caller(self) -> None:
        """Counted only."""
        self.handoffs += 1

    def caller_waits(self) -> None:
        """Counted only."""
        self.handoffs += 1

    def record_tail(self) -> None:
        """Nothing to mark."""

    def record(self, event: Any) -> None:
        """A stand-in for an event records what it likes."""
        event.record()

    def scope(self) -> Any:
        """Nothing changes."""
        return _UNCHANGED

    def cross(self) -> None:
        """Counted only."""
        self.handoffs += 1

    def cross_back(self, caller: None) -> None:
        """Counted only."""
        self.handoffs += 1

    def synchronize(self) -> None:
        """Nothing is in flight."""


class _Callers:
    """Streams that are current, each made into an object once: that costs more than an event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Any] = {}

    def of(self, handle: int) -> Any:
        """The stream that is current, by its driver's handle."""
        found = self._known.get(handle)
        if found is None:
            if len(self._known) >= _MOST_CALLERS:
                self._known.clear()
            found = self._known[handle] = torch.cuda.current_stream(self._device)
        return found


class SideStream:
    """
    A stream whose work waits for no other, and for whose work a caller's stream waits.

    Args:
        device: Its device.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self.stream.device_index
        self._callers = _Callers(device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """In it the stream is current; the caller's, which it gives, waits behind it."""
        caller = self._callers.of(_current_handle(self._index))
        with _current(self.stream, caller):
            yield caller
        self._done.record(self.stream)
        caller.wait_event(self._done)


@contextmanager
def _current(stream: Any, caller: Any) -> Iterator[None]:
    """Make a stream current in the place of its device's current one."""
    if torch.cuda.current_device() != stream.device_index:
        # Two devices have a current stream each; torch's context knows how to keep both.
        with torch.cuda.stream(stream):
            yield
        return
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(caller)


class GraphStream:
    """
    The manager-owned stream of one CUDA device.

    Args:
        device: The device.
        two_way: False leaves the second half out. Only the test that shows why that is wrong
            may do so.
    """

    def __init__(self, device: torch.device, *, two_way: bool = True) -> None:
        self.device = device
        self.two_way = two_way
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = self.stream.cuda_stream
        self._index = self.stream.device_index
        self.handoffs = 0
        self._callers = _Callers(device)
        self._from_caller = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Recorded inside graphs at their tail, and by eager actions at their end.
        self.tail = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]

    def is_current(self) -> bool:
        """Whether the calling code already runs on the graph stream."""
        # The handle alone: a stream object costs more than all else that an action asks here.
        return bool(_current_handle(self._index) == self._handle)

    def wait_for_caller(self) -> None:
        """Record the caller's position and let the graph stream wait for it."""
        handle = _current_handle(self._index)
        if handle != self._handle:
            self._from_caller.record(self._callers.of(handle))
            self.stream.wait_event(self._from_caller)
        self.handoffs += 1

    def record_tail(self) -> None:
        """Record the graph stream's position; inside a capture this becomes a node of the graph."""
        self.tail.record(self.stream)

    def record(self, event: Any) -> None:
        """Record an event on the graph stream, whichever is current."""
        event.record(self.stream)

    def caller_waits(self) -> None:
        """Let the caller wait for the latest tail."""
        handle = _current_handle(self._index)
        if self.two_way and handle != self._handle:
            self._callers.of(handle).wait_event(self.tail)
        self.handoffs += 1

    def scope(self) -> Any:
        """Make the graph stream current; nothing changes where it already is."""
        return _UNCHANGED if self.is_current() else torch.cuda.stream(self.stream)

    def cross(self) -> Any:
        """
        Let the graph stream wait for the caller and make it current: one look at where it stands.

        Returns:
            None where the graph stream was current already; else the caller's stream, and the
            context that was entered where another device was current.
        """
        self.handoffs += 1
        handle = _current_handle(self._index)
        if handle == self._handle:
            return None
        caller, other = self._callers.of(handle), None
        self._from_caller.record(caller)
        self.stream.wait_event(self._from_caller)
        if torch.cuda.current_device() == self._index:
            torch.cuda.set_stream(self.stream)
        else:
            # Two devices have a current stream each; torch's context knows how to keep both.
            other = torch.cuda.stream(self.stream)
            other.__enter__()  # type: ignore[no-untyped-call]
        return caller, other

    def cross_back(self, caller: Any) -> None:
        """Make the caller's stream current again and let it wait for the latest tail."""
        self.handoffs += 1
        if caller is None:
            return
        stream, other = caller
        if other is None:
            torch.cuda.set_stream(stream)
        else:
            other.__exit__(None, None, None)
        if self.two_way:
            stream.wait_event(self.tail)

    def synchronize(self) -> None:
        """Let the host wait for the graph stream."""
        self.stream.synchronize()


def handoff_for(device: torch.device) -> Handoff:
    """The handoff of a device."""
    return GraphStream(device) if device.type == "cuda" else HostHandoff()
