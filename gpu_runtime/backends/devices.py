"""
Which device is meant: one place for what "the CUDA device" and its number for nvidia-smi are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

__all__ = ["placed", "visible_id"]


def placed(device: torch.device | str = "cuda") -> torch.device:
    """
    A device with its index: a CUDA device without one is the current CUDA device.

    A rank of a host with several GPUs makes its own the current one; tensors, streams and events
    that took device 0 instead would not match. Without a CUDA device the index is 0, so that
    whoever uses the device says what is missing.

    >>> placed("cpu")
    device(type='cpu')
    >>> placed("cuda:3")
    device(type='cuda', index=3)
    """
    asked = torch.device(device)
    index: int | None = asked.index  # torch's own type leaves None out
    if asked.type != "cuda" or index is not None:
        return asked
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def visible_id(index: int = 0, environ: Mapping[str, str] | None = None) -> str:
    """
    What nvidia-smi calls the device that a CUDA process counts as `index`.

    nvidia-smi does not look at `CUDA_VISIBLE_DEVICES`, CUDA counts only what it names.

    Args:
        index: The number of the device among those that are visible.
        environ: The environment; the process's own when None.

    Returns:
        Its number on the host, or its UUID where the variable names it so; `index` itself where
        the variable is not set or names fewer devices.

    >>> visible_id(0, {"CUDA_VISIBLE_DEVICES": "3,5"}), visible_id(1, {})
    ('3', '1')
    """
    named = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "")
    visible = [entry.strip() for entry in named.split(",") if entry.strip()]
    return visible[index] if index < len(visible) else str(index)
