"""
A small model cut into stages, and its data: what the pipeline's command and its tests train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from qeffect.schedule.actions import Schedule
from qeffect.schedule.tables import read_table
from qeffect.schedule.torch_tables import SINGLE, class_name, torch_schedule

from ..backends.layers import LayerConfig
from ..backends.protocol import BackendError, StageBackend, TensorSpec
from ..step.clipping import Clipping
from ..step.memory.arena import Rule
from ..step.optimizer import Optimizer
from ..step.plan.slots import Provisioning
from .ties import Tie

__all__ = ["NAMES", "Batches", "Job", "loss_of"]

#: Short names of torch's schedule classes.
NAMES = {
    "il": "ScheduleInterleaved1F1B",
    "izb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
}


@attrs.frozen(kw_only=True)
class Job:
    """
    One pipeline: the schedule, the mapping onto ranks, the model.

    Args:
        schedule: A short name of `NAMES`, a class of torch by its own, or a table as a CSV file.
        pp: Ranks of the pipeline.
        vpp: Stages of each rank; None takes 1 for 1F1B and GPipe, 2 for the others.
        dp: Replicas.
        microbatches: Microbatches of a step and replica.
        layers: Layers of a stage.
        history: Entries of an amax history.
        rule: Where dW writes.
        provisioning: How slots are counted.
        config: Dimensions of a layer.
        seed: What parameters and data are drawn from.
        amax: Whose amax scales are made of: a `replica`'s own, or that of all `replicas`.
    """

    schedule: str = "zbv"
    pp: int = 2
    vpp: int | None = None
    dp: int = 1
    microbatches: int = 4
    layers: int = 1
    history: int = 4
    rule: Rule = "accumulate"
    provisioning: Provisioning = "live"
    config: LayerConfig = attrs.field(factory=lambda: LayerConfig(32, 64, 2, 16))
    seed: int = 0
    amax: str = "replica"

    @property
    def cls_name(self) -> str:
        """
        torch's name of the schedule class; empty for a table from a file.

        Raises:
            ScheduleError: There is no such class.
        """
        if self.schedule.endswith(".csv"):
            return ""
        return class_name(NAMES.get(self.schedule, self.schedule))

    @property
    def stages_a_rank(self) -> int:
        """Stages of each rank."""
        return self.vpp if self.vpp is not None else 1 if self.cls_name in SINGLE else 2

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages_a_rank

    @property
    def world(self) -> int:
        """Processes of the job."""
        return self.pp * self.dp

    def table(self) -> Schedule:
        """
        The table with messages: torch's own, or the file's.

        Raises:
            ScheduleError: torch is missing or refuses the combination, or the file has no table.
        """
        if not self.cls_name:
            return read_table(self.schedule)
        return torch_schedule(
            self.cls_name,
            pp=self.pp,
            vpp=self.stages_a_rank,
            microbatches=self.microbatches,
            comms=True,
        )

    def ranks(self, replica: int) -> list[int]:
        """Global rank of each pipeline rank of a replica; replicas follow each other."""
        return [replica * self.pp + rank for rank in range(self.pp)]

    def options(self, index: int, device: torch.device, *, loss: bool) -> dict[str, object]:
        """What a stage of either backend is made with, beside its dimensions."""
        target = attrs.evolve(self.config.activation(device), differentiable=False)
        ends = loss and index == self.num_stages - 1
        return {
            "num_layers": self.layers,
            "first": index == 0,
            "loss": self.loss if ends else None,
            "extra_inputs": (target,) if ends else (),
            "seed": self.seed + index,
        }

    def stages(
        self,
        indices: Sequence[int],
        device: torch.device,
        backend: str,
        *,
        loss: bool = True,
        fuse: bool | None = None,
    ) -> list[StageBackend]:
        """
        Stages in a state domain of their own; the same bits for a stage in any process.

        Args:
            indices: Which stages.
            device: Where they live.
            backend: `reference` or `transformer-engine`.
            loss: Whether the last stage ends in the loss.
            fuse: Whether the library accumulates into `main_grad` itself; None lets it choose.
        """
        made = {n: self.options(n, device, loss=loss) for n in indices}
        if backend == "reference":
            from ..backends.reference import ReferenceDomain, ReferenceStage

            domain = ReferenceDomain(self.history, device=device)
            return [
                ReferenceStage(n, domain, self.config, **made[n])  # type: ignore[arg-type]
                for n in indices
            ]
        from ..backends.te.domain import TransformerEngineDomain, reset_process
        from ..backends.te.stage import TransformerEngineStage

        reset_process()
        te_domain = TransformerEngineDomain("delayed", self.history, device=device)
        return [
            TransformerEngineStage(
                n,
                te_domain,
                self.config,
                fuse_wgrad_accumulation=False if self.rule == "copied" else fuse,
                **made[n],  # type: ignore[arg-type]
            )
            for n in indices
        ]

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Tied weights: none here."""
        return ()

    @property
    def clipping(self) -> Clipping:
        """What an update does with the norm of all gradients: nothing here."""
        return Clipping()

    def optimizer(self, stages: list[StageBackend], *, capturable: bool = False) -> Optimizer:
        """The optimizer over a rank's stages; a graph can hold a capturable one's update."""
        return Optimizer(stages, capturable=capturable)

    def prepare(self, step: int, optimizer: Optimizer) -> None:
        """What a step changes of the optimizer before it runs: nothing here."""

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """A microbatch's share of the loss; shares of microbatches and replicas add up to it."""
        return loss_of(hidden, target, self.microbatches * self.dp)

    def batch(
        self, device: torch.device, replica: int = 0
    ) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """Input and target of a step's microbatch, the same on every rank that asks."""
        c = self.config

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            place = (step * self.dp + replica) * self.microbatches + microbatch
            g = torch.Generator().manual_seed((self.seed << 32) + place)
            shape = c.sequence, c.batch, c.hidden
            x, y = (torch.randn(shape, generator=g).to(c.dtype).to(device) for _ in range(2))
            return x, y

        return draw


def loss_of(hidden: Tensor, target: Tensor, parts: int) -> Tensor:
    """A share of a mean squared error."""
    return (hidden.float() - target.float()).pow(2).mean() / parts


def require_meeting(
    ends: Sequence[tuple[int, Sequence[TensorSpec], Sequence[TensorSpec]]],
) -> None:
    """
    Require that each stage gives what the next takes.

    Args:
        ends: Index, inputs and outputs of every stage of the pipeline, in any order.

    Raises:
        BackendError: Two neighbours do not meet; the message names both.
    """
    by_index = {index: (inputs, outputs) for index, inputs, outputs in ends}
    for index in sorted(by_index):
        if index + 1 not in by_index:
            continue
        gives, takes = by_index[index][1][0], by_index[index + 1][0][0]
        a, b = (f"{tuple(s.shape)} of {s.dtype}" for s in (gives, takes))
        if a != b:
            raise BackendError(
                f"stage {index} gives {a}, stage {index + 1} takes {b}; build both with the same "
                "dimensions"
            )


class Batches:
    """
    A job's data as a pipeline's feed; it keeps the losses of the step.

    Args:
        draw: Input and target of a step's microbatch.
        device: Where the gradient of the loss lives.
        repeat: Give every step the first one's data, drawn once: drawing takes longer than a step.
    """

    def __init__(
        self,
        draw: Callable[[int, int], tuple[Tensor, Tensor]],
        device: torch.device,
        *,
        repeat: bool = False,
    ) -> None:
        once: Callable[[int], tuple[Tensor, Tensor]] = functools.cache(lambda m: draw(0, m))
        self.draw = (lambda _, m: once(m)) if repeat else draw
        self.one = torch.ones((), device=device)
        self.losses: dict[int, dict[int, Tensor]] = {}

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The input for the first stage, the target for the last."""
        x, target = self.draw(step, microbatch)
        return (x, target)[: len(stage.inputs)] if stage.index == 0 else (target,)

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The gradient of the loss by itself."""
        return (self.one,)

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Keep the loss."""
        self.losses.setdefault(step, {})[microbatch] = outputs[0].detach().clone()

    def losses_of(self, step: int) -> list[float]:
        """The losses of a step by microbatch; waits for the device."""
        held = self.losses.get(step, {})
        return [float(held[m]) for m in sorted(held)]
