"""One guarded step of a `torch.distributed.pipelining` schedule, as calls of a contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from qeffect.contract import Contract

from .works import Works

__all__ = ["GuardedStep", "TableReductions"]


@attrs.frozen
class TableReductions:
    """
    The reductions and awaited transfers of a table.

    Args:
        reduces: Whether the table reduces the gradients of each stage of this rank.
        awaits_sends: Whether the table awaits its sends; otherwise they end with the step.
        awaits_reductions: Whether the table awaits its reductions; otherwise they end with the
            step.
    """

    reduces: Mapping[int, bool]
    awaits_sends: bool = False
    awaits_reductions: bool = False


class GuardedStep(Works):
    """
    The live work, messages and reductions of one step under a contract.

    Every method that calls the contract raises `Refused` if an action breaks it.

    Args:
        contract: The contract of the rank.
        reductions: The table's reductions.
    """

    def __init__(self, contract: Contract, reductions: TableReductions) -> None:
        super().__init__(contract)
        self.reductions = reductions
        self._final: set[int] = set()
        self._reducing: list[int] = []

    def reduce(self, stage: int) -> None:
        """Finalize a stage, and start its reduction if the table has one."""
        self.contract.finalize(stage)
        self._final.add(stage)
        if self.reductions.reduces[stage]:
            self.contract.start_reduction(stage)
            self._reducing.append(stage)

    def finish(self, stages: Iterable[int]) -> None:
        """
        End the step: its transfers, stages and reductions, then the epoch.

        Args:
            stages: Indices of this rank's stages.
        """
        if not self.reductions.awaits_sends:  # torch has already waited for every send
            for event in sorted(self.reading):
                self.finish_send(event)
        for stage in stages:
            if stage not in self._final:
                self.contract.finalize(stage)
        if not self.reductions.awaits_reductions:
            for reduced in self._reducing:
                self.contract.finish_reduction(reduced)
        self.contract.commit_epoch()
