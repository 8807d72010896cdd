"""
A check that tensors still have the same address, shape, dtype and device.

A step checks every gradient destination of every microbatch twice, so the check must be fast.
Addresses are compared one by one. Shape, dtype and device are compared by one call of the guards of
torch's compiler. These guards are not a public interface, and they also report changes that matter
only to a compiler. If the guards are missing or report a change, every tensor's attributes are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor

_address = Tensor.data_ptr
_form = attrgetter("shape", "dtype", "device")


def _guard(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """Torch's own check that tensors keep their form; None if torch lacks this interface."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return check if check(*tensors) else None
    except (
        Exception
    ):  # whatever a torch without this interface raises: attributes are compared instead
        return None


class TensorIdentity:
    """
    Records the address, shape, dtype and device of tensors now, for a later comparison.

    Args:
        tensors: The tensors to check, such as those that a captured graph writes.
    """

    __slots__ = ("_addresses", "_forms", "_guard", "_tensors")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = [*map(_address, self._tensors)]
        self._forms: list[tuple[Any, ...]] = [*map(_form, self._tensors)]
        self._guard = _guard(self._tensors) if self._tensors else None

    def unchanged(self) -> bool:
        """Whether every tensor has the recorded address, shape, dtype and device."""
        tensors = self._tensors
        if [*map(_address, tensors)] != self._addresses:
            return False
        guard = self._guard
        if guard is not None and guard(*tensors):
            return True
        return [*map(_form, tensors)] == self._forms
