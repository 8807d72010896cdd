"""
The norms that torch computes, for layers and heads.
"""

from __future__ import annotations

import torch

from .layers import LayerConfig

__all__ = ["CUDNN_NORMS", "EPSILON", "norm_of"]

EPSILON = 1e-5
"""The epsilon that Transformer Engine adds to a variance by default."""
CUDNN_NORMS = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")
"""Environment variables with which Transformer Engine takes cuDNN's norms instead of its own."""


def norm_of(config: LayerConfig, device: torch.device) -> torch.nn.Module:
    """
    Make the module of a norm over the hidden states.

    Args:
        config: Dimensions of a layer: width, dtype and kind of the norm.
        device: Device of the norm's parameters.
    """
    kind = torch.nn.RMSNorm if config.norm == "rmsnorm" else torch.nn.LayerNorm
    return kind(config.hidden, eps=EPSILON, device=device, dtype=config.dtype)
