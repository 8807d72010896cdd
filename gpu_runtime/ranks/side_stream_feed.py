"""
Data that are made on a side stream, so that a feed never waits for a message.

The stream of a pipeline waits for messages of other ranks. If a host waits for data on that stream,
behind a message from a rank that is gone, it waits forever and cannot learn the cause. A separate
stream is not enough if a launch holds all the device's queues, so a feed must not wait for the
device at all (`feed.to_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..backends.protocol import StageBackend
from ..step.streams import CopyStream, SideStream
from .feed import Feed

__all__ = ["SideStreamFeed", "feed_data", "feed_for", "feed_into"]

#: Key of one piece of data: `inputs` or `output_gradients`, the stage, and the microbatch.
Place = tuple[str, StageBackend, int]


class SideStreamFeed:
    """
    A feed of a GPU that makes its data on a side stream.

    Args:
        inner: The feed; it waits for no stream.
        device: Device of the data.
    """

    def __init__(self, inner: Feed, device: torch.device) -> None:
        self.inner = inner
        self.side = SideStream(device)
        self.device = device
        self.copies: CopyStream | None = None  # made once a slot is filled on it

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The inner feed's inputs, ready for the current stream."""
        return self._given(self.inner.inputs, stage, step, microbatch)

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The inner feed's output gradients, ready for the current stream."""
        return self._given(self.inner.output_gradients, stage, step, microbatch)

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Hand the outputs to the inner feed, on their own stream."""
        self.inner.outputs(stage, step, microbatch, outputs)

    def _given(self, make: Any, *place: Any) -> Sequence[Tensor]:
        with self.made_here() as caller:
            given: Sequence[Tensor] = make(*place)
        for tensor in given:
            tensor.record_stream(caller)
        return given

    def into(
        self,
        put: Callable[[Sequence[Tensor]], None],
        stage: StageBackend,
        step: int,
        microbatch: int,
    ) -> None:
        """
        Make the inner feed's inputs, and copy them into a slot on a separate stream for copies.

        The data are made on the side stream, so that no copy from the host waits for the slot. The
        caller's stream waits for the data. The copying stream waits for the caller's stream, on
        which the slot was last used; the caller's stream then waits for the copy.
        """
        given = self.inputs(stage, step, microbatch)
        if self.copies is None:
            self.copies = CopyStream(self.device)
        with self.copies.scope() as stream:
            put(given)
        for tensor in given:
            tensor.record_stream(stream)

    def every(self, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
        """Ask for all pieces as `feed_data` does, but change streams only once."""
        with self.made_here() as caller:
            given = _asked(self.inner, step, places)
        for tensor in {id(tensor): tensor for own in given for tensor in own}.values():
            tensor.record_stream(caller)
        return given

    def made_here(self) -> AbstractContextManager[Any]:
        """
        A context on the side stream; it yields the caller's stream, which waits for the side stream
        at the end.
        """
        return self.side.scope()


def feed_data(feed: Feed, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
    """
    Ask a feed for several pieces of data of a step, ready for the current stream.

    Args:
        feed: The feed.
        step: The step.
        places: `inputs` or `output_gradients`, and the stage and microbatch.
    """
    if isinstance(feed, SideStreamFeed):
        return feed.every(step, places)
    return _asked(feed, step, places)


def feed_into(
    feed: Feed,
    put: Callable[[Sequence[Tensor]], None],
    stage: StageBackend,
    step: int,
    microbatch: int,
) -> None:
    """
    Copy a microbatch's inputs into a slot, on the feed's own stream if it has one.

    Args:
        feed: The feed.
        put: Copies inputs into the slot, on the current stream.
        stage: The stage.
        step: The step.
        microbatch: The number of the microbatch in the step's data.
    """
    if isinstance(feed, SideStreamFeed):
        feed.into(put, stage, step, microbatch)
    else:
        put(feed.inputs(stage, step, microbatch))


def _asked(feed: Feed, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
    return [getattr(feed, what)(stage, step, m) for what, stage, m in places]


def feed_for(feed: Feed, device: torch.device) -> Feed:
    """Wrap a feed for a pipeline on a device; a CPU has no streams, and takes the feed itself."""
    return feed if device.type == "cpu" else SideStreamFeed(feed, device)
