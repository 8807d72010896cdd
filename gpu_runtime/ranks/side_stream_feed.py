"""
Create a pipeline's data on a side stream, so that the data never wait for a message.

A pipeline's stream waits for messages of other ranks. Suppose that the sender of a message is gone,
and that the host waits for data that are queued after this message on the same stream. Then the
host waits forever and cannot report the cause. Even a separate stream can be blocked, if a launch
occupies all the device's queues. Therefore a feed must not wait for the device at all
(`feed.to_device`).
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
    A feed for a GPU that creates the data on a side stream.

    Args:
        inner: The feed that creates the data, without waiting for any stream.
        device: Device of the data.
    """

    def __init__(self, inner: Feed, device: torch.device) -> None:
        self.inner = inner
        self.side = SideStream(device)
        self.device = device
        self.copies: CopyStream | None = None  # made once a slot is filled on it

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Return the inner feed's inputs, ready for use on the current stream."""
        return self._given(self.inner.inputs, stage, step, microbatch)

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Return the inner feed's output gradients, ready for use on the current stream."""
        return self._given(self.inner.output_gradients, stage, step, microbatch)

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Pass the outputs to the inner feed, on the stream that computed them."""
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
        Create the inner feed's inputs, and copy them into a slot (the buffers of one microbatch) on
        a separate stream.

        The data are created on the side stream, so that copies from the host do not wait for the
        slot. The caller's stream waits for the data. The copy into the slot runs on a third stream.
        The third stream first waits for the caller's stream, which last used the slot. Afterwards
        the caller's stream waits for the copy.
        """
        given = self.inputs(stage, step, microbatch)
        if self.copies is None:
            self.copies = CopyStream(self.device)
        with self.copies.scope() as stream:
            put(given)
        for tensor in given:
            tensor.record_stream(stream)

    def every(self, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
        """Return the same data as `feed_data`, but switch the stream only once."""
        with self.made_here() as caller:
            given = _asked(self.inner, step, places)
        for tensor in {id(tensor): tensor for own in given for tensor in own}.values():
            tensor.record_stream(caller)
        return given

    def made_here(self) -> AbstractContextManager[Any]:
        """
        A context in which the side stream is current. It yields the caller's stream. At the end the
        caller's stream waits for the side stream.
        """
        return self.side.scope()


def feed_data(feed: Feed, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
    """
    Get several tensors of a step's data from a feed, ready for use on the current stream.

    Args:
        feed: The feed, which supplies the data of each step.
        step: The number of the step.
        places: One triple per request: `inputs` or `output_gradients`, the stage, and the
            microbatch.
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
    Copy a microbatch's inputs into a slot (its buffers). If the feed has its own stream, the copy
    runs there.

    Args:
        feed: The feed, which supplies the data of each step.
        put: Function that copies inputs into the slot, on the current stream.
        stage: The stage that the inputs enter.
        step: The number of the step.
        microbatch: The number of the microbatch in the step's data.
    """
    if isinstance(feed, SideStreamFeed):
        feed.into(put, stage, step, microbatch)
    else:
        put(feed.inputs(stage, step, microbatch))


def _asked(feed: Feed, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
    return [getattr(feed, what)(stage, step, m) for what, stage, m in places]


def feed_for(feed: Feed, device: torch.device) -> Feed:
    """
    Wrap a feed for a pipeline on a device; on a CPU, which has no streams, return the feed itself.
    """
    return feed if device.type == "cpu" else SideStreamFeed(feed, device)
