"""
Calls about a whole optimizer step that recurs: recorded once, then committed as one.
"""

from __future__ import annotations

from ..steps import Difference, RecordedStep, Recording, StepState
from ..threads import exclusive_call
from .queries import Queries

__all__ = ["StepCalls"]


class StepCalls(Queries):
    """Record a step; later compare it with the state and commit it as one."""

    def step_state(self) -> StepState:
        """The contract's state as far as a step may change it."""
        return self._steps.step_state()

    @exclusive_call
    def record_step(self) -> Recording:
        """
        Begin to record a step, whose actions are then checked and committed one by one.

        `Recording.end`, called after the step's `commit_epoch` and its last `join`, returns the
        step for `check_step` and `commit_step`.

        Raises:
            ValueError: The contract has an observer; a recorded step would bypass it.

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

    @exclusive_call
    def check_step(self, step: RecordedStep) -> Difference | None:
        """
        Ask whether every action of a recorded step would be accepted now; nothing changes.

        The state that the step's transitions read is compared once; `qeffect.steps` explains why
        that replaces every guard of every action. The caller must know that the step would run the
        same actions with the same evidence: the order, slots and destinations.

        Returns:
            None if every guard would pass and `commit_step` would leave the same state. Otherwise
            the first difference, with the clause that would refuse. A difference may be harmless:
            check and commit the actions one by one then.

        Raises:
            TypeError, ValueError: The argument is not a recorded step, or not of this contract.
        """
        return self._steps.differs(step)

    @exclusive_call
    def commit_step(self, step: RecordedStep) -> int:
        """
        Commit every action of a recorded step, and its epoch, at once.

        Afterwards the state is the same as after checking and committing the actions one by one.
        The state is compared again first, since calls may have come after `check_step`.

        Returns:
            The new epoch.

        Raises:
            Refused: ``epoch.uncounted``: the counts of the last commit were not presented.
            TypeError, ValueError: The argument is not a recorded step of this contract, or the
                state differs from the step's start; nothing was changed.
        """
        difference = self._steps.differs(step)
        if difference is not None:
            raise ValueError(f"commit_step: {difference}; ask check_step before the step is run")
        if self._counted is not None:
            self._counted.require_commit(None)
        self._steps.commit(step)
        if self._counted is not None:
            self._counted.committed()
        return self._epochs.current
