"""The names of Megatron-core that the guard replaces, and how it puts them back."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import attrs

__all__ = ["Library", "Patches", "library"]

_ABSENT = object()


@attrs.frozen
class Library:
    """
    The modules of Megatron-core that the guard looks into.

    Args:
        release: Megatron-core's release.
        schedules: The forward-backward loops.
        p2p: The exchanges of tensors between stages.
        buffers: The buckets of gradients.
        optimizer: The optimizers.
        graphs: The graphs of layers.
        state: The process groups.
        saves: The modules that hold the function `save`.
        queue: The module of asynchronous saves; None if it cannot be imported.
        iteration: The graph of a whole step; None if it cannot be imported.
    """

    release: str
    schedules: Any
    p2p: Any
    buffers: Any
    optimizer: Any
    graphs: Any
    state: Any
    saves: tuple[Any, ...]
    queue: Any = None
    iteration: Any = None

    def optimizers(self) -> Iterator[type]:
        """Yield the optimizer classes that define their own `step`."""
        todo = [self.optimizer.MegatronOptimizer]
        while todo:
            cls = todo.pop()
            todo += cls.__subclasses__()
            if "step" in vars(cls) and not getattr(cls.step, "__isabstractmethod__", False):
                yield cls

    @property
    def scaling(self) -> Any:
        """Transformer Engine's manager of the FP8 scaling state; None without that library."""
        return getattr(self.graphs, "FP8GlobalStateManager", None)


def library() -> Library:
    """
    Import Megatron-core.

    Raises:
        ImportError: Megatron-core is not installed, or one of its modules cannot be imported.
    """
    core = "megatron.core"
    return Library(
        str(getattr(import_module(core), "__version__", "unknown")),
        schedules=import_module(f"{core}.pipeline_parallel.schedules"),
        p2p=import_module(f"{core}.pipeline_parallel.p2p_communication"),
        buffers=import_module(f"{core}.distributed.param_and_grad_buffer"),
        optimizer=import_module(f"{core}.optimizer.optimizer"),
        graphs=import_module(f"{core}.transformer.cuda_graphs"),
        state=import_module(f"{core}.parallel_state"),
        saves=(
            import_module(f"{core}.dist_checkpointing"),
            import_module(f"{core}.dist_checkpointing.serialization"),
        ),
        queue=_optional(f"{core}.dist_checkpointing.strategies.async_utils"),
        iteration=_optional(f"{core}.full_cuda_graph"),
    )


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


class Patches:
    """Attributes that are replaced until `restore`."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or a class."""
        self._put.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put every attribute back, except attributes that other code has replaced after `put`."""
        while self._put:
            owner, name, before, value = self._put.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
