"""
Make results depend only on their inputs: fix the choice of kernels, and the number of threads on a
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from .protocol import BackendError

__all__ = ["DETERMINISTIC", "require_deterministic"]

#: Transformer Engine allows nondeterministic attention by default; cuBLAS needs a fixed workspace.
DETERMINISTIC: Mapping[str, str] = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def require_deterministic(device: torch.device) -> None:
    """
    Prepare this process for scales that are updated once an epoch (an optimizer step): use
    deterministic kernels, and one thread on a CPU.

    On a GPU, call this function before the libraries are imported, because the libraries read the
    environment variables only once.

    Raises:
        BackendError: On a GPU, an environment variable is already set to another value.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    for name, value in DETERMINISTIC.items():
        found = os.environ.setdefault(name, value)
        if device.type == "cuda" and found != value:
            raise BackendError(
                f"{name} is {found!r} in the environment, but scales='epoch' needs {value!r}: "
                f"otherwise the bits may depend on the mapping onto ranks; unset {name}"
            )
