"""
Keep the data of a step at fixed addresses, from which the graph of the step reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..backends.protocol import BackendError, StageBackend
from .feed import Feed
from .pipeline import Passage
from .side_stream_feed import feed_data

__all__ = ["StagedFeed"]

_form = attrgetter("shape", "dtype", "device")
_form_and_graph = attrgetter("shape", "dtype", "device", "requires_grad")


class StagedFeed:
    """A feed that keeps its data in fixed buffers, from which a graph can read."""

    def __init__(self, inner: Feed) -> None:
        self.inner = inner
        self.losses: dict[int, Tensor] = {}
        self._held: dict[tuple[str, int, int], tuple[StageBackend, tuple[Tensor, ...]]] = {}
        self._places: list[tuple[str, StageBackend, int]] = []
        self._many: list[int] = []
        self._forms: list[Any] = []
        self._alike: list[tuple[list[Tensor], list[int]]] = []
        self.rehearsing = False

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Return the buffers of a stage's inputs."""
        return self._held["inputs", stage.index, microbatch][1]

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Return the buffers of the last stage's output gradients."""
        return self._held["output_gradients", stage.index, microbatch][1]

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """
        Keep the last stage's first output. In a rehearsal there are no outputs, so nothing is kept.
        """
        if not self.rehearsing:
            if microbatch not in self.losses:
                self.losses[microbatch] = torch.empty_like(outputs[0])
            self.losses[microbatch].copy_(outputs[0])

    def prepare(self, passages: Iterable[Passage], step: int) -> None:
        """Allocate buffers for all data of a step, in memory that no graph owns."""
        for p in passages:
            if p.stage.index == 0 or len(p.stage.inputs) > 1:
                self._place("inputs", p, step)
            if p.last:
                self._place("output_gradients", p, step)
        self._places = [(what, own, m) for (what, _, m), (own, _) in self._held.items()]
        tensors = [held for _, held in self._held.values()]
        every = [*chain.from_iterable(tensors)]
        self._many, self._forms = [*map(len, tensors)], [*map(_form_and_graph, every)]
        # One copy moves all tensors of one dtype.
        alike: dict[torch.dtype, list[int]] = {}
        for n, tensor in enumerate(every):
            alike.setdefault(tensor.dtype, []).append(n)
        self._alike = [([every[n] for n in own], own) for own in alike.values()]

    def _place(self, what: str, p: Passage, step: int) -> None:
        given = getattr(self.inner, what)(p.stage, step, p.microbatch)
        held = tuple(tensor.detach().clone() for tensor in given)
        self._held[what, p.stage.index, p.microbatch] = p.stage, held

    def load(self, step: int) -> None:
        """
        Copy a step's data into the buffers on the current stream, with one copy per dtype.

        Raises:
            BackendError: The data's number, shapes, dtypes or devices differ from those of the
                captured step; nothing was copied.
        """
        given = feed_data(self.inner, step, self._places)
        values = [*chain.from_iterable(given)]
        if [*map(_form_and_graph, values)] != self._forms or [*map(len, given)] != self._many:
            self._require_forms(step, given)
            # Only autograd differs: without detach the buffers would join its graph.
            values = [value.detach() for value in values]
        for places, own in self._alike:
            torch._foreach_copy_(places, [values[n] for n in own])

    def _require_forms(self, step: int, given: Sequence[Sequence[Tensor]]) -> None:
        for (what, index, m), found in zip(self._held, given, strict=True):
            held = self._held[what, index, m][1]
            if [*map(_form, found)] != [*map(_form, held)]:
                raise BackendError(
                    f"stage {index}, {what} of microbatch {m} in step {step}: expected "
                    f"{_described(held)}, found {_described(found)}; every launch must be given "
                    "the shapes, dtypes and devices of the captured step"
                )


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{t.dtype} of {tuple(t.shape)} on {t.device}" for t in tensors) or "nothing"
