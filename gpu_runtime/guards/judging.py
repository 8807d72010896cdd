"""What every guard does with a contract: ask it, refuse or report violations, and log events."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from qeffect.contract import Contract
from qeffect.log.recorder import Recorder
from qeffect.refusals import Refused, refused
from qeffect.schedule.findings import Finding

from .advice import AdviceTable, advised
from .recurring import RecurringSteps
from .reports import Reports, Violation

__all__ = ["ContractLogs", "Judge"]

_T = TypeVar("_T")


class ContractLogs:
    """
    The event logs of a rank: one file for each contract, one contract after another.

    The last file is complete after `close`, or at the end of the process.

    Args:
        folder: Folder of the files; None writes no files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._contracts = 0
        self.close: Callable[[], Any] = lambda: None

    def begin(self, contract: Contract, rank: int) -> None:
        """Begin the event log of a contract, and close the log of the last contract."""
        if self._folder is None:
            return
        self.close()
        name = f"rank{rank}" + (f".contract{self._contracts}" if self._contracts else "")
        self._contracts += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(contract, self._folder / f"{name}.jsonl", rank=rank)
        self.close = weakref.finalize(self, recorder.close)


class Judge:
    """
    Asks the contract about actions, and refuses or reports a violation.

    The judge adds the framework's advice to a refusal. Then the judge either raises the refusal,
    with rank and action in a note, or reports it. After a report, nothing is judged until the guard
    sets `judges` again.

    Args:
        reports: Where violations are reported; with None, a violation raises.
        rank: Returns the rank of the process in its pipeline.
        stop: Called after a reported violation.
        advice: The framework's cause and remedy for each clause.

    Attributes:
        judges: Whether the contract is asked at present.
        at: The action that was checked last, in the framework's notation.
        step: Number of the guarded step, from 0.
    """

    def __init__(
        self,
        reports: Reports | None,
        rank: Callable[[], int],
        stop: Callable[[], None],
        advice: AdviceTable,
    ) -> None:
        self.reports = reports
        self.judges = True
        self.at = ""
        self.step = 0
        self._rank, self._stop, self._advice = rank, stop, advice

    def __call__(
        self, action: str, call: Callable[..., _T], *args: Any, step: int | None = None
    ) -> _T | None:
        """
        Ask the contract about an action, if `judges` is set.

        Args:
            action: The action, in the framework's notation; if empty, the previous action.
            call: Asks the contract.
            args: Arguments of `call`.
            step: The action's index in the rank's row of the schedule, from 0.

        Raises:
            Refused: The action breaks the contract, and violations are not reported.
        """
        if not self.judges:
            return None
        if action:
            self.at = action
        try:
            return call(*args)
        except Exception as error:
            self.failed(error, step=step)
        return None

    def failed(self, error: Exception, *, step: int | None = None) -> None:
        """
        Raise or report a refusal, or an error of the guard itself; an `except` clause calls this.

        A caller may skip `__call__`, to save its Python frame, and call the contract directly if
        `judges` is set. The caller must then pass any error that the contract raises to this
        method.

        Args:
            error: The error that was raised when the contract was asked.
            step: The action's index in the rank's row of the schedule, from 0.

        Raises:
            Refused: The error is a refusal, and violations are not reported.
            Exception: Any other error, if violations are not reported.
        """
        try:
            if isinstance(error, Refused):
                advised(error, self._advice)
                if self.reports is None:
                    place = "" if step is None else f", step {step} of its row"
                    error.add_note(f"at pipeline rank {self._rank()}{place}: {self.at}")
                    raise error
                self.judges = False  # also while the violation is reported to the user's callable
                self.reports.add(Violation.of(error, self._rank(), self.step, self.at))
            else:
                if self.reports is None:
                    raise error
                self.judges = False
                self.reports.fail(error, self.at)
        finally:
            # Else this frame, which is in the error's own traceback, keeps all its frames alive.
            del error
        self._stop()

    def report_schedule(self, reports: Reports, finding: Finding, source: str, step: int) -> None:
        """
        Report that `qeffect check` refuses a schedule, whose steps are then not judged.

        Args:
            reports: Where the violation is reported.
            finding: What is wrong with the schedule.
            source: Name of the schedule.
            step: Number of the guarded step, from 0.
        """
        self.judges = False
        refusal = refused(finding.clause, "check", str(finding), finding.expected)
        advised(refusal, self._advice)
        reports.add(Violation.of(refusal, self._rank(), step, source))

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The first violation of each clause; empty if violations are not reported."""
        return () if self.reports is None else tuple(self.reports.violations.values())

    def abort(self, steps: RecurringSteps) -> None:
        """Abort the actions that are under way."""
        contract = steps.settle()
        for ticket in contract.outstanding():
            try:
                contract.abort(ticket)
            except Exception as error:  # an error of the log: the abort has happened
                if self.reports is None:
                    raise
                self.reports.fail(error, self.at)
