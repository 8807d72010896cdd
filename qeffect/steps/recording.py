"""
Recording: collects the transitions (contract calls) of one step while the step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ..engine.stage import Transitions
from ..refusals import Refused
from .counters import Event
from .recorded_step import RecordedStep
from .state import StepState

__all__ = ["RecordableContract", "Recording", "StepObserver"]


class RecordableContract(Protocol):
    """The attributes of a contract that a recording uses."""

    observer: Callable[[str, tuple[Any, ...], Any], None] | None
    transitions: Transitions

    def step_state(self) -> StepState:
        """Return the contract's current state."""


@runtime_checkable
class StepObserver(Protocol):
    """
    An observer that supports steps committed in one call, such as an event log's recorder.

    While a step is recorded, between `begin_step` and `keep_step` or `drop_step`, such an observer
    is called for every transition.
    """

    def __call__(self, transition: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Take one accepted transition."""

    def begin_step(self) -> Any:
        """Begin a recorded step; the result identifies the step."""

    def keep_step(self, began: Any, step: RecordedStep) -> None:
        """Keep a step, which was recorded successfully."""

    def drop_step(self, began: Any) -> None:
        """Discard a step, because it was not recorded successfully."""

    def repeats(self, step: RecordedStep) -> bool:
        """Whether the observer still keeps a recorded step."""

    def repeat_step(self, step: RecordedStep) -> None:
        """Note that the contract committed a kept step in one call."""


class Recording:
    """
    A step that is being recorded while its transitions run.

    Args:
        contract: The contract. Until `end` or `drop`, the recording is the contract's observer, and
            passes every transition on to the former observer.

    Attributes:
        observer: The contract's observer before the recording; None if it had none.

    Raises:
        ValueError: The contract has an observer that is not a `StepObserver`; a step committed in
            one call would bypass this observer.
    """

    def __init__(self, contract: RecordableContract) -> None:
        before = contract.observer
        if before is not None and not isinstance(before, StepObserver):
            raise ValueError(
                "record_step: the contract has an observer, which a recorded step would bypass; "
                "set observer to None first"
            )
        self.observer: StepObserver | None = before
        self._contract = contract
        self._start = contract.step_state()
        self._events: list[Event] = []
        self._began = None if self.observer is None else self.observer.begin_step()
        contract.observer = self

    def __call__(self, transition: str, given: tuple[Any, ...], result: Any) -> None:
        """Take one accepted transition; the contract calls this."""
        self._events.append((transition, given))
        if self.observer is not None:
            self.observer(transition, given, result)

    def drop(self) -> None:
        """Stop recording and discard the step."""
        self._stop()
        self._tell_dropped()

    def end(self) -> RecordedStep:
        """
        Stop recording and return the step.

        Raises:
            ValueError: The step cannot recur: one of its actions failed, or the step depends on the
                value of a counter.
        """
        if not self._stop():
            self._tell_dropped()
            raise ValueError("the contract's observer was replaced during the step")
        try:
            step = RecordedStep.of(
                self._contract.transitions, self._start, self._events, self._contract.step_state()
            )
        except BaseException as error:  # an interrupt too: the observer waits for the step's end
            self._tell_dropped()
            if isinstance(error, Refused):
                raise ValueError(
                    f"the recorded transitions are refused by {error.clause}; some transitions may "
                    "not have been recorded"
                ) from None
            raise
        if self.observer is not None:
            self.observer.keep_step(self._began, step)
        return step

    def _tell_dropped(self) -> None:
        """Tell the observer once, if the contract still calls it, that the step is not kept."""
        observer, self.observer = self.observer, None
        if observer is not None and self._contract.observer is observer:
            observer.drop_step(self._began)

    def _stop(self) -> bool:
        """Restore the contract's former observer; return whether the recording was the observer."""
        if self._contract.observer is not self:
            return False
        self._contract.observer = self.observer
        return True
