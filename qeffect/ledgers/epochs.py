"""
The end of an epoch: finalized gradients, their reductions, and the commit.
"""

from __future__ import annotations

from .runner import FAILURES, Runner

__all__ = ["Epochs"]


class Epochs:
    """
    What is asked and told between the last dW of an epoch and the next epoch.

    Args:
        runner: Runs the transitions.
        stage: A stage of the process; all have one weight epoch, since commit is atomic.
    """

    __slots__ = ("_runner", "_stage")

    def __init__(self, runner: Runner, stage: int) -> None:
        self._runner = runner
        self._stage = stage

    @property
    def current(self) -> int:
        """The weight epoch of the process."""
        return int(self._runner.memory.weight_epoch[self._stage])

    def finalize(self, stage: int, link: int) -> None:
        """Declare a stage's gradients whole."""
        self._runner.arguments.stage("finalize", stage)
        self._runner.arguments.link("finalize", link)
        self._runner.run("finalize", stage, link)

    def reduction(self, transition: str, stage: int) -> None:
        """Tell what became of a stage's reduction: it starts, finished or failed."""
        self._runner.arguments.stage(transition, stage)
        self._runner.run(transition, stage)

    def check_commit(self, epoch: int | None) -> None:
        """Run every guard of a commit, over a copy of the memory that is then dropped."""
        runner = self._runner
        given = (self._named(epoch),)
        try:
            runner.transitions.commit_epoch(runner.memory.copy(), *given)
        except FAILURES as error:
            raise runner.failure(error, "commit_epoch", given) from None

    def commit(self, epoch: int | None) -> int:
        """Advance every stage to the next weight epoch and return it."""
        current = self._named(epoch)
        self._runner.run("commit_epoch", current)
        return current + 1

    def _named(self, epoch: int | None) -> int:
        """Return the epoch that is meant: the one that was named, or the current one."""
        if epoch is None:
            return self.current
        self._runner.arguments.integer("commit_epoch", "epoch", epoch)
        return epoch
