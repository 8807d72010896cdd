"""
The language model of the complete-step tables and of the comparison with Megatron-core (`report
peers`).

Like the paper's model, this model has one layer per stage, with token embedding and head over
32,768 tokens. In `report peers` the head is bf16, as in Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ...backends.layers import LayerConfig
from ...ranks.feed import to_device
from ...ranks.membership import Member
from ...runtime import Mode
from ...step.optimizer import Gradients, Optimizer
from ...training.language_model import LanguageJob
from ..runner.timing import RoundPlan
from .pipelines import GuardedSide, NativeSide, build_guarded, build_native
from .side import NamedRow
from .torch_pipeline import Batch

__all__ = [
    "HISTORY",
    "LAYERS",
    "MAIN_GRADS",
    "PP",
    "TINY_VOCABULARY",
    "VOCABULARY",
    "VPP",
    "DrawnLanguage",
    "PeerRow",
    "PeerSettings",
    "motionless_adamw",
]

PP = VPP = 2
HISTORY = 4
LAYERS: Mapping[str, LayerConfig] = {
    "h2048-s256": LayerConfig(2048, 8192, 16, 256),
    "h4096-s256": LayerConfig(4096, 11008, 32, 256),
    "h4096-s1024": LayerConfig(4096, 14336, 32, 1024),
    "h4096-s4096": LayerConfig(4096, 14336, 32, 4096),
    "tiny": LayerConfig(32, 64, 2, 16),
}
"""
Layers by name; a cell is a name and a number of microbatches, such as `tiny-m4`. `tiny` is for a
CPU.
"""
VOCABULARY, TINY_VOCABULARY = 32768, 64
MAIN_GRADS: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Data types of accumulated weight gradients, by name."""


@attrs.frozen(kw_only=True)
class DrawnLanguage(LanguageJob):
    """
    A language model over uniformly drawn tokens, which are int64 tensors of shape `(sequence,
    batch)`.
    """

    def batch(self, device: torch.device, replica: int = 0) -> Batch:
        """Tokens and targets of a step's microbatch, the same on every rank."""
        shape = self.config.sequence, self.config.batch

        def draw(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            place = (step * self.dp + replica) * self.microbatches + microbatch
            g = torch.Generator().manual_seed((self.seed << 32) + place)
            x, y = (torch.randint(self.vocabulary, shape, generator=g) for _ in range(2))
            return to_device(x, device), to_device(y, device)

        return draw


@attrs.frozen(kw_only=True)
class PeerSettings:
    """
    What every mode of `report peers` measures, and how.

    Args:
        cells: Layers and microbatches, as `h2048-s256-m4`.
        main_grads: Data types of accumulated gradients, names of `MAIN_GRADS`; with fp32, master
            weights are fp32 too.
        rounds: Number of timed rounds per side (a framework in one mode).
        steps: Steps per round for modes that replay graphs.
        native_steps: Steps per round for modes without graphs.
        device: `cuda`, or `cpu` for our pipeline and torch's only.
        profile: Whether the ranks start a second time, under the profiler.
        settling_steps: Number of steps after which gradients are compared; after these steps,
            scales repeat and graphs are captured.
    """

    cells: Sequence[str]
    main_grads: Sequence[str] = tuple(MAIN_GRADS)
    rounds: int = 3
    steps: int = 10
    native_steps: int = 3
    device: str = "cuda"
    profile: bool = True
    settling_steps: int = 8

    def configuration(self) -> dict[str, Any]:
        """The settings, by their names in the report."""
        fields = attrs.asdict(self)
        fields["settled"] = fields.pop("settling_steps")
        return fields

    def job(self, cell: str, schedule: str, group: int | None = None) -> DrawnLanguage:
        """
        The language model of a cell (a workload: layer dimensions and number of microbatches), with
        one layer per stage.

        Args:
            cell: Layers and microbatches.
            schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
            group: Microbatches whose weight gradients are one product, with scales that are updated
                once per step. With None, there are no groups, and scales are updated at every
                action.
        """
        layers, microbatches = cell.rsplit("-m", 1)
        return DrawnLanguage(
            schedule=schedule,
            pp=PP,
            vpp=VPP,
            microbatches=int(microbatches),
            config=LAYERS[layers],
            history=HISTORY,
            vocabulary=TINY_VOCABULARY if layers == "tiny" else VOCABULARY,
            head="bf16",
            scales="action" if group is None else "epoch",
            wgrad_group=group or 1,
        )

    def rounds_of(self, mode: Mode) -> RoundPlan:
        """The rounds and steps with which a mode is timed."""
        eager = mode == "eager"
        return RoundPlan(self.rounds, self.native_steps if eager else self.steps, settles=eager)


def motionless_adamw(
    stages: Any, *, capturable: bool = False, master_dtype: torch.dtype | None = None
) -> Optimizer:
    """Make AdamW with a learning rate of zero, so that an update changes no weight."""
    return Optimizer(
        stages, lr=0.0, weight_decay=0.0, capturable=capturable, master_dtype=master_dtype
    )


@attrs.frozen
class PeerRow(NamedRow):
    """
    One row of `report peers`: one cell (workload) under one schedule, run by one side (a framework
    in one mode).

    Args:
        cell: Layers and microbatches, as `h2048-s256-m4`.
        side: `native`, `replays`, `one launch`, or a mode of Megatron-core.
        schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
        settings: How every mode is measured.
        main_grad: Data type of accumulated gradients, a name of `MAIN_GRADS`.
        group: Microbatches whose weight gradients are one product; None for no groups.
    """

    settings: PeerSettings
    main_grad: str = "bf16"
    group: int | None = None
    copies = split = False

    @property
    def name(self) -> dict[str, Any]:
        """Cell, side, schedule, type of gradients and group."""
        return {**super().name, "main_grad": self.main_grad, "group": self.group}

    @property
    def label(self) -> str:
        """The name of this row in progress lines."""
        grouped = "" if self.group is None else f", group of {self.group}"
        return f"{self.cell}, {self.side}, {self.schedule}, {self.main_grad}{grouped}"

    @property
    def settling_steps(self) -> int:
        """Number of steps after which gradients are compared."""
        return self.settings.settling_steps

    def job(self) -> DrawnLanguage:
        """The row's model."""
        return self.settings.job(self.cell, self.schedule, self.group)

    def make(
        self, member: Member, look: Callable[[Gradients], None] = lambda _: None
    ) -> NativeSide | GuardedSide:
        """
        Build the row's side; for the native side, `look` is called with the gradients of every
        step.
        """
        if self.side == "native":
            return build_native(member, self.job(), optimizer=motionless_adamw, look=look)
        mode: Mode | None = "one launch" if self.side == "one launch" else None
        dtype = MAIN_GRADS[self.main_grad]
        return build_guarded(member, self.job(), mode, optimizer=motionless_adamw, dtype=dtype)

    def measured(
        self, gradients: Sequence[Mapping[str, Any]], loss: float | None, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The row as the report stores it."""
        return {**self.name, "error": None, "gradients": list(gradients), "loss": loss, **found}
