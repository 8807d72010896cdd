"""
Calls that take a checkpoint, restore a checkpoint, or declare a weight cache lost.
"""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..threads import exclusive_call
from .queries import Queries

__all__ = ["RestartCalls"]


class RestartCalls(Queries):
    """The calls that save and restore the persistent state, and declare a weight cache lost."""

    @exclusive_call
    def check_checkpoint(self) -> None:
        """
        Test whether `checkpoint` would be accepted now, without changing or logging anything.

        Raises:
            Refused: The refusal that `checkpoint` would raise.

        >>> from qeffect import Contract, StageConfig
        >>> contract = Contract([StageConfig(0, microbatches=1, slots=1)])
        >>> contract.check_checkpoint()
        """
        self._restarts.check_checkpoint()

    @exclusive_call
    def checkpoint(self, *, state: Any = None, recipe: Any = None) -> Checkpoint:
        """
        Return the persistent part of the state, if no tape is live and no action is in flight
        (paper, III-E; Invariant 4).

        Args:
            state: Handle of the numerical state that the caller saves with the checkpoint.
            recipe: Precision recipe, any JSON value.

        Raises:
            Refused: A persistence guard refused.
        """
        return self._restarts.checkpoint(self.configuration, state, recipe)

    @exclusive_call
    def restore(self, checkpoint: Checkpoint, *, incarnation: int | None = None) -> None:
        """
        Begin a new incarnation (life of the contract until the next restore) at a checkpoint's
        epoch, in this process or a fresh process.

        Afterwards every older reference is refused and every weight cache is stale. The caller
        must restore the numerical state first.

        Args:
            checkpoint: A checkpoint of a contract with the same configuration.
            incarnation: Number of the new incarnation; by default drawn at random.

        Raises:
            Refused: ``persistence.configuration``, or device work is still in flight, or this
                contract already had the given incarnation.
            TypeError, ValueError: The argument is not a `Checkpoint`, or the incarnation does not
                fit in 64 bits.
        """
        self._restarts.restore(self.configuration, checkpoint, incarnation=incarnation)

    @exclusive_call
    def invalidate(self, stage: int) -> None:
        """
        Declare that a stage's weight cache is lost, for example because it was re-created.

        Raises:
            Refused: ``version.in-flight``; ``version.left-out`` if the stages have no cache.
        """
        self._arguments.stage("invalidate", stage)
        self._runner.run("invalidate", stage)
