"""
Detect changes of the optimizer that would have no effect on the graph of a captured step.

The graph contains the addresses of the optimizer's state, and the values of numbers such as the
learning rate. If such a number is a tensor on the device, the graph contains only its address. Then
the number may change between launches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..step.optimizer import Optimizer

__all__ = ["BakedOptimizer"]

_address = Tensor.data_ptr


class BakedOptimizer:
    """
    Records an optimizer at its capture, to detect later changes.

    Args:
        optimizer: The optimizer whose update has just been captured.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._addresses = optimizer.addresses()
        self._numbers = _numbers(optimizer)
        self._prepare()

    def _prepare(self) -> None:
        groups = self.optimizer.adamw.param_groups
        own = [value for group in groups for name, value in group.items() if name != "params"]
        self._fixed = not any(isinstance(value, list) for value in own)
        # Kept alive, so that no later object can reuse the identity of one of these.
        self._values = [value for group in groups for value in group.values()]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._seen = [*map(_identities, groups)]
        self._places = [*map(_address, self._tensors)]

    def unmoved(self) -> bool:
        """
        Return whether all addresses of the state and all numbers of all parameter groups are
        unchanged.

        A number that is still the same Python object counts as unchanged. The items of a list are
        always compared.
        """
        if self.optimizer.addresses() != self._addresses:
            return False
        found = [*map(_identities, self.optimizer.adamw.param_groups)]
        if self._fixed and found == self._seen:
            if [*map(_address, self._tensors)] == self._places:
                return True
        if _numbers(self.optimizer) != self._numbers:
            return False
        self._prepare()
        return True


def _identities(group: dict[str, Any]) -> list[Any]:
    return [*group, *map(id, group.values())]


def _numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: _told(value) for name, value in group.items() if name != "params"}
        for group in optimizer.adamw.param_groups
    ]


def _told(value: Any) -> Any:
    """
    Return what the graph contains of a value: a tensor's address, a list's items, or the number
    itself.
    """
    if isinstance(value, Tensor):
        return value.data_ptr()
    return [*map(_told, value)] if isinstance(value, list) else value
