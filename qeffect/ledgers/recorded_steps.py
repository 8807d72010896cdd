"""
Recorded steps: compare a contract's state with a step's start, and write the step's end.
"""

from __future__ import annotations

from attrs import evolve

from ..refusals import refused
from ..steps import Difference, RecordedStep, StepObserver, StepState
from ..text import shown
from .expected_counts import ExpectedCounts
from .pool import Pool
from .runner import Runner
from .step_trial import attempt

__all__ = ["RecordedSteps"]


class RecordedSteps:
    """
    Compare and commit recorded steps.

    Args:
        runner: The runner; its memory is compared and written.
        pool: The free slots (sets of buffers); they are compared and written too.
        counted: Expected counts of the devices; None if devices count no actions.
    """

    __slots__ = ("_checked", "_counted", "_pool", "_runner", "_same")

    def __init__(self, runner: Runner, pool: Pool, counted: ExpectedCounts | None) -> None:
        self._runner = runner
        self._pool = pool
        self._counted = counted
        #: The incarnation and serial at which a step was checked and may be under way; or None.
        self._checked: tuple[int, int] | None = None
        #: The step from whose recorded state the last check found no difference; or None.
        self._same: RecordedStep | None = None

    def step_state(self) -> StepState:
        """Return a copy of the state that a step may change."""
        counts = None if self._counted is None else self._counted.own()
        return StepState(self._runner.memory.copy(), self._free(), {**self._pool.reserved}, counts)

    def _free(self) -> dict[int, tuple[int, ...]]:
        return {stage: tuple(own) for stage, own in self._pool.free.items()}

    def differs(self, step: RecordedStep, *, guards_alone: bool = False) -> Difference | None:
        """
        Return the first difference that prevents a commit of the step now; None if every transition
        of the step would be accepted.

        Args:
            step: The recorded step.
            guards_alone: If True, do not require that the device counts of the last commit were
                presented.

        Raises:
            TypeError: The argument is not a recorded step.
            ValueError: The step was recorded by a contract with other relations.
        """
        self._checked = self._same = None
        found = self._impeded(step) or self._asked(step, guards_alone=guards_alone)
        if isinstance(found, Difference):
            return found
        self._checked = self._moment()
        self._same = step if found is None else None
        return None

    def _moment(self) -> tuple[int, int]:
        """Return numbers that change when a ticket is issued or a restore happens."""
        memory = self._runner.memory
        return memory.incarnation[0], memory.serial[0]

    def withdraw(self) -> None:
        """Forget that a step was checked, because it was not run."""
        self._checked = None

    def require_none(self, transition: str) -> None:
        """
        Refuse a call while a step accepted by `differs` may be running, since the step's update
        writes the weights.
        """
        if self._checked is not None and self._checked == self._moment():
            raise refused(
                "persistence.action-in-flight",
                transition,
                "a step that check_step accepted and that may be writing weights and scales",
                "commit_step if the step was enqueued, or withdraw_step if it was not enqueued",
            )

    def _impeded(self, step: RecordedStep) -> Difference | None:
        """Return why no step can be committed in any state of the contract, or None."""
        if not isinstance(step, RecordedStep):
            raise TypeError(f"expected a RecordedStep, got {shown(step)}")
        runner = self._runner
        if step.transitions is not runner.transitions:
            raise ValueError("check_step: the step was recorded by a contract with other relations")
        observer = runner.observer
        if observer is not None and not (
            isinstance(observer, StepObserver) and observer.repeats(step)
        ):
            return Difference(
                "the observer", observer, "no observer, or an observer that keeps the step"
            )
        if self._counted is not None:
            if not self._counted.late:
                found, wanted = "at the commit", "after the commit (late=True)"
                return Difference("the time of comparing device counts", found, wanted)
        return None

    def _asked(self, step: RecordedStep, *, guards_alone: bool) -> Difference | StepState | None:
        """Return why a step is refused; None if the step recurs; or the state after a trial run."""
        memory = self._runner.memory
        difference = step.differs(StepState(memory, {}, self._pool.reserved, None))
        tried = None
        if difference is not None:
            if not step.is_of(memory):
                return difference
            outcome = attempt(step, StepState(memory, self._free(), self._pool.reserved, None))
            if not isinstance(outcome, StepState):
                return evolve(difference, clause=outcome)
            tried = outcome
        if self._counted is not None and self._counted.awaited is not None and not guards_alone:
            return Difference(
                "the state of the last commit's device counts",
                "not presented",
                "presented",
                "epoch.uncounted",
            )
        return tried

    def commit(self, step: RecordedStep, *, unchanged: bool = False) -> None:
        """
        Write the state with which a recorded step ends.

        Args:
            step: The recorded step.
            unchanged: Whether the state has not changed since the last call of `differs`.

        Raises:
            Refused: ``epoch.uncounted``: the device counts of the last commit were not presented.
            TypeError, ValueError: The argument is not a step of this contract, or a transition of
                the step would be refused.
        """
        found: Difference | StepState | None = self._impeded(step)
        if found is None and not (unchanged and step is self._same):
            found = self._asked(step, guards_alone=True)
        if isinstance(found, Difference):
            raise ValueError(f"commit_step: {found}; call check_step before the step is run")
        if self._counted is not None:
            self._counted.require_commit(None)
        self._checked = self._same = None
        memory, end = self._runner.memory, step.end
        if found is None:
            step.write(memory)
        else:
            end = found
            memory.assign(found.memory)
        for stage, own in self._pool.free.items():
            slots = step.free_after(stage, tuple(own)) if found is None else end.free[stage]
            if tuple(own) != slots:
                own.clear()
                own.update(dict.fromkeys(slots))
        self._pool.reserved.clear()
        self._pool.reserved.update(end.reserved)
        if self._counted is not None:
            self._counted.ran_step(step.folds, step.counted)
            self._counted.committed()
        observer = self._runner.observer
        # None is asked first: the look-up of an observer's methods costs some microseconds a step.
        if observer is not None and isinstance(observer, StepObserver):
            observer.repeat_step(step)
