"""
A small model and its data, for both backends. The pipeline command and its tests train this model.
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

from ..backends.determinism import require_deterministic
from ..backends.ends import LossShare
from ..backends.epoch_scales import Scales
from ..backends.layers import LayerConfig
from ..backends.protocol import BackendError, StageBackend, TensorSpec
from ..backends.random_streams import require_probability, stream_of
from ..step.clipping import Clipping
from ..step.memory.arena import Rule
from ..step.optimizer import Optimizer
from ..step.plan.slots import Provisioning
from .feed import to_device
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
    One pipeline: the schedule, the mapping onto ranks, and the model.

    Args:
        schedule: A short name from `NAMES`, the name of a torch class, or the path of a CSV table.
        pp: Number of ranks of the pipeline.
        vpp: Number of stages per rank. None means 1 for 1F1B and GPipe, and 2 for other schedules.
        dp: Number of replicas (data parallelism).
        microbatches: Number of microbatches per step and replica, over all walks (passes over the
            table).
        walks: Number of walks (passes over the table) in a step; each walk takes an equal share of
            the microbatches.
        layers: Number of layers per stage.
        history: Number of entries of an amax history.
        rule: Where dW writes: `copied`, `per_microbatch` or `accumulate` (`step/memory/arena.py`).
        provisioning: `live`: each stage has as many slots (sets of buffers for one microbatch) as
            microbatches are in progress at once; `static`: one slot per microbatch.
        config: Dimensions of a layer.
        seed: Seed of parameters and data.
        amax: Which amaxes (largest absolute values) determine a replica's scales: with `replica`
            the replica's own amaxes, with `replicas` the amaxes of all replicas.
        dropout: Probability with which each layer drops elements of its two residual branches.
        wgrad_group: Number of microbatches whose weight gradients are computed as one product; more
            than 1 needs ``scales="epoch"``.
        recompute: Stages that keep only the inputs of their layers, so that dI recomputes the
            activations. The bits stay the same.
        scales: When FP8 scales are updated: at every F and dI (``action``), or once per optimizer
            step (``epoch``). With ``epoch``, seeds and dropout's random numbers depend on the
            layer. The process then uses deterministic kernels and, on a CPU, one thread.

    Raises:
        ValueError: `dropout` is not a number in [0, 1).
    """

    schedule: str = "zbv"
    pp: int = 2
    vpp: int | None = None
    dp: int = 1
    microbatches: int = 4
    walks: int = 1
    layers: int = 1
    history: int = 4
    rule: Rule = "accumulate"
    provisioning: Provisioning = "live"
    config: LayerConfig = attrs.field(factory=lambda: LayerConfig(32, 64, 2, 16))
    seed: int = 0
    amax: str = "replica"
    dropout: float = attrs.field(default=0.0)
    wgrad_group: int = 1
    recompute: tuple[int, ...] = ()
    scales: Scales = "action"

    @dropout.validator
    def _is_probability(self, _: object, value: float) -> None:
        require_probability(value)

    @property
    def cls_name(self) -> str:
        """
        torch's name for the schedule class; empty if the schedule table comes from a file.

        Raises:
            ScheduleError: torch has no schedule class for this schedule.
        """
        if self.schedule.endswith(".csv"):
            return ""
        return class_name(NAMES.get(self.schedule, self.schedule))

    @property
    def stages_a_rank(self) -> int:
        """Number of stages per rank."""
        return self.vpp if self.vpp is not None else 1 if self.cls_name in SINGLE else 2

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.pp * self.stages_a_rank

    @property
    def world(self) -> int:
        """Number of processes of the job."""
        return self.pp * self.dp

    def table(self) -> Schedule:
        """
        Return the schedule table with messages: torch's own table, or the table in the file.

        Raises:
            ScheduleError: torch is missing or refuses the combination, or the file is not a valid
                table.
            ValueError: The microbatches cannot be divided into walks of equal length.
        """
        if self.microbatches % self.walks:
            raise ValueError(
                f"microbatches is {self.microbatches} and walks is {self.walks}; expected a "
                "multiple of walks: each walk (pass over the table) takes an equal share"
            )
        if not self.cls_name:
            return read_table(self.schedule)
        return torch_schedule(
            self.cls_name,
            pp=self.pp,
            vpp=self.stages_a_rank,
            microbatches=self.microbatches // self.walks,
            comms=True,
        )

    def ranks(self, replica: int) -> list[int]:
        """Return the global ranks of a replica, by pipeline rank; replica 0 has the first ranks."""
        return [replica * self.pp + rank for rank in range(self.pp)]

    def options(self, index: int, device: torch.device, *, loss: bool) -> dict[str, object]:
        """
        Return the arguments of a stage's constructor, without the dimensions. They are the same for
        both backends.
        """
        target = attrs.evolve(self.config.hidden_states(device), differentiable=False)
        ends = loss and index == self.num_stages - 1
        by_layer = self.scales == "epoch"
        return {
            "num_layers": self.layers,
            "first": index == 0,
            "loss": self.loss if ends else None,
            "extra_inputs": (target,) if ends else (),
            "seed": self.seed if by_layer else self.seed + index,
            "first_layer": index * self.layers if by_layer else None,
        }

    def stages(
        self,
        indices: Sequence[int],
        device: torch.device,
        backend: str,
        *,
        loss: bool = True,
        fuse: bool | None = None,
        replica: int = 0,
    ) -> list[StageBackend]:
        """
        Make stages in a new state domain (stages whose FP8 scales are updated together). A stage
        starts with the same bits in any process.

        Args:
            indices: Indices of the stages.
            device: Device of the stages' tensors.
            backend: `reference` or `transformer-engine`.
            loss: Whether the last stage computes the loss.
            fuse: Whether the library itself adds gradients to `main_grad`; with None the library
                decides.
            replica: Index of the replica that the stages belong to. Dropout differs between
                replicas.
        """
        if self.scales == "epoch":
            require_deterministic(device)
        made = {n: self.options(n, device, loss=loss) for n in indices}
        stream = stream_of(
            self.seed, replica, 0 if self.scales == "epoch" else min(indices, default=0)
        )
        if backend == "reference":
            from ..backends.reference import ReferenceDomain, ReferenceStage

            domain = ReferenceDomain(self.history, device=device, scales=self.scales)
            domain.random.stream = stream
            return [
                ReferenceStage(
                    n,
                    domain,
                    self.config,
                    dropout=self.dropout,
                    recompute=n in self.recompute,
                    **made[n],  # type: ignore[arg-type]
                )
                for n in indices
            ]
        from ..backends.te.domain import TransformerEngineDomain, reset_process
        from ..backends.te.stage import TransformerEngineStage

        reset_process()
        te_domain = TransformerEngineDomain(
            "delayed", self.history, device=device, scales=self.scales
        )
        te_domain.random.stream = stream
        return [
            TransformerEngineStage(
                n,
                te_domain,
                self.config,
                dropout=self.dropout,
                recompute=n in self.recompute,
                fuse_wgrad_accumulation=False if self.rule == "copied" else fuse,
                **made[n],  # type: ignore[arg-type]
            )
            for n in indices
        ]

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Tied weights. This model has no tied weights."""
        return ()

    @property
    def clipping(self) -> Clipping:
        """
        How an update uses the norm of all gradients. The updates of this model do not use the norm.
        """
        return Clipping()

    def optimizer(self, stages: list[StageBackend], *, capturable: bool = False) -> Optimizer:
        """
        Return the optimizer of a rank's stages. With `capturable`, a graph can contain its update.
        """
        return Optimizer(stages, capturable=capturable)

    def prepare(self, step: int, optimizer: Optimizer) -> None:
        """Change the optimizer before a step runs. For this model nothing changes."""

    @property
    def loss(self) -> LossShare:
        """
        The function that computes a microbatch's share of the loss. The loss is the sum of the
        shares over microbatches and replicas.
        """
        return LossShare(mean_squared_error, self.microbatches * self.dp)

    def batch(
        self, device: torch.device, replica: int = 0
    ) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """
        Return a function of step and microbatch that returns input and target. The values are the
        same on all ranks.
        """
        c = self.config

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            place = (step * self.dp + replica) * self.microbatches + microbatch
            g = torch.Generator().manual_seed((self.seed << 32) + place)
            shape = c.sequence, c.batch, c.hidden
            x, y = (torch.randn(shape, generator=g).to(c.dtype) for _ in range(2))
            return to_device(x, device), to_device(y, device)

        return draw


def mean_squared_error(hidden: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of a microbatch, in fp32."""
    return (hidden.float() - target.float()).pow(2).mean()


def loss_of(hidden: Tensor, target: Tensor, parts: int) -> Tensor:
    """
    Return a microbatch's share of the loss: the mean squared error divided by `parts` (the number
    of microbatches).
    """
    return mean_squared_error(hidden, target) / parts


def require_meeting(
    ends: Sequence[tuple[int, Sequence[TensorSpec], Sequence[TensorSpec]]],
) -> None:
    """
    Raise an error unless each stage's output has the shape and type of the next stage's input.

    Args:
        ends: For every stage of the pipeline, in any order: its index, and the specifications of
            its inputs and outputs.

    Raises:
        BackendError: The output of a stage and the next stage's input differ; the message names
            both.
    """
    by_index = {index: (inputs, outputs) for index, inputs, outputs in ends}
    for index in sorted(by_index):
        if index + 1 not in by_index:
            continue
        gives, takes = by_index[index][1][0], by_index[index + 1][0][0]
        a, b = (f"{tuple(s.shape)} of {s.dtype}" for s in (gives, takes))
        if a != b:
            raise BackendError(
                f"stage {index} outputs {a}, but stage {index + 1} expects {b}; build both with "
                "the same dimensions"
            )


class Batches:
    """
    A pipeline's feed that supplies a job's data. It also keeps each step's losses.

    Args:
        draw: Function of step and microbatch that returns input and target.
        device: Device of the loss gradient.
        repeat: Whether every step gets the first step's data. They are then drawn only once,
            because drawing takes longer than a step.
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
        """Return the input for the first stage, and the target for the last stage."""
        x, target = self.draw(step, microbatch)
        return (x, target)[: len(stage.inputs)] if stage.index == 0 else (target,)

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Return the gradient of the loss with respect to itself: 1."""
        return (self.one,)

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Keep a copy of the loss."""
        self.losses.setdefault(step, {})[microbatch] = outputs[0].detach().clone()

    def losses_of(self, step: int) -> list[float]:
        """Return the losses of a step by microbatch; the host waits for the device."""
        held = self.losses.get(step, {})
        return [float(held[m]) for m in sorted(held)]
