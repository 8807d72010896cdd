"""
A runtime in miniature: drives a contract by stage and microbatch while its log is recorded.
"""

from __future__ import annotations

from typing import Any, Final

from qeffect import Checkpoint, Destination, StageConfig
from qeffect.caller import Caller
from qeffect.log.recorder import Recorder

__all__ = ["MATRICES", "Driver", "placed"]

MATRICES: Final = ("fc1", "fc2")


class Driver(Caller):
    """
    An orderly caller whose calls are recorded, and whose actions may fail.

    Args:
        stages: The stages.
        incarnation: The random number, pinned so that a scenario's log is always the same.
        options: Further arguments of the contract.
    """

    def __init__(self, stages: list[StageConfig], incarnation: int, **options: Any) -> None:
        super().__init__(stages, **options)
        self.contract.memory.incarnation[0] = incarnation
        self.log = Recorder(self.contract, rank=0)

    def fail(self, action: Any) -> None:
        """Let a guarded action's physical work raise."""
        try:
            with action:
                raise RuntimeError("replay failed")
        except RuntimeError:
            return

    def begin_again(self, checkpoint: Checkpoint, incarnation: int) -> None:
        """Purge, drain and restore, as after a failure."""
        self.contract.purge(self.contract.epoch)
        self.contract.drain()
        self.contract.restore(checkpoint, incarnation=incarnation)


def placed(microbatches: int | None, base: int) -> tuple[Destination, ...]:
    """Return destinations laid end to end: one per microbatch, or (None) one in all."""
    each: list[int | None] = [None] if microbatches is None else list(range(microbatches))
    return tuple(
        Destination(matrix, microbatch, (4, 8), "float32", "cuda:0", base + 128 * place, 128)
        for place, (matrix, microbatch) in enumerate((m, i) for m in MATRICES for i in each)
    )
