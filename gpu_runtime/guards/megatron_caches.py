"""
Which forwards of Megatron-core quantize the weights anew.

Transformer Engine's modules keep quantized weights in a cache, and fill it anew if
`is_first_microbatch` is set. Eager modules read the attribute. The graphs of
``cuda_graph_impl="local"`` read a flag on the device, which `_set_skip_fp8_weight_update_tensor`
writes; this module records the last value of the flag, and which graphs were replayed with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

__all__ = ["Caches", "innermost", "is_plain"]


def innermost(module: Any) -> Any:
    """Return the module inside wrappers such as DistributedDataParallel and Float16Module."""
    while (inner := getattr(module, "module", None)) is not None:
        module = inner
    return module


def is_plain(parameter: Any) -> bool:
    """Whether a parameter is ordinary; the library itself writes its quantized parameters."""
    return type(parameter).__name__ == "Parameter"


def _casts(module: Any) -> bool:
    """Whether a module casts a weight; a weight that is a quantized parameter needs no cache."""
    own = (p for p in module._parameters.values() if p is not None)
    return any(p.dim() > 1 and is_plain(p) for p in own)


class Caches:
    """
    The caches of quantized weights of a rank's chunks.

    The modules of a chunk that keep a cache are listed once, at the chunk's first step.

    Attributes:
        skips: The flag of the graphs: True skips quantization; None if it was never written.
    """

    def __init__(self) -> None:
        self.skips: bool | None = None
        self._modules: weakref.WeakKeyDictionary[Any, list[tuple[str, Any]]]
        self._modules = weakref.WeakKeyDictionary()
        self._replayed: list[bool | None] = []
        self._kept: list[str] | None = None

    def of(self, chunk: Any) -> list[tuple[str, Any]]:
        """Return the modules of a chunk that keep a cache, with their names."""
        found = self._modules.get(chunk)
        if found is None:
            found = self._modules[chunk] = [
                (name, module)
                for name, module in chunk.named_modules()
                if hasattr(module, "is_first_microbatch")
                and not hasattr(module, "cudagraph_runners")  # the manager of a layer's graphs
                and _casts(module)
            ]
        return found

    def used(self, chunk: Any) -> list[tuple[str, Any]]:
        """
        Return the modules of a chunk that keep a cache and have run since the step began.

        A module clears its own `is_first_microbatch` when it runs. Graphs do not clear it, so each
        module of a layer with graphs is taken for one that has run.
        """
        graphed = {
            module
            for layer in chunk.modules()
            if vars(layer).get("cuda_graphs") or hasattr(layer, "cudagraph_manager")
            for module in layer.modules()
        }
        return [
            (name, module)
            for name, module in self.of(chunk)
            if module in graphed or not module.is_first_microbatch
        ]

    def quantizing(self, chunks: Sequence[Any], config: Any) -> list[list[tuple[str, Any]]]:
        """Return the modules of each chunk that are to quantize their weights once in a step."""
        for name in ("fp8", "fp4", "use_kitchen", "quant_recipe"):
            if getattr(config, name, None):
                return [self.of(chunk) for chunk in chunks]
        return [[] for _ in chunks]

    def begin(self) -> None:
        """Forget what the last forward showed."""
        self._replayed, self._kept = [], None

    def entered(self, modules: Sequence[tuple[str, Any]]) -> None:
        """Record which modules would use their old cache; called where the forward begins."""
        self._kept = [name for name, module in modules if not module.is_first_microbatch]

    def replayed(self, runner: Any) -> None:
        """Record the replay of a layer's forward graph."""
        if getattr(runner, "fp8_enabled", False) or getattr(runner, "fp4_enabled", False):
            self._replayed.append(self.skips)

    def mode(self, chunk: Any) -> tuple[int, int]:
        """
        Return which graphs the last forward used.

        The first number is how many local graphs the forward replayed. The second number is how
        many layers have graphs of Transformer Engine.
        """
        layers, seen, todo = 0, set(), [chunk]
        while todo:  # less than half the time of `chunk.modules()`
            module = todo.pop()
            if module is not None and module not in seen:
                seen.add(module)
                layers += bool(vars(module).get("cuda_graphs"))
                todo += module._modules.values()
        return len(self._replayed), layers

    def stale(self) -> str | None:
        """Return why the last forward used an old cache; None if it filled the cache."""
        if self._replayed and any(skip is not None for skip in self._replayed):
            kept = sum(map(bool, self._replayed))
            if kept == 0:
                return None
            return (
                f"{kept} of {len(self._replayed)} replayed graphs with the flag that skips the "
                "quantization of weights"
            )
        if not self._kept:
            return None
        return f"is_first_microbatch=False in {len(self._kept)} modules, first {self._kept[0]}"
