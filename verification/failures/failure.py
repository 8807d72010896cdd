"""
The entry of a public failure, and the run of its re-enactment.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from attrs import asdict, frozen

from qeffect.refusals import Refused

from .history import History

__all__ = ["KINDS", "WHOLE_CAUSE", "Enactment", "Failure", "FailureOutcome", "Rows", "run"]

#: A re-enactment: a function that makes calls of the contract through a history.
Enactment = Callable[[History], None]

#: How `Failure.guessed` begins if no report names a cause and the row re-enacts a guess.
WHOLE_CAUSE = "the whole cause"

#: Why a failure is not caught, by kind.
KINDS = {
    "values": "a number in a message, a loss or a placeholder is wrong, but every action is right",
    "state": "saved or restored numbers of the caller are wrong; the contract never sees them",
    "memory": "memory is lost below the contract: in the allocator, or while a graph is captured",
    "autograd": "the fault happens inside one call of autograd",
    "transport": "the fault is in communicators or in the driver, below the order of calls",
    "harmless": "the fault costs time but changes no number; the contract never refuses a wait",
    "evidence": "the contract has no field for the report that would show the fault",
    "cause": "the cause was never published",
}


@frozen
class Failure:
    """
    One public failure.

    Args:
        name: Short name for the command line.
        references: Where the failure was reported: ``owner/repository#number``, ``!number`` for a
            merge request named in the history, ``@commit`` for a commit.
        relation: The relation of the contract that the failure breaks.
        state: Status of the report, such as ``fixed 2026-03``.
        what: What failed, in one line.
        cause: The reported cause, in our own words.
        consequence: What the project observed.
        fix: How the project fixed the fault.
        clause: The clause that refuses the failure; empty if no clause does.
        at: The transition and action at which the contract refuses.
        reports: What the runtime must report so that the contract can refuse the failure, beyond
            the calls that every runtime makes. The report is an optional argument of a call,
            evidence of the device, or a resource of the runtime that is reported in place of a
            resource that the contract counts (such as a gradient buffer as a slot).
        kind: Why the contract does not catch the failure, one of `KINDS`; empty if it does.
        why: The same reason as a sentence.
        guessed: A detail of the cause that no report states, or `WHOLE_CAUSE` with the assumed
            cause; empty if nothing was guessed.
        shown: A test that shows more of the failure than a re-enactment can; may be empty.
        enact: The re-enactment; None if the fault and its fix make the same calls of the contract.
    """

    name: str
    references: tuple[str, ...]
    relation: str
    state: str
    what: str
    cause: str
    consequence: str
    fix: str
    clause: str = ""
    at: str = ""
    reports: str = ""
    kind: str = ""
    why: str = ""
    guessed: str = ""
    shown: str = ""
    enact: Enactment | None = None

    @property
    def verdict(self) -> str:
        """The expected verdict: ``refused``, ``not caught`` or ``unexplained``."""
        if self.clause:
            return "refused"
        return "unexplained" if self.kind == "cause" else "not caught"


class Rows:
    """
    Collects the failures of one relation, in the order in which they are written.

    Args:
        relation: The relation of the contract that the failures break.
    """

    def __init__(self, relation: str) -> None:
        self.relation = relation
        self.rows: list[Failure] = []

    def enacted(
        self, name: str, *references: str, **story: str
    ) -> Callable[[Enactment], Enactment]:
        """Return a decorator that adds a failure with the decorated re-enactment."""

        def decorate(enact: Enactment) -> Enactment:
            self._add(name, references, story, enact)
            return enact

        return decorate

    def untold(self, name: str, *references: str, **story: str) -> None:
        """Add a failure without a re-enactment: fault and fix make the same contract calls."""
        self._add(name, references, story, None)

    def _add(
        self, name: str, references: tuple[str, ...], story: dict[str, str], enact: Any
    ) -> None:
        self.rows.append(Failure(name, references, self.relation, enact=enact, **story))


@frozen
class FailureOutcome:
    """
    The outcome of a failure's re-enactment.

    Args:
        verdict: ``refused``, ``not caught`` or ``unexplained``.
        clause: The clause that refused the faulty run; empty if it was accepted.
        at: The transition and the action that were refused.
        found: What the guard found.
        expected: What the guard expected.
        unchanged: Whether the refused call left the contract's state unchanged. If the contract
            refuses an action's evidence, it also aborts the tape; this does not count as a change.
            None if no call was refused, or only a table.
        legal: Whether the corrected run was accepted to its end; None without a re-enactment.
        problem: How the outcome differs from the failure's entry; empty if they agree.
        steps: The calls of the faulty run.
        legal_steps: The calls of the corrected run.
    """

    verdict: str
    clause: str = ""
    at: str = ""
    found: str = ""
    expected: str = ""
    unchanged: bool | None = None
    legal: bool | None = None
    problem: str = ""
    steps: tuple[str, ...] = ()
    legal_steps: tuple[str, ...] = ()

    def difference(self) -> tuple[str, ...]:
        """
        The calls that the faulty run leaves out (``-``) or adds (``+``), compared with the
        corrected run.

        Calls of the corrected run that come after the faulty run's refusal are ignored.
        """
        matcher = difflib.SequenceMatcher(None, self.legal_steps, self.steps, autojunk=False)
        found = [op for op in matcher.get_opcodes() if op[0] != "equal"]
        if self.clause and found and found[-1][2] == len(self.legal_steps):
            # The run ended with the refused call; the rest of the legal run does not count.
            tag, low, _, begin, end = found[-1]
            names = [step.split(" ")[0] for step in self.steps[begin:end]]
            same = [step.split(" ")[0] for step in self.legal_steps[low : low + end - begin]]
            found[-1] = (tag, low, low + len(names) if names == same else low, begin, end)
        return tuple(
            line
            for _, low, high, begin, end in found
            for line in (
                *(f"- {step}" for step in self.legal_steps[low:high]),
                *(f"+ {step}" for step in self.steps[begin:end]),
            )
        )


def run(failure: Failure) -> FailureOutcome:
    """
    Re-enact a failure: first the corrected run, then the faulty run.

    Args:
        failure: The entry of the failure.
    """
    if failure.enact is None:
        return FailureOutcome(failure.verdict)
    legal, faulty = History(faulty=False), History(faulty=True)
    trouble = _enact(failure.enact, legal)
    refused = _enact(failure.enact, faulty)
    found: dict[str, Any] = {
        "legal": trouble is None,
        "steps": tuple(faulty.steps),
        "legal_steps": tuple(legal.steps),
    }
    if refused is None:
        outcome = FailureOutcome("not caught", **found)
    else:
        outcome = FailureOutcome(
            "refused",
            clause=refused.clause,
            at=faulty.at(refused),
            found=str(refused.found),
            expected=str(refused.expected),
            unchanged=faulty.unchanged,
            **found,
        )
    return _judged(failure, outcome, trouble)


def _enact(enact: Enactment, history: History) -> Refused | None:
    try:
        enact(history)
    except Refused as refused:
        return refused
    return None


def _judged(failure: Failure, outcome: FailureOutcome, trouble: Refused | None) -> FailureOutcome:
    """Add to an outcome how it differs from the failure's entry, if it does."""
    stated = (failure.verdict, failure.clause, failure.at)
    got = (outcome.verdict, outcome.clause, outcome.at)
    problems: Iterable[str] = ()
    if trouble is not None:
        problems = (f"the corrected run is refused: {trouble}",)
    elif stated != got:
        problems = (f"the entry states {_said(*stated)}, but its run gave {_said(*got)}",)
    elif outcome.unchanged is False:
        problems = ("the refused call changed the state",)
    elif not outcome.difference():
        problems = ("the faulty run makes the same calls as the corrected run",)
    values = asdict(outcome, recurse=False)
    return FailureOutcome(**{**values, "problem": "; ".join(problems)})


def _said(verdict: str, clause: str, at: str) -> str:
    return f"{verdict} by {clause} at {at}" if clause else verdict
