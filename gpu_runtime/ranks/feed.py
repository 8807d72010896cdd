"""
The source of a pipeline's data.
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

    A plain ``tensor.to("cuda")`` waits, as its memory is pageable; `to_device` first copies to
    pinned memory.

    Args:
        tensor: A tensor on the CPU.
        device: The device; for a CPU, the tensor itself is returned.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Feed(Protocol):
    """
    Brings data into the pipeline, and takes its outputs.

    A step in mode ``one launch`` asks for all its data before it uses any. On a GPU, inputs and
    gradients are asked for on a separate stream that does not wait for any other stream. So the
    returned tensors must not be written again, and must not depend on the `outputs` of the same
    step.

    No method may wait for the device: copy with `to_device`. A graph that waits for another rank
    can hold up any stream of its device. If that rank is gone, the host would wait for ever, and
    could not learn why.
    """

    def inputs(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """
        Return the inputs of a stage that do not come from another stage.

        For the first stage: all inputs. For every other stage: all inputs but the first, such as
        targets.
        """

    def output_gradients(self, stage: StageBackend, step: int, microbatch: int) -> Sequence[Tensor]:
        """The gradients of the last stage's outputs; 1 for a scalar loss."""

    def outputs(
        self, stage: StageBackend, step: int, microbatch: int, outputs: Sequence[Tensor]
    ) -> None:
        """Take the last stage's outputs; copy them to keep them, as they are overwritten."""
