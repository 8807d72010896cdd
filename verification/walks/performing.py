"""
Where a walk's call meets a contract: the oracle and its world know calls, and no contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qeffect import Contract

from .world import Call

__all__ = ["perform"]


def perform(call: Call, contract: Contract, make: Callable[[], Contract]) -> tuple[Contract, Any]:
    """
    Make a call.

    Args:
        call: The call.
        contract: What it goes to, unless it restores in a new process.
        make: What makes the contract of a new process.

    Returns:
        The contract that it went to, and what that returned.

    Raises:
        Refused: As the contract.
    """
    name, given = call.transition, dict(call.arguments)
    if "ticket" in given:
        name = name.partition("_")[0]
    if given.pop("fresh", False):
        contract = make()
    return contract, getattr(contract, name)(**given)
