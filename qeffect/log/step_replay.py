"""
The replay of steps that a log repeats in one line. The replayer keeps each recorded step, and runs
its transitions again for each line that repeats it.

A *recorded step* ran action by action. The contract can commit each later equal step in one call
(`qeffect.steps`), and the log then has one line for the step. For this line the replayer runs every
transition of the recorded step, one by one, with every guard. The contract skips these transitions
after a comparison of states; the replayer does not rely on that comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ..contract import Contract
from ..engine.concrete_memory import Memory
from ..explain import explain
from ..refusals import Refused
from ..steps.counters import Event, moved_between, translated_event
from ..steps.recorded_step import RECUR
from .format import KEPT_STEPS, MARKS

__all__ = ["RepeatError", "StepReplay"]


class RepeatError(Exception):
    """
    The refusal of a line about a recorded step.

    Args:
        clause: The violated clause: ``log.step``, or the clause of a refused transition of the
            step.
        found: The value in the line.
        expected: The expected value.
        action: The refused transition (contract call) of the step; None if the line itself is
            refused.
    """

    def __init__(self, clause: str, found: str, expected: str, action: str | None = None) -> None:
        super().__init__(clause, found, expected)
        self.clause, self.found, self.expected, self.action = clause, found, expected, action


@frozen
class _StepRecord:
    """A recorded step: the contract's memory before the step, and the step's transitions."""

    start: Memory
    events: tuple[Event, ...]


class StepReplay:
    """
    The recorded steps of one log.

    Args:
        contract: The contract on which the log's calls are repeated.
        arguments: Converts a well-formed event into the arguments of its transition.
        seq: Function that returns the sequence number of the current line.

    Attributes:
        events: The transitions so far of the step that is being recorded; None while no step is
            being recorded.
    """

    def __init__(
        self,
        contract: Contract,
        arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]],
        seq: Callable[[], int],
    ) -> None:
        self.contract = contract
        self.events: list[Event] | None = None
        self._arguments = arguments
        self._seq = seq
        self._began = 0
        self._start: Memory | None = None
        self._steps: dict[int, _StepRecord] = {}

    def functions(self) -> dict[str, Callable[..., None]]:
        """Return the functions that apply the lines about steps, by the line's kind."""
        return {
            "begin_step": self.begin,
            "keep_step": self.keep,
            "drop_step": self.drop,
            "repeat_step": self.repeat,
        }

    def take(self, began: int, start: Memory, events: Sequence[Mapping[str, Any]]) -> None:
        """
        Add a step that an earlier file recorded.

        Args:
            began: Sequence number of the line that began the step.
            start: The contract's memory before the step.
            events: The step's transitions, as well-formed log lines.
        """
        known = tuple((event["transition"], self._arguments(event)) for event in events)
        self._keep(began, start, known)

    def same(self, other: StepReplay) -> bool:
        """Return whether another replay has the same recorded steps."""
        return [*self._steps] == [*other._steps] and all(
            kept.events == other._steps[began].events
            and kept.start.snapshot() == other._steps[began].start.snapshot()
            for began, kept in self._steps.items()
        )

    def note(self, event: Mapping[str, Any]) -> None:
        """Add an accepted transition to the step that is being recorded, if any."""
        name = event["transition"]
        if name not in MARKS and self.events is not None:
            self.events.append((name, self._arguments(event)))

    def begin(self, st: Memory) -> None:
        """Begin to record a step."""
        if self.events is not None:
            raise RepeatError("log.step", "a second step begins", "the end of the first step")
        self.events, self._start, self._began = [], st.copy(), self._seq()

    def drop(self, st: Memory) -> None:
        """Discard the step that is being recorded."""
        if self.events is None:
            raise RepeatError("log.step", "a step that never began is dropped", "a step that began")
        self.events = None

    def keep(self, st: Memory) -> None:
        """Finish and keep the step that is being recorded; only the last few steps are kept."""
        if self.events is None or self._start is None:
            raise RepeatError("log.step", "a step that never began is kept", "a step that began")
        events, self.events = tuple(self.events), None
        self._keep(self._began, self._start, events)

    def _keep(self, began: int, start: Memory, events: tuple[Event, ...]) -> None:
        names = [name for name, _ in events]
        if {*names} - RECUR or names.count("commit_update") != 1:
            raise RepeatError(
                "log.step", "a step that cannot recur is kept", "one update and no restart"
            )
        self._steps[began] = _StepRecord(start, events)
        for old in [*self._steps][:-KEPT_STEPS]:
            del self._steps[old]

    def repeat(self, st: Memory, step: int) -> None:
        """
        Run the transitions of a recorded step again. Epochs, generations and similar numbers in
        their arguments are raised by the amounts that the contract's counters have risen since the
        recording.
        """
        kept = self._steps.get(step)
        if kept is None or kept.start.incarnation[0] != st.incarnation[0]:
            known = [n for n, k in self._steps.items() if k.start.incarnation == st.incarnation]
            raise RepeatError(
                "log.step", f"step {step}", f"one of the steps kept in this incarnation: {known}"
            )
        if self.events is not None:
            raise RepeatError(
                "log.step", f"step {step}, while another step is recorded", "no step inside a step"
            )
        amounts = moved_between(kept.start, st)
        functions = self.contract.transitions.functions
        for event in kept.events:
            name, given = translated_event(st, event, amounts)
            try:
                functions[name](st, *given)
            except Refused as refused:
                why = explain(refused, name, st, given)
                raise RepeatError(why.clause, why.found, why.expected, name) from None
