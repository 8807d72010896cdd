"""
Evidence (an action's reports at its commit), converted to the values that the guards compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .relations.constants import NEVER
from .text import shown
from .tickets import Fills, Ticket

__all__ = [
    "NO_FILL",
    "commit_arguments",
    "printable_count",
    "readable_count",
    "sorted_fills",
    "sorted_names",
]

#: The evidence of an action that filled no cache, or whose backend cannot report fills.
NO_FILL: Final = ((), NEVER)

#: The largest count that a refusal repeats as a number.
_LARGEST: Final = (1 << 63) - 1

#: Stands for the epoch of a fill that cannot be read; differs from `NEVER` and from every epoch.
_UNREADABLE: Final = NEVER - 1


def sorted_names(evidence: Iterable[str]) -> tuple[Any, ...]:
    """
    Return the names of matrices, sorted.

    A string is rejected, although Python would iterate over its letters. If the evidence cannot be
    read, the result is a tuple that holds only the error. Such a tuple equals no stage's matrices,
    so the guard refuses the action.
    """
    try:
        if isinstance(evidence, str):
            raise TypeError(f"{shown(evidence)} is one name; expected a collection of names")
        names = tuple(sorted(evidence))
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"{shown(name)} is not a name")
    except Exception as error:  # the caller's iterable may raise anything; the action has failed
        return (error,)
    return names


def readable_count(reported: Any) -> int:
    """
    Return a reported count or effect token; `NEVER` if the report is missing or cannot be read.
    """
    return reported if type(reported) is int and reported >= 0 else NEVER


def printable_count(reported: Any) -> Any:
    """
    Return a reported count as a refusal shows it: `NEVER` for None, an unusable value as text.
    """
    if reported is None:
        return NEVER
    return reported if 0 <= readable_count(reported) <= _LARGEST else shown(reported)


def sorted_fills(filled: Fills, epoch: int) -> tuple[tuple[Any, ...], int]:
    """
    Return the matrices whose caches were filled, sorted, and the weight epoch that they were filled
    from.

    If some caches were filled from another epoch than ``epoch``, the first such epoch is returned.
    If the report cannot be read, the weights are unknown, and the returned epoch is a value that no
    guard accepts.
    """
    try:
        pairs = list(filled.items() if isinstance(filled, Mapping) else filled)
        if not pairs:
            return NO_FILL
        of = next((e for _, e in pairs if e.__class__ is not int or e != epoch), epoch)
        known = of.__class__ is int and of >= 0
        return sorted_names([name for name, _ in pairs]), of if known else _UNREADABLE
    except Exception:  # the caller's iterable may raise anything; the action has failed
        return (), _UNREADABLE


def commit_arguments(
    ticket: Ticket,
    names: Any,
    of: int,
    evidence: Any,
    updates: Any,
    scales: Any,
    draws: Any,
    *,
    weighed: tuple[Any, Any],
) -> tuple[Any, ...]:
    """
    Return the arguments of the transition that commits a ticket's action.

    Args:
        ticket: The ticket (reservation) of the action.
        names: Matrices whose weight cache was filled; given for a refresh and for F.
        of: Weight epoch that the caches were filled from; for a refresh, an evaluation and F.
        evidence: Matrices that were queued or covered; for dI and dW.
        updates: Number of scaling updates; for F, dI and an evaluation.
        scales: Effect token of the F whose scales were used; for dI.
        draws: Position of the random generator; for F and dI.
        weighed: For dI, the gradient's weight as a number of equal parts, and the number of parts
            that the epoch's weights add up to (`StageConfig.counted`).
    """
    redeems = ticket.slot, ticket.serial
    if ticket.action == "F":
        return (*redeems, names, of, updates, draws)
    if ticket.action == "refresh":
        return (*redeems, names, of)
    if ticket.action == "evaluation":
        return (*redeems, of, updates)
    if ticket.action == "update":
        return redeems
    if ticket.action == "dI":
        return (*redeems, evidence, updates, scales, draws, *weighed)
    return (*redeems, evidence)
