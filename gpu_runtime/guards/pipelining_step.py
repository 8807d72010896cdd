"""
One guarded step of a `torch.distributed.pipelining` schedule. Its actions become calls of a
contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from qeffect.refusals import refused

from .recurring import RecurringSteps
from .works import Works

__all__ = ["GuardedStep", "TableReductions"]


@attrs.frozen
class TableReductions:
    """
    What a schedule table says about reductions, and about waits for transfers.

    Args:
        reduces: Whether the table reduces the gradients of each stage of this rank.
        awaits_sends: Whether the table says where to wait for sends. If not, sends end with the
            step.
        awaits_reductions: Whether the table says where to wait for reductions. If not, reductions
            end with the step.
    """

    reduces: Mapping[int, bool]
    awaits_sends: bool = False
    awaits_reductions: bool = False


class GuardedStep(Works):
    """
    The unfinished work, messages and reductions of one step, which a contract checks.

    Every method that calls the contract raises `Refused` if an action breaks the contract.

    Args:
        steps: The steps of the rank's contract.
        reductions: What the table says about reductions.
        accumulates: Whether gradients accumulate over several steps until an update. Each step is
            then a walk (one pass over the schedule) with its own reductions. The contract accepts
            reductions only after the epoch's last walk, but the last walk is known only when the
            update begins. Therefore this object counts the reductions itself, and reports them to
            the contract at the update.
        whole: Whether the step begins an epoch.
    """

    def __init__(
        self,
        steps: RecurringSteps,
        reductions: TableReductions,
        *,
        accumulates: bool = False,
        whole: bool = True,
    ) -> None:
        super().__init__(steps, whole=whole)
        self.reductions = reductions
        self._accumulates = accumulates
        self._final: set[int] = set()
        self._reducing: list[int] = []
        self._reduced: set[int] = set()

    def reduce(self, stage: int) -> None:
        """Finalize a stage. If the table contains a reduction of the stage, start the reduction."""
        self.finalize(stage)
        self._final.add(stage)
        if self.reductions.reduces[stage]:
            if not self._accumulates:
                self.start_reduction(stage)
            self._reducing.append(stage)

    def end_reduction(self, stage: int) -> None:
        """Record the end of a reduction for which the framework has waited."""
        if not self._accumulates:
            self.finish_reduction(stage)
        elif stage not in self._reducing or stage in self._reduced:
            raise refused(
                "reduction.not-started",
                "finish_reduction",
                f"no reduction of stage {stage} under way in this step of the schedule",
                "a reduction that was started",
            )
        self._reduced.add(stage)

    def finish(self, stages: Iterable[int]) -> None:
        """
        End the step: first its transfers, stages and reductions, then the epoch.

        Args:
            stages: Indices of this rank's stages.
        """
        self._finish_work(stages)
        if not self.reductions.awaits_reductions:
            for reduced in self._reducing:
                self.finish_reduction(reduced)
        self.commit_epoch()
        self.end()

    def finish_walk(self, stages: Iterable[int]) -> None:
        """
        End a step whose gradients a later update uses.

        Args:
            stages: Indices of this rank's stages.
        """
        own = list(stages)
        self._finish_work(own)
        awaited = self._reduced if self.reductions.awaits_reductions else set(self._reducing)
        for stage in own:
            if self.reductions.reduces[stage] and stage not in awaited:
                begun = stage in self._reducing
                raise refused(
                    "reduction.in-flight" if begun else "reduction.missing",
                    "check_update",
                    f"gradients of stage {stage}, whose reduction "
                    + ("was not awaited" if begun else "did not begin"),
                    "one reduction in each step of the schedule, awaited before the step ends",
                )

    def check_last_update(self) -> None:
        """Check the update that ends the epoch."""
        for stage in self._reducing:
            self.start_reduction(stage)
            self.finish_reduction(stage)
        self._reducing.clear()
        self.check_update()

    def _finish_work(self, stages: Iterable[int]) -> None:
        """End transfers, and finalize the stages that no reduction has finalized."""
        if not self.reductions.awaits_sends:  # torch has already waited for every send
            self.finish_sends()
        for stage in stages:
            if stage not in self._final:
                self.finalize(stage)
