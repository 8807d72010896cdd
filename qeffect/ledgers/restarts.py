"""
Restarts: checkpoints of a contract, and restores, which begin new incarnations (lives) of the
contract.
"""

from __future__ import annotations

import secrets
from typing import Any

from ..checkpoint import Checkpoint, require_same
from ..configuration import Configuration
from ..refusals import refused
from ..text import shown
from .epochs import Epochs
from .expected_counts import ExpectedCounts
from .pool import Pool
from .recorded_steps import RecordedSteps
from .runner import FAILURES, Runner

__all__ = ["Restarts"]


class Restarts:
    """
    The calls that take checkpoints and restore them.

    Args:
        runner: Runs the transitions.
        pool: The free slots (sets of buffers); all slots are free after a restore.
        epochs: The ledger that knows the current epoch.
        steps: The ledger that knows whether a recorded step may be running.
        counted: Expected device counts, zero after a restore; None if devices count no actions.
    """

    __slots__ = ("_begun", "_counted", "_epochs", "_pool", "_runner", "_steps")

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        epochs: Epochs,
        steps: RecordedSteps,
        counted: ExpectedCounts | None = None,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._epochs = epochs
        self._steps = steps
        self._counted = counted
        self._begun: set[int] = set()

    def check_checkpoint(self) -> None:
        """Run every guard of a checkpoint over a copy of the memory."""
        self._require_compared()
        self._steps.require_none("checkpoint")
        runner = self._runner
        try:
            runner.transitions.checkpoint(runner.memory.copy())
        except FAILURES as error:
            raise runner.failure(error, "checkpoint", ()) from None

    def checkpoint(self, own: Configuration, state: Any, recipe: Any) -> Checkpoint:
        """Return a checkpoint; raise `Refused` while a tape is live or an action is in flight."""
        self._require_compared()
        self._steps.require_none("checkpoint")
        self._runner.run("checkpoint")
        return Checkpoint(self._epochs.current, own, state, recipe)

    def _require_compared(self) -> None:
        """Require that no commit awaits counts: the device may have skipped its update."""
        if self._counted is not None:
            self._counted.require_compared("checkpoint")

    def restore(self, own: Configuration, checkpoint: Checkpoint, incarnation: int | None) -> None:
        """Begin a new incarnation (life of the contract) at a checkpoint's epoch."""
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"restore: expected a Checkpoint, got {shown(checkpoint)}")
        if incarnation is not None and not (
            incarnation.__class__ is int and 0 <= incarnation < 1 << 64
        ):
            raise ValueError(
                f"restore: incarnation must be an int of 64 bits, got {shown(incarnation)}"
            )
        require_same(checkpoint, own)
        leaving = int(self._runner.memory.incarnation[0])
        fresh = secrets.randbits(64) if incarnation is None else incarnation
        if fresh in self._begun:
            raise refused(
                "persistence.same-incarnation",
                "restore",
                f"incarnation {fresh:016x}, which this contract already had",
                "a new random incarnation",
            )
        self._runner.apply("restore", checkpoint.epoch, fresh)
        self._begun.add(leaving)
        self._pool.reset()
        if self._counted is not None:
            self._counted.reset()
        self._runner.tell("restore", (checkpoint.epoch, fresh), None)
