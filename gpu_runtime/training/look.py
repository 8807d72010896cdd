"""
Check that all values for a checkpoint are finite: weights, optimizer moments and scales.

The device computes the largest magnitude of each tensor. This magnitude is infinite or NaN if any
value of the tensor is infinite or NaN. The host reads one flag per tensor. Amax histories are not
checked: with `skip_nonfinite` a history may contain an infinite amax for a while, but no scale is
computed from this amax.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from ..backends.protocol import parameters
from ..ranks.worker import Worker
from .state import MODEL, NUMERICAL, OPTIMIZER, Naming, shares_amax

__all__ = ["NonFinite", "nonfinite", "persistent"]


@attrs.frozen
class NonFinite:
    """
    A tensor with values that are not finite.

    Args:
        name: The tensor's name in a checkpoint.
        stage: The stage of the tensor.
        count: Number of values in the tensor that are not finite.
        size: Number of values in the tensor.
    """

    name: str
    stage: int
    count: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.name} of stage {self.stage} is not finite in {self.count:,} of {self.size:,} "
            f"values"
        )


def persistent(worker: Worker, naming: Naming) -> Iterator[tuple[str, int, Tensor]]:
    """
    Return the name, the stage and the live tensor of every weight, optimizer moment, master weight
    and scale of a rank.

    Args:
        worker: This rank, between two steps.
        naming: How checkpoints name each tensor of the model.
    """
    runtime = worker.runtime
    for stage in runtime.stages.values():
        for local, parameter in parameters(stage).items():
            yield f"{MODEL}.{naming(stage.index, local)}", stage.index, parameter.detach()
    for name, tensor in worker.optimizer.state_tensors().items():
        _, index, rest = name.split(".", 2)
        local, _, kind = rest.rpartition(".")
        if kind != "step":
            yield f"{OPTIMIZER}.{naming(int(index), local)}.{kind}", int(index), tensor
    scope = f"{NUMERICAL}.dp{0 if shares_amax(runtime) else worker.replica}"
    for stage in runtime.domain.stages:
        for local, tensor in stage.numerical_state().items():
            if local.endswith("scale"):
                yield f"{scope}.{naming(stage.index, local)}", stage.index, tensor


def nonfinite(worker: Worker, naming: Naming) -> list[NonFinite]:
    """
    List this rank's tensors with values that are not finite. The host waits for the device.

    Args:
        worker: This rank, between two steps.
        naming: How checkpoints name each tensor of the model.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, int, Tensor]]] = {}
    for name, stage, tensor in persistent(worker, naming):
        if tensor.is_floating_point() and tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append((name, stage, tensor))
    flags = [
        torch.stack(torch._foreach_norm([tensor for *_, tensor in group], float("inf"))).isfinite()
        for group in groups.values()
    ]
    found = []
    for group, finite in zip(groups.values(), flags, strict=True):
        for (name, stage, tensor), good in zip(group, finite.tolist(), strict=True):
            if not good:
                bad = int((~tensor.isfinite()).sum())
                found.append(NonFinite(name, stage, bad, tensor.numel()))
    return found
