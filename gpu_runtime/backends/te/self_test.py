"""
A self-test of the Transformer Engine backend, for `qeffect runtime doctor`.
"""

from __future__ import annotations

import torch

from ..layers import LayerConfig
from .domain import TransformerEngineDomain, reset_process
from .stage import TransformerEngineStage

__all__ = ["check_backend"]


def check_backend(device: torch.device | str = "cuda") -> None:
    """
    Run refresh, F, dI and dW of one small layer eagerly, and unregister the layer afterwards.

    Unlike a check of names, this test also finds a library in which a required name has another
    meaning. The FP8 state of this process is reset.

    Args:
        device: Where to run; by default the current CUDA device.

    Raises:
        BackendError: FP8 modules are already registered in this process, or the library lacks or
            has changed a name that the runtime uses. The message names the reason.
    """
    # 128 tokens: the library's fused attention backward is wrong below.
    config = LayerConfig(sequence=128)
    domain = TransformerEngineDomain("delayed", 16, device)
    try:
        stage = TransformerEngineStage(0, domain, config)
        gradients = {
            unit.name: torch.zeros(unit.shape, dtype=config.dtype, device=domain.device)
            for unit in stage.units
        }
        stage.warm()
        stage.refresh_cache()
        tape = stage.new_tape(0)
        outputs = stage.forward(tape, [spec.buffer() for spec in stage.inputs])
        stage.bind(tape, gradients)
        stage.dgrad(tape, [torch.ones_like(output) for output in outputs])
        stage.wgrad(tape, accumulate=False)
        stage.address_probe()()
        if domain.device.type == "cuda":
            torch.cuda.synchronize(domain.device)
    finally:
        reset_process()
