"""
The graph stream, and the waits in both directions between the graph stream and the callers'
streams.

Warm-up, copies, capture and replay all run on the graph stream, which the runtime owns. A replay
must see the caller's work, so the graph stream waits for the caller's stream. The caller must see a
replay's results, so the caller's stream waits for an event at the end of the graph. Without the
second wait, the caller's work silently reads half-updated state.

A CPU has no streams. There both waits are only counted, so the contract's completion guards run
unchanged. If the caller already uses the graph stream, no waits are needed, because a stream runs
its work in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import attrs
import torch

_UNCHANGED = nullcontext()
"""A scope that changes nothing; it has no state, so all callers share it."""
_MOST_CALLERS = 64
"""Largest number of streams that a handoff remembers; torch's own pools have 32 per priority."""


def _no_handle(device_index: int) -> int:
    raise RuntimeError(f"this torch has no CUDA, so device {device_index} has no current stream")


_current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_handle)
"""The driver's handle of a device's current stream; each action reads it three times."""


class Handoff(Protocol):
    """
    The waits between the graph stream and callers' streams, and a context in which the graph stream
    is the current stream.
    """

    handoffs: int

    def wait_for_caller(self) -> None:
        """Make the graph stream wait for all work submitted to the current stream so far."""

    def record_tail(self) -> None:
        """
        Mark the end of the graph stream's work so far. In a capture the mark becomes part of the
        graph.
        """

    def record(self, event: Any) -> None:
        """Record a caller's event after the graph stream's work so far."""

    def caller_waits(self) -> None:
        """Make the current stream wait for the latest mark of `record_tail`."""

    def scope(self) -> Any:
        """A context in which the graph stream is the current stream."""

    def cross(self) -> Any:
        """
        Call `wait_for_caller`, then make the graph stream current. Pass the result to `cross_back`.
        """

    def cross_back(self, caller: Any) -> None:
        """Restore the stream that was current before `cross`, then call `caller_waits`."""

    def synchronize(self) -> None:
        """Let the host wait until the graph stream is empty."""


@attrs.define
class HostHandoff:
    """The handoff on a CPU, where work runs in program order."""

    handoffs: int = 0

    def wait_for_caller(self) -> None:
        """Count the wait; a CPU has no streams."""
        self.handoffs += 1

    def caller_waits(self) -> None:
        """Count the wait; a CPU has no streams."""
        self.handoffs += 1

    def record_tail(self) -> None:
        """Do nothing: a CPU has no stream to mark."""

    def record(self, event: Any) -> None:
        """Record an event's replacement on the CPU."""
        event.record()

    def scope(self) -> Any:
        """A context that changes nothing."""
        return _UNCHANGED

    def cross(self) -> None:
        """Count the crossing; a CPU has no streams."""
        self.handoffs += 1

    def cross_back(self, caller: None) -> None:
        """Count the crossing; a CPU has no streams."""
        self.handoffs += 1

    def synchronize(self) -> None:
        """Do nothing: on a CPU no work is in flight."""


class _Callers:
    """
    Caches the objects of current streams, because making a stream object costs more than an event.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Any] = {}

    def of(self, handle: int) -> Any:
        """Return the current stream's object, from the driver's handle of the stream."""
        found = self._known.get(handle)
        if found is None:
            if len(self._known) >= _MOST_CALLERS:
                self._known.clear()
            found = self._known[handle] = torch.cuda.current_stream(self._device)
        return found


class SideStream:
    """
    A stream that waits for no other stream. The caller's stream waits for the work of this stream.

    Args:
        device: The CUDA device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self.stream.device_index
        self._callers = _Callers(device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """
        Make this stream current and yield the caller's stream. At the end the caller's stream waits
        for this stream.
        """
        caller = self._callers.of(_current_handle(self._index))
        with _current(self.stream, caller):
            yield caller
        self._done.record(self.stream)
        caller.wait_event(self._done)


class CopyStream:
    """
    A stream for copies. It first waits for the caller's stream; afterwards the caller's stream
    waits for it.

    Args:
        device: The CUDA device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index = self.stream.device_index
        self._callers = _Callers(device)
        self._begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """
        Make the stream current and yield it. Its work begins after all work that the caller has
        submitted so far.
        """
        caller = self._callers.of(_current_handle(self._index))
        self._begun.record(caller)
        self.stream.wait_event(self._begun)
        with _current(self.stream, caller):
            yield self.stream
        self._done.record(self.stream)
        caller.wait_event(self._done)


@contextmanager
def _current(stream: Any, caller: Any) -> Iterator[None]:
    """Make a stream the current one of its device."""
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
    The runtime's own stream on one CUDA device.

    Args:
        device: The CUDA device of the stream.
        two_way: Whether the caller's stream waits for the graph stream. Only a test passes False,
            to show why both waits are needed.
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
        # Compare handles: making a stream object costs more than all other work here.
        return bool(_current_handle(self._index) == self._handle)

    def wait_for_caller(self) -> None:
        """Let the graph stream wait for all work submitted to the caller's stream so far."""
        handle = _current_handle(self._index)
        if handle != self._handle:
            self._from_caller.record(self._callers.of(handle))
            self.stream.wait_event(self._from_caller)
        self.handoffs += 1

    def record_tail(self) -> None:
        """
        Mark the end of the graph stream's work so far. In a capture the mark becomes part of the
        graph.
        """
        self.tail.record(self.stream)

    def record(self, event: Any) -> None:
        """Record an event on the graph stream, whichever stream is current."""
        event.record(self.stream)

    def caller_waits(self) -> None:
        """Let the caller's stream wait for the latest mark of `record_tail`."""
        handle = _current_handle(self._index)
        if self.two_way and handle != self._handle:
            self._callers.of(handle).wait_event(self.tail)
        self.handoffs += 1

    def scope(self) -> Any:
        """Make the graph stream current. If it is already current, nothing changes."""
        return _UNCHANGED if self.is_current() else torch.cuda.stream(self.stream)

    def cross(self) -> Any:
        """
        Let the graph stream wait for the caller, and make the graph stream current.

        Returns:
            None if the graph stream was already current; otherwise the caller's stream, and the
            device context that was entered if another device was current.
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
        """
        Make the caller's stream current again, and let it wait for the latest mark of
        `record_tail`.
        """
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
    """Return the handoff for a device."""
    return GraphStream(device) if device.type == "cuda" else HostHandoff()
