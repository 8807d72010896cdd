"""
A caller that records its calls in an event log; in the scenarios it replaces a runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from qeffect import Destination, StageConfig
from qeffect.log.recorder import Recorder

from ..caller import ProcessCaller
from ..process import Process

__all__ = ["MATRICES", "RecordedCaller", "placed"]

MATRICES: Final = ("fc1", "fc2")


class RecordedCaller(ProcessCaller):
    """
    A caller with an event log.

    Args:
        stages: The stages.
        incarnation: The contract's incarnation. It is random in a real run, and fixed here so that
            a scenario always writes the same log.
        options: Further arguments of the process.
    """

    def __init__(self, stages: Sequence[StageConfig], incarnation: int, **options: Any) -> None:
        super().__init__(Process("example log", stages, **options))
        self.contract.memory.incarnation[0] = incarnation
        self.log = Recorder(self.contract, rank=0)


def placed(microbatches: int | None, base: int) -> tuple[Destination, ...]:
    """Return adjacent destinations: one per microbatch, or one per matrix if given None."""
    each: list[int | None] = [None] if microbatches is None else list(range(microbatches))
    return tuple(
        Destination(matrix, microbatch, (4, 8), "float32", "cuda:0", base + 128 * place, 128)
        for place, (matrix, microbatch) in enumerate((m, i) for m in MATRICES for i in each)
    )
