"""
A look at tensors: whether each still is where, and what, it was.

A step looks at every destination of every microbatch twice, so the look is as short as torch lets
it be: the addresses one by one, and the rest (shape, dtype, device) in one call of the guards that
torch's compiler has for this very question. They are no public interface: where they are missing,
or where they answer no, as they do for a change that matters to a compiler alone, every tensor is
looked at by its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor

_address = Tensor.data_ptr
_form = attrgetter("shape", "dtype", "device")


def _guard(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """Torch's own check that tensors have the form they have now; None where there is none."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return check if check(*tensors) else None
    except (
        Exception
    ):  # whatever a torch without this interface raises: the attributes are looked at
        return None


class TensorIdentity:
    """
    What identifies some tensors now, and whether it still does.

    Args:
        tensors: The tensors; a captured graph writes to exactly these.
    """

    __slots__ = ("_addresses", "_forms", "_guard", "_tensors")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = [*map(_address, self._tensors)]
        self._forms: list[tuple[Any, ...]] = [*map(_form, self._tensors)]
        self._guard = _guard(self._tensors) if self._tensors else None

    def unchanged(self) -> bool:
        """Look at every tensor again: address, shape, dtype and device."""
        tensors = self._tensors
        if [*map(_address, tensors)] != self._addresses:
            return False
        guard = self._guard
        if guard is not None and guard(*tensors):
            return True
        return [*map(_form, tensors)] == self._forms
