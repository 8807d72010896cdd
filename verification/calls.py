"""
Calls of a contract as data: which method or transition is called, with which arguments.
"""

from __future__ import annotations

from typing import Any

from attrs import Factory, frozen

from qeffect import Checkpoint, TapeKey, TapeRef, Ticket

__all__ = ["Action", "Call"]

#: A transition and its arguments, as the kernel's composed function takes them.
Action = tuple[str, tuple[Any, ...]]


@frozen
class Call:
    """
    One call of the contract's public API.

    Args:
        transition: The transition that the call runs, or ``purge``.
        arguments: The arguments of the call, by name.
    """

    transition: str
    arguments: dict[str, Any] = Factory(dict)

    def __str__(self) -> str:
        given = (
            f"{name}={_text(value)}" for name, value in self.arguments.items() if value is not None
        )
        return f"{self.transition}({', '.join(given)})"


def _text(value: Any) -> str:
    if isinstance(value, Ticket):
        return f"{value.action} ticket {value.serial}"
    if isinstance(value, TapeRef):
        return f"slot {value.slot} generation {value.generation} of {value.incarnation:x}"
    if isinstance(value, Checkpoint):
        return f"checkpoint of epoch {value.epoch} with stages {[c.stage for c in value.stages]}"
    return str(value) if isinstance(value, TapeKey) else repr(value)
