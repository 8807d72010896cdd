"""
Find FP8 scales for the first step of a run. This is needed if scales are updated once an epoch (an
optimizer step).

A new run has scales of 1, at which gradients underflow in E5M2. Scales that are updated at every F
and dI recover within a step. Scales that are updated once an epoch recover only after a step, so
the whole first step would be wrong. If a gradient underflows to zero, the gradients of all earlier
layers are zero too, so several steps may be wrong. Therefore a run begins with walks (passes) over
the microbatches of its first step. The gradients and losses of these walks are dropped, and no
weight is updated:

1. Empty every history.
2. Run F, dI and dW of every microbatch of the first step, on every replica.
3. Update the scales once, as after a step.
4. Stop if no amax (largest absolute value of a tensor) was zero and no scale changed by more than a
factor of 2, in all processes. Otherwise repeat from item 2, up to `MOST_WALKS` times in all.

Each amax history then contains one entry, from the last walk. The result depends only on the model,
the data and the number of replicas, so every mapping of stages to ranks gives the same scales. A
run that resumes from a checkpoint loads its scales and never calibrates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ..backends.epoch_scales import move_scales
from ..backends.protocol import StateDomain
from .memory.numerical_state import live_state

__all__ = ["MOST_WALKS", "SETTLED", "Calibration", "calibrate"]

MOST_WALKS: Final = 16
"""Largest number of walks: if a tensor is always zero, the scales never converge."""
SETTLED: Final = 2.0
"""Largest factor by which a scale may move in the last walk."""


@attrs.frozen
class Calibration:
    """
    The result of a calibration, equal on all ranks.

    Args:
        walks: Number of walks (passes over the rank's actions, without an update of weights).
        converged: Whether the scales had converged after the last walk. Training begins in either
            case.
    """

    walks: int
    converged: bool


def calibrate(
    domain: StateDomain,
    walk: Callable[[], None],
    agree: Callable[[bool], bool] = lambda converged: converged,
) -> Calibration:
    """
    Update the scales of a new run until they fit the first step.

    Args:
        domain: A state domain (stages whose scales are updated together) whose scales are updated
            once an epoch.
        walk: Runs F, dI and dW of every microbatch of the first step, and drops the gradients.
        agree: Function of one bool: whether this process's scales have converged. It returns
            whether the scales of all processes have converged.
    """
    live = live_state(domain)
    histories = [tensor for name, tensor in live.items() if name.endswith("amax_history")]
    scales = {name: tensor for name, tensor in live.items() if name.endswith("scale")}
    for number in range(1, MOST_WALKS + 1):
        with torch.no_grad():
            for history in histories:
                history.zero_()
        walk()
        seen = all(bool((history[0] > 0).all()) for history in histories)
        before = {name: scale.clone() for name, scale in scales.items()}
        move_scales(domain)
        if agree(seen and _near(before, scales)):
            return Calibration(number, True)
    return Calibration(MOST_WALKS, False)


def _near(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether no scale moved by more than the factor `SETTLED`."""
    moved = (after[name] / before[name] for name in before)
    return all(bool(((r <= SETTLED) & (r >= 1 / SETTLED)).all()) for r in moved)
