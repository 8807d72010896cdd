"""
The steps of a guarded contract: most repeat a recorded step, and are committed in one call.

A training step makes the same calls as the step before. So the guard records the calls of one whole
step, and `Contract.record_step` records their transitions. In a later step the guard compares each
call with the recorded one instead of making it, which takes less time, and commits the step in one
call at its end (`Contract.commit_step`). This is as strict as making the calls: before the step
`Contract.check_step` compares the contract's state with the state in which the recorded step began,
and from that state the contract accepted the same calls (spec/contract.md, "A step in one call").

At the first call that differs from the recorded one, the guard makes the calls of the step so far
one by one, and then the call that differs, which the contract accepts or refuses.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Final, Protocol

from qeffect.contract import Contract
from qeffect.steps import RecordedStep, Recording

__all__ = ["Call", "RecurringSteps", "Script"]

Call = tuple[str, tuple[Any, ...], dict[str, Any] | None]
"""A method of `Works` by name, its positional arguments, and its named arguments (None if none)."""

Script = tuple[Call | None, ...]
"""The calls of a recorded step, followed by None."""

#: How many steps are recorded at most, and how many steps in a row may differ from a recorded one.
_RECORDINGS: Final = 3
_DIFFERENT: Final = 3


class RepeatingStep(Protocol):
    """A step that may repeat a recorded one."""

    def catch_up(self) -> None:
        """Make the calls that were only compared so far, and go on without comparing or
        recording."""


class RecurringSteps:
    """
    Records one step of a contract, and finds out which later steps may repeat the recorded step.

    The first step of a contract is not recorded, because it begins in a state of its own. Nothing
    is recorded while the contract has an observer, such as an event log. The reason: after a hang
    the log must also have the calls of the unfinished step.

    Args:
        contract: The contract.

    Attributes:
        raw_contract: The contract. While a step repeats a recorded step, the contract is still in
            the state before the step.
        repeated: How many steps the contract has committed in one call.
    """

    def __init__(self, contract: Contract) -> None:
        self.raw_contract = contract
        self.repeated = 0
        self._begun = self._recordings = self._different = 0
        self._step: RepeatingStep | None = None
        self._recorded: RecordedStep | None = None
        self._script: Script = ()
        self._recording: Recording | None = None
        self._thread = get_ident()  # of the step

    @property
    def contract(self) -> Contract:
        """
        The contract, after every call that the current step has made so far.

        A thread that did not begin the step gets the contract as it is, which may be in the state
        before the step.
        """
        return self.settle() if get_ident() == self._thread else self.raw_contract

    def settle(self) -> Contract:
        """
        Let the current step make the calls that were only compared so far; return the contract.

        Only a guard calls this method, while the training waits for the guard. Any thread may call
        it.
        """
        step, self._step = self._step, None
        if step is not None:
            step.catch_up()
        return self.raw_contract

    def begin(self, step: RepeatingStep) -> Script | None:
        """
        Begin a step.

        Returns:
            The calls that the step is compared with. An empty tuple means that the step is
            recorded; None means that the step is neither compared nor recorded.
        """
        self.settle()
        self._thread = get_ident()
        self._begun += 1
        if self._begun == 1 or self.raw_contract.observer is not None:
            return None
        if self._recorded is not None and self.raw_contract.check_step(self._recorded) is None:
            self._step = step
            return self._script
        if self._recordings == _RECORDINGS:
            return None
        self._recordings += 1
        self._step, self._recording = step, self.raw_contract.record_step()
        return ()

    def drop(self) -> None:
        """Do not record the current step."""
        if self._recording is not None:
            self._recording.drop()
            self._recording = None

    def keep(self, calls: list[Call]) -> None:
        """Keep a recorded step that has ended, given its calls, for later steps to repeat."""
        self._step = None
        recording, self._recording = self._recording, None
        assert recording is not None
        try:
            self._recorded = recording.end()
        except ValueError:  # an action failed, or the step depends on the value of a counter
            self._recorded = None
            return
        self._script, self._different = (*calls, None), 0

    def differ(self) -> None:
        """Record that the current step does not repeat the recorded one."""
        self.raw_contract.withdraw_step()
        self._different += 1
        if self._different == _DIFFERENT:
            self._recorded = None

    def commit(self) -> bool:
        """
        Commit the current step, all of whose calls have repeated the recorded ones.

        Returns:
            Whether the step is committed. Otherwise a user of the contract has changed it since the
            step began, and the step has to make its calls.
        """
        assert self._recorded is not None
        try:
            self.raw_contract.commit_step(self._recorded)
        except ValueError:
            return False
        self._step, self._different = None, 0
        self.repeated += 1
        return True
