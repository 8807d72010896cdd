"""
The interface of a pipeline's data source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..backends.protocol import StageBackend

__all__ = ["Feed", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """
    Copy a tensor from the host to a device; the host does not wait for the device.

    A plain ``tensor.to("cuda")`` from pageable memory waits for the device. Therefore `to_device`
    first copies to pinned memory.

    Args:
        tensor: A tensor on the CPU.
        device: The device; for a CPU, the tensor itself is returned.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Feed(Protocol):
    """
    Supplies the pipeline's data, and receives its outputs.

    In mode ``one launch``, a step requests all its data before it uses any of them. On a GPU, the
    pipeline requests inputs and gradients on a separate stream that does not wait for other
    streams. Therefore the returned tensors must not be written again, and must not depend on the
    `outputs` of the same step.

    No method may wait for the device. Therefore use `to_device` for copies. A graph that waits for
    another rank can block every stream of its device. If the other rank is gone, a host that waits
    for the device never returns and cannot report the cause.
    """

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """
        Return the inputs of a stage that do not come from another stage.

        For the first stage: all inputs. For every other stage: all inputs after the first (for
        example targets), because the first input is the output of the previous stage.
        """

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """Return the gradients of the last stage's outputs. For a scalar loss the gradient is 1."""

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """
        Receive the last stage's outputs. A later microbatch overwrites these tensors, so copy them
        if you need them later.
        """
