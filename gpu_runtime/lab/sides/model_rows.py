"""
The rows of the table of whole models: common decoders, at usual training lengths.

Layers have RMSNorm, SwiGLU, rotary positions and grouped-query attention, without biases. The
layers' matrix products are FP8 with delayed scaling. The head is bf16, or one of the FP8 heads;
everything else is bf16.
Gradients are bf16, or fp32 with fp32 master weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from ...backends.layers import LayerConfig
from ...ranks.membership import Member
from ...runtime import Mode, mode_on
from ...training.balance import Times, agreed_times
from ...training.language_model import balanced_cut, even_cut
from .language import MAIN_GRADS, TINY_VOCABULARY, DrawnLanguage
from .pipelines import GuardedSide, NativeSide, backend_on, build_guarded, build_native
from .side import NamedRow

__all__ = ["CELLS", "MODELS", "SCHEDULES", "ModelRow", "ModelShape", "measured_cut", "model_rows"]

SCHEDULES = ("il", "zbv", "izb")
HISTORY = 16
VPP = 2


@attrs.frozen
class ModelShape:
    """
    Dimensions of a decoder, without its sequence length.

    Args:
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        layers: Number of layers.
        vocabulary: Number of tokens in the vocabulary.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int = 128_256

    def config(self, sequence: int) -> LayerConfig:
        """The dimensions of the decoder's layers at a sequence length."""
        return LayerConfig(
            self.hidden,
            self.ffn,
            self.heads,
            sequence,
            kv_heads=self.kv_heads,
            norm="rmsnorm",
            activation="swiglu",
            positions="rotary",
            bias=False,
        )


MODELS: Mapping[str, ModelShape] = {
    "1b": ModelShape(2048, 8192, 32, 8, 16),
    "3b": ModelShape(3072, 8192, 24, 8, 28),
    "8b": ModelShape(4096, 14336, 32, 8, 32),
    "tiny": ModelShape(32, 64, 2, 1, 6, TINY_VOCABULARY),
}
"""Shapes by name; `tiny` is for a CPU."""
CELLS = (
    "1b-s4096-m8",
    "3b-s4096-m8",
    "8b-s4096-m8",
    "1b-s8192-m8",
    "3b-s8192-m8",
    "8b-s8192-m8",
    "tiny-s16-m4",
)
"""Model, sequence length and number of microbatches of each cell; a microbatch is one sequence."""


@attrs.frozen
class ModelRow(NamedRow):
    """
    One row of the report, to be measured: one model under one schedule, run by one side.

    Args:
        cell: Model, sequence length and number of microbatches, such as `1b-s4096-m8`; one of
            `CELLS`.
        side: The way to run a step: `native`, `replays` or `one launch`.
        schedule: Short name of a schedule class of torch, such as `il` or `zbv`.
        pp: Number of ranks, with two stages each.
        cut: Layers of each stage; None for an even division.
        replicas: Replicas of the pipeline, whose gradients are reduced.
        main_grad: Data type of accumulated gradients, a name of `MAIN_GRADS`.
        head: What computes the head, one of `heads.HEADS`.
        recompute: Whether every stage recomputes the activations of its layers in dI.
    """

    pp: int = 2
    cut: tuple[int, ...] | None = None
    replicas: int = 1
    main_grad: str = "bf16"
    head: str = "bf16"
    recompute: bool = False
    settling_steps = 3
    copies = split = False

    @property
    def name(self) -> dict[str, Any]:
        """Cell, side and schedule, and what differs from most rows: replicas, recomputation."""
        several = {"replicas": self.replicas} if self.replicas > 1 else {}
        return {**super().name, **several, **({"recompute": True} if self.recompute else {})}

    @property
    def label(self) -> str:
        """The name of this row in progress lines."""
        several = f", {self.replicas} replicas" if self.replicas > 1 else ""
        fp32 = ", fp32 gradients" if self.main_grad == "fp32" else ""
        again = ", recomputed" if self.recompute else ""
        return f"{self.cell}, {self.side}, {self.schedule}{several}{again}{fp32}"

    @property
    def shape(self) -> ModelShape:
        """The dimensions of the row's model."""
        return MODELS[self.cell.split("-")[0]]

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return int(self.cell.rpartition("-m")[2])

    def job(self) -> DrawnLanguage:
        """The pipeline job that this row describes."""
        sequence = int(self.cell.split("-")[1].removeprefix("s"))
        stages = self.pp * VPP
        cut = self.cut or even_cut(self.shape.layers, stages)
        return DrawnLanguage(
            schedule=self.schedule,
            pp=self.pp,
            dp=self.replicas,
            vpp=VPP,
            microbatches=self.microbatches,
            config=self.shape.config(sequence),
            history=HISTORY,
            rule="accumulate",
            vocabulary=self.shape.vocabulary,
            cut=cut,
            head=self.head,
            recompute=tuple(range(stages)) if self.recompute else (),
        )

    def make(self, member: Member) -> NativeSide | GuardedSide:
        """Build the pipeline that runs this row; every rank calls this method."""
        if self.side == "native":
            return build_native(member, self.job())
        mode: Mode | None = "one launch" if self.side != "replays" else None
        return build_guarded(member, self.job(), mode, dtype=MAIN_GRADS[self.main_grad])


def measured_cut(member: Member, row: ModelRow) -> tuple[Times, tuple[int, ...]]:
    """
    Times of the model's parts on the slowest rank, and the resulting number of layers per stage;
    all ranks call this function.

    Raises:
        BackendError: A rank cannot build or capture a stage; every rank raises this error.
    """
    job, device = row.job(), member.device
    backend = backend_on(device.type)
    times = agreed_times(member, job, backend, mode=mode_on(device), place=row.cell)
    if device.type == "cuda":
        # The first row's memory peak must not include this measurement.
        torch.cuda.reset_peak_memory_stats(device)
    layer, embedding, head = (sum(part) for part in (times.layer, times.embedding, times.head))
    layers = row.shape.layers
    return times, balanced_cut([layer] * layers, row.pp * VPP, embedding=embedding, head=head)


def model_rows(
    cells: Sequence[str],
    schedules: Sequence[str],
    pp: int,
    *,
    device: str,
    main_grad: str = "bf16",
    head: str = "bf16",
    recompute: bool = False,
    native: bool = True,
) -> list[ModelRow]:
    """
    The rows of some models, in the order of measuring: native first, then guarded rows under each
    schedule, then the guarded rows that recompute activations.

    Native accumulates gradients in bf16 only, so its row is the same with fp32.

    Args:
        cells: Names of the cells, from `CELLS`.
        schedules: Names of the schedules, from `SCHEDULES`.
        pp: Number of pipeline ranks.
        device: `cuda`, where guarded steps are one launch each, or `cpu`, where they are eager.
        main_grad: A name of `MAIN_GRADS`.
        head: What computes the head, one of `heads.HEADS`.
        recompute: Whether the guarded rows are measured a second time, with recomputation.
        native: Whether native is measured.
    """
    side = "one launch" if device == "cuda" else "replays"
    rows = []
    for cell in cells:
        if native:
            rows.append(ModelRow(cell, "native", "il", pp, head=head))
        rows += [
            ModelRow(cell, side, name, pp, main_grad=main_grad, head=head, recompute=again)
            for again in ((False, True) if recompute else (False,))
            for name in schedules
        ]
    return rows
