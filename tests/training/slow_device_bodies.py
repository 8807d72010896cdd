"""What the ranks run in the tests of a slow device, on GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch

from qeffect.gpu_runtime.backends.te.stage import TransformerEngineStage

from . import launched_bodies

#: Cycles that a slow device spins behind each action.
CYCLES = 2_000_000


def slow_device(path: str, rank: int) -> dict[str, Any]:
    """Train a run with launches; the device of one rank spins after every F, dI and dW."""
    if os.environ["RANK"] == str(rank):
        for name in ("forward", "dgrad", "wgrad"):
            _slowed(name)
    (found,) = launched_bodies.on_devices([(path, {})])
    return {"launches": found["launches"]}


def _slowed(name: str) -> None:
    real = getattr(TransformerEngineStage, name)

    def slow(self: Any, *given: Any, **named: Any) -> Any:
        found = real(self, *given, **named)
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        return found

    setattr(TransformerEngineStage, name, slow)
