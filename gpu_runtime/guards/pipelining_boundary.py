"""
The boundaries of a guarded pipeline's epochs (optimizer steps): the begin and end of a step, and
the update.

If the guard follows no optimizer, each step of the schedule is one epoch. If the guard follows an
optimizer, each step is a walk (one pass over the schedule), and the optimizer's update ends the
epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qeffect.contract import Contract
from qeffect.stage_config import StageConfig

from .judging import ContractLogs, Judge
from .pipelining_step import GuardedStep, TableReductions
from .pipelining_update import Updates
from .pipelining_walk import ActionGuard
from .recurring import RecurringSteps

__all__ = ["UNUSED", "EpochBoundaries"]

#: Relations of the contract that the guard leaves out: weight caches, gradient buffers, graphs and
#: streams.
UNUSED = ("version", "arena", "capture", "completion")


class EpochBoundaries:
    """
    Begins and ends the steps, updates and contracts of one rank.

    Args:
        schedule: The schedule.
        stages: The schedule's stages on this rank.
        actions: The object that guards the actions between the boundaries.
        judge: The object that asks the contract.
        reductions: Which reductions the table contains.
        declared: The order of F and dI that the table declares; None without a table.
        logs: The rank's event logs.
        rank: This process's rank in the pipeline.
        known: Whether the table is valid, so that its steps can be checked.

    Attributes:
        contract: The contract of the current epoch.
        updates: The optimizer whose updates end epochs; None if each step is one epoch.
    """

    def __init__(
        self,
        schedule: Any,
        stages: list[Any],
        actions: ActionGuard,
        judge: Judge,
        reductions: TableReductions,
        declared: Any,
        logs: ContractLogs,
        rank: Callable[[], int],
        *,
        known: bool,
    ) -> None:
        self._schedule, self._stages = schedule, stages
        self._actions, self._judge = actions, judge
        self._reductions, self._declared = reductions, declared
        self._logs, self._rank, self._known = logs, rank, known
        self.updates: Updates | None = None
        self._update = False  # whether an update is under way that was checked
        self._stepping = self._updating = False
        self._left = False  # whether the latest step was left unfinished
        self._looped = True  # whether torch's loop returned in the latest step
        self._steps = self._epoch = 0
        self._recurring = RecurringSteps(self._contract())
        actions.step = self._new_step()

    @property
    def contract(self) -> Contract:
        """The contract, which contains every call of the current step so far."""
        return self._recurring.contract

    def follow(self, updates: Updates) -> None:
        """From now on, let the updates of an optimizer end the epochs."""
        updates.watch(self._before_update, self._after_update, self._before_part)
        self.updates = updates
        self._actions.evidence.watch_shards(updates.parameters)
        self._actions.step = self._new_step()

    def restart(self, epoch: int) -> None:
        """Begin an epoch with a new contract."""
        self._epoch = epoch
        self._restart()
        self._actions.begin_step(self._new_step())
        self._left = False
        if self.updates is not None:
            self.updates.forget()

    def ending(self) -> Mapping[str, Any]:
        """Return how the latest step ended, for `PipelineRanks.agree`."""
        return {
            "epoch": self._recurring.raw_contract.epoch,
            "posted": self._actions.messages,
            "of": self._expected,
            "whole": self._whole(),
        }

    def _whole(self) -> bool:
        """Whether the latest step posted all of its messages, or none."""
        if self._looped or self._actions.messages == 0:
            return True
        # A class without a table may hold back a message that it has asked its stage for.
        return self._actions.walks and self._actions.messages == self._expected

    def _contract(self) -> Contract:
        microbatches = self._schedule._n_microbatches
        local = {stage.stage_index for stage in self._stages}
        configs = []
        for stage in self._stages:
            index = stage.stage_index
            before = not stage.is_first and index - 1 not in local
            behind = not stage.is_last and index + 1 not in local
            configs.append(
                StageConfig(
                    index,
                    microbatches=microbatches,
                    slots=microbatches,
                    sends_output=behind,
                    sends_gradient=before,
                    receives_input=before,
                    receives_gradient=behind,
                    feeds=index + 1 if index + 1 in local else None,
                    reduces=self._reductions.reduces[index],
                )
            )
        self._expected = microbatches * sum(
            (c.receives_input, c.receives_gradient, c.sends_output, c.sends_gradient).count(True)
            for c in configs
        )
        contract = Contract(configs, omit=UNUSED, declared=self._declared, epoch=self._epoch)
        self._logs.begin(contract, self._rank())
        return contract

    def _restart(self) -> None:
        self._recurring = RecurringSteps(self._contract())

    def _new_step(self, *, whole: bool = True) -> GuardedStep:
        accumulates = self.updates is not None
        return GuardedStep(self._recurring, self._reductions, accumulates=accumulates, whole=whole)

    # A step

    def guarded_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a guarded version of the schedule's `step`."""

        def guarded_step(*args: Any, **kwargs: Any) -> Any:
            if not self._schedule._has_backward:  # eval
                with self._unguarded():
                    return step(*args, **kwargs)
            self._begin_step()
            self._stepping = True
            try:
                with self._actions.guarded_walk():
                    found = step(*args, **kwargs)
                self._looped = True
                self._finish()
            except BaseException:
                self._actions.abort()
                if self.updates is not None:  # without this walk the earlier ones are useless
                    self.updates.forget()
                raise
            finally:
                self._stepping = False
            return found

        return guarded_step

    def runtime_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """
        Wrap the `step` of a runtime around the schedule, which may write `.grad` after the
        schedule's step.
        """

        def runtime_step(*args: Any, **kwargs: Any) -> Any:
            found = step(*args, **kwargs)
            if self.updates is not None:
                self.updates.finish_walk()
            return found

        return runtime_step

    @contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Let forwards run outside any epoch."""
        judges, self._judge.judges = self._judge.judges, False
        try:
            yield
        finally:
            self._judge.judges = judges

    def _begin_step(self) -> None:
        """Begin a step; the first step of an epoch also begins the epoch."""
        begins_epoch = self.updates is None or self.updates.walked == 0
        if begins_epoch:
            if self._judge.reports is not None and self._left:  # a violation, or a failed step
                self._epoch = self._steps  # the epoch of the ranks that committed the last step
                self._judge.judges = self._known
                self._judge("the beginning of the step", self._restart)
            self._left = True
            self._judge.step = self._steps
            self._steps += 1
        self._actions.messages, self._looped = 0, False
        step = self._new_step(whole=begins_epoch)
        self._actions.begin_step(step, begins_epoch=begins_epoch)
        self._actions.read_functions()
        self._updating = False  # an update may have raised
        self._judge("the beginning of the step", self._actions.check_functions)
        if self.updates is not None:
            begin = self.updates.check_first_walk if begins_epoch else self._next_walk
            self._judge("the beginning of the step", begin)

    def _next_walk(self) -> None:
        """Begin another walk of the epoch."""
        assert self.updates is not None
        self.updates.check_next_walk()
        self._recurring.settle().next_walk()

    def _finish(self) -> None:
        updates, own = self.updates, [stage.stage_index for stage in self._stages]

        def finish() -> None:
            self._actions.evidence.check_replicas()
            if updates is None:
                self._actions.step.finish(own)
                self._left = False
            else:
                self._actions.step.finish_walk(own)
                updates.finish_walk()

        self._judge("the end of the step", finish)
        if updates is not None:
            updates.walked += 1

    # The update

    def _before_update(self, *_: Any) -> None:
        """Check the optimizer's update, which is about to run."""
        self._updating = True
        self._update = self._judge("the optimizer's update", self._check_update) is not None

    def _before_part(self, *_: Any) -> None:
        """Check the update of one optimizer of a container."""
        updates = self.updates
        assert updates is not None
        if not self._updating and (self._stepping or updates.walked):
            self._judge("the update of one optimizer", updates.check_part)

    def _check_update(self) -> bool:
        updates = self.updates
        assert updates is not None
        self._actions.evidence.check_update()
        if not self._stepping and updates.walked:
            updates.check_due()
        self._actions.step.check_last_update()
        updates.begin_update()
        return True

    def _after_update(self, *_: Any) -> None:
        """Commit the optimizer's update, which has run, and begin the next epoch."""
        checked, self._update = self._update, False
        self._updating = False
        assert self.updates is not None
        if checked:
            self._judge("the optimizer's update", self._commit_update)
        self.updates.forget()

    def _commit_update(self) -> None:
        assert self.updates is not None
        try:
            self.updates.finish_update()
        except BaseException:
            self._actions.abort()
            raise
        self._actions.step.commit_update()
        self._actions.step.end()
        self._actions.evidence.forget_weights()
        self._left = False
