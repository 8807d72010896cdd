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
    Compute the digest of each tensor; all tensors are on one device and copied to the host at once.

    The host waits for the device once, not once per tensor: a recording holds a hundred thousand
    tensors.

    Args:
        tensors: Tensors of any shape and dtype, on one device.

    Returns:
        ``dtype:shape:sha256`` for each tensor, in order.
    """
    if not tensors:
        return []
    # FP8 types have no NumPy equivalent, bytes do.
    parts = [raw_bits(tensor) for tensor in tensors]
    host = (torch.cat(parts) if len(parts) > 1 else parts[0]).cpu().numpy()
    found, start = [], 0
    for tensor, part in zip(tensors, parts, strict=True):
        stop = start + part.numel()
        shape = "x".join(map(str, tensor.shape))
        digest_of = hashlib.sha256(host[start:stop].data).hexdigest()
        found.append(f"{tensor.dtype}:{shape}:{digest_of}")
        start = stop
    return found
