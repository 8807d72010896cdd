"""
Find which microbatch each buffer of DeepSpeed's engine should contain, and which microbatch it
contains.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

from qeffect.schedule.pairing import Work

__all__ = ["Buffers", "first_tensor"]

#: Values that have a graph. Tensors without one may be shared by microbatches, as a mask is.
_WITH_GRAPH = frozenset({"used", "output"})


def first_tensor(value: Any, *, with_graph: bool = False) -> Any:
    """
    Return the first tensor in nested tuples, lists and mappings; None if there is no tensor.

    Args:
        value: The nested value.
        with_graph: Whether to skip tensors without an autograd graph.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        found = (first_tensor(each, with_graph=with_graph) for each in value)
        return next((tensor for tensor in found if tensor is not None), None)
    if not hasattr(value, "requires_grad") or (with_graph and value.grad_fn is None):
        return None
    return value


class Buffers:
    """
    The contents of one rank's buffers in one step.

    A *work* is a stage together with a microbatch. An instruction names a buffer, not a microbatch.
    The microbatch follows from the instructions: the k-th load or receive of a stage brings
    microbatch k, and a backward belongs to the last forward in the same buffer. This class also
    records for which microbatch each tensor was made, so the tensor in a buffer shows which
    microbatch the buffer contains. Only weak references to the tensors are kept, because the engine
    frees the tensors.

    Attributes:
        inputs: By buffer, the work whose input arrived last.
        tapes: By buffer, the work whose forward ran last.
        gradients: By buffer, the work whose backward ran last.
        labels: The buffers with labels that no forward has used yet.
        received: The work whose gradient was received last.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, Work] = {}
        self.tapes: dict[int, Work] = {}
        self.gradients: dict[int, Work] = {}
        self.labels: set[int] = set()
        self.received: Work | None = None
        self._counts: Counter[tuple[str, int]] = Counter()
        self._made: dict[tuple[str, int], tuple[Any, Work]] = {}

    def next(self, what: str, stage: int) -> Work:
        """
        Return a stage's next work for an instruction that names no microbatch. Microbatches count
        from 0.
        """
        self._counts[what, stage] += 1
        return stage, self._counts[what, stage] - 1

    def made(self, what: str, work: Work, value: Any) -> None:
        """
        Record for which work a value was made.

        Args:
            what: The kind of value: ``input``, ``output``, ``gradient``, or ``used`` for the tensor
                from which a backward starts.
            work: The work.
            value: The content of a buffer.
        """
        tensor = first_tensor(value, with_graph=what in _WITH_GRAPH)
        if tensor is not None:
            self._made[what, id(tensor)] = weakref.ref(tensor), work

    def maker(self, what: str, value: Any) -> Work | None:
        """Return the work for which a value was made; None if the value is unknown."""
        tensor = first_tensor(value, with_graph=what in _WITH_GRAPH)
        found = self._made.get((what, id(tensor)))
        return None if found is None or found[0]() is not tensor else found[1]
