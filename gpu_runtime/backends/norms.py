"""
The norms of layers and heads that torch computes.
"""

from __future__ import annotations

import torch

from .layers import LayerConfig

__all__ = ["EPSILON", "norm_of"]

EPSILON = 1e-5
"""What Transformer Engine adds to a variance by default."""


def norm_of(config: LayerConfig, device: torch.device) -> torch.nn.Module:
    """
    Return a norm over the hidden states.

    Args:
        config: Width, type, and which norm.
        device: Device of its parameters.
    """
    kind = torch.nn.RMSNorm if config.norm == "rmsnorm" else torch.nn.LayerNorm
    return kind(config.hidden, eps=EPSILON, device=device, dtype=config.dtype)
