"""
The CUDA device that a process uses, and its number for nvidia-smi.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

__all__ = ["generator_of", "placed", "visible_id"]


def placed(device: torch.device | str = "cuda") -> torch.device:
    """
    Return a device with an index. A CUDA device without an index becomes the current CUDA device.

    On a host with several GPUs, each rank makes its own GPU the current device. Tensors, streams
    and events on device 0 would not match that GPU. If the host has no CUDA device, the index is 0;
    then the first use of the device raises an error that says what is missing.

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
    Return nvidia-smi's name for the device that has the number `index` in this process.

    nvidia-smi ignores `CUDA_VISIBLE_DEVICES`, but CUDA counts only the devices in this variable.

    Args:
        index: The number of the device among the visible devices.
        environ: The environment variables; by default the variables of this process.

    Returns:
        The device's number on the host, or its UUID if the variable contains UUIDs. If the variable
        is not set or names too few devices, the result is `index`.

    >>> visible_id(0, {"CUDA_VISIBLE_DEVICES": "3,5"}), visible_id(1, {})
    ('3', '1')
    """
    named = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "")
    visible = [entry.strip() for entry in named.split(",") if entry.strip()]
    return visible[index] if index < len(visible) else str(index)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the random generator that operations on a CUDA device use by default."""
    # torch fills the tuple when CUDA begins.
    return torch.cuda.default_generators[device.index]
