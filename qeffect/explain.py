"""
The texts of refusals: for every clause, the value that was found and the value that was expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .engine.stage import TRANSITIONS
from .explanations import arena, completion, epochs, order, ownership, version
from .explanations.words import Explanation
from .refusals import Refused
from .text import shown

__all__ = ["EXPLANATIONS", "explain"]

#: For each clause, the function that returns what was found and what was expected.
EXPLANATIONS: Final[Mapping[str, Explanation]] = {
    **ownership.EXPLANATIONS,
    **version.EXPLANATIONS,
    **order.EXPLANATIONS,
    **arena.EXPLANATIONS,
    **completion.EXPLANATIONS,
    **epochs.EXPLANATIONS,
}


def explain(refused: Refused, transition: str, st: Any, arguments: tuple[Any, ...]) -> Refused:
    """Fill in a refusal's found and expected values, computed from the unchanged state."""
    refused.transition = transition
    given = dict(zip(TRANSITIONS[transition], arguments, strict=True))
    given["transition"] = transition
    try:
        refused.found, refused.expected = EXPLANATIONS[refused.clause](st, given)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        told = ((name, value) for name, value in given.items() if name != "transition")
        refused.found = ", ".join(f"{name} {shown(value)}" for name, value in told)
        refused.expected = "numbers that this contract has issued"
    return refused
