"""
Faults that a rank finds late. The rank reports such a fault to its contract before it stops.

An error of a device, and a difference between two runs of a step, are found only after the contract
has accepted the actions that they concern. The contract then refuses the commit of that epoch, and
a checkpoint over weights that the fault may have reached.
"""

from __future__ import annotations

import torch

from ..runtime import Runtime
from .causes import WEIGHT, MismatchError

__all__ = ["record_fault"]


def record_fault(runtime: Runtime, error: BaseException, epoch: int, rank: int) -> None:
    """
    Tell the contract which stages an error may have affected; other errors change nothing.

    After an error of a device (`torch.AcceleratorError`), no later work of the process runs. The
    error may come from the last update, since the host does not wait for the update. So the last
    committed epoch counts as failed, every action and checkpoint is refused until a `restore`, and
    the error is marked as unrecoverable. If a weight changed between two runs of a step, the last
    epoch counts as failed too. Any other difference between two runs spoils the step, if no
    device's gate has skipped the step's update yet.

    Args:
        runtime: The rank's runtime.
        error: Why the rank stops.
        epoch: The epoch of the error.
        rank: The rank; differences of other ranks are not its own faults.
    """
    if isinstance(error, torch.AcceleratorError):
        error.unrecoverable = True  # type: ignore[attr-defined]
        runtime.device_failed()
    elif isinstance(error, MismatchError):
        for one in error.found:
            if one.rank == rank and one.name.startswith(WEIGHT):
                runtime.fail(one.stage, max(epoch - 1, 0))
            elif one.rank == rank and epoch == runtime.epoch:
                runtime.fail(one.stage, epoch)
