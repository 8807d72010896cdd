"""
The data of comparisons and measurements: random, but the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor

from ...backends.protocol import StageBackend, TensorSpec


@attrs.frozen
class Workload:
    """
    Random inputs and output gradients that every process can draw again.

    The data are drawn on the CPU from the seed, the step, the stage and the microbatch, so that all
    processes and devices get the same bits.

    Args:
        seed: Seed of all data.
        gradient_scale: Standard deviation of output gradients.
    """

    seed: int = 1
    gradient_scale: float = 0.01

    def _draw(self, spec: TensorSpec, place: Iterable[int], scale: float) -> Tensor:
        mixed = self.seed
        for part in place:
            mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
        generator = torch.Generator().manual_seed(mixed)
        if not spec.dtype.is_floating_point:
            drawn = torch.randint(0, 128, spec.shape, generator=generator)
        else:
            drawn = torch.randn(spec.shape, generator=generator) * scale
        return drawn.to(spec.dtype).to(spec.device)

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> tuple[Tensor, ...]:
        """The inputs of a stage's F."""
        return tuple(
            self._draw(spec, (step, stage.index, microbatch, 0, n), 1.0)
            for n, spec in enumerate(stage.inputs)
        )

    def output_gradients(
        self, stage: StageBackend, step: int, microbatch: int
    ) -> tuple[Tensor, ...]:
        """The output gradients of a stage's dI; the gradient of a scalar loss is a constant."""
        return tuple(
            torch.full(spec.shape, self.gradient_scale, dtype=spec.dtype, device=spec.device)
            if spec.shape == ()
            else self._draw(spec, (step, stage.index, microbatch, 1, n), self.gradient_scale)
            for n, spec in enumerate(stage.outputs)
            if spec.differentiable
        )


def by_index(stages: Iterable[StageBackend]) -> dict[int, StageBackend]:
    """A dictionary of stages by their pipeline index."""
    return {stage.index: stage for stage in stages}
