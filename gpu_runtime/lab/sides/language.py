"""
What every mode of the peers has in common: the model, the gradients that are kept and compared.

No side moves a weight: the learning rate is zero, so that the scales come to repeat themselves from
step to step and the gradients of a later step can be compared, whatever a mode did to capture. The
update runs all the same, as the last part of every step. What is not seen so is a weight cache that
a mode never fills again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ...ranks.world import Member, gathered
from ...step.memory.numerical_state import same_bits
from ...step.optimizer import Optimizer
from ..commands.tables import LAYERS, TINY_VOCABULARY, VOCABULARY, DrawnLanguage
from ..statistics.peers import combined
from .pipelines import Turns

__all__ = [
    "HISTORY",
    "PP",
    "VPP",
    "Asked",
    "compared",
    "keep",
    "kept",
    "named",
    "still",
    "sums",
]

PP = VPP = 2
HISTORY = 4


@attrs.frozen(kw_only=True)
class Asked:
    """
    What a process measures.

    Args:
        cells: Layers and microbatches, as `h2048-s256-m4`.
        rounds: Turns of each side.
        steps: Steps of a turn that replays graphs.
        native_steps: Steps of a turn that launches.
        device: `cuda`, or `cpu` for ours and torch's alone.
        profile: Whether kernels are counted.
        settled: Steps after which gradients are compared: by then the scales repeat themselves, and
            graphs are captured.
    """

    cells: Sequence[str]
    rounds: int = 3
    steps: int = 10
    native_steps: int = 3
    device: str = "cuda"
    profile: bool = True
    settled: int = 8

    def job(self, cell: str, schedule: str) -> DrawnLanguage:
        """The language model of a cell, one layer a stage."""
        layers, microbatches = cell.rsplit("-m", 1)
        return DrawnLanguage(
            schedule=schedule,
            pp=PP,
            vpp=VPP,
            microbatches=int(microbatches),
            config=LAYERS[layers],
            history=HISTORY,
            vocabulary=TINY_VOCABULARY if layers == "tiny" else VOCABULARY,
        )

    def turns(self, *, graphs: bool) -> Turns:
        """How a side is timed."""
        return Turns(self.rounds, self.steps if graphs else self.native_steps, self.profile)


def still(stages: Any, *, capturable: bool = False) -> Optimizer:
    """AdamW that moves no weight."""
    return Optimizer(stages, lr=0.0, weight_decay=0.0, capturable=capturable)


# Gradients


def sums(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """
    Of each tensor, what `measure.peers.combined` adds up.

    Raises:
        ValueError: The names or the shapes differ.
    """
    if odd := sorted(own.keys() ^ theirs.keys()):
        raise ValueError(f"gradients disagree on {len(odd)} names, first {odd[0]}")
    found = {}
    for name, a in own.items():
        b = theirs[name].to(a.device)
        if a.shape != b.shape:
            raise ValueError(f"{name} is {tuple(a.shape)} here and {tuple(b.shape)} there")
        x, y = a.detach().double().flatten(), b.detach().double().flatten()
        apart = x - y
        values = torch.stack([apart @ apart, x @ x, y @ y, x @ y, (~x.isfinite()).sum().double()])
        numbers = [n if n == n and abs(n) != float("inf") else 0.0 for n in values.tolist()]
        keys = ("apart", "own", "theirs", "product", "odd")
        found[name] = {**dict(zip(keys, numbers, strict=True)), "same": float(same_bits(a, b))}
    return found


def kept(folder: Path, cell: str, side: str, rank: int) -> Path:
    """Where a rank's gradients of a side are."""
    return folder / f"{cell}.{side.replace(' ', '-')}.{rank}.pt"


def keep(folder: Path, cell: str, side: str, rank: int, own: Mapping[str, Tensor]) -> None:
    """Write a rank's gradients, by the model's names, whole or not at all."""
    path = kept(folder, cell, side, rank)
    part = path.with_suffix(".part")
    torch.save({name: tensor.detach().cpu() for name, tensor in own.items()}, part)
    part.replace(path)


def compared(
    member: Member,
    folder: Path,
    cell: str,
    references: Sequence[str],
    own: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """
    A side's gradients against those of others that have been kept; all ranks call it.

    Another schedule may have put a stage on another rank: each takes what it has from all files. A
    reference that was not kept whole is left out.
    """
    found = []
    dist.barrier()  # behind what all ranks keep
    for side in references:
        paths = [kept(folder, cell, side, rank) for rank in range(member.world)]
        if not all(gathered(member, all(path.exists() for path in paths))):
            continue
        theirs: dict[str, Tensor] = {}
        for path in paths:
            held = torch.load(path, weights_only=True, mmap=True)
            theirs.update((name, held[name]) for name in own.keys() & held.keys())
        found.append({"with": side, **combined(gathered(member, sums(own, theirs)))})
    return found


def named(
    cell: str,
    side: str,
    schedule: str,
    gradients: Sequence[Mapping[str, Any]],
    loss: float | None,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """A row that was measured."""
    return {
        "cell": cell,
        "side": side,
        "schedule": schedule,
        "error": None,
        "gradients": list(gradients),
        "loss": loss,
        **found,
    }
