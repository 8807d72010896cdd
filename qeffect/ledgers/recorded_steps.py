"""
Recorded steps: compare a contract's state with a step's start, and write the step's end.
"""

from __future__ import annotations

from ..steps import Difference, RecordedStep, StepState
from ..text import shown
from .expected_counts import ExpectedCounts
from .pool import Pool
from .runner import Runner

__all__ = ["RecordedSteps"]


class RecordedSteps:
    """
    Compare and commit recorded steps.

    Args:
        runner: The runner; its memory is compared and written.
        pool: The free slots; they are compared and written too.
        counted: Expected counts of the devices; None if nothing is counted.
    """

    __slots__ = ("_counted", "_pool", "_runner")

    def __init__(self, runner: Runner, pool: Pool, counted: ExpectedCounts | None) -> None:
        self._runner = runner
        self._pool = pool
        self._counted = counted

    def step_state(self) -> StepState:
        """Return a copy of the state that a step may change."""
        counts = None if self._counted is None else self._counted.own()
        return StepState(self._runner.memory.copy(), self._free(), {**self._pool.reserved}, counts)

    def _free(self) -> dict[int, tuple[int, ...]]:
        return {stage: tuple(own) for stage, own in self._pool.free.items()}

    def differs(self, step: RecordedStep) -> Difference | None:
        """
        Compare a step's start with the current state.

        Raises:
            TypeError: The argument is not a recorded step.
            ValueError: The step was recorded by a contract with other relations.
        """
        if not isinstance(step, RecordedStep):
            raise TypeError(f"expected a RecordedStep, got {shown(step)}")
        runner = self._runner
        if step.transitions is not runner.transitions:
            raise ValueError("check_step: the step was recorded by a contract with other relations")
        if runner.observer is not None:
            return Difference("the observer", runner.observer, None)
        if self._counted is not None and not self._counted.late:
            return Difference("when counts are compared", "at the commit", "after it: late=True")
        found = StepState(runner.memory, self._free(), self._pool.reserved, None)
        return step.differs(found)

    def commit(self, step: RecordedStep) -> None:
        """Write a step's end; `differs` must have returned None."""
        step.write(self._runner.memory)
        for stage, slots in step.end.free.items():
            own = self._pool.free[stage]
            if tuple(own) != slots:
                own.clear()
                own.update(dict.fromkeys(slots))
        self._pool.reserved.clear()
        self._pool.reserved.update(step.end.reserved)
        if self._counted is not None:
            self._counted.ran_step(step.folds, step.counted)
