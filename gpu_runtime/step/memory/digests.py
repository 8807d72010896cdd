"""
Digests of tensors: shape, type and SHA-256 of the raw bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .numerical_state import raw_bits

__all__ = ["digests"]


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """
    Compute the digest of each tensor. All tensors of a device are copied to the host together.

    The host therefore waits once per device instead of once per tensor. A comparison of two runs
    computes a hundred thousand digests.

    Args:
        tensors: Tensors of any shape, dtype and device.

    Returns:
        ``dtype:shape:sha256`` for each tensor, in order.
    """
    # FP8 types have no NumPy equivalent, bytes do.
    parts = [raw_bits(tensor) for tensor in tensors]
    hosts = {}
    for device in dict.fromkeys(part.device for part in parts):
        own = [part for part in parts if part.device == device]
        hosts[device] = (torch.cat(own) if len(own) > 1 else own[0]).cpu().numpy()
    found, starts = [], dict.fromkeys(hosts, 0)
    for tensor, part in zip(tensors, parts, strict=True):
        start = starts[part.device]
        stop = starts[part.device] = start + part.numel()
        shape = "x".join(map(str, tensor.shape))
        digest_of = hashlib.sha256(hosts[part.device][start:stop].data).hexdigest()
        found.append(f"{tensor.dtype}:{shape}:{digest_of}")
    return found
