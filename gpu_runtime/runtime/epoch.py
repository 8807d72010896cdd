"""
The end of an epoch (one optimizer step): gradients become final and are reduced, and the optimizer
updates the weights.

A commit ends an epoch. The contract checks the commit before the update runs, so a refusal leaves
the weights unchanged. The update runs on the graph stream, after the last dW and before the next
replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from qeffect.action_blocks import Update
from qeffect.counts import DeviceCounts

from ..backends.epoch_scales import move_scales, moves_once
from ..backends.protocol import BackendError
from ..step.clipping import Norm
from ..step.optimizer import Gradients, Optimizer
from ..step.plan.order import Kind
from .parts import RuntimeParts

__all__ = ["EpochRuntime"]


class EpochRuntime(RuntimeParts):
    """The methods of a runtime that end an epoch: finalize, reduce and update."""

    def finish(self, optimizer: Optimizer, *, caller: Hashable = "main") -> Gradients:
        """
        Finalize every stage, update the parameters, and start the next epoch.

        Args:
            optimizer: The optimizer over the same stages.
            caller: Name of the caller's stream.

        Returns:
            The gradients that were passed to the optimizer; valid until the next dW.

        Raises:
            Refused: An F, dI or dW is missing or unfinished, or an action of the epoch has failed;
                nothing was updated.
        """
        gradients = self.finalize(caller=caller)
        self.update(optimizer, gradients, caller=caller)
        return gradients

    def reduce(self, bucket: int | str, *, caller: Hashable = "main") -> None:
        """
        Start the reduction of a bucket (gradients that are reduced together) before the epoch ends.
        Other stages may still run.

        The last dW of the bucket's stage must have run. `finalize` reduces the other buckets, and
        waits for the reductions that were started here.

        Args:
            bucket: Name of the bucket.
            caller: Name of the caller's stream.

        Raises:
            Refused: A dW of the stage is missing, the bucket is not the next in the declared order,
                or its reduction has already begun.
            BackendError: The runtime has no reducer, or no bucket with that name.
        """
        reducer = self._guarded_reducer
        if reducer is None:
            raise BackendError(
                f"bucket {bucket!r} cannot be reduced: the runtime has no reducer; pass reducer="
            )
        if bucket not in self._reductions.buckets:
            raise BackendError(
                f"no bucket {bucket!r} exists; expected one of {[*self._reductions.buckets]}"
            )
        link = self.actions._enter(caller)
        with self.handoff.scope():
            self._reductions.start(reducer, bucket, link)
            self.handoff.record_tail()
        self.actions._leave(link)

    def finalize_stage(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Declare one stage's gradients complete, and start their reductions. Other stages may still
        run.

        Args:
            stage: The stage. Its last dW must have run.
            caller: Name of the caller's stream, the same for every stage.

        Raises:
            Refused: An action of the stage is missing, or an action of the epoch has failed.
        """
        link = self.actions._enter(caller)
        self.contract.finalize(stage, link)
        self._final.add(stage)
        with self.handoff.scope():
            self._gradients(stage)
            if (reducer := self._guarded_reducer) is not None:
                self._reductions.start_of(reducer, stage, link)
            self.handoff.record_tail()
        self.actions._leave(link)

    def next_walk(self, *, caller: Hashable = "main") -> int:
        """
        End one walk (a pass over the order of actions) and begin the next. Gradients add up over
        the walks of an epoch.

        Every microbatch of the order must have run, and no reduction may have started. The epoch
        continues: weight caches are not refreshed, and weights are not updated. The last walk of
        the epoch ends with `finish`.

        Args:
            caller: Name of the caller's stream, the same for every walk and for `finalize`.

        Returns:
            Number of finished walks of the epoch: 1 after the first.

        Raises:
            BackendError: The configuration allows no further walk.
            Refused: An action is missing or unfinished, an action of the epoch has failed, or a
                reduction has started.
        """
        walk = self.contract.memory.walk[0]
        if walk + 1 >= self.config.walks:
            raise BackendError(
                f"walk {walk + 2} (a pass over the order) of epoch {self.epoch} begins, but the "
                f"runtime was made for at most {self.config.walks}; make it with "
                f"RuntimeConfig(walks={walk + 2}) or end the epoch with finish()"
            )
        link = self.actions._enter(caller)
        for index in self.memories:
            if index not in self._final:
                self.contract.finalize(index, link)
                self._final.add(index)
        over = self.contract.next_walk()
        self._final.clear()
        self.actions._leave(link)
        return over

    def shorten_walk(self, microbatches: int) -> None:
        """
        Let the next walk (pass over the order of actions) run only its first microbatches. Use this
        for a short last batch.

        Call this method before the walk's first F, then run the order without the actions of the
        other microbatches. The following walk takes all microbatches again. An epoch that `rebuild`
        restarts also takes all microbatches.

        Args:
            microbatches: Number of microbatches in the next walk, at least 1.

        Raises:
            BackendError: The configuration does not allow short walks. It must not declare the
                order, tie weights of two stages or run a step as one launch, and it needs the rule
                ``accumulate`` and a group of 1. Or the walk would leave out the microbatch of the
                order's first dW.
            Refused: The walk has begun, or was shortened already.
            TypeError, ValueError: `microbatches` is not an ``int``, or is out of range.
        """
        obstacle = self._short_walk_obstacle()
        if obstacle:
            raise BackendError(f"shorten_walk: {obstacle}")
        if type(microbatches) is int and microbatches > 0:
            for index in self.memories:
                first = self.order.microbatches(index, Kind.WGRAD)[0]
                if first >= microbatches:
                    raise BackendError(
                        f"shorten_walk: the first dW of stage {index} overwrites the gradients. It "
                        f"belongs to microbatch {first}, which a walk of {microbatches} "
                        "microbatches leaves out; take an order whose first dW belongs to "
                        "microbatch 0"
                    )
        self.contract.shorten_walk(microbatches)

    def _short_walk_obstacle(self) -> str:
        """Return why walks (passes over the order) cannot be shortened; empty if they can."""
        if self.config.group > 1:
            return f"group is {self.config.group}; set group=1"
        if self.config.rule != "accumulate":
            return f"rule is {self.config.rule!r}; set rule='accumulate'"
        if self.config.declared and "order" in self.relations:
            return "declared is True, so every walk must run the whole order; set declared=False"
        if self.config.mode == "one launch":
            return "a step as one launch always runs all microbatches; set mode='replays'"
        if self.tied.sharers:
            return f"the stages {sorted(self.tied.sharers)} share tied weights"
        return ""

    def finalize(self, *, caller: Hashable = "main") -> Gradients:
        """
        Declare every stage's gradients complete, sum them, and reduce the remaining buckets.

        Stages that were passed to `finalize_stage` are already complete.

        Raises:
            Refused: An action is missing or has failed. With ``counts='next step'`` also if the
                device skipped the last update; `rebuild` then restarts the epoch of that update.
        """
        self.confirm()
        return self.declare_final(caller=caller)

    def declare_final(self, *, caller: Hashable = "main") -> Gradients:
        """
        Do the same as `finalize`, but do not check the device's counts of the previous step.

        Raises:
            Refused: An action is missing, or an action of the epoch has failed.
        """
        link = self.actions._enter(caller)
        for index in self.memories:
            if index not in self._final:
                self.contract.finalize(index, link)
        with self.handoff.scope():
            if self.counters is not None and not self.config.counts_late:
                self.counters.read()  # first, so that the sums run while the host checks it
            gradients: dict[int, Mapping[str, torch.Tensor]] = {
                index: self._gradients(index) for index in self.memories
            }
            if self.reducer is not None:
                self._reductions.end(self.reducer, link)
            self.handoff.record_tail()
        self.actions._leave(link)
        return gradients

    def update(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        *,
        caller: Hashable = "main",
        norm: Norm | None = None,
    ) -> int:
        """
        Run the optimizer and commit the epoch.

        The contract checks before the optimizer runs, so a refusal leaves the weights unchanged. If
        the optimizer raises an error, the weights are half updated, and no action or checkpoint is
        accepted before a `restore`. The update runs on the graph stream, after the caller's work
        and before the next replay. This call also updates FP8 scales that are updated once an
        epoch, even if the weights are not updated because of the norm.

        Args:
            optimizer: The optimizer over the same stages.
            gradients: The gradients that `finalize` returned: by stage and parameter name.
            caller: Name of the caller's stream, the same as for `finalize`.
            norm: The gradients' norm, the factor by which the gradients were multiplied, and
                whether to skip the update. It must be the same on every rank. The epoch commits
                even if the update is skipped.

        Returns:
            The new epoch.

        Raises:
            Refused: An action is unfinished, a stage is not final, another caller called
                `finalize`, or the device did not run the committed actions. Nothing was updated.
        """
        link = self.actions._enter(caller)
        late = self.config.counts_late
        counted = None if late else self.device_counts()
        try:
            with (
                self.contract.update(caller=caller, counted=counted) as update,
                self.handoff.scope(),
            ):
                skip = self._gate() if late else None
                scale = None if norm is None else norm.scale(self.domain.device)
                if norm is not None and norm.skipped:
                    # Call the optimizer in any case: its first step makes its state.
                    skip = torch.ones((), device=self.domain.device)
                optimizer.step(gradients, skip=skip, scale=scale)
                self._move_scales(update)  # also if the norm skips the update
                self._committed, self._before = self._before, self._committed
                self._committed.take()
                self.handoff.record_tail()
                self.forget_gradients()
        except BaseException:
            self._abort_update()
            raise
        # The update was enqueued on the graph stream: its own order lets later replays wait for it.
        self.contract.join(link)
        self.actions._leave(link)
        return self.contract.epoch

    def _move_scales(self, update: Update) -> None:
        """Update the FP8 scales that are updated once an epoch, and tell the contract."""
        if not moves_once(self.domain):
            return
        reports = next(iter(self.memories.values())).reports
        before = reports.updates()
        move_scales(self.domain)
        self.tell_moved(update, reports.since(before))

    def tell_moved(self, update: Update, moved: int | None) -> None:
        """
        Report the update of the FP8 scales to the contract, if scales are updated once an epoch.

        Args:
            update: The weight update that is in progress.
            moved: How often the scales were updated, as the backend reports; None if it does not
                report this.

        Raises:
            Refused: ``order.scaling-updates``: the backend does not report exactly one update of
                the scales. ``order.nothing-gathered``: no F or dI has gathered amaxes (largest
                absolute values). ``order.moves-outside-update``: no weight update is in progress,
                or the scales have already been updated.
        """
        own = self.contract.stages[0]
        if own.scales != "epoch":
            return
        update.move_scales(own.stage, moved if own.reports_updates else None)
        for memory in self.memories.values():
            memory.reports.moved(self.contract.token(own.stage))

    def _abort_update(self) -> None:
        """Abort an update that passed its check, but whose observer raised an error."""
        for ticket in self.contract.outstanding():
            if ticket.action == "update":
                self.contract.abort(ticket)

    def _gate(self) -> torch.Tensor | None:
        """Let the device compare the actions that it ran with the committed actions."""
        if self.counters is None:
            return None
        return self.counters.gate(self.contract.committed_counts()[self.domain_name])

    @property
    def domain_name(self) -> Hashable:
        """
        Name of the state domain (stages whose FP8 scales are updated together) in the contract.
        """
        return self.contract.stages[0].domain

    def confirm(self) -> None:
        """
        With ``counts='next step'``, compare the device's counts at the last commit with the
        committed actions.

        `finalize` and `checkpoint` call this method. With any other value of `counts` the method
        does nothing. The call waits for the last update. Normally that update ended long before.

        Raises:
            Refused: The device skipped the last update, because the actions that it ran differ from
                the committed actions. `rebuild` restarts the epoch.
        """
        if self.contract.counts_awaited:
            counted = self.device_counts()
            assert counted is not None
            self.contract.present_counts(counted)

    def fail(self, stage: int, epoch: int | None = None) -> None:
        """
        Record a fault that is noticed only after the action, such as an asynchronous error of the
        device.

        After a fault of the current epoch, the epoch cannot commit, and `rebuild` restarts it.
        After a fault of a committed epoch, no action or checkpoint is accepted before a `restore`.

        Args:
            stage: The stage whose action failed.
            epoch: The epoch of this action; by default the current epoch.

        Raises:
            Refused: ``epoch.not-begun``: the given epoch has not begun.
            TypeError, ValueError: The stage does not exist, or the epoch is not an integer of at
                least 0.
        """
        self.contract.fail(stage, epoch)

    def device_failed(self) -> None:
        """
        Record that the device failed, at an unknown action.

        The host does not wait for the device, so the last update may have failed. Therefore this
        method marks the last committed epoch as failed, or epoch 0 if no epoch was committed.
        """
        for stage in self.memories:
            self.fail(stage, max(self.epoch - 1, 0))

    def start_weights_read(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Record that a separate stream begins to read a stage's weights, for example to broadcast
        them.

        The separate stream must first wait for the work that the caller has submitted so far. The
        contract accepts no update before `finish_weights_read`.

        Args:
            stage: The stage whose weights are read.
            caller: Name of the caller's stream.

        Raises:
            Refused: Another read of these weights is unfinished, the caller's stream has not waited
                for the latest update, or the weights are half updated.
        """
        self.contract.start_weights_read(stage, self.actions.links[caller])

    def finish_weights_read(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Record that the caller's stream waits until the read of a stage's weights ends.

        Args:
            stage: The stage whose weights are read.
            caller: Name of the caller's stream, the same as for `finalize` and `update`.

        Raises:
            Refused: No read of the weights was started, or another caller has already waited for
                the gradients or for a read in this epoch.
        """
        self.contract.finish_weights_read(stage, self.actions.links[caller])

    def start_gradients_read(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Record that a separate stream begins to read a stage's gradients, for example for a norm.

        The separate stream must first wait for the work that the caller has submitted so far.
        Before `finish_gradients_read` the contract accepts no update, and no further walk (pass
        over the order of actions).

        Args:
            stage: The stage; its gradients must be final and reduced.
            caller: Name of the caller's stream, the same as for `finalize`.

        Raises:
            Refused: The stage is not final, a bucket is not reduced, another read of these
                gradients is unfinished, or another stream waited for the gradients.
        """
        self.contract.start_gradients_read(stage, self.actions.links[caller])

    def finish_gradients_read(self, stage: int, *, caller: Hashable = "main") -> None:
        """
        Record that the caller's stream and the graph stream wait until a read of gradients ends.

        Args:
            stage: The stage.
            caller: Name of the caller's stream, the same as for `finalize` and `update`.

        Raises:
            Refused: No read of the gradients was started, or another stream waited for the
                gradients.
        """
        self.contract.finish_gradients_read(stage, self.actions.links[caller])

    def counts_now(self) -> dict[Hashable, DeviceCounts] | None:
        """
        The device's counts of its actions so far, by state domain; None if the device does not
        count.

        Waits for the device.
        """
        if self.counters is not None:
            with self.handoff.scope():
                self.counters.read()
        return self.device_counts()

    def device_counts(self) -> dict[Hashable, DeviceCounts] | None:
        """
        The device's counts of its actions at the last `finalize`, by state domain.

        With ``counts='next step'``, the result contains the counts at the last `update`. If your
        loop commits without `update`, pass these counts to the contract as `counted`.

        The result is None if `RuntimeConfig.counts` is None. The call waits for the device.
        """
        if self.counters is None:
            return None
        return {self.domain_name: self.counters.taken()}
