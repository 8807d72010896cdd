"""
Faults that a rank finds only after the faulty action. The rank reports such a fault to its contract
before it stops.

An error of a device, or a difference between two runs of a step, is found only after the contract
has accepted the faulty actions. The contract then refuses the commit of that epoch (the optimizer
step). The contract also refuses a checkpoint of weights that the fault may have changed.
"""

from __future__ import annotations

import torch

from ..runtime import Runtime
from .causes import WEIGHT, MismatchError

__all__ = ["record_fault"]


def record_fault(runtime: Runtime, error: BaseException, epoch: int, rank: int) -> None:
    """
    Report to the contract which stages an error may have affected. Only errors of the device, and
    differences between two runs of a step, are reported.

    After an error of a device (`torch.AcceleratorError`), no later work of the process runs. The
    error may come from the last update, since the host does not wait for the update. Therefore the
    last committed epoch counts as failed, every action and checkpoint is refused until a `restore`,
    and the error is marked as unrecoverable. If a weight changed between two runs of a step, the
    last committed epoch also counts as failed. After any other difference, only the current step
    fails. In mode ``one launch`` the host finds a difference one step later. Then only a changed
    weight is reported. For any other difference, the device has already skipped the update of the
    faulty step (`gate.py`).

    Args:
        runtime: The guarded runtime of this rank, whose contract gets the report.
        error: Why the rank stops.
        epoch: The epoch (optimizer step) in which the error occurred.
        rank: This rank's number; differences on other ranks are not faults of this rank.
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
