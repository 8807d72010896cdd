"""
The exception that every guard raises, and its record as plain data.
"""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen

__all__ = ["Refusal", "Refused", "refused"]


@frozen
class Refusal:
    """
    A refusal as plain data, ready for JSON.

    Args:
        clause: Stable id of the clause that was violated, for example ``order.token``.
        transition: The contract call that refused, for example ``check_forward``.
        found: The value that the guard found.
        expected: The value that the contract requires.
        cause: The likely cause: the clause's text, or the text given to `Refused.advise`.
        remedy: What to do: the clause's text, or the text given to `Refused.advise`.
        section: The clause's section in the paper; ``design`` for clauses that the paper lacks.

    >>> refusal = Refused("order.token").record()
    >>> refusal.clause, refusal.section
    ('order.token', ...)
    >>> sorted(refusal.asdict())
    ['cause', 'clause', 'expected', 'found', 'remedy', 'section', 'transition']
    """

    clause: str
    transition: str = ""
    found: str = ""
    expected: str = ""
    cause: str = ""
    remedy: str = ""
    section: str = ""

    def asdict(self) -> dict[str, str]:
        """Return the record as a plain dictionary."""
        return asdict(self)


class Refused(Exception):  # noqa: N818 - the contract's own word, not an error of ours
    """
    The contract refused a call. The call changed no state, with one exception: if the evidence of a
    commit (the action's report) is refused, the action is also aborted.

    A guard raises this exception with the clause only. The public API adds what was found and what
    was expected before the exception reaches the caller. The guards for other frameworks also
    replace the advice, because the clause's own advice addresses code that calls the contract.

    Attributes:
        clause: Stable id of the clause that was violated.
        transition: The contract call that refused.
        found: The value that the guard found.
        expected: The value that the contract requires.
        advice: The cause and the remedy that were given to `advise`; they replace the clause's
            texts. None if `advise` was not called.

    >>> raise Refused("order.token")
    Traceback (most recent call last):
    ...
    qeffect.refusals.Refused: order.token
    """

    __slots__ = ("advice", "clause", "expected", "found", "transition")

    def __init__(self, clause: str) -> None:
        self.clause = clause
        self.transition = ""
        self.found = ""
        self.expected = ""
        self.advice: tuple[str, str] | None = None

    @property
    def relation(self) -> str:
        """
        The relation (group of guards) whose clause was violated: the clause id before the dot.
        """
        return self.clause.partition(".")[0]

    def advise(self, cause: str, remedy: str) -> Refused:
        """
        Replace the clause's cause and remedy; return the refusal.

        Args:
            cause: The likely cause of the refusal.
            remedy: What the user should do.

        >>> refusal = Refused("order.token").advise("A hook ran twice.", "Remove the hook.")
        >>> refusal.record().remedy
        'Remove the hook.'
        """
        self.advice = cause, remedy
        return self

    def record(self) -> Refusal:
        """
        Return the refusal as a plain record, with the advice given to `advise` or else the clause's
        texts.
        """
        from qeffect.spec.clauses import CLAUSES

        clause = CLAUSES.get(self.clause)
        cause, remedy = self.advice or ((clause.cause, clause.remedy) if clause else ("", ""))
        return Refusal(
            clause=self.clause,
            transition=self.transition,
            found=str(self.found),
            expected=str(self.expected),
            cause=cause,
            remedy=remedy,
            section=clause.section if clause else "",
        )

    def __str__(self) -> str:
        if not self.transition:
            return self.clause
        r = self.record()
        return (
            f"{r.clause} in {r.transition}: found {r.found}; expected {r.expected}. "
            f"Likely cause: {r.cause} What to do: {r.remedy}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.clause, self.transition, self.found, self.expected, self.advice)
        return (refused, arguments, vars(self))  # its notes


def refused(
    clause: str,
    transition: str,
    found: str,
    expected: str,
    advice: tuple[str, str] | None = None,
) -> Refused:
    """
    Return a refusal with found and expected filled in, and with advice if there is any.

    >>> refused("order.token", "check_forward", "effect token 3", "token 4").found
    'effect token 3'
    """
    refusal = Refused(clause)
    refusal.transition, refusal.found, refusal.expected = transition, found, expected
    refusal.advice = advice
    return refusal
