"""
Lets TorchTitan run on a machine without an accelerator, over gloo. Import it before TorchTitan.

TorchTitan asks torch for the kind of accelerator, and the module of that kind for its name, its
memory and its number of devices. After the first step it shortens the timeouts of groups, with a
barrier that gloo does not have. None of this touches a computation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

__all__: list[str] = []

_utils: Any = torch._utils
_cpu: Any = torch.cpu
_utils._get_available_device_type = lambda: "cpu"
_utils._get_device_module = lambda name: getattr(torch, name)
_cpu.get_device_name = lambda device=None: "cpu"
_cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
_cpu.reset_peak_memory_stats = _cpu.empty_cache = lambda *_, **__: None
_cpu.memory_stats = lambda device=None: {}
_cpu.device_count = lambda: 64

import torchtitan.distributed.utils as _distributed  # noqa: E402

_distributed.set_pg_timeouts = lambda timeout, parallel_dims: None
