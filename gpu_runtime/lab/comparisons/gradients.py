"""
Gradients of the peers (our pipeline, torch's and Megatron-core): one mode saves its gradients, and
later modes compare their own gradients with the saved gradients.

The learning rate is zero, so no weight changes, and scales repeat from step to step. Gradients of a
later step can thus be compared even if modes capture graphs at different steps. The update still
runs as the last part of every step. The comparison does not notice a mode that never refreshes its
weight cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ranks.membership import Member, all_gather
from ...step.memory.numerical_state import same_bits
from ..statistics.peers import combine_distances

__all__ = ["compare_gradients", "distance_sums", "gradients_path", "save_gradients"]


def distance_sums(
    own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """
    For each tensor, the sums that `statistics.peers.combine_distances` adds up.

    Raises:
        ValueError: The names or the shapes differ.
    """
    if odd := sorted(own.keys() ^ theirs.keys()):
        raise ValueError(
            f"expected the same gradients on both sides, found {len(odd)} on one side only, such "
            f"as {odd[0]}"
        )
    found = {}
    for name, a in own.items():
        b = theirs[name].to(a.device)
        if a.shape != b.shape:
            raise ValueError(
                f"{name}: expected the same shape on both sides, found {tuple(a.shape)} and "
                f"{tuple(b.shape)}"
            )
        x, y = a.detach().double().flatten(), b.detach().double().flatten()
        apart = x - y
        values = torch.stack([apart @ apart, x @ x, y @ y, x @ y, (~x.isfinite()).sum().double()])
        numbers = [n if n == n and abs(n) != float("inf") else 0.0 for n in values.tolist()]
        keys = ("apart", "own", "theirs", "product", "odd")
        found[name] = {**dict(zip(keys, numbers, strict=True)), "same": float(same_bits(a, b))}
    return found


def gradients_path(folder: Path, cell: str, side: str, rank: int) -> Path:
    """The file with the gradients of one side on one rank."""
    return folder / f"{cell}.{side.replace(' ', '-')}.{rank}.pt"


def save_gradients(
    folder: Path, cell: str, side: str, rank: int, own: Mapping[str, Tensor]
) -> None:
    """
    Save a rank's gradients under the model's parameter names; the file appears only once it is
    complete.
    """
    path = gradients_path(folder, cell, side, rank)
    part = path.with_suffix(".part")
    torch.save({name: tensor.detach().cpu() for name, tensor in own.items()}, part)
    part.replace(path)


def compare_gradients(
    member: Member,
    folder: Path,
    cell: str,
    references: Sequence[str],
    own: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """
    Compare a side's gradients with the saved gradients of other sides; every rank calls this
    function.

    Another schedule may place a stage on another rank, so each rank reads its tensors from the
    files of all ranks. A reference side is left out if the file of any rank is missing.
    """
    found = []
    dist.barrier()  # after all ranks have saved
    for side in references:
        paths = [gradients_path(folder, cell, side, rank) for rank in range(member.world)]
        if not all(all_gather(member, all(path.exists() for path in paths))):
            continue
        theirs: dict[str, Tensor] = {}
        for path in paths:
            held = torch.load(path, weights_only=True, mmap=True)
            theirs.update((name, held[name]) for name in own.keys() & held.keys())
        found.append(
            {"with": side, **combine_distances(all_gather(member, distance_sums(own, theirs)))}
        )
    return found
