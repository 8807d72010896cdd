"""
Recording: the transitions of one step, heard from a contract while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..engine.stage import Transitions
from .counters import Event
from .recorded_step import RecordedStep
from .state import StepState

__all__ = ["RecordableContract", "Recording"]


class RecordableContract(Protocol):
    """What a recording needs of a contract."""

    observer: Callable[[str, tuple[Any, ...], Any], None] | None
    transitions: Transitions

    def step_state(self) -> StepState:
        """The contract's state now."""


class Recording:
    """
    A step that is being recorded while its transitions run.

    Args:
        contract: The contract; until `end` or `drop` the recording is its observer.

    Raises:
        ValueError: The contract already has an observer.
    """

    def __init__(self, contract: RecordableContract) -> None:
        if contract.observer is not None:
            raise ValueError(
                "record_step: the contract has an observer, which a recorded step would bypass; "
                "set observer to None first"
            )
        self._contract = contract
        self._start = contract.step_state()
        self._events: list[Event] = []
        contract.observer = self._hear

    def _hear(self, transition: str, given: tuple[Any, ...], result: Any) -> None:
        self._events.append((transition, given))

    def drop(self) -> None:
        """Stop recording and discard the step."""
        if self._contract.observer == self._hear:
            self._contract.observer = None

    def end(self) -> RecordedStep:
        """
        Stop recording and return the step.

        Raises:
            ValueError: The step does not recur: an action of it failed, or it depends on the value
                of a counter.
        """
        contract = self._contract
        if contract.observer != self._hear:
            raise ValueError("the contract's observer was replaced during the step")
        self.drop()
        end = contract.step_state()
        return RecordedStep.of(contract.transitions, self._start, self._events, end)
