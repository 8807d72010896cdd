"""Which microbatch each buffer of DeepSpeed's engine holds: by its instructions, and in fact."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

from qeffect.schedule.pairing import Work

__all__ = ["Buffers", "first_tensor"]


def first_tensor(value: Any) -> Any:
    """Return the first tensor of a nest of tuples, lists and mappings; None without one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return value if hasattr(value, "requires_grad") else None


class Buffers:
    """
    What the buffers of one rank hold in one step.

    An instruction names a buffer, not a microbatch. By the instructions, the k-th load or receive
    of a stage brings microbatch k, and a backward belongs to the forward that ran last in its
    buffer. In fact, a buffer holds a tensor, and this class knows which microbatch a tensor was
    made for. The tensors are held weakly, since the engine frees them.

    Attributes:
        inputs: By buffer, the work whose input came last.
        tapes: By buffer, the work that was forwarded last.
        gradients: By buffer, the work whose backward ran last.
        labels: The buffers whose labels no forward has used.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, Work] = {}
        self.tapes: dict[int, Work] = {}
        self.gradients: dict[int, Work] = {}
        self.labels: set[int] = set()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._made: dict[tuple[str, int], tuple[Any, Work]] = {}

    def next(self, what: str, stage: int) -> Work:
        """Return the next work of a stage of which nothing says which microbatch it is."""
        self._counts[what, stage] += 1
        return stage, self._counts[what, stage] - 1

    def made(self, what: str, work: Work, value: Any) -> None:
        """Record what a buffer holds of a work: its ``input`` or its ``output``."""
        tensor = first_tensor(value)
        if tensor is not None:
            self._made[what, id(tensor)] = weakref.ref(tensor), work

    def maker(self, what: str, value: Any) -> Work | None:
        """Return the work that a tensor was made for; None if the tensor is unknown."""
        tensor = first_tensor(value)
        found = self._made.get((what, id(tensor)))
        return None if found is None or found[0]() is not tensor else found[1]
