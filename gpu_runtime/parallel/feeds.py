"""
Data that are made beside the pipeline's stream, so that a feed never waits for a message.

The stream that a pipeline calls on waits for messages of other ranks. A copy from ordinary memory
of the host to a device ends with a wait of the host for that stream; behind a message of a rank
that is gone the host would wait for ever, and could not learn why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import StageBackend
from qeffect.gpu_runtime.parallel.executor import Feed

__all__ = ["Beside", "beside"]


class Beside:
    """
    A feed of a GPU whose data are made on a stream of their own.

    Args:
        inner: The feed; it may wait for the stream that is current, and for no other.
        device: Where the data go.
    """

    def __init__(self, inner: Feed, device: torch.device) -> None:
        self.inner = inner
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """What the inner feed gives, ready for the stream that is current."""
        return self._made(self.inner.inputs, stage, step, microbatch)

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Likewise."""
        return self._made(self.inner.output_gradients, stage, step, microbatch)

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """The inner feed looks at them, on the stream that they are on."""
        self.inner.outputs(stage, step, microbatch, outputs)

    def _made(self, make: Any, *place: Any) -> Sequence[Tensor]:
        with self.made_here() as caller:
            given: Sequence[Tensor] = make(*place)
        for tensor in given:
            tensor.record_stream(caller)
        return given

    @contextmanager
    def made_here(self) -> Iterator[torch.cuda.Stream]:
        """In it this feed's stream is current; the caller's, which it gives, waits behind it."""
        caller = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream):
            yield caller
        caller.wait_stream(self.stream)


def beside(feed: Feed, device: torch.device) -> Feed:
    """A feed for a pipeline of a device: on a CPU nothing runs behind the host."""
    return feed if device.type == "cpu" else Beside(feed, device)
