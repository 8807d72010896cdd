"""
What a process runs: the order of its F, dI and dW, and the data that flows through them.

An order is one rank's row of a schedule table. Both sides of a comparison run the same one: the
state domain is rolled by every F and dI of the process, so another order is another computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from qeffect.gpu_runtime.backends.protocol import StageBackend, TensorSpec
from qeffect.schedule.actions import COMPUTE, Kind, Schedule

__all__ = ["Kind", "Order", "Step", "Workload"]


class Step(NamedTuple):
    """One F, dI or dW."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@attrs.frozen
class Order:
    """
    The F, dI and dW of one process in one epoch, in the order in which they run.

    >>> order = Order.parse("0F0 0F1 0I1 0I0 0W0 0W1")
    >>> order.microbatches(0, Kind.DGRAD)
    (1, 0)
    >>> order.peaks
    {0: 2}

    Args:
        steps: The actions.
        source: Where they come from, for people.
    """

    steps: tuple[Step, ...]
    source: str = ""

    @classmethod
    def of_rank(cls, schedule: Schedule, rank: int) -> Order:
        """
        One rank's row of a schedule; a full backward is its dI, then its dW.

        Raises:
            ValueError: The schedule has no such rank.
        """
        if not 0 <= rank < schedule.num_ranks:
            raise ValueError(
                f"{schedule.source} has ranks 0 to {schedule.num_ranks - 1}, found rank {rank}"
            )
        steps = (
            Step(atom.kind, atom.stage, atom.microbatch)
            for atom in schedule.atoms[rank]
            if atom.kind in COMPUTE
        )
        return cls(tuple(steps), f"{schedule.source} rank {rank}")

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read an order from cells, as in `0F0 0I0 0W0`."""
        from qeffect.schedule.actions import Action

        atoms = (atom for cell in text.split() for atom in Action.parse(cell).atoms())
        return cls(tuple(Step(a.kind, a.stage, a.microbatch) for a in atoms), "given")

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Stages that appear, ascending."""
        return tuple(sorted({step.stage for step in self.steps}))

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches of one epoch."""
        return 1 + max(step.microbatch for step in self.steps)

    def microbatches(self, stage: int, kind: Kind) -> tuple[int, ...]:
        """A stage's microbatches in the order of one kind of action."""
        return tuple(s.microbatch for s in self.steps if s.stage == stage and s.kind is kind)

    @property
    def wgrads_follow_dgrads(self) -> bool:
        """Whether every stage's dW runs in the order of its dI."""
        return all(
            self.microbatches(stage, Kind.WGRAD) == self.microbatches(stage, Kind.DGRAD)
            for stage in self.stages
        )

    @property
    def peaks(self) -> dict[int, int]:
        """The most tapes that are live at once, by stage: a tape lives from its F to its dW."""
        live = dict.fromkeys(self.stages, 0)
        peak = dict(live)
        for step in self.steps:
            live[step.stage] += {Kind.FORWARD: 1, Kind.WGRAD: -1}.get(step.kind, 0)
            peak[step.stage] = max(peak[step.stage], live[step.stage])
        return peak


@attrs.frozen
class Workload:
    """
    Random inputs and output gradients that any process can make again.

    Drawn on the CPU from the seed and the place in the run, so that a comparison across processes
    and devices sees the same bits.

    Args:
        seed: What everything is drawn from.
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
        """What a stage's F takes."""
        return tuple(
            self._draw(spec, (step, stage.index, microbatch, 0, n), 1.0)
            for n, spec in enumerate(stage.inputs)
        )

    def output_gradients(
        self, stage: StageBackend, step: int, microbatch: int
    ) -> tuple[Tensor, ...]:
        """What a stage's dI takes; the gradient of a scalar loss is a constant."""
        return tuple(
            torch.full(spec.shape, self.gradient_scale, dtype=spec.dtype, device=spec.device)
            if spec.shape == ()
            else self._draw(spec, (step, stage.index, microbatch, 1, n), self.gradient_scale)
            for n, spec in enumerate(stage.outputs)
            if spec.differentiable
        )


def by_index(stages: Iterable[StageBackend]) -> dict[int, StageBackend]:
    """Stages by their pipeline index."""
    return {stage.index: stage for stage in stages}


Gradients = Mapping[int, Mapping[str, Tensor]]
"""Parameter gradients of an epoch: by stage, then by parameter name."""
