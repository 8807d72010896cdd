"""
Data that are made beside the pipeline's stream, so that a feed never waits for a message.

The stream that a pipeline calls on waits for messages of other ranks. A copy from ordinary memory
of the host to a device ends with a wait of the host for that stream; behind a message of a rank
that is gone the host would wait for ever, and could not learn why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..backends.protocol import StageBackend
from ..step.streams import SideStream
from .pipeline import Feed

__all__ = ["SideStreamFeed", "feed_data", "feed_for"]

#: What is asked for: `inputs` or `output_gradients`, of a stage, for a microbatch.
Place = tuple[str, StageBackend, int]


class SideStreamFeed:
    """
    A feed of a GPU whose data are made on a stream of their own.

    Args:
        inner: The feed; it may wait for the stream that is current, and for no other.
        device: Where the data go.
    """

    def __init__(self, inner: Feed, device: torch.device) -> None:
        self.inner = inner
        self.side = SideStream(device)

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """What the inner feed gives, ready for the stream that is current."""
        return self._given(self.inner.inputs, stage, step, microbatch)

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Likewise."""
        return self._given(self.inner.output_gradients, stage, step, microbatch)

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """The inner feed looks at them, on the stream that they are on."""
        self.inner.outputs(stage, step, microbatch, outputs)

    def _given(self, make: Any, *place: Any) -> Sequence[Tensor]:
        with self.made_here() as caller:
            given: Sequence[Tensor] = make(*place)
        for tensor in given:
            tensor.record_stream(caller)
        return given

    def every(self, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
        """As `feed_data`, with one change of streams."""
        with self.made_here() as caller:
            given = _asked(self.inner, step, places)
        for tensor in {id(tensor): tensor for own in given for tensor in own}.values():
            tensor.record_stream(caller)
        return given

    def made_here(self) -> AbstractContextManager[Any]:
        """In it this feed's stream is current; the caller's, which it gives, waits behind it."""
        return self.side.scope()


def feed_data(feed: Feed, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
    """
    What a feed gives in a step at several places, ready for the stream that is current.

    Args:
        feed: The feed.
        step: The step.
        places: `inputs` or `output_gradients`, and the stage and microbatch.
    """
    if isinstance(feed, SideStreamFeed):
        return feed.every(step, places)
    return _asked(feed, step, places)


def _asked(feed: Feed, step: int, places: Iterable[Place]) -> list[Sequence[Tensor]]:
    return [getattr(feed, what)(stage, step, m) for what, stage, m in places]


def feed_for(feed: Feed, device: torch.device) -> Feed:
    """A feed for a pipeline of a device: on a CPU nothing runs behind the host."""
    return feed if device.type == "cpu" else SideStreamFeed(feed, device)
