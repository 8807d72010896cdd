"""
The environment variables with which the libraries choose deterministic kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DETERMINISTIC"]

#: Transformer Engine allows nondeterministic attention by default; cuBLAS needs a fixed workspace.
DETERMINISTIC: Mapping[str, str] = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
