"""
Findings: the violations that a check of a schedule reports, each with the id of the violated
clause (a rule of the contract).

The clauses for schedules (`schedule.*`) are in `qeffect.spec.clauses.schedule`. To add a clause,
add an entry there.
"""

from __future__ import annotations

from typing import Any

import attrs

from qeffect.spec.clauses import SCHEDULE_CLAUSES

from .actions import Atom

__all__ = ["SCHEDULE_CLAUSES", "Finding", "Place", "finding", "place"]


@attrs.frozen
class Place:
    """
    A table entry that is related to a finding.

    Args:
        rank: Rank of the entry.
        step: Step of the entry.
        action: Text of the entry.
        role: The entry's relation to the refused entry. `owner` left the work that the refused dW
            should get, and `picked` left the work that this dW gets. `first` is an earlier entry
            with which the refused entry conflicts, and `needs` is an entry that must come before
            the refused entry. `peer` is the message that is received instead. `awaited` is an entry
            that a stopped rank waits for, and `waits` is an entry at which another rank stops.
    """

    rank: int
    step: int
    action: str
    role: str


@attrs.frozen
class Finding:
    """
    One violation: where, which clause, what was expected and what was found.

    Args:
        clause: The id of the violated clause.
        rank: The rank at fault; `None` if no single rank is at fault.
        step: The step of the refused entry; `None` if an entry is missing.
        action: Text of the refused entry.
        message: The violation in one sentence.
        expected: What the clause requires at this entry.
        found: What the table has at this entry.
        remedy: What to do.
        related: Other entries that a picture of the finding should show.
    """

    clause: str
    rank: int | None
    step: int | None
    action: str | None
    message: str
    expected: str
    found: str
    remedy: str
    related: tuple[Place, ...] = ()

    def __str__(self) -> str:
        """The finding as one line: its place, its clause and its message."""
        place = ""
        if self.rank is not None:
            place = f"rank {self.rank}"
            if self.step is not None:
                place += f", step {self.step} ({self.action})"
            place += ": "
        return f"{place}{self.clause}: {self.message}"

    def record(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return attrs.asdict(self)


def finding(
    name: str,
    message: str,
    *,
    rank: int | None,
    atom: Atom | None = None,
    expected: str,
    found: str,
    related: tuple[Place, ...] = (),
) -> Finding:
    """
    Return a finding of the clause `schedule.<name>`, with the clause's remedy.

    Args:
        name: The clause id without its leading "schedule.".
        message: The violation in one sentence.
        rank: The rank at fault; `None` if no single rank is at fault.
        atom: The refused action; `None` if an action is missing.
        expected: What the clause requires at this action.
        found: What the table has at this action.
        related: Other entries that a picture of the finding should show.
    """
    clause = SCHEDULE_CLAUSES[f"schedule.{name}"]
    return Finding(
        clause=clause.id,
        rank=rank,
        step=None if atom is None else atom.step,
        action=None if atom is None else str(atom.action),
        message=message,
        expected=expected,
        found=found,
        remedy=clause.remedy,
        related=related,
    )


def place(rank: int, atom: Atom, role: str) -> Place:
    """Return the `Place` of the entry that an indivisible part of an action belongs to."""
    return Place(rank, atom.step, str(atom.action), role)
