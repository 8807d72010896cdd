"""
Let Megatron-core, whose code requests device "cuda", run on a CPU, in tests and in `report modes`.

Since 0.18, Megatron-core imports Triton, whose kernels no test calls; a stand-in module takes
Triton's place.
"""

from __future__ import annotations

import builtins
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["install"]


class _AsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")  # the optimizers ask for it
        return found


class _Triton(ModuleType):
    """
    A stand-in module that has every attribute. If an attribute decorates a function, the function
    stays unchanged.
    """

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Triton(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class _Stream:
    """A stream without a device: enqueued work runs at once."""

    def __init__(self, device: Any = None) -> None:
        """Accept any device."""

    def wait_stream(self, other: Any) -> None:
        """Return at once, because all work has already run."""


def install() -> None:
    """Make ``cuda`` mean the CPU in this process from now on."""
    load = builtins.__import__

    def imported(name: str, names: Any = None, *rest: Any, **kwargs: Any) -> Any:
        by = (names or kwargs.get("globals") or {}).get("__name__", "")
        if name.partition(".")[0] == "triton" and by.startswith("megatron."):
            return _Triton("triton")
        return load(name, *(() if names is None else (names,)), *rest, **kwargs)

    python: Any = builtins
    python.__import__ = imported
    mode: Any = _AsCpu()
    mode.__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.Stream = _Stream
    cuda.stream = lambda *_: nullcontext()
