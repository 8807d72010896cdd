"""
The state that a recorded step is compared with, and a difference between that state and the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from attrs import frozen

from ..counts import DeviceCounts
from ..engine.concrete_memory import Memory
from ..keys import Cell

__all__ = ["Difference", "StepState"]


@frozen
class Difference:
    """
    Why a recorded step cannot be committed now.

    Args:
        where: The entry that differs from the recorded start, as ``column[index]``; or the name of
            another part of the contract.
        found: The current value.
        expected: The recorded value, plus the amount by which its counter has risen.
        clause: The clause that would refuse one of the step's transitions; None if no clause would,
            or if no transition was tried.

    >>> print(Difference("poisoned[0]", 1, 0, "order.poisoned"))
    poisoned[0] is 1; the recorded step expects 0 (order.poisoned)
    """

    where: str
    found: Any
    expected: Any
    clause: str | None = None

    def __str__(self) -> str:
        clause = "" if self.clause is None else f" ({self.clause})"
        return (
            f"{self.where} is {self.found!r}; the recorded step expects {self.expected!r}{clause}"
        )


@frozen
class StepState:
    """
    The part of a contract's state, at one moment, that a step may change.

    Args:
        memory: The contract's memory, with every column.
        free: The free slots (sets of buffers) of each stage, in their order.
        reserved: For each cell (a key without its epoch), the slot that the cell's key reserved.
        counts: For each state domain, the expected device counts; None if devices count no actions.
    """

    memory: Memory
    free: Mapping[int, tuple[int, ...]]
    reserved: Mapping[Cell, int]
    counts: Mapping[Hashable, DeviceCounts] | None
