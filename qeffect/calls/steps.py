"""
Calls that record a whole optimizer step once, and later commit each repetition in one call.
"""

from __future__ import annotations

from ..steps import Difference, RecordedStep, Recording, StepState
from ..threads import ConcurrentCallError, exclusive_call
from .queries import Queries

__all__ = ["StepCalls"]


class StepCalls(Queries):
    """The calls that record an optimizer step, and later check and commit it in one call each."""

    def step_state(self) -> StepState:
        """Return the part of the contract's state that a step may change."""
        return self._steps.step_state()

    @exclusive_call
    def record_step(self) -> Recording:
        """
        Begin to record a step, whose actions are then checked and committed one by one.

        `Recording.end`, called after the step's `commit_epoch` and its last `join`, returns the
        step for `check_step` and `commit_step`.

        Raises:
            ValueError: The contract has an observer that is not a `StepObserver`; a step committed
                in one call would bypass this observer. The recorder of an event log is a
                `StepObserver`.

        >>> from qeffect import Contract, StageConfig, TapeKey
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> def run() -> None:
        ...     key = TapeKey(contract.epoch, stage=0, microbatch=0)
        ...     contract.join()
        ...     with contract.refresh(0):
        ...         pass
        ...     with contract.forward(key) as f:
        ...         contract.bind(key)
        ...     contract.wait()
        ...     with contract.dgrad(key, f.ref):
        ...         pass
        ...     with contract.wgrad(key, f.ref):
        ...         pass
        ...     contract.wait()
        ...     contract.finalize(0)
        ...     contract.commit_epoch()
        >>> run()
        >>> recording = contract.record_step()
        >>> run()
        >>> step = recording.end()
        >>> contract.check_step(step) is None, contract.commit_step(step), contract.token(0)
        (True, 3, 6)
        """
        return Recording(self)

    def check_step(self, step: RecordedStep, *, guards_alone: bool = False) -> Difference | None:
        """
        Test whether `commit_step` would be accepted now, without changing or logging anything.

        If `commit_step` would be accepted, the caller may run the step. The step's update writes
        the weights, so no checkpoint is accepted before `commit_step`, `withdraw_step` or the check
        of another action.

        The call compares the state once with the state in which the recorded step began.
        `qeffect.steps` explains why this comparison replaces every guard of every action. If more
        than the counters has changed, the step's transitions run one by one over a copy of the
        state. The caller must ensure that the step runs the same actions in the same order, with
        the same slots (sets of buffers), gradient destinations and evidence (reports at commits).

        Args:
            step: The recorded step.
            guards_alone: If True, do not require that the device counts of the last commit were
                presented (`present_counts`).

        Returns:
            None if every transition would be accepted, with the recorded slots. Otherwise a
            difference, with the clause of the first refused transition. The clause is None if no
            transition was refused, but the contract was restored, the observer does not keep the
            step, an argument of the step is unusable now, or the contract was made with
            ``counted=True`` and without ``late=True``.

        Raises:
            TypeError, ValueError: The argument is not a recorded step, or not of this contract.
        """
        if self._entered:
            raise ConcurrentCallError("check_step")
        self._entered, accepted = True, False
        try:
            found = self._steps.differs(step, guards_alone=guards_alone)
            accepted = found is None
            return found
        finally:
            self._entered = None if accepted else False

    @exclusive_call
    def withdraw_step(self) -> None:
        """
        Report that a step accepted by `check_step` was not run and will not be run.

        Afterwards a checkpoint is accepted. If no accepted step awaits its commit, the call does
        nothing.
        """
        self._steps.withdraw()

    def commit_step(self, step: RecordedStep) -> int:
        """
        Commit every action of a recorded step, and its epoch, at once.

        Afterwards the state is the same as after checking and committing the actions one by one, in
        the recorded slots (sets of buffers). If the contract was called since `check_step` accepted
        the step, and the call may have changed the state, the state is compared again first.

        Returns:
            The new epoch.

        Raises:
            Refused: ``epoch.uncounted``: the device counts of the last commit were not presented.
            TypeError, ValueError: The argument is not a recorded step of this contract, or one of
                its transitions would be refused; nothing was changed.
        """
        if self._entered:
            raise ConcurrentCallError("commit_step")
        unchanged = self._entered is None
        self._entered = True
        try:
            self._steps.commit(step, unchanged=unchanged)
            return self._epochs.current
        finally:
            self._entered = False
